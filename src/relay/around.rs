//! What a service puts around each attempt.

use std::{fmt, panic::AssertUnwindSafe, pin::Pin, sync::Mutex};

use async_trait::async_trait;
use futures::FutureExt;
use tracing::warn;

use crate::{context::DeliveryContext, declare::BoxError, declare::chain};

/// Called around each attempt of a durable delivery: to set up what handlers need (a tenant, a connection of another
/// system), to measure, to log in the service's own way.
///
/// It runs outside of the handler's transaction. If it fails, panics or returns before it has called [`Next::run`] to
/// its end, the receiver does not run and the attempt has failed. After that it can't change the outcome: what it
/// answers is only logged. Where the handler takes a transaction its work is committed by the end of [`Next::run`];
/// other outcomes are written in batches, after the hook has ended.
///
/// ```
/// use owed::{AroundDelivery, Attempted, BoxError, DeliveryContext, MemoryStore, Next, Outbox, async_trait};
/// use std::time::Instant;
///
/// struct Timed;
///
/// #[async_trait]
/// impl AroundDelivery for Timed {
///     async fn around(&self, context: &DeliveryContext, next: Next<'_>) -> Result<(), BoxError> {
///         let started = Instant::now();
///         let attempted = next.run().await;
///         println!("{}: {:?} in {:?}", context.receiver, matches!(attempted, Attempted::Succeeded), started.elapsed());
///         Ok(())
///     }
/// }
///
/// let outbox = Outbox::builder(MemoryStore::new()).around_delivery(Timed).build()?;
/// # Ok::<(), owed::BuildError>(())
/// ```
#[async_trait]
pub trait AroundDelivery: Send + Sync + 'static {
    /// Calls `next.run()`, with whatever belongs before and after it.
    ///
    /// # Errors
    /// Before the receiver has run: the attempt has failed with this error. After it: logged, and nothing else.
    ///
    /// # Cancel safety
    /// Dropped with the relay that runs it, or at the end of its grace period, as handlers are.
    async fn around(&self, context: &DeliveryContext, next: Next<'_>) -> Result<(), BoxError>;
}

/// How an attempt ended, as [`Next::run`] tells.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attempted {
    /// The handler ran to its end.
    Succeeded,
    /// It failed, with this error. What becomes of its delivery is decided by the failure's verdict.
    Failed(String),
    /// Somebody else has taken the row over, and the handler's work was rolled back.
    Lost,
}

/// The attempt that an [`AroundDelivery`] is around.
#[must_use = "an attempt that is not run has failed"]
pub struct Next<'a> {
    running: Pin<&'a mut (dyn Future<Output = Attempted> + Send)>,
}

impl fmt::Debug for Next<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Next")
    }
}

impl Next<'_> {
    /// Runs the receiver.
    ///
    /// # Cancel safety
    /// Dropped, the handler is dropped at its next await, its transaction rolls back, and the attempt has failed.
    pub async fn run(self) -> Attempted {
        self.running.await
    }
}

/// Runs `attempt` inside the hook. Answers what the attempt answered, or why it did not come to its end.
pub(super) async fn around<T: Send>(
    hook: &dyn AroundDelivery,
    context: &DeliveryContext,
    attempt: impl Future<Output = T> + Send,
    shown: impl Fn(&T) -> Attempted + Send + Sync,
) -> Result<T, String> {
    let ended: Mutex<Option<T>> = Mutex::new(None);
    let keep = |value| *ended.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(value);
    let running = async {
        let value = attempt.await;
        let attempted = shown(&value);
        keep(value);
        attempted
    };
    let hooked = {
        // Dropped here, whatever the hook did with it: nothing of the attempt goes on once it is decided about.
        let mut running = Box::pin(running);
        AssertUnwindSafe(hook.around(context, Next { running: running.as_mut() })).catch_unwind().await
    };
    let ended = ended.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let wrong = match hooked {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(chain(&*error)),
        Err(_) => Some("it panicked".to_owned()),
    };
    match (ended, wrong) {
        (Some(ended), None) => Ok(ended),
        (Some(ended), Some(_)) => {
            // Its text may quote what is private, and there is no row to keep it on.
            warn!(
                receiver = &*context.receiver,
                "the around-delivery hook failed after the receiver had run: the outcome stands"
            );
            Ok(ended)
        }
        (None, Some(wrong)) => Err(format!("the around-delivery hook failed: {wrong}")),
        (None, None) => Err("the around-delivery hook ended without running the receiver to its end".into()),
    }
}
