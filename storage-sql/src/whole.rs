//! Calls that come to their end even where their future is dropped.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    task::block_in_place,
    time::timeout,
};

/// A call on a connection that breaks if it is dropped halfway, and that can't go on in a task of its own, since it
/// borrows the connection.
///
/// Dropped once it has begun, it is waited for, right there: on a runtime of several threads another one brings
/// the answer. On a runtime of one thread (`current_thread`) nobody would, so there it is dropped as it is.
pub(crate) struct Whole<F: Future + Unpin> {
    call: Option<F>,
    begun: bool,
    patience: Duration,
}

impl<F: Future + Unpin> Whole<F> {
    /// Waits for at most so long where it is dropped.
    pub(crate) fn new(call: F, patience: Duration) -> Self {
        Whole { call: Some(call), begun: false, patience }
    }
}

impl<F: Future + Unpin> Future for Whole<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.begun = true;
        // Polled after its end: never ready again.
        let Some(call) = &mut self.call else { return Poll::Pending };
        let ended = ready!(Pin::new(call).poll(context));
        self.call = None;
        Poll::Ready(ended)
    }
}

impl<F: Future + Unpin> Drop for Whole<F> {
    fn drop(&mut self) {
        let Some(call) = self.call.take().filter(|_| self.begun) else { return };
        let Ok(runtime) = Handle::try_current() else { return };
        if runtime.runtime_flavor() != RuntimeFlavor::MultiThread {
            return;
        }
        let wait =
            || block_in_place(|| runtime.block_on(async { timeout(self.patience, call).await.is_ok() }));
        // A `LocalSet` lets nobody wait in place, and says so by a panic.
        let _ = catch_unwind(AssertUnwindSafe(wait));
    }
}
