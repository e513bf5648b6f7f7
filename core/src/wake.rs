//! Signals that shorten a wait and carry nothing.
//!
//! The delivery row is the obligation; a wake-up only says "look now". Any of them may be lost: the relay's
//! poll is the floor.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::StoreError;

/// Waits for a store to say that something may be owed.
#[async_trait]
pub trait Listener: Send {
    /// Returns once something may be owed since the last call returned. Several wake-ups in between count as
    /// one.
    ///
    /// # Errors
    /// When the way by which wake-ups come has failed. The caller sleeps its poll interval and asks for a new
    /// listener.
    ///
    /// # Cancel safety
    /// Dropped, it loses no wake-up that a later call on the same listener would have seen.
    async fn wait(&mut self) -> Result<(), StoreError>;
}

/// A wake-up within one process, shared by the clones of a store.
#[derive(Clone, Debug, Default)]
pub struct Signal {
    notify: Arc<Notify>,
}

impl Signal {
    /// A signal that nobody has raised.
    pub fn new() -> Self {
        Signal::default()
    }

    /// Wakes everybody who waits, and the next one who would have.
    pub fn raise(&self) {
        self.notify.notify_waiters();
        self.notify.notify_one();
    }

    /// Returns when it is raised. Cancel-safe.
    pub async fn raised(&self) {
        self.notify.notified().await;
    }
}

#[async_trait]
impl Listener for Signal {
    async fn wait(&mut self) -> Result<(), StoreError> {
        self.raised().await;
        Ok(())
    }
}
