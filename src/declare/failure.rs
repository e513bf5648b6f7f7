//! What a handler says when it did not succeed.

use std::{error::Error, fmt, marker::PhantomData, time::Duration};

use owed_core::Timestamp;

use super::state::{BoundedVerdicts, DurableVerdicts, Plain, Unbounded, Verdicts};

/// Any error of a handler's, kept with its sources.
pub type BoxError = Box<dyn Error + Send + Sync + 'static>;

/// What an inline or on-commit handler fails with. Made by `?` from any error.
pub type Refusal = Failure<Plain>;

/// Why a handler did not succeed, and what should happen to its delivery.
///
/// Any error becomes a counted failure through `?`. A durable receiver can say more:
///
/// ```
/// # use owed::Failure;
/// # use std::time::Duration;
/// # struct Answer { status: u16, retry_after: u64 }
/// # async fn post() -> std::io::Result<Answer> { Ok(Answer { status: 410, retry_after: 1 }) }
/// async fn call() -> Result<(), Failure> {
///     let answer = post().await?; // an I/O error: counted, and tried again on the backoff curve
///     match answer.status {
///         410 => Err(Failure::permanent("the endpoint is gone")), // dead at once
///         429 => Err(Failure::retry_after(Duration::from_secs(answer.retry_after))),
///         _ => Ok(()),
///     }
/// }
/// # let _ = call();
/// ```
///
/// `V` says which verdicts exist: [`Unbounded`] for a durable receiver,
/// [`Bounded`](crate::state::Bounded) for one that declared `give_up_after`, [`Plain`] for any other.
pub struct Failure<V: Verdicts = Unbounded> {
    pub(crate) verdict: Verdict,
    pub(crate) error: BoxError,
    verdicts: PhantomData<fn() -> V>,
}

/// What a failure asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Counted,
    Permanent,
    RetryAfter(Duration),
    Defer(Duration),
    NotYet(Timestamp),
}

impl<V: Verdicts> Failure<V> {
    fn new(verdict: Verdict, error: impl Into<BoxError>) -> Self {
        Failure { verdict, error: error.into(), verdicts: PhantomData }
    }

    /// This delivery can never succeed: dead-letters it on this attempt, whatever is left of its budget.
    pub fn permanent(error: impl Into<BoxError>) -> Self
    where
        V: DurableVerdicts,
    {
        Failure::new(Verdict::Permanent, error)
    }

    /// Fails this attempt, and asks for the next one after `delay` instead of a time on the backoff curve. The
    /// attempt counts. More than the setting `max_retry_delay` is cut to it, with a warning.
    pub fn retry_after(delay: Duration) -> Self
    where
        V: DurableVerdicts,
    {
        Failure::new(Verdict::RetryAfter(delay), format!("asked to be retried after {delay:?}"))
    }

    /// The work is not due before `until`: moves the row there, spending no attempt and keeping no error. A
    /// time that has already come is an ordinary failure instead, since the row would come straight back.
    pub fn not_yet(until: Timestamp) -> Self
    where
        V: DurableVerdicts,
    {
        Failure::new(Verdict::NotYet(until), format!("is not due before {until}"))
    }

    /// The destination is limiting how much it takes: tries again between `delay` and twice that, without
    /// counting the attempt, and pauses the receiver's lane in this relay for `delay`. Ends in a dead letter
    /// once the delivery has been owed for the receiver's `give_up_after`, which is why only a receiver that
    /// declared one can say it. A delay of zero is an ordinary, counted failure.
    pub fn defer(delay: Duration) -> Self
    where
        V: BoundedVerdicts,
    {
        if delay.is_zero() {
            return Failure::new(
                Verdict::Counted,
                "asked to be deferred by nothing: a delay must be above zero",
            );
        }
        Failure::new(Verdict::Defer(delay), format!("asked to be deferred by {delay:?}"))
    }

    /// Replaces what is stored as the row's last error.
    #[must_use]
    pub fn because(mut self, error: impl Into<BoxError>) -> Self {
        self.error = error.into();
        self
    }
}

// `Failure` is no `Error` itself, which is what lets `?` take every type that is.
impl<V: Verdicts, E: Into<BoxError>> From<E> for Failure<V> {
    fn from(error: E) -> Self {
        Failure::new(Verdict::Counted, error)
    }
}

impl<V: Verdicts> fmt::Debug for Failure<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failure").field("verdict", &self.verdict).field("error", &self.error).finish()
    }
}

impl<V: Verdicts> fmt::Display for Failure<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// An error and its sources on one line, as it is stored on a row.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        // Many errors repeat their source in their own text.
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        source = cause.source();
    }
    text
}
