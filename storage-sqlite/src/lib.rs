//! The SQLite store of `owed`: the embedded default, in a file of the service's own.
//!
//! ```no_run
//! # use owed_sqlite::SqliteStore;
//! # async fn example() -> Result<(), owed_core::StoreError> {
//! let store = SqliteStore::connect("sqlite://shop.db").await?;
//! store.migrate().await?;
//! # Ok(()) }
//! ```
//!
//! SQLite has one writer at a time. Within a process writers queue for one connection, in order; other processes
//! wait for its lock, up to a minute. Nobody is told "database is locked" before that. Readers never wait
//! (write-ahead log). Every commit reaches the disk before it returns (`synchronous = FULL`).
//!
//! A transaction takes the write lock when it begins: keep it short, and do not wait in it for another one of the same
//! process. A database in memory has one connection for everything, so there a reader waits for an open transaction as
//! well.
//!
//! Times are kept as microseconds since 1970: `datetime(available_at / 1e6, 'unixepoch')` shows one.
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

use std::sync::Arc;

use async_trait::async_trait;
use owed_core::{
    Backlog, Cancelled, Capabilities, ClaimKey, ClaimRequest, Claimed, Clock, DeliveryId, DeliveryQuery,
    DeliveryRow, EventId, EventQuery, EventRow, Listener, NewDelivery, NewEvent, Pause, Prunable, PruneMark,
    Pruned, Recorded, Reopened, Settled, Settlement, Signal, Store, StoreError, Tally, Timestamp,
};
use owed_sql::{
    Dialect, Migrator, Operator, TableNames, Tables, classify, pause, read, retrying, settle,
    steps::Steps,
    tx::{self, Opener},
};
use sea_orm::{ConnectionTrait, DatabaseConnection, DatabaseTransaction, Statement};
use sea_orm_migration::MigrationTrait;

pub use connect::SqliteBuilder;

const DIALECT: Dialect = Dialect::Sqlite;

/// Events and deliveries in a SQLite database. Clones share its connections.
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    /// One connection: the queue of this process's writers.
    write: DatabaseConnection,
    read: DatabaseConnection,
    opener: Opener,
    names: TableNames,
    tables: Tables,
    operator: Operator,
    steps: Steps,
    clock: Arc<dyn Clock>,
    signal: Signal,
    version: String,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("names", &self.inner.names).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Opens a database file, and makes it if it is not there: `sqlite://shop.db`, or `sqlite::memory:`.
    ///
    /// # Errors
    /// If the URL is none, or the file can't be opened.
    pub async fn connect(url: impl Into<String>) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Opens a database file with other table names, or another clock.
    pub fn builder(url: impl Into<String>) -> SqliteBuilder {
        SqliteBuilder::of_url(url.into())
    }

    /// Uses connections that the service has already, with other table names if it wants.
    ///
    /// The store's own pool writes over one connection, so that writers of this process queue in order. A pool of
    /// several leaves it to SQLite, which makes a writer wait only for as long as that pool's `busy_timeout`.
    pub fn on(db: DatabaseConnection) -> SqliteBuilder {
        SqliteBuilder::of_connection(db)
    }

    /// The connection that writes, for the service's own statements outside of a transaction.
    pub fn connection(&self) -> &DatabaseConnection {
        &self.inner.write
    }

    /// Makes or brings up to date its tables. Running it again, or in two processes at once, is harmless.
    ///
    /// # Errors
    /// If the database refuses.
    ///
    /// # Cancel safety
    /// Dropped, it is rolled back as a whole.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        let begun = self.inner.opener.begin().await?;
        self.migrator().run(&begun).await?;
        tx::commit(begun).await
    }

    /// Its migrations, for a service's own migrator.
    pub fn migrations(&self) -> Vec<Box<dyn MigrationTrait>> {
        self.migrator().boxed()
    }

    /// Its migrations as SQL.
    pub fn migration_sql(&self) -> String {
        self.migrator().sql()
    }

    /// The database's file; empty for one in memory.
    ///
    /// # Errors
    /// If the database can't be read.
    pub async fn file(&self) -> Result<String, StoreError> {
        let doing = "asking for its file";
        let asked = Statement::from_string(
            DIALECT.backend(),
            "SELECT file FROM pragma_database_list WHERE name = 'main'",
        );
        let row = self.inner.read.query_one_raw(asked).await.map_err(|error| classify(doing, error))?;
        let file: Option<Option<String>> =
            row.map(|row| row.try_get_by_index(0)).transpose().map_err(|error| classify(doing, error))?;
        Ok(file.flatten().unwrap_or_default())
    }

    /// How the database goes about a claim, in its own words: what an operator looks at when claims are slow, and what
    /// the tests hold it to. Claims nothing.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain_claim(&self, request: &ClaimRequest) -> Result<String, StoreError> {
        self.inner.steps.explain(&self.inner.read, request).await
    }

    /// How the database goes about a page of dead letters. As [`explain_claim`](Self::explain_claim).
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain_dead_letters(&self) -> Result<String, StoreError> {
        read::explain_dead(&self.inner.read, DIALECT, &self.inner.tables).await
    }

    /// How the database goes about looking for events to prune. As [`explain_claim`](Self::explain_claim).
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain_prunable(&self, kind: &Prunable) -> Result<String, StoreError> {
        self.inner.operator.explain_prunable(&self.inner.read, kind).await
    }

    fn migrator(&self) -> Migrator {
        schema::migrator(&self.inner.names)
    }
}

