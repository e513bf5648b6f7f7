//! Connecting, and finding out which server answers.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use owed_core::{Clock, SampledClock, Signal, Store, StoreError};
use owed_sql::{
    Fresh, Operator, TableNames, classify_sqlx, fresh::TRUSTED, names::PREFIX, steps::Steps, tx::Opener,
};
use sea_orm::{
    DatabaseConnection, IsolationLevel, TransactionOptions,
    sqlx::{
        self, Connection, MySqlPool,
        mysql::{MySqlConnectOptions, MySqlPoolOptions},
    },
};

use crate::{DIALECT, Inner, MysqlStore, Time, schema};

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
    pub(crate) fn read(said: &str) -> Result<Self, StoreError> {
        let kind = if said.to_ascii_lowercase().contains("mariadb") { Kind::Mariadb } else { Kind::Mysql };
        // MariaDB's own protocol puts this before its version, for clients that knew MySQL alone.
        let said = said.strip_prefix("5.5.5-").filter(|_| kind == Kind::Mariadb).unwrap_or(said);
        let version = said.split(['-', '+', ' ']).next().unwrap_or_default().to_owned();
        let numbers: Vec<u32> = version.split('.').map_while(|number| number.parse().ok()).collect();
        let least: [u32; 3] = match kind {
            Kind::Mysql => [8, 0, 1],
            Kind::Mariadb => [10, 6, 0],
        };
        let server = Server { kind, version };
        if numbers.is_empty() || numbers[..] < least[..] {
            return Err(StoreError::unsupported(format!(
                "this server is {server}, which can't skip rows that another relay holds: owed needs MySQL 8.0.1 or MariaDB 10.6, or later"
            )));
        }
        Ok(server)
    }
}

/// How far apart the ids are that one INSERT of many rows draws (`auto_increment_increment`).
///
/// A session keeps the value that it began with, whatever is set for later ones. So what the sessions of a pool of
/// ours say when they connect holds for as long as they all say the same; else whoever needs it asks its session.
#[derive(Clone, Debug)]
pub(crate) struct Spacing(Arc<AtomicI64>);

/// What a session says about it.
pub(crate) const SPACING: &str = "SELECT CAST(@@SESSION.auto_increment_increment AS SIGNED)";

impl Spacing {
    const UNKNOWN: i64 = 0;
    const ASK: i64 = -1;

    /// To be learnt from the sessions of a pool of ours.
    fn learnt() -> Self {
        Spacing(Arc::new(AtomicI64::new(Self::UNKNOWN)))
    }

    fn ask_always(&self) {
        self.0.store(Self::ASK, Ordering::Relaxed);
    }

    /// Notes what a new session says.
    fn learn(&self, said: i64) {
        let learnt = self.0.compare_exchange(Self::UNKNOWN, said, Ordering::Relaxed, Ordering::Relaxed);
        if learnt.is_err_and(|before| before != said) {
            self.ask_always();
        }
    }

    /// The distance, where it is the same in every session.
    pub(crate) fn known(&self) -> Option<i64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|known| *known > 0)
    }
}

