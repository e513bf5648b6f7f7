//! The MySQL and MariaDB store of `owed`: for MySQL from 8.0.1 and MariaDB from 10.6 on. The tests run
//! on MySQL 9 and MariaDB 10.11.
//!
//! ```no_run
//! # use owed_mysql::MysqlStore;
//! # async fn example() -> Result<(), owed_core::StoreError> {
//! let store = MysqlStore::connect("mysql://shop@localhost/shop").await?;
//! store.migrate().await?;
//! # Ok(()) }
//! ```
//!
//! Neither server can answer rows from an UPDATE or take arrays, so claims and batches are a few statements by
//! primary key in one READ COMMITTED transaction, which takes no gap locks against those who insert. An idle relay
//! sends one statement a look. Times are `DATETIME(6)` in UTC, whatever the session's time zone; keys are compared
//! by their bytes.
//!
//! Wake-ups reach relays of the same process alone: neither server can notify. Others find rows at their poll.
//!
//! Put no trigger on its tables: the ids of a batch are counted on from the first one (on MySQL; MariaDB answers each),
//! which holds for as long as an INSERT draws all of its ids at once.
//!
//! # Dropped futures
//!
//! A call that is dropped leaves no transaction open and no connection half-way, for any `await`. On a runtime of
//! several threads that includes savepoints: whoever drops one on its way waits for the server's answer. On a runtime
//! of one thread (`current_thread`) there would be nobody to bring it, so there a transaction whose savepoint was
//! dropped while it was being opened, released or undone must be dropped as well.

mod connect;
mod record;
mod schema;

use std::{sync::Arc, time::Instant};

use async_trait::async_trait;
use chrono::NaiveDateTime;
use owed_core::{
    Backlog, Cancelled, Capabilities, ClaimKey, ClaimRequest, Claimed, Clock, DeliveryId, DeliveryQuery,
    DeliveryRow, EventId, EventQuery, EventRow, Listener, NewDelivery, NewEvent, Pause, Prunable, PruneMark,
    Pruned, Recorded, Reopened, SampledClock, Settled, Settlement, Signal, Store, StoreError, Tally,
    Timestamp,
};
use owed_sql::{
    Dialect, Fresh, Migrator, Operator, TableNames, Tables, classify, classify_sqlx, pause, read, retrying,
    settle,
    steps::Steps,
    tx::{self, Opener},
};
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DatabaseTransaction,
    sqlx::{self, Connection, MySqlConnection, MySqlPool},
};
use sea_orm_migration::MigrationTrait;

pub use connect::MysqlBuilder;
use connect::{Server, Spacing};

const DIALECT: Dialect = Dialect::Mysql;

/// Events and deliveries in a MySQL or MariaDB database. Clones share its connections.
#[derive(Clone)]
pub struct MysqlStore {
    inner: Arc<Inner>,
}

#[derive(Clone)]
struct Inner {
    db: DatabaseConnection,
    opener: Opener,
    fresh: Fresh,
    names: TableNames,
    tables: Tables,
    operator: Operator,
    /// The table of dedupe keys.
    dedupe: String,
    steps: Steps,
    time: Time,
    signal: Signal,
    server: Server,
    spacing: Spacing,
}

#[derive(Clone)]
enum Time {
    /// The server's clock, sampled.
    Server(Arc<SampledClock>),
    /// Somebody else's, such as a test's.
    Given(Arc<dyn Clock>),
}

impl std::fmt::Debug for MysqlStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MysqlStore").field("names", &self.inner.names).finish_non_exhaustive()
    }
}

impl MysqlStore {
    /// Connects to a server: `mysql://user:password@host/database` (or `mariadb://`).
    ///
    /// # Errors
    /// If the URL is none, the server can't be reached, or is too old to skip locked rows.
    pub async fn connect(url: impl Into<String>) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Connects with other table names, another number of connections, or another clock.
    pub fn builder(url: impl Into<String>) -> MysqlBuilder {
        MysqlBuilder::of_url(url.into())
    }

