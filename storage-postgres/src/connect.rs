//! Connecting.

use std::{str::FromStr, sync::Arc};

use owed_core::{Clock, SampledClock, Signal, Store, StoreError};
use owed_sql::{Fresh, Operator, TableNames, classify_sqlx, fresh::TRUSTED, names::PREFIX, tx::Opener};
use sea_orm::{
    DatabaseConnection, IsolationLevel, TransactionOptions,
    sqlx::{
        self, Connection, PgPool,
        postgres::{PgConnectOptions, PgPoolOptions},
    },
};

use crate::{DIALECT, Inner, PostgresStore, Statements, Time, claim, record, settle};

/// Connects to PostgreSQL. Made by [`PostgresStore::builder`] and [`PostgresStore::on`].
#[must_use = "nothing is connected until `connect` is awaited"]
pub struct PostgresBuilder {
    to: To,
    prefix: String,
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
        PostgresBuilder { to, prefix: PREFIX.into(), schema: None, max_connections: 16, clock: None }
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
    /// If the URL is none, a name can't be used, the server can't be reached, or is older than PostgreSQL 12.
    pub async fn connect(self) -> Result<PostgresStore, StoreError> {
        let names = TableNames::new(self.prefix, self.schema)?;
        let fresh = Fresh::default();
        let (db, ours): (DatabaseConnection, bool) = match self.to {
            To::Connection(db) => (*db, false),
            To::Url(url) => {
                let options = PgConnectOptions::from_str(&url)
                    .map_err(|error| classify_sqlx("reading the database's URL", error))?;
                (pool(options, self.max_connections, fresh.clone()).into(), true)
            }
        };
        let pool = db.get_postgres_connection_pool();
        let (version, isolation): (String, String) = sqlx::query_as(
            "SELECT current_setting('server_version'), current_setting('default_transaction_isolation')",
        )
        .fetch_one(pool)
        .await
        .map_err(|error| classify_sqlx("asking for the server's version", error))?;
        let version = served(&version)?;
        // Where sessions are READ COMMITTED already, `BEGIN` is enough: one round trip.
        let plain = ours || isolation == READ_COMMITTED;
        let opener = opener(&db, plain);
        let tables = names.tables(DIALECT);
        let operator = Operator::new(DIALECT, &names, None);
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
        let (signal, sql) = (Signal::new(), Arc::new(sql));
        let inner = Inner { db, opener, fresh, names, tables, operator, time, signal, version, sql };
        let store = PostgresStore { inner: Arc::new(inner) };
        store.sync_clock().await?;
        Ok(store)
    }
}

const READ_COMMITTED: &str = "read committed";

/// The oldest release whose SQL the statements are written in (`AS MATERIALIZED`).
const OLDEST: u32 = 12;

/// The version in what a server says of itself: `15.4`, `16.1 (Debian 16.1-1.pgdg120+1)`, `17beta2`.
///
/// # Errors
/// If it is too old, or can't be read.
fn served(said: &str) -> Result<String, StoreError> {
    let version = said.split_whitespace().next().unwrap_or_default();
    let major: String = version.chars().take_while(char::is_ascii_digit).collect();
    match major.parse::<u32>() {
        Ok(major) if major >= OLDEST => Ok(version.to_owned()),
        _ => Err(StoreError::unsupported(format!(
            "this server is PostgreSQL {said}, and owed needs PostgreSQL {OLDEST} or later"
        ))),
    }
}

pub(crate) fn opener(db: &DatabaseConnection, plain: bool) -> Opener {
    let isolation_level = (!plain).then_some(IsolationLevel::ReadCommitted);
    let options = TransactionOptions { isolation_level, ..TransactionOptions::default() };
    Opener::new(db.clone(), options, db.get_postgres_connection_pool().options().get_max_connections())
}

/// A pool whose sessions are READ COMMITTED, and which spends no round trip on looking at a connection that was
/// in use a moment ago.
pub(crate) fn pool(options: PgConnectOptions, most: u32, fresh: Fresh) -> PgPool {
    PgPoolOptions::new()
        .max_connections(most)
        .after_connect(|connection, _| {
            Box::pin(async move {
                let asked = sqlx::query_scalar("SELECT current_setting('default_transaction_isolation')");
                let isolation: String = asked.fetch_one(&mut *connection).await?;
                if isolation != READ_COMMITTED {
                    let set = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED";
                    sqlx::query(set).execute(connection).await?;
                }
                Ok(())
            })
        })
        .test_before_acquire(false)
        .before_acquire(move |connection, meta| {
            let allowed = fresh.allows(meta.age);
            Box::pin(async move {
                if allowed && meta.idle_for >= TRUSTED {
                    connection.ping().await?;
                }
                Ok(allowed)
            })
        })
        .connect_lazy_with(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_too_old_is_refused_by_name() {
        for (said, read) in [
            ("15.4", "15.4"),
            ("16.1 (Debian 16.1-1.pgdg120+1)", "16.1"),
            ("12.0", "12.0"),
            ("18beta1", "18beta1"),
        ] {
            assert_eq!(served(said).unwrap(), read);
        }
        for said in ["11.22", "9.4.26", "what"] {
            let refused = served(said).unwrap_err().to_string();
            assert_eq!(
                refused,
                format!("this server is PostgreSQL {said}, and owed needs PostgreSQL 12 or later")
            );
        }
    }
}
