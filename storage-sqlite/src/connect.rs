//! Opening a database.

use std::{str::FromStr, sync::Arc};

use owed_core::{Clock, SampledClock, Signal, StoreError};
use owed_sql::{
    TableNames, classify, classify_sqlx,
    steps::{PATIENCE, Steps},
};
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbBackend, Statement,
    sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use crate::{DIALECT, Inner, SqliteStore};

/// Readers of one process at once.
const READERS: u32 = 8;

/// Opens a SQLite database with other table names, or another clock. Made by [`SqliteStore::builder`].
#[must_use = "nothing is opened until `connect` is awaited"]
pub struct SqliteBuilder {
    url: String,
    prefix: Option<String>,
    clock: Arc<dyn Clock>,
}

impl std::fmt::Debug for SqliteBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteBuilder").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl SqliteBuilder {
    pub(crate) fn new(url: String) -> Self {
        SqliteBuilder { url, prefix: None, clock: Arc::new(SampledClock::default()) }
    }

    /// What the names of its tables start with. Default `owed_`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = Some(prefix.into());
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
        let names = match self.prefix {
            Some(prefix) => TableNames::new(prefix, None)?,
            None => TableNames::default(),
        };
        let in_memory = self.url.contains(":memory:") || self.url.contains("mode=memory");
        let mut options = SqliteConnectOptions::from_str(&self.url)
            .map_err(|error| classify_sqlx("reading the database's URL", error))?
            .create_if_missing(true)
            .busy_timeout(PATIENCE)
            .foreign_keys(true)
            .synchronous(SqliteSynchronous::Full);
        if !in_memory {
            options = options.journal_mode(SqliteJournalMode::Wal);
        }
        let opening = |error| classify_sqlx("opening the database", error);
        let pool =
            || SqlitePoolOptions::new().acquire_timeout(PATIENCE).idle_timeout(None).max_lifetime(None);
        let write = pool()
            .max_connections(1)
            .min_connections(1)
            .connect_with(options.clone())
            .await
            .map_err(opening)?;
        // A database in memory is its connection's own: then readers queue with the writers.
        let read = if in_memory {
            write.clone()
        } else {
            pool().max_connections(READERS).connect_lazy_with(options)
        };
        let write = DatabaseConnection::from(write);
        let asked = Statement::from_string(DbBackend::Sqlite, "SELECT sqlite_version()");
        let version =
            write.query_one_raw(asked).await.map_err(|error| classify("asking for its version", error))?;
        let version = version.and_then(|row| row.try_get_by_index(0).ok()).unwrap_or_default();
        let tables = names.tables(DIALECT);
        let steps =
            Steps { dialect: DIALECT, tables: tables.clone(), skip: "", wait: "", index: String::new() };
        let inner = Inner {
            write,
            read: read.into(),
            names,
            tables,
            steps,
            clock: self.clock,
            signal: Signal::new(),
            version,
        };
        Ok(SqliteStore { inner: Arc::new(inner) })
    }
}