    /// Uses connections that the service has already, with other table names if it wants.
    pub fn on(db: DatabaseConnection) -> MysqlBuilder {
        MysqlBuilder::of_connection(db)
    }

    /// The connections, for the service's own statements outside of a transaction.
    pub fn connection(&self) -> &DatabaseConnection {
        &self.inner.db
    }

    /// Makes or brings up to date its tables. Running it again, or in two processes at once, is harmless: one
    /// waits for the other.
    ///
    /// # Errors
    /// If the server refuses.
    ///
    /// # Cancel safety
    /// Neither server can roll back the making of a table: dropped, it may be done in part, and running it again
    /// goes on from there.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        let migrating = |error| classify_sqlx("preparing to migrate", error);
        // A lock of the server that belongs to one connection, and ends with it, whatever happens here. Not one of
        // the pool's, which may have no other.
        let options = self.pool().connect_options();
        let mut connection = MySqlConnection::connect_with(&options).await.map_err(migrating)?;
        let locked: Option<i64> = sqlx::query_scalar("SELECT GET_LOCK('owed migrations', 60)")
            .fetch_one(&mut connection)
            .await
            .map_err(migrating)?;
        if locked != Some(1) {
            return Err(StoreError::Unavailable {
                doing: "preparing to migrate",
                source: "another process has been migrating for a minute".into(),
            });
        }
        let migrated = self.migrator().run(&self.inner.db).await;
        // The lock is gone either way; this way the server does not have to find out.
        let _ = connection.close().await;
        migrated
    }

    /// Its migrations, for a service's own migrator.
    pub fn migrations(&self) -> Vec<Box<dyn MigrationTrait>> {
        self.migrator().boxed()
    }

    /// Its migrations as SQL.
    pub fn migration_sql(&self) -> String {
        self.migrator().sql()
    }

    /// Drops its tables, and everything in them. For tests.
    ///
    /// # Errors
    /// If the server refuses.
    pub async fn drop_tables(&self) -> Result<(), StoreError> {
        let sql = schema::drop(&self.inner.names);
        self.inner
            .db
            .execute_unprepared(&sql)
            .await
            .map_err(|error| classify("dropping its tables", error))?;
        Ok(())
    }

    /// How the database goes about a claim, in its own words: what an operator looks at when claims are slow, and what
    /// the tests hold it to. Claims nothing.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain_claim(&self, request: &ClaimRequest) -> Result<String, StoreError> {
        self.inner.steps.explain(&self.inner.db, request).await
    }

    /// How the database goes about a page of dead letters. As [`explain_claim`](Self::explain_claim).
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain_dead_letters(&self) -> Result<String, StoreError> {
        read::explain_dead(&self.inner.db, DIALECT, &self.inner.tables).await
    }

    /// How the database goes about looking for events to prune. As [`explain_claim`](Self::explain_claim).
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain_prunable(&self, kind: &Prunable) -> Result<String, StoreError> {
        self.inner.operator.explain_prunable(&self.inner.db, kind).await
    }

    fn migrator(&self) -> Migrator {
        schema::migrator(&self.inner.names, self.inner.server.kind)
    }

    fn pool(&self) -> &MySqlPool {
        self.inner.db.get_mysql_connection_pool()
    }
}

/// Runs some work in a transaction of its own, again if the database asks for it. A macro, since a closure that
/// borrows the transaction in its future can't be shown to be `Send`.
macro_rules! in_tx {
    ($store:ident, |$tx:ident| $work:expr) => {
        $store.inner.fresh.noting(
            retrying(|| async {
                let $tx = $store.inner.opener.begin().await?;
                let answer = $work.await?;
                tx::commit($tx).await?;
                Ok(answer)
            })
            .await,
        )
    };
}

