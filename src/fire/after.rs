//! What runs after a commit: on-commit receivers, eager attempts, the wake-up.

use std::{fmt, panic::AssertUnwindSafe, sync::Arc};

use futures::{FutureExt, future::BoxFuture};
use owed_core::{Claimed, EventRow, Store};
use tracing::{error, warn};

use crate::{
    context::DeliveryContext,
    declare::{Declared, Ran},
    error::Error,
    outbox::Outbox,
    relay,
    scope::Scope,
};

/// What waits for a transaction's commit.
pub(crate) struct After<S: Store> {
    /// Each with the scope that its event was fired in.
    pub(crate) on_commit: Vec<(Arc<Declared<S>>, Arc<EventRow>, Arc<Scope>)>,
    /// Rows that were born claimed by this process.
    pub(crate) eager: Vec<Claimed>,
    /// Whether somebody has to be woken.
    pub(crate) owes: bool,
}

impl<S: Store> Default for After<S> {
    fn default() -> Self {
        After { on_commit: Vec::new(), eager: Vec::new(), owes: false }
    }
}

impl<S: Store> After<S> {
    pub(crate) fn extend(&mut self, more: After<S>) {
        self.on_commit.extend(more.on_commit);
        self.eager.extend(more.eager);
        self.owes |= more.owes;
    }

    fn is_empty(&self) -> bool {
        self.on_commit.is_empty() && self.eager.is_empty() && !self.owes
    }
}

/// Boxed, since an on-commit receiver may commit a transaction of its own, which comes back here.
pub(crate) fn run_after<S: Store>(outbox: &Outbox<S>, after: After<S>) -> BoxFuture<'_, ()> {
    Box::pin(async move {
        if after.owes {
            outbox.waker().wake();
        }
        for claimed in after.eager {
            relay::attempt_eagerly(outbox, claimed);
        }
        for (receiver, event, scope) in after.on_commit {
            run_on_commit(outbox, &receiver, &event, scope).await;
        }
    })
}

/// Runs one on-commit receiver. Whatever it does, the others run and nobody who fired sees it.
async fn run_on_commit<S: Store>(
    outbox: &Outbox<S>,
    receiver: &Declared<S>,
    event: &Arc<EventRow>,
    scope: Arc<Scope>,
) {
    let context = DeliveryContext::of_event(receiver.key.clone(), event);
    let running = async {
        let tx = if receiver.takes_tx { Some(outbox.begin().await?) } else { None };
        let ran = receiver.run(event, context, tx.as_ref().map(|tx| tx.lend())).await;
        match (ran, tx) {
            (Ran::Succeeded, Some(tx)) => tx.commit().await.map(|()| Ran::Succeeded),
            (ran, _) => Ok::<_, Error>(ran),
        }
    };
    let ran = AssertUnwindSafe(scope.caused_by(event.id, event.correlation_id, running)).catch_unwind().await;
    let (key, event) = (&*receiver.key, event.id);
    match ran {
        Ok(Ok(Ran::Succeeded)) => {}
        Ok(Ok(Ran::Failed { .. })) => warn!(receiver = key, %event, "an on-commit receiver failed"),
        Ok(Ok(Ran::Undecodable(_))) => {
            error!(receiver = key, %event, "an on-commit receiver's event can't be decoded");
        }
        Ok(Err(error)) => warn!(receiver = key, %event, %error, "an on-commit receiver's transaction failed"),
        Err(_) => error!(receiver = key, %event, "an on-commit receiver panicked"),
    }
}

/// What has to run once the service has committed the transaction that it opened itself.
///
/// Dropped instead, nothing is lost: durable deliveries are found by the next poll, eager ones once their lease
/// has ended. On-commit receivers of these events do not run, which is logged.
#[must_use = "call `committed` after the commit: on-commit receivers and eager attempts wait for it"]
pub struct AfterCommit<S: Store> {
    outbox: Outbox<S>,
    after: After<S>,
}

impl<S: Store> fmt::Debug for AfterCommit<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AfterCommit").finish_non_exhaustive()
    }
}

impl<S: Store> AfterCommit<S> {
    pub(crate) fn new(outbox: Outbox<S>, after: After<S>) -> Self {
        AfterCommit { outbox, after }
    }

    /// Runs the on-commit receivers (waited for, each on its own), eager attempts (not waited for) and the
    /// wake-up. To be called when the transaction has committed, and only then.
    ///
    /// # Cancel safety
    /// Once it has begun it goes on, even if this future is dropped.
    pub async fn committed(mut self) {
        let (outbox, after) = (self.outbox.clone(), std::mem::take(&mut self.after));
        crate::task::join(tokio::spawn(async move { run_after(&outbox, after).await })).await;
    }

    /// Says that the transaction was rolled back: nothing runs.
    pub fn rolled_back(mut self) {
        self.after = After::default();
    }
}

impl<S: Store> Drop for AfterCommit<S> {
    fn drop(&mut self) {
        if !self.after.is_empty() {
            warn!(
                on_commit = self.after.on_commit.len(),
                eager = self.after.eager.len(),
                "a joined transaction ended without `committed` or `rolled_back`: its on-commit receivers do not run"
            );
        }
    }
}