/// Connects to MySQL or MariaDB. Made by [`MysqlStore::builder`] and [`MysqlStore::on`].
#[must_use = "nothing is connected until `connect` is awaited"]
pub struct MysqlBuilder {
    to: To,
    prefix: String,
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
        MysqlBuilder { to, prefix: PREFIX.into(), max_connections: 16, clock: None }
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
        let names = TableNames::new(self.prefix, None)?;
        let (fresh, spacing) = (Fresh::default(), Spacing::learnt());
        let (db, ours): (DatabaseConnection, bool) = match self.to {
            To::Connection(db) => {
                spacing.ask_always();
                (*db, false)
            }
            To::Url(url) => {
                let url = match url.strip_prefix("mariadb://") {
                    Some(rest) => format!("mysql://{rest}"),
                    None => url,
                };
                let options = MySqlConnectOptions::from_str(&url)
                    .map_err(|error| classify_sqlx("reading the database's URL", error))?;
                (pool(options, self.max_connections, fresh.clone(), spacing.clone()).into(), true)
            }
        };
        let asking = |error| classify_sqlx("asking for the server's version", error);
        let pool = db.get_mysql_connection_pool();
        let version: String = sqlx::query_scalar("SELECT VERSION()").fetch_one(pool).await.map_err(asking)?;
        let server = Server::read(&version)?;
        let galera = sqlx::query("SHOW VARIABLES WHERE Variable_name = 'wsrep_on' AND Value = 'ON'");
        if galera.fetch_optional(pool).await.map_err(asking)?.is_some() {
            // A node of a Galera cluster sets its sessions' spacing anew when others come and go.
            spacing.ask_always();
        }
        let opener = opener(&db, ours);
        let tables = names.tables(DIALECT);
        let operator = Operator::new(DIALECT, &names, Some(schema::dedupe(&names)));
        let steps = Steps {
            dialect: DIALECT,
            tables: tables.clone(),
            skip: " FOR UPDATE SKIP LOCKED",
            wait: " FOR UPDATE",
            // Statistics that lag behind a burst must not turn a claim into a scan of the table.
            primary: "FORCE INDEX (PRIMARY)",
            index: format!("FORCE INDEX ({})", DIALECT.quote(&format!("{}delivery_claim", names.prefix()))),
        };
        let time = match self.clock {
            Some(clock) => Time::Given(clock),
            None => Time::Server(Arc::new(SampledClock::default())),
        };
        let (signal, dedupe) = (Signal::new(), schema::dedupe(&names));
        let inner = Inner {
            db,
            opener,
            fresh,
            names,
            tables,
            operator,
            dedupe,
            steps,
            time,
            signal,
            server,
            spacing,
        };
        let store = MysqlStore { inner: Arc::new(inner) };
        store.sync_clock().await?;
        Ok(store)
    }
}

pub(crate) fn opener(db: &DatabaseConnection, plain: bool) -> Opener {
    let isolation_level = (!plain).then_some(IsolationLevel::ReadCommitted);
    let options = TransactionOptions { isolation_level, ..TransactionOptions::default() };
    Opener::new(db.clone(), options, db.get_mysql_connection_pool().options().get_max_connections())
}

/// How long a connection that comes back to the pool may take to answer.
const ANSWER: Duration = Duration::from_secs(2);

/// A pool whose sessions are READ COMMITTED, so that neither a transaction nor a statement on its own has to ask,
/// and which spends no round trip on looking at a connection that was in use a moment ago.
pub(crate) fn pool(options: MySqlConnectOptions, most: u32, fresh: Fresh, spacing: Spacing) -> MySqlPool {
    MySqlPoolOptions::new()
        .max_connections(most)
        .after_connect(move |connection, _| {
            let spacing = spacing.clone();
            Box::pin(async move {
                let set = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
                sqlx::query(set).execute(&mut *connection).await?;
                let asked = sqlx::query_scalar(SPACING).fetch_one(connection).await?;
                spacing.learn(asked);
                Ok(())
            })
        })
        .after_release(|connection, _| {
            Box::pin(async move {
                // A statement whose future was dropped while it was being prepared leaves answers behind that
                // sqlx 0.9 waits for as if they were still to come: such a connection never comes back to the
                // pool, and takes its place along. It is given up instead.
                let answered = tokio::time::timeout(ANSWER, connection.ping()).await;
                answered
                    .map_err(|_| sqlx::Error::Protocol("no answer after a dropped statement".into()))??;
                Ok(true)
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
    fn spacing_is_known_for_as_long_as_all_sessions_agree() {
        let spacing = Spacing::learnt();
        assert_eq!(spacing.known(), None);
        spacing.learn(1);
        spacing.learn(1);
        assert_eq!(spacing.known(), Some(1));
        spacing.learn(2);
        spacing.learn(1);
        assert_eq!(spacing.known(), None);
    }

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
            assert_eq!(Server::read(said).unwrap().to_string(), shown);
        }
        for (said, shown) in [
            ("8.0.0", "MySQL 8.0.0"),
            ("5.7.44-log", "MySQL 5.7.44"),
            ("10.5.23-MariaDB", "MariaDB 10.5.23"),
            ("what", "MySQL what"),
        ] {
            let refused = Server::read(said).unwrap_err().to_string();
            assert!(refused.contains(shown) && refused.contains("10.6"), "{refused}");
        }
    }
}
