//! Transactions that no dropped future can leave open.
//!
//! A `BEGIN` whose future is dropped while it is on its way comes back to the pool as a connection with an open
//! transaction (seen with sqlx 0.9 on PostgreSQL): the next one to use it would work in a stranger's
//! transaction. So transactions begin and end in tasks of their own. Whoever waits may go; the task goes on, and
//! what it opened is rolled back when nobody takes it.

use owed_core::StoreError;
use sea_orm::{DatabaseConnection, DatabaseTransaction, TransactionOptions, TransactionTrait};
use tokio::task::JoinHandle;

use crate::classify;

async fn joined<T>(task: JoinHandle<T>) -> T {
    match task.await {
        Ok(value) => value,
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        // The runtime is shutting down.
        Err(_) => std::future::pending().await,
    }
}

/// Opens a transaction.
///
/// # Errors
/// If the database can't be reached or refuses.
pub async fn begin(
    db: &DatabaseConnection,
    options: TransactionOptions,
) -> Result<DatabaseTransaction, StoreError> {
    let db = db.clone();
    let begun = joined(tokio::spawn(async move { db.begin_with_options(options).await })).await;
    begun.map_err(|error| classify("opening a transaction", error))
}

/// Opens a savepoint. Dropped in flight it may stay on the server, where the next one of its name covers it.
///
/// # Errors
/// If the database can't be reached or refuses.
pub async fn savepoint(tx: &DatabaseTransaction) -> Result<DatabaseTransaction, StoreError> {
    tx.begin().await.map_err(|error| classify("opening a savepoint", error))
}

/// Commits a transaction, or releases a savepoint. Goes on when dropped.
///
/// # Errors
/// If the database can't be reached (it is then not known whether it committed) or refuses.
pub async fn commit(tx: DatabaseTransaction) -> Result<(), StoreError> {
    let ended = joined(tokio::spawn(tx.commit())).await;
    ended.map_err(|error| classify("committing a transaction", error))
}

/// Rolls a transaction back, or undoes a savepoint. Goes on when dropped.
///
/// # Errors
/// If the database can't be reached; it has not committed then.
pub async fn rollback(tx: DatabaseTransaction) -> Result<(), StoreError> {
    let ended = joined(tokio::spawn(tx.rollback())).await;
    ended.map_err(|error| classify("rolling a transaction back", error))
}
