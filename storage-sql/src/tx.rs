//! Transactions that no dropped future can leave open.
//!
//! A `BEGIN` whose future is dropped while it is on its way comes back to the pool as a connection with an open
//! transaction (seen with sqlx 0.9 on PostgreSQL): the next one to use it would work in a stranger's
//! transaction. So transactions begin and end in tasks of their own. Whoever waits may go; the task goes on, and
//! what it opened is rolled back when nobody takes it.

use std::{sync::Arc, time::Duration};

use owed_core::StoreError;
use sea_orm::{DatabaseConnection, DatabaseTransaction, DbErr, TransactionOptions, TransactionTrait};
use tokio::{
    sync::Semaphore,
    task::{JoinError, JoinHandle},
    time::timeout,
};

use crate::{classify, whole::Whole};

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
/// It must not be dropped before its answer: SeaORM 2.0.4 over sqlx 0.9.0 then takes itself to be at the depth
/// before the savepoint and rolls back *that*, on PostgreSQL and MySQL: the whole transaction is undone, silently,
/// and what is done on it afterwards is committed statement by statement.
///
/// # Errors
/// If the database can't be reached or refuses.
///
/// # Cancel safety
/// Dropped in flight, the savepoint is undone and the transaction goes on. To see to that, the drop waits for the
/// server's answer, which it can on a runtime of several threads. On a runtime of one (`current_thread`) nobody
/// would be left to bring the answer: there the transaction has to be dropped too.
pub async fn savepoint(tx: &DatabaseTransaction) -> Result<DatabaseTransaction, StoreError> {
    let begun = Whole::new(tx.begin(), ANSWER).await;
    begun.map_err(|error| classify("opening a savepoint", error))
}

/// The end of a transaction or of a savepoint, in a task of its own.
///
/// Dropped, the task goes on. But the transaction around a savepoint is likely to be used or dropped next, and must
/// not find the savepoint half ended: so the drop waits for it.
fn ending(
    end: impl Future<Output = Result<(), DbErr>> + Send + 'static,
) -> Whole<JoinHandle<Result<(), DbErr>>> {
    Whole::new(tokio::spawn(end), ANSWER)
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
