//! The states that a [`Receiver`](super::Receiver) is in. Each has no size and no values: it only decides
//! which methods exist.

mod sealed {
    pub trait Sealed {}
}
use sealed::Sealed;

macro_rules! states {
    ($($(#[$doc:meta])* $name:ident: $($kind:ident),+;)+) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub enum $name {}
        impl Sealed for $name {}
        $(impl $kind for $name {})+
    )+};
}

/// When a receiver runs, and what it promises: [`Undecided`], [`Inline`], [`OnCommit`] or [`Durable`].
pub trait Mode: Sealed + Send + Sync + 'static {}
/// When a durable delivery is owed: [`AtOnce`], [`Eager`] or [`Due`].
pub trait When: Sealed + Send + Sync + 'static {}
/// Whether one event is one delivery or one for each target: [`One`] or [`FanOut`].
pub trait Reach: Sealed + Send + Sync + 'static {}
/// What kind of failure a handler may answer with: [`Plain`], [`Unbounded`] or [`Bounded`].
pub trait Verdicts: Sealed + Send + Sync + 'static {}

/// A delivery that is owed as soon as its event is: [`AtOnce`] or [`Eager`]. What a fan-out can be.
#[diagnostic::on_unimplemented(
    message = "a receiver that is `due` later has no targets",
    label = "targets are resolved when the event fires, and this receiver runs later",
    note = "fire a follow-up event from the due receiver, and give that event's receiver the targets"
)]
pub trait Immediate: When {}

/// Verdicts of a durable receiver: [`Unbounded`] or [`Bounded`].
#[diagnostic::on_unimplemented(
    message = "only a durable receiver can answer with this verdict",
    label = "an inline or on-commit receiver has no delivery row to retry, postpone or bury",
    note = "declare the receiver `.durable()`, or return an ordinary error with `?`"
)]
pub trait DurableVerdicts: Verdicts {}

/// Verdicts of a receiver that declared `give_up_after`: [`Bounded`].
#[diagnostic::on_unimplemented(
    message = "this receiver can't defer: nothing would ever end its delivery",
    label = "a deferral spends no attempt, so it needs a bound in time",
    note = "declare the receiver `.give_up_after(..)`, and let its handler return `Result<(), Failure<Bounded>>`"
)]
pub trait BoundedVerdicts: DurableVerdicts {}

states! {
    /// Not yet said: call `.inline()`, `.on_commit()` or `.durable()` next.
    Undecided: Mode;
    /// Runs inside the firing transaction, and can refuse it by failing.
    Inline: Mode;
    /// Runs after the commit in the firing process, best effort: nothing is recorded and nothing is retried.
    OnCommit: Mode;
    /// Owed by a row of the firing transaction, and delivered at least once.
    Durable: Mode;

    /// Owed as soon as the event commits.
    AtOnce: When, Immediate;
    /// Owed as soon as the event commits, and first attempted by the firing process.
    Eager: When, Immediate;
    /// Owed from a time of its own.
    Due: When;

    /// One event is one delivery.
    One: Reach;
    /// One event is one delivery for each target.
    FanOut: Reach;

    /// Failures of inline and on-commit receivers: an error, and nothing else.
    Plain: Verdicts;
    /// Failures of durable receivers: an error, permanent, retry-after, not-yet.
    Unbounded: Verdicts, DurableVerdicts;
    /// Failures of durable receivers that declared `give_up_after`: those may be deferred as well.
    Bounded: Verdicts, DurableVerdicts, BoundedVerdicts;
}
