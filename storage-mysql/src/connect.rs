//! Connecting, and finding out which server answers.

use std::{fmt, str::FromStr, sync::Arc};

use owed_core::{Clock, SampledClock, Signal, Store, StoreError};
use owed_sql::{
    TableNames, classify_sqlx,
    steps::{PATIENCE, Steps},
};
use sea_orm::{
    DatabaseConnection,
    sqlx::{
        self, MySqlPool,
        mysql::{MySqlConnectOptions, MySqlPoolOptions},
    },
};

use crate::{DIALECT, Inner, MysqlStore, Time};

/// Which of the two it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Mysql,
    Mariadb,
}

/// The server that answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) kind: Kind,
    version: String,
    /// How far apart the numbers are that one INSERT draws.
    pub(crate) increment: i64,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            Kind::Mysql => "MySQL",
            Kind::Mariadb => "MariaDB",
        };
        write!(f, "{name} {}", self.version)
    }
}

impl Server {
    /// Reads what `VERSION()` answers: `9.1.0`, `8.4.3-0ubuntu1`, `10.11.6-MariaDB-0+deb12u1`,
    /// `5.5.5-10.6.16-MariaDB`.
    ///
    /// # Errors
    /// A server that is too old to skip locked rows: it would wait for another relay's rows instead.
    pub(crate) fn read(said: &str, increment: i64) -> Result<Self, StoreError> {
        let kind = if said.to_ascii_lowercase().contains("mariadb") { Kind::Mariadb } else { Kind::Mysql };
        // MariaDB's own protocol puts this before its version, for clients that knew MySQL alone.
        let said = said.strip_prefix("5.5.5-").filter(|_| kind == Kind::Mariadb).unwrap_or(said);
        let version = said.split(['-', '+', ' ']).next().unwrap_or_default().to_owned();
        let numbers: Vec<u32> = version.split('.').map_while(|number| number.parse().ok()).collect();
        let least: [u32; 3] = match kind {
            Kind::Mysql => [8, 0, 1],
            Kind::Mariadb => [10, 6, 0],
        };
        let server = Server { kind, version, increment };
        if numbers.is_empty() || numbers[..] < least[..] {
            return Err(StoreError::unsupported(format!(
                "this server is {server}, which can't skip rows that another relay holds: owed needs MySQL 8.0.1 or MariaDB 10.6, or later"
            )));
        }
        Ok(server)
    }
}

/// Connects to MySQL or MariaDB. Made by [`MysqlStore::builder`] and [`MysqlStore::on`].
#[must_use = "nothing is connected until `connect` is awaited"]
pub struct MysqlBuilder {
    to: To,
    prefix: Option<String>,
    max_connections: u32,
    clock: Option<Arc<dyn Clock>>,
}

enum To {
    Url(String),
    Connection(Box<DatabaseConnection>),
}

impl fmt::Debug for MysqlBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MysqlBuilder").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl MysqlBuilder {
    fn to(to: To) -> Self {
        MysqlBuilder { to, prefix: None, max_connections: 16, clock: None }
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

    /// Connects, and reads the server's version and clock.
    ///
    /// # Errors
    /// If the URL is none, a name can't be used, the server can't be reached, or is too old to skip locked rows.
    pub async fn connect(self) -> Result<MysqlStore, StoreError> {
        let names = TableNames::new(self.prefix.unwrap_or_else(|| "owed_".into()), None)?;
        let (db, ours): (DatabaseConnection, bool) = match self.to {
            To::Connection(db) => (*db, false),
            To::Url(url) => {
                let url = match url.strip_prefix("mariadb://") {
                    Some(rest) => format!("mysql://{rest}"),
                    None => url,
                };
                let options = MySqlConnectOptions::from_str(&url)
                    .map_err(|error| classify_sqlx("reading the database's URL", error))?;
                (pool(options, self.max_connections).into(), true)
            }
        };
        let (version, increment): (String, u64) =
            sqlx::query_as("SELECT VERSION(), CAST(@@auto_increment_increment AS UNSIGNED)")
                .fetch_one(db.get_mysql_connection_pool())
                .await
                .map_err(|error| classify_sqlx("asking for the server's version", error))?;
        let server = Server::read(&version, i64::try_from(increment).unwrap_or(1))?;
        let tables = names.tables(DIALECT);
        let steps = Steps {
            dialect: DIALECT,
            tables: tables.clone(),
            skip: " FOR UPDATE SKIP LOCKED",
            wait: " FOR UPDATE",
            // Statistics that lag behind a burst must not turn a claim into a scan of the table.
            index: format!("FORCE INDEX ({})", DIALECT.quote(&format!("{}delivery_claim", names.prefix()))),
        };
        let time = match self.clock {
            Some(clock) => Time::Given(clock),
            None => Time::Server(Arc::new(SampledClock::default())),
        };
        let inner =
            Inner { db, names, tables, steps, time, signal: Signal::new(), server, read_committed: ours };
        let store = MysqlStore { inner: Arc::new(inner) };
        store.sync_clock().await?;
        Ok(store)
    }
}

/// A pool whose sessions are READ COMMITTED, so that neither a transaction nor a statement on its own has to ask.
pub(crate) fn pool(options: MySqlConnectOptions, most: u32) -> MySqlPool {
    let pool = MySqlPoolOptions::new().max_connections(most).acquire_timeout(PATIENCE);
    let pool = pool.after_connect(|connection, _| {
        Box::pin(async move {
            let set = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
            sqlx::query(set).execute(connection).await.map(|_| ())
        })
    });
    pool.connect_lazy_with(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_known_by_what_it_says_and_an_old_one_is_refused_by_name() {
        for (said, shown) in [
            ("9.1.0", "MySQL 9.1.0"),
            ("8.0.1", "MySQL 8.0.1"),
            ("8.4.3-0ubuntu0.24.04", "MySQL 8.4.3"),
            ("10.11.6-MariaDB-0+deb12u1", "MariaDB 10.11.6"),
            ("5.5.5-10.6.16-MariaDB", "MariaDB 10.6.16"),
            ("11.4.2-MariaDB", "MariaDB 11.4.2"),
        ] {
            assert_eq!(Server::read(said, 1).unwrap().to_string(), shown);
        }
        for (said, shown) in [
            ("8.0.0", "MySQL 8.0.0"),
            ("5.7.44-log", "MySQL 5.7.44"),
            ("10.5.23-MariaDB", "MariaDB 10.5.23"),
            ("what", "MySQL what"),
        ] {
            let refused = Server::read(said, 1).unwrap_err().to_string();
            assert!(refused.contains(shown) && refused.contains("10.6"), "{refused}");
        }
    }
}
