//! The PostgreSQL store of `owed`.
//!
//! ```no_run
//! # use owed_postgres::PostgresStore;
//! # async fn example() -> Result<(), owed_core::StoreError> {
//! let store = PostgresStore::connect("postgres://shop@localhost/shop").await?;
//! store.migrate().await?;
//! # Ok(()) }
//! ```
//!
//! Each hot statement is in a file of its own, with the plan that it must get:
//!
//! | file | statement | round trips |
//! | --- | --- | --- |
//! | `record` | events and all they owe | one for any number of them |
//! | `claim` | rows and their events, whole | one |
//! | `settle` | many outcomes, each on its own condition | one |
//! | `lease` | renew, hand back, take over | one each |
//!
//! A connection that was in use within the last second is taken for alive and not looked at first, so after a restart
//! of the server a call may find a dead one, and say [`StoreError::Unavailable`]. One that turned read-only (a
//! fail-over) is not used again.
//!
//! # Dropped futures
//!
//! A call that is dropped leaves no transaction open and no connection half-way, for any `await`. On a runtime of
//! several threads that includes savepoints: whoever drops one on its way waits for the server's answer. On a runtime
//! of one thread (`current_thread`) there would be nobody to bring it, so there a transaction whose savepoint was
//! dropped while it was being opened, released or undone must be dropped as well.

mod claim;
mod connect;
mod lease;
mod record;
mod row;
mod schema;
mod settle;
mod wake;

use std::{sync::Arc, time::Instant};

use async_trait::async_trait;
use owed_core::{
    Backlog, Cancelled, Capabilities, ClaimKey, ClaimRequest, Claimed, Clock, DeliveryId, DeliveryQuery,
    DeliveryRow, EventId, EventQuery, EventRow, Listener, NewDelivery, NewEvent, Pause, Prunable, PruneMark,
    Pruned, Recorded, Reopened, SampledClock, Settled, Settlement, Signal, Store, StoreError, Tally,
    Timestamp,
};
use owed_sql::{
    Dialect, Fresh, Migrator, Operator, TableNames, Tables, classify, classify_sqlx, pause, read, retrying,
    settle as shared,
    tx::{self, Opener},
};
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DatabaseTransaction,
    sqlx::{self, PgPool},
};
use sea_orm_migration::MigrationTrait;

pub use connect::PostgresBuilder;

const DIALECT: Dialect = Dialect::Postgres;

/// Events and deliveries in a PostgreSQL database. Clones share its connections.
#[derive(Clone)]
pub struct PostgresStore {
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
    time: Time,
    signal: Signal,
    version: String,
    sql: Arc<Statements>,
}

/// The texts of the hot statements, put together once.
struct Statements {
    claim: String,
    claim_filtered: String,
    settle_succeeded: String,
    settle_any: String,
    record: String,
}

#[derive(Clone)]
enum Time {
    /// The server's clock, sampled.
    Server(Arc<SampledClock>),
    /// Somebody else's, such as a test's.
    Given(Arc<dyn Clock>),
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresStore").field("names", &self.inner.names).finish_non_exhaustive()
    }
}

impl PostgresStore {
    /// Connects to a server: `postgres://user:password@host/database`.
    ///
    /// # Errors
    /// If the URL is none, or the server can't be reached.
    pub async fn connect(url: impl Into<String>) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Connects with other table names, another number of connections, or another clock.
    pub fn builder(url: impl Into<String>) -> PostgresBuilder {
        PostgresBuilder::of_url(url.into())
    }

    /// Uses connections that the service has already, with other table names if it wants.
    pub fn on(db: DatabaseConnection) -> PostgresBuilder {
        PostgresBuilder::of_connection(db)
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
    /// Dropped, it is rolled back as a whole.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        let begun = self.begin().await?;
        schema::prepare(&begun, &self.inner.names).await?;
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
        claim::explain(self.pool(), &self.inner.sql, request).await
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
        schema::migrator(&self.inner.names)
    }

    fn pool(&self) -> &PgPool {
        self.inner.db.get_postgres_connection_pool()
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
impl Store for PostgresStore {
    type Tx = DatabaseTransaction;

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(format!("PostgreSQL {}", self.inner.version))
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
            let asked = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&mut *connection).await;
            clock.sample(sent, asked.map_err(reading)?);
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
        self.inner.fresh.noting(retrying(|| claim::claim(self.pool(), &self.inner.sql, request)).await)
    }

    async fn take(
        &self,
        key: &ClaimKey,
        worker: &str,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<Option<Claimed>, StoreError> {
        self.inner
            .fresh
            .noting(retrying(|| lease::take(self.pool(), &self.inner.tables, key, worker, now, until)).await)
    }

    async fn renew(&self, keys: &[ClaimKey], until: Timestamp) -> Result<Vec<DeliveryId>, StoreError> {
        self.inner.fresh.noting(retrying(|| lease::renew(self.pool(), &self.inner.tables, keys, until)).await)
    }

    async fn release(&self, keys: &[ClaimKey], at: Timestamp) -> Result<u64, StoreError> {
        self.inner.fresh.noting(retrying(|| lease::release(self.pool(), &self.inner.tables, keys, at)).await)
    }

    async fn suspect(&self, key: &ClaimKey) -> Result<Settled, StoreError> {
        self.inner
            .fresh
            .noting(retrying(|| shared::suspect(&self.inner.db, DIALECT, &self.inner.tables, key)).await)
    }

    async fn settle(
        &self,
        tx: &DatabaseTransaction,
        settlement: &Settlement,
        now: Timestamp,
    ) -> Result<Settled, StoreError> {
        self.inner.fresh.noting(shared::settle(tx, DIALECT, &self.inner.tables, settlement, now).await)
    }

    async fn settle_all(
        &self,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<Vec<Settled>, StoreError> {
        self.inner
            .fresh
            .noting(retrying(|| settle::settle_all(self.pool(), &self.inner.sql, settlements, now)).await)
    }

    async fn expedite(&self, receivers: &[&str], now: Timestamp) -> Result<u64, StoreError> {
        self.inner
            .fresh
            .noting(retrying(|| lease::expedite(self.pool(), &self.inner.tables, receivers, now)).await)
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
        wake::notify(self.pool(), &self.inner.names).await
    }

    async fn listen(&self) -> Result<Box<dyn Listener>, StoreError> {
        wake::listen(self.pool(), &self.inner.names, self.inner.signal.clone()).await
    }

    async fn detached(&self, connections: u32) -> Result<Self, StoreError> {
        let options = self.pool().connect_options().as_ref().clone();
        let db = connect::pool(options, connections, self.inner.fresh.clone()).into();
        let opener = connect::opener(&db, true);
        Ok(PostgresStore { inner: Arc::new(Inner { db, opener, ..Inner::clone(&self.inner) }) })
    }
}
