//! Connecting.

use std::{str::FromStr, sync::Arc};

use owed_core::{Clock, SampledClock, Signal, Store, StoreError};
use owed_sql::{TableNames, classify_sqlx, steps::PATIENCE};
use sea_orm::{
    DatabaseConnection,
    sqlx::{
        self, PgPool,
        postgres::{PgConnectOptions, PgPoolOptions},
    },
};

use crate::{DIALECT, Inner, PostgresStore, Statements, Time, claim, record, settle};

/// Connects to PostgreSQL. Made by [`PostgresStore::builder`] and [`PostgresStore::on`].
#[must_use = "nothing is connected until `connect` is awaited"]
pub struct PostgresBuilder {
    to: To,
    prefix: Option<String>,
    schema: Option<String>,
    max_connections: u32,
    clock: Option<Arc<dyn Clock>>,
}

enum To {
    Url(String),
    Connection(Box<DatabaseConnection>),
}

impl std::fmt::Debug for PostgresBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresBuilder")
            .field("prefix", &self.prefix)
            .field("schema", &self.schema)
            .finish_non_exhaustive()
    }
}

impl PostgresBuilder {
    fn to(to: To) -> Self {
        PostgresBuilder { to, prefix: None, schema: None, max_connections: 16, clock: None }
    }

    pub(crate) fn of_url(url: String) -> Self {
        Self::to(To::Url(url))
    }

    pub(crate) fn of_connection(db: DatabaseConnection) -> Self {
        Self::to(To::Connection(Box::new(db)))
    }

    /// What the names of its tables start with. Default `owed_`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = Some(prefix.into());
        self
    }

    /// The schema of its tables. Default: the first of the session's search path.
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// The most connections of its pool. Default 16. A relay needs as many as handlers with a transaction run at
    /// once, and three more.
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections;
        self
    }

    /// Takes the time from here instead of the server: a clock that a test moves.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Connects, and reads the server's version, clock and isolation level.
    ///
    /// # Errors
    /// If the URL is none, a name can't be used, the server can't be reached, or is too old to skip locked rows.
    pub async fn connect(self) -> Result<PostgresStore, StoreError> {
        let names = TableNames::new(self.prefix.unwrap_or_else(|| "owed_".into()), self.schema)?;
        let (db, ours) = match self.to {
            To::Connection(db) => (*db, false),
            To::Url(url) => {
                let options = PgConnectOptions::from_str(&url)
                    .map_err(|error| classify_sqlx("reading the database's URL", error))?;
                (pool(options, self.max_connections, false)?.into(), true)
            }
        };
        let asking = |error| classify_sqlx("asking for the server's version", error);
        let asked: (String, String, String) = sqlx::query_as(
            "SELECT current_setting('server_version'), current_setting('server_version_num'), \
             current_setting('default_transaction_isolation')",
        )
        .fetch_one(db.get_postgres_connection_pool())
        .await
        .map_err(asking)?;
        let (version, number, isolation) = asked;
        if number.parse::<u32>().is_ok_and(|number| number < 110_000) {
            return Err(StoreError::unsupported(format!(
                "this server is PostgreSQL {version}, and owed needs 11 or later"
            )));
        }
        let version = version.split_whitespace().next().unwrap_or_default().to_owned();
        let tables = names.tables(DIALECT);
        let sql = Statements {
            claim: claim::sql(&tables, false),
            claim_filtered: claim::sql(&tables, true),
            settle_succeeded: settle::succeeded_sql(&tables),
            settle_any: settle::any_sql(&tables),
            record: record::sql(&tables, &names),
        };
        let time = match self.clock {
            Some(clock) => Time::Given(clock),
            None => Time::Server(Arc::new(SampledClock::default())),
        };
        let store = PostgresStore {
            inner: Arc::new(Inner {
                db,
                names,
                tables,
                time,
                signal: Signal::new(),
                version,
                read_committed: ours || isolation == "read committed",
                sql: Arc::new(sql),
            }),
        };
        store.sync_clock().await?;
        Ok(store)
    }
}

/// A pool whose sessions are READ COMMITTED, so that neither a transaction nor a statement on its own has to ask.
pub(crate) fn pool(options: PgConnectOptions, most: u32, plain: bool) -> Result<PgPool, StoreError> {
    let pool = PgPoolOptions::new().max_connections(most).acquire_timeout(PATIENCE);
    let pool = pool.after_connect(move |connection, _| {
        Box::pin(async move {
            if plain {
                return Ok(());
            }
            let asked: String =
                sqlx::query_scalar("SHOW default_transaction_isolation").fetch_one(&mut *connection).await?;
            if asked != "read committed" {
                let set = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED";
                sqlx::query(set).execute(connection).await?;
            }
            Ok(())
        })
    });
    Ok(pool.connect_lazy_with(options))
}
