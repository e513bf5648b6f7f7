//! Waiting for tasks of our own.

use tokio::task::JoinHandle;

/// Waits for a task that nothing aborts, and goes on with its panic if it had one.
pub(crate) async fn join<T>(task: JoinHandle<T>) -> T {
    match task.await {
        Ok(value) => value,
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        // Only a runtime that is shutting down ends a task otherwise, and then nobody is left to go on.
        Err(_) => std::future::pending().await,
    }
}
