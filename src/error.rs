//! What can go wrong for a caller, by what can be done about it.

use owed_core::{Refused, StoreError};

use crate::declare::BoxError;

/// A failure of `owed`. The variants say what a caller can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value is empty, over its limit, or can't be stored. Nothing was written, and the transaction is usable.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// An event of a type that the outbox was not told about. Nothing was written.
    #[error(
        "the event {name} is not declared in this outbox: add `.event::<{type_name}>()` to its builder, or a receiver for it"
    )]
    NotDeclared {
        /// The event's name.
        name: &'static str,
        /// Its Rust type.
        type_name: &'static str,
    },
    /// The event's serde implementation failed. Nothing was written.
    #[error("the event {name} can't be encoded")]
    Encode {
        /// The event's name.
        name: &'static str,
        /// What serde said.
        #[source]
        source: BoxError,
    },
    /// A receiver's `targets` or `due_at` answered what can't be used. Nothing was written.
    #[error("the receiver {receiver} can't be owed the event: {why}")]
    Owing {
        /// The receiver's key.
        receiver: String,
        /// What it answered, without private values.
        why: String,
    },
    /// A note of a scope can't be serialised, or could not be read back. Nothing was opened.
    #[error("the scope's data {key:?} can't be kept")]
    ScopeData {
        /// The note's key.
        key: String,
        /// What serde said.
        #[source]
        source: BoxError,
    },
    /// A text that should be a W3C trace context is none.
    #[error(
        "the scope's trace context, of {size} bytes, is not a W3C traceparent: 00-<32 hex digits>-<16>-<2>, in lower case"
    )]
    TraceContext {
        /// The text's size in bytes.
        size: usize,
    },
    /// An inline receiver failed: it refuses the change. The transaction can only be rolled back.
    #[error("the inline receiver {receiver} refused the event")]
    Inline {
        /// The receiver's key.
        receiver: String,
        /// What it failed with.
        #[source]
        source: BoxError,
    },
    /// The transaction can't be committed any more, and was rolled back instead.
    #[error("the transaction was rolled back instead of committed: {because}")]
    Poisoned {
        /// What happened in it.
        because: String,
    },
    /// A handler still holds the transaction that it was lent (in a task that it spawned, say), so it can't be
    /// committed. It is rolled back once that handle is dropped.
    #[error("the transaction can't be committed: a handler kept the `Tx` that it was lent")]
    StillShared,
    /// A relay was asked for what it can't serve.
    #[error("the relay can't start: {why}")]
    Relay {
        /// What is wrong, with the values.
        why: String,
    },
    /// Rows of a lane were asked for that nobody declares.
    #[error("no receiver is declared in the lane {lane:?}; the lanes are {lanes}")]
    NoLane {
        /// The lane.
        lane: String,
        /// The lanes there are, between commas.
        lanes: String,
    },
    /// The store failed. [`StoreError::is_transient`] says whether trying again may work.
    #[error(transparent)]
    Store(#[from] StoreError),
}
