//! Transactions that no dropped future can leave open.
//!
//! A `BEGIN` whose future is dropped while it is on its way comes back to the pool as a connection with an open
//! transaction (seen with sqlx 0.9 on PostgreSQL): the next one to use it would work in a stranger's
//! transaction. So transactions begin and end in tasks of their own. Whoever waits may go; the task goes on, and
//! what it opened is rolled back when nobody takes it.

use std::sync::Arc;

use owed_core::StoreError;
use sea_orm::{DatabaseConnection, DatabaseTransaction, TransactionOptions, TransactionTrait};
use tokio::{
    sync::Semaphore,
    task::JoinHandle,
    time::{Duration, timeout},
};

use crate::classify;

/// The longest that anybody waits for a turn: to write to SQLite, or to be given a connection.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What a task of ours came to, whoever waited for it.
async fn joined<T>(
    doing: &'static str,
    task: JoinHandle<Result<T, sea_orm::DbErr>>,
) -> Result<T, StoreError> {
    match task.await {
        Ok(ended) => ended.map_err(|error| classify(doing, error)),
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        // The runtime that the task ran on is shutting down.
        Err(ended) => Err(StoreError::Unavailable { doing, source: Box::new(ended) }),
    }
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
        joined(doing, tokio::spawn(begin)).await
    }
}

/// Opens a savepoint.
///
/// # Errors
/// If the database can't be reached or refuses.
///
/// # Cancel safety
/// **Not to be dropped in flight**, unless the transaction is dropped with it: SeaORM then takes the reply that is
/// still to come for one that never will, rolls back the whole transaction, and what is done on it afterwards is
/// committed statement by statement. It can't go on in a task of its own, since it borrows the transaction:
/// whoever owns that one puts both into a task. (`SeaORM` 2.0.4 over sqlx 0.9.0, PostgreSQL and MySQL; on SQLite
/// it is undone as it should be, or the whole transaction is.)
pub async fn savepoint(tx: &DatabaseTransaction) -> Result<DatabaseTransaction, StoreError> {
    tx.begin().await.map_err(|error| classify("opening a savepoint", error))
}

/// Commits a transaction, or releases a savepoint. Goes on when dropped.
///
/// # Errors
/// If the database can't be reached (it is then not known whether it committed) or refuses.
pub async fn commit(tx: DatabaseTransaction) -> Result<(), StoreError> {
    joined("committing a transaction", tokio::spawn(tx.commit())).await
}

/// Rolls a transaction back, or undoes a savepoint. Goes on when dropped.
///
/// # Errors
/// If the database can't be reached; it has not committed then.
pub async fn rollback(tx: DatabaseTransaction) -> Result<(), StoreError> {
    joined("rolling a transaction back", tokio::spawn(tx.rollback())).await
}