#[async_trait]
impl Store for MysqlStore {
    type Tx = DatabaseTransaction;

    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::new(self.inner.server.to_string());
        can.wakes_other_processes = false;
        can
    }

    fn now(&self) -> Timestamp {
        match &self.inner.time {
            Time::Server(clock) => clock.now(),
            Time::Given(clock) => clock.now(),
        }
    }

    async fn sync_clock(&self) -> Result<(), StoreError> {
        if let Time::Server(clock) = &self.inner.time {
            let reading = |error| classify_sqlx("reading the server's clock", error);
            let mut connection = self.pool().acquire().await.map_err(reading)?;
            let sent = Instant::now();
            let said: NaiveDateTime = sqlx::query_scalar("SELECT CAST(UTC_TIMESTAMP(6) AS DATETIME(6))")
                .fetch_one(&mut *connection)
                .await
                .map_err(reading)?;
            clock.sample(sent, said.and_utc());
        }
        Ok(())
    }

    async fn begin(&self) -> Result<DatabaseTransaction, StoreError> {
        self.inner.opener.begin().await
    }

    async fn savepoint(&self, tx: &DatabaseTransaction) -> Result<DatabaseTransaction, StoreError> {
        tx::savepoint(tx).await
    }

    async fn commit(&self, tx: DatabaseTransaction) -> Result<(), StoreError> {
        tx::commit(tx).await
    }

    async fn rollback(&self, tx: DatabaseTransaction) -> Result<(), StoreError> {
        tx::rollback(tx).await
    }

    async fn record(
        &self,
        tx: &DatabaseTransaction,
        events: &[NewEvent],
    ) -> Result<Vec<Recorded>, StoreError> {
        self.inner.fresh.noting(record::record(tx, &self.inner, events).await)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Claimed>, StoreError> {
        if request.limit == 0 || request.receivers.is_empty() {
            return Ok(Vec::new());
        }
        let due = retrying(|| self.inner.steps.due(&self.inner.db, request)).await?;
        if due.is_empty() {
            return Ok(Vec::new());
        }
        in_tx!(self, |tx| self.inner.steps.claim(&tx, request, &due))
    }

    async fn take(
        &self,
        key: &ClaimKey,
        worker: &str,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<Option<Claimed>, StoreError> {
        in_tx!(self, |tx| self.inner.steps.take(&tx, key, worker, now, until))
    }

    async fn renew(&self, keys: &[ClaimKey], until: Timestamp) -> Result<Vec<DeliveryId>, StoreError> {
        in_tx!(self, |tx| self.inner.steps.renew(&tx, keys, until))
    }

    async fn release(&self, keys: &[ClaimKey], at: Timestamp) -> Result<u64, StoreError> {
        in_tx!(self, |tx| self.inner.steps.release(&tx, keys, at))
    }

    async fn suspect(&self, key: &ClaimKey) -> Result<Settled, StoreError> {
        let noted = retrying(|| settle::suspect(&self.inner.db, DIALECT, &self.inner.tables, key)).await;
        self.inner.fresh.noting(noted)
    }

    async fn settle(
        &self,
        tx: &DatabaseTransaction,
        settlement: &Settlement,
        now: Timestamp,
    ) -> Result<Settled, StoreError> {
        self.inner.fresh.noting(settle::settle(tx, DIALECT, &self.inner.tables, settlement, now).await)
    }

    async fn settle_all(
        &self,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<Vec<Settled>, StoreError> {
        in_tx!(self, |tx| self.inner.steps.settle_all(&tx, settlements, now))
    }

    async fn expedite(&self, receivers: &[&str], now: Timestamp) -> Result<u64, StoreError> {
        in_tx!(self, |tx| self.inner.steps.expedite(&tx, receivers, now))
    }

    async fn pause(&self, pause: &Pause) -> Result<(), StoreError> {
        in_tx!(self, |tx| pause::record(&tx, DIALECT, &self.inner.tables, pause))
    }

    async fn lock_events(
        &self,
        tx: &DatabaseTransaction,
        events: &[EventId],
    ) -> Result<Vec<EventRow>, StoreError> {
        self.inner.fresh.noting(self.inner.operator.lock_events(tx, events).await)
    }

    async fn cancel(
        &self,
        tx: &DatabaseTransaction,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<Cancelled, StoreError> {
        self.inner.fresh.noting(self.inner.operator.cancel(tx, deliveries, now).await)
    }

    async fn requeue(
        &self,
        tx: &DatabaseTransaction,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<u64, StoreError> {
        self.inner.fresh.noting(self.inner.operator.requeue(tx, deliveries, now).await)
    }

    async fn reopen(
        &self,
        tx: &DatabaseTransaction,
        event: EventId,
        rows: &[NewDelivery],
    ) -> Result<Reopened, StoreError> {
        self.inner.fresh.noting(self.inner.operator.reopen(tx, event, rows).await)
    }

    async fn retention_windows(&self) -> Result<Vec<i64>, StoreError> {
        self.inner.operator.retention_windows(&self.inner.db).await
    }

    async fn prunable(
        &self,
        kind: &Prunable,
        after: Option<PruneMark>,
        limit: u32,
    ) -> Result<Vec<PruneMark>, StoreError> {
        self.inner.operator.prunable(&self.inner.db, kind, after, limit).await
    }

    async fn prune(&self, kind: &Prunable, events: &[EventId], rows: u32) -> Result<Pruned, StoreError> {
        in_tx!(self, |tx| self.inner.operator.prune(&tx, kind, events, rows))
    }

    async fn pauses(&self, now: Timestamp) -> Result<Vec<Pause>, StoreError> {
        pause::current(&self.inner.db, DIALECT, &self.inner.tables, now).await
    }

    async fn owed(&self, receiver: &str, limit: u32) -> Result<Vec<DeliveryRow>, StoreError> {
        read::owed(&self.inner.db, DIALECT, &self.inner.tables, receiver, limit).await
    }

    async fn owed_receivers(&self) -> Result<Vec<String>, StoreError> {
        read::owed_receivers(&self.inner.db, DIALECT, &self.inner.tables).await
    }

    async fn backlog(&self, receiver: &str, now: Timestamp, bound: u32) -> Result<Backlog, StoreError> {
        read::backlog(&self.inner.db, DIALECT, &self.inner.tables, receiver, now, bound).await
    }

    async fn dead_letters(&self, bound: u32) -> Result<Vec<(String, u64)>, StoreError> {
        read::dead_letters(&self.inner.db, DIALECT, &self.inner.tables, bound).await
    }

    async fn last_successes(&self) -> Result<Vec<(String, Timestamp)>, StoreError> {
        read::last_successes(&self.inner.db, DIALECT, &self.inner.tables).await
    }

    async fn tally(&self) -> Result<Vec<Tally>, StoreError> {
        read::tally(&self.inner.db, DIALECT, &self.inner.tables).await
    }

    async fn events(&self, query: &EventQuery) -> Result<Vec<EventRow>, StoreError> {
        read::events(&self.inner.db, DIALECT, &self.inner.tables, query).await
    }

    async fn deliveries(&self, query: &DeliveryQuery) -> Result<Vec<DeliveryRow>, StoreError> {
        read::deliveries(&self.inner.db, DIALECT, &self.inner.tables, query).await
    }

    async fn events_in(
        &self,
        tx: &DatabaseTransaction,
        query: &EventQuery,
    ) -> Result<Vec<EventRow>, StoreError> {
        read::events(tx, DIALECT, &self.inner.tables, query).await
    }

    async fn deliveries_in(
        &self,
        tx: &DatabaseTransaction,
        query: &DeliveryQuery,
    ) -> Result<Vec<DeliveryRow>, StoreError> {
        read::deliveries(tx, DIALECT, &self.inner.tables, query).await
    }

    async fn wake(&self) -> Result<(), StoreError> {
        self.inner.signal.raise();
        Ok(())
    }

    async fn listen(&self) -> Result<Box<dyn Listener>, StoreError> {
        Ok(Box::new(self.inner.signal.clone()))
    }

    async fn detached(&self, connections: u32) -> Result<Self, StoreError> {
        let options = self.pool().connect_options().as_ref().clone();
        let pool = connect::pool(options, connections, self.inner.fresh.clone(), self.inner.spacing.clone());
        let db = pool.into();
        let opener = connect::opener(&db, true);
        Ok(MysqlStore { inner: Arc::new(Inner { db, opener, ..Inner::clone(&self.inner) }) })
    }
}
