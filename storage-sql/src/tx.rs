//! Transactions that no dropped future can leave open.
//!
//! A `BEGIN` whose future is dropped while it is on its way comes back to the pool as a connection with an open
//! transaction (seen with sqlx 0.9 on PostgreSQL): the next one to use it would work in a stranger's
//! transaction. So transactions begin and end in tasks of their own. Whoever waits may go; the task goes on, and
//! what it opened is rolled back when nobody takes it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use owed_core::StoreError;
use sea_orm::{DatabaseConnection, DatabaseTransaction, DbErr, TransactionOptions, TransactionTrait};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::Semaphore,
    task::{JoinError, JoinHandle, block_in_place},
    time::timeout,
};

use crate::classify;

/// The longest that anybody waits for a turn: to write to SQLite, or to be given a connection.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What a task of ours came to, whoever waited for it.
fn came_to<T>(doing: &'static str, task: Result<Result<T, DbErr>, JoinError>) -> Result<T, StoreError> {
    match task {
        Ok(ended) => ended.map_err(|error| classify(doing, error)),
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        // The runtime that the task ran on is shutting down.
        Err(ended) => Err(StoreError::Unavailable { doing, source: Box::new(ended) }),
    }
}

/// How long a drop waits for an answer that is on its way.
const ANSWER: Duration = Duration::from_secs(5);

/// Waits where something is dropped, on a runtime of several threads: another one brings the answer. On a runtime
/// of one thread nobody would.
fn wait_in_place(for_answer: impl Future) {
    let Ok(runtime) = Handle::try_current() else { return };
    if runtime.runtime_flavor() != RuntimeFlavor::MultiThread {
        return;
    }
    let wait = || block_in_place(|| runtime.block_on(async { timeout(ANSWER, for_answer).await.is_ok() }));
    // A `LocalSet` lets nobody wait in place, and says so by a panic.
    let _ = catch_unwind(AssertUnwindSafe(wait));
}

/// Opens transactions on one pool.
#[derive(Clone, Debug)]
pub struct Opener {
    db: DatabaseConnection,
    options: TransactionOptions,
    /// One for each connection of the pool. A caller waits for one in its own future and the task goes on with it,
    /// so that callers who gave up on a busy pool do not leave a queue of tasks that each want a connection.
    turns: Arc<Semaphore>,
}

impl Opener {
    /// Opens transactions with these options on `db`, whose pool has `connections`.
    pub fn new(db: DatabaseConnection, options: TransactionOptions, connections: u32) -> Self {
        Opener { db, options, turns: Arc::new(Semaphore::new(connections.max(1) as usize)) }
    }

    /// Opens a transaction.
    ///
    /// # Errors
    /// If the database can't be reached or refuses, or no connection came free for [`PATIENCE`].
    ///
    /// # Cancel safety
    /// Dropped in flight, what was opened is rolled back before anybody else uses the connection.
    pub async fn begin(&self) -> Result<DatabaseTransaction, StoreError> {
        let doing = "opening a transaction";
        let unavailable = |source| StoreError::Unavailable { doing, source };
        let turn = timeout(PATIENCE, self.turns.clone().acquire_owned()).await;
        let turn = turn.map_err(|waited| unavailable(waited.into()))?;
        let turn = turn.map_err(|closed| unavailable(closed.into()))?;
        let (db, options) = (self.db.clone(), self.options);
        let begin = async move {
            let begun = db.begin_with_options(options).await;
            drop(turn);
            begun
        };
        came_to(doing, tokio::spawn(begin).await)
    }
}

/// Opens a savepoint.
///
/// # Errors
/// If the database can't be reached or refuses.
///
/// # Cancel safety
/// Dropped in flight, the savepoint is undone and the transaction goes on. To see to that, the drop waits for the
/// server's answer, which it can on a runtime of several threads. On a runtime of one (`current_thread`) nobody
/// would be left to bring the answer: there the transaction has to be dropped too. See [`InFlight`].
pub async fn savepoint(tx: &DatabaseTransaction) -> Result<DatabaseTransaction, StoreError> {
    let begun = InFlight { begin: Some(tx.begin()), sent: false }.await;
    begun.map_err(|error| classify("opening a savepoint", error))
}

type Begin<'t> = Pin<Box<dyn Future<Output = Result<DatabaseTransaction, DbErr>> + Send + 't>>;

/// A savepoint on its way. It borrows its transaction, so it can't be put into a task of its own.
///
/// It must not be dropped before the answer: SeaORM 2.0.4 over sqlx 0.9.0 then takes itself to be at the depth
/// before the savepoint and rolls back *that*, on PostgreSQL and MySQL: the whole transaction is undone, silently,
/// and what is done on it afterwards is committed statement by statement.
struct InFlight<'t> {
    begin: Option<Begin<'t>>,
    sent: bool,
}

impl Future for InFlight<'_> {
    type Output = Result<DatabaseTransaction, DbErr>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.sent = true;
        // Polled after it has ended: never ready again, as for any async function.
        let Some(begin) = &mut self.begin else { return Poll::Pending };
        let ended = ready!(begin.as_mut().poll(context));
        self.begin = None;
        Poll::Ready(ended)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if let Some(begin) = self.begin.take().filter(|_| self.sent) {
            wait_in_place(begin);
        }
    }
}

/// The end of a transaction or of a savepoint, in a task of its own.
///
/// Dropped, the task goes on. But the transaction around a savepoint is likely to be used or dropped next, and must
/// not find the savepoint half ended: so the drop waits for it.
struct Ending {
    task: Option<JoinHandle<Result<(), DbErr>>>,
}

impl Future for Ending {
    type Output = Result<Result<(), DbErr>, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(task) = &mut self.task else { return Poll::Pending };
        let ended = ready!(Pin::new(task).poll(context));
        self.task = None;
        Poll::Ready(ended)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(task) = self.task.take().filter(|task| !task.is_finished()) {
            wait_in_place(task);
        }
    }
}

fn ending(end: impl Future<Output = Result<(), DbErr>> + Send + 'static) -> Ending {
    Ending { task: Some(tokio::spawn(end)) }
}

/// Commits a transaction, or releases a savepoint.
///
/// # Errors
/// If the database can't be reached (it is then not known whether it committed) or refuses.
///
/// # Cancel safety
/// Once begun it goes on. On a runtime of several threads the drop waits for it; on one of a single thread, the
/// transaction around a savepoint that was dropped in its release can only be dropped.
pub async fn commit(tx: DatabaseTransaction) -> Result<(), StoreError> {
    came_to("committing a transaction", ending(tx.commit()).await)
}

/// Rolls a transaction back, or undoes a savepoint.
///
/// # Errors
/// If the database can't be reached; it has not committed then.
///
/// # Cancel safety
/// As [`commit`].
pub async fn rollback(tx: DatabaseTransaction) -> Result<(), StoreError> {
    came_to("rolling a transaction back", ending(tx.rollback()).await)
}