/// Runs some work in a transaction of its own, again if the database asks for it. A macro, since a closure that
/// borrows the transaction in its future can't be shown to be `Send`.
macro_rules! in_tx {
    ($store:ident, |$tx:ident| $work:expr) => {
        retrying(|| async {
            let $tx = $store.inner.opener.begin().await?;
            let answer = $work.await?;
            tx::commit($tx).await?;
            Ok(answer)
        })
        .await
    };
}

#[async_trait]
impl Store for SqliteStore {
    type Tx = DatabaseTransaction;

    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::new(format!("SQLite {}", self.inner.version));
        can.wakes_other_processes = false;
        can
    }

    fn now(&self) -> Timestamp {
        self.inner.clock.now()
    }

    async fn sync_clock(&self) -> Result<(), StoreError> {
        // The database runs in this process: its clock is this machine's.
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
        record::record(tx, &self.inner.tables, events).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Claimed>, StoreError> {
        // Read first: looking for work does not queue with the writers.
        let due = self.inner.steps.due(&self.inner.read, request).await?;
        if due.is_empty() || request.limit == 0 {
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
        retrying(|| settle::suspect(&self.inner.write, DIALECT, &self.inner.tables, key)).await
    }

    async fn settle(
        &self,
        tx: &DatabaseTransaction,
        settlement: &Settlement,
        now: Timestamp,
    ) -> Result<Settled, StoreError> {
        settle::settle(tx, DIALECT, &self.inner.tables, settlement, now).await
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
        self.inner.operator.lock_events(tx, events).await
    }

    async fn cancel(
        &self,
        tx: &DatabaseTransaction,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<Cancelled, StoreError> {
        self.inner.operator.cancel(tx, deliveries, now).await
    }

    async fn requeue(
        &self,
        tx: &DatabaseTransaction,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<u64, StoreError> {
        self.inner.operator.requeue(tx, deliveries, now).await
    }

    async fn reopen(
        &self,
        tx: &DatabaseTransaction,
        event: EventId,
        rows: &[NewDelivery],
    ) -> Result<Reopened, StoreError> {
        self.inner.operator.reopen(tx, event, rows).await
    }

    async fn retention_windows(&self) -> Result<Vec<i64>, StoreError> {
        self.inner.operator.retention_windows(&self.inner.read).await
    }

    async fn prunable(
        &self,
        kind: &Prunable,
        after: Option<PruneMark>,
        limit: u32,
    ) -> Result<Vec<PruneMark>, StoreError> {
        self.inner.operator.prunable(&self.inner.read, kind, after, limit).await
    }

    async fn prune(&self, kind: &Prunable, events: &[EventId], rows: u32) -> Result<Pruned, StoreError> {
        in_tx!(self, |tx| self.inner.operator.prune(&tx, kind, events, rows))
    }

    async fn pauses(&self, now: Timestamp) -> Result<Vec<Pause>, StoreError> {
        pause::current(&self.inner.read, DIALECT, &self.inner.tables, now).await
    }

    async fn owed(&self, receiver: &str, limit: u32) -> Result<Vec<DeliveryRow>, StoreError> {
        read::owed(&self.inner.read, DIALECT, &self.inner.tables, receiver, limit).await
    }

    async fn owed_receivers(&self) -> Result<Vec<String>, StoreError> {
        read::owed_receivers(&self.inner.read, DIALECT, &self.inner.tables).await
    }

    async fn backlog(&self, receiver: &str, now: Timestamp, bound: u32) -> Result<Backlog, StoreError> {
        read::backlog(&self.inner.read, DIALECT, &self.inner.tables, receiver, now, bound).await
    }

    async fn dead_letters(&self, bound: u32) -> Result<Vec<(String, u64)>, StoreError> {
        read::dead_letters(&self.inner.read, DIALECT, &self.inner.tables, bound).await
    }

    async fn last_successes(&self) -> Result<Vec<(String, Timestamp)>, StoreError> {
        read::last_successes(&self.inner.read, DIALECT, &self.inner.tables).await
    }

    async fn tally(&self) -> Result<Vec<Tally>, StoreError> {
        read::tally(&self.inner.read, DIALECT, &self.inner.tables).await
    }

    async fn events(&self, query: &EventQuery) -> Result<Vec<EventRow>, StoreError> {
        read::events(&self.inner.read, DIALECT, &self.inner.tables, query).await
    }

    async fn deliveries(&self, query: &DeliveryQuery) -> Result<Vec<DeliveryRow>, StoreError> {
        read::deliveries(&self.inner.read, DIALECT, &self.inner.tables, query).await
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

    async fn detached(&self, _: u32) -> Result<Self, StoreError> {
        // Its connections are driven by threads of their own, on whichever runtime they are used.
        Ok(self.clone())
    }
}
