//! Opening a database.

use std::{str::FromStr, sync::Arc, time::Duration};

use owed_core::{Clock, SampledClock, Signal, StoreError};
use owed_sql::{
    Operator, TableNames, classify, classify_sqlx,
    names::PREFIX,
    steps::Steps,
    tx::{Opener, PATIENCE},
};
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbBackend, SqliteTransactionMode, Statement, TransactionOptions,
    sqlx::{
        SqlitePool,
        sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
    },
};

use crate::{DIALECT, Inner, SqliteStore};

/// Readers of one process at once.
const READERS: u32 = 8;

/// Opens a SQLite database with other table names, or another clock. Made by [`SqliteStore::builder`] and
/// [`SqliteStore::on`].
#[must_use = "nothing is opened until `connect` is awaited"]
pub struct SqliteBuilder {
    to: To,
    prefix: String,
    clock: Arc<dyn Clock>,
}

enum To {
    Url(String),
    Connection(Box<DatabaseConnection>),
}

impl std::fmt::Debug for SqliteBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteBuilder").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl SqliteBuilder {
    fn to(to: To) -> Self {
        SqliteBuilder { to, prefix: PREFIX.into(), clock: Arc::new(SampledClock::default()) }
    }

    pub(crate) fn of_url(url: String) -> Self {
        Self::to(To::Url(url))
    }

    pub(crate) fn of_connection(db: DatabaseConnection) -> Self {
        Self::to(To::Connection(Box::new(db)))
    }

    /// What the names of its tables start with. Default `owed_`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Takes the time from here: a clock that a test moves.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Opens the database.
    ///
    /// # Errors
    /// If the URL is none, a name can't be used, or the file can't be opened.
    pub async fn connect(self) -> Result<SqliteStore, StoreError> {
        let names = TableNames::new(self.prefix, None)?;
        let (write, read, writers) = match self.to {
            To::Connection(db) => {
                let writers = db.get_sqlite_connection_pool().options().get_max_connections();
                (*db.clone(), *db, writers)
            }
            To::Url(url) => {
                let (write, read) = open(&url).await?;
                (write.into(), read.into(), 1)
            }
        };
        let asked = Statement::from_string(DbBackend::Sqlite, "SELECT sqlite_version()");
        let version =
            write.query_one_raw(asked).await.map_err(|error| classify("asking for its version", error))?;
        let version = version.and_then(|row| row.try_get_by_index(0).ok()).unwrap_or_default();
        let tables = names.tables(DIALECT);
        let operator = Operator::new(DIALECT, &names, None);
        let steps = Steps {
            dialect: DIALECT,
            tables: tables.clone(),
            skip: "",
            wait: "",
            index: String::new(),
            primary: "",
        };
        // A transaction that is going to write takes the write lock when it begins: one that took it later could
        // find that another has written meanwhile, and fail.
        let immediate = TransactionOptions {
            sqlite_transaction_mode: Some(SqliteTransactionMode::Immediate),
            ..TransactionOptions::default()
        };
        let opener = Opener::new(write.clone(), immediate, writers);
        let clock = self.clock;
        let inner = Inner {
            write,
            read,
            opener,
            names,
            tables,
            operator,
            steps,
            clock,
            signal: Signal::new(),
            version,
        };
        Ok(SqliteStore { inner: Arc::new(inner) })
    }
}

/// The one connection that writes, and those that read.
async fn open(url: &str) -> Result<(SqlitePool, SqlitePool), StoreError> {
    let in_memory = url.contains(":memory:") || url.contains("mode=memory");
    let mut options = SqliteConnectOptions::from_str(url)
        .map_err(|error| classify_sqlx("reading the database's URL", error))?
        .create_if_missing(true)
        .busy_timeout(PATIENCE)
        .foreign_keys(true)
        .synchronous(SqliteSynchronous::Full);
    if !in_memory {
        options = options.journal_mode(SqliteJournalMode::Wal);
    }
    let pool = || SqlitePoolOptions::new().acquire_timeout(PATIENCE).idle_timeout(None).max_lifetime(None);
    // A process that turns a new file to its write-ahead log turns the others away without letting them wait.
    let mut waited = Duration::ZERO;
    let write = loop {
        let opened = pool().max_connections(1).min_connections(1).connect_with(options.clone()).await;
        match opened.map_err(|error| classify_sqlx("opening the database", error)) {
            Err(StoreError::Retry { .. }) if waited < PATIENCE => {
                waited += OPENING;
                tokio::time::sleep(OPENING).await;
            }
            opened => break opened?,
        }
    };
    // A database in memory is its connection's own: then readers queue with the writers.
    let read =
        if in_memory { write.clone() } else { pool().max_connections(READERS).connect_lazy_with(options) };
    Ok((write, read))
}

/// The pause before a file that another process is making ready is opened again.
const OPENING: Duration = Duration::from_millis(20);
