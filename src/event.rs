//! What an event is, and what a receiver can listen on.

use std::sync::Arc;

use owed_core::{EventRow, RetentionRule};
use serde::{Serialize, de::DeserializeOwned};

use crate::codec::{self, DecodeError, Value};
use crate::declare::BoxError;

/// A fact that a service announces: a serde type with a name that outlives its Rust path.
///
/// Derive it:
///
/// ```
/// use owed::Event;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(name = "shop.OrderPlaced", version = 2, retention = days(30))]
/// struct OrderPlaced { order: i64, #[serde(default)] total_cents: i64 }
///
/// assert_eq!(OrderPlaced::NAME, "shop.OrderPlaced");
/// ```
///
/// | attribute | default | meaning |
/// | --- | --- | --- |
/// | `name = "…"` | `crate-name.TypeName` | what rows carry; moving the type to another module does not change it |
/// | `version = n` | 1 | of the payload's shape; a field added with a serde default is not a new version |
/// | `retention = …` | the ordinary window | `days(n)`, `hours(n)`, `seconds(n)`, `succeeded` or `settled` |
/// | `upgrade = path` | none | a function `fn(i32, Value) -> Result<Value, E>` for rows of older versions |
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an event",
    label = "needs #[derive(Event)] (and serde's Serialize and Deserialize)",
    note = "add `#[derive(Serialize, Deserialize, owed::Event)]` to `{Self}`"
)]
pub trait Event: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// What rows carry. At most 255 characters.
    const NAME: &'static str;
    /// The version of the payload's shape.
    const VERSION: i32;
    /// Whether [`Event::upgrade`] does something.
    const UPGRADES: bool = false;
    /// How long it is kept: a type of [`retention`](crate::retention).
    type Retention: retention::Retention;

    /// Brings a payload of version `from`, which is older than [`Event::VERSION`], to today's shape.
    ///
    /// # Errors
    /// The delivery is dead-lettered at once, with what this says.
    fn upgrade(from: i32, payload: Value) -> Result<Value, BoxError> {
        let _ = from;
        Ok(payload)
    }
}

/// How long an event is kept, as types: what is deleted once consumed can't carry a dedupe key, since the key
/// would protect only until then.
pub mod retention {
    use super::RetentionRule;

    mod sealed {
        pub trait Sealed {}
    }

    /// A retention that an event can declare.
    pub trait Retention: sealed::Sealed + 'static {
        /// What is copied onto each row.
        const RULE: RetentionRule;
    }

    /// A retention that outlives the deliveries, so that a dedupe key of the event means something.
    #[diagnostic::on_unimplemented(
        message = "an event with the retention `{Self}` can't have a dedupe key",
        label = "it is deleted once it is consumed, and its key with it",
        note = "declare the event with a window instead, such as #[event(retention = days(7))], or fire it without the key"
    )]
    pub trait Lasting: Retention {}

    /// The ordinary window: the setting `retention`, 90 days unless changed.
    #[derive(Debug)]
    pub enum Ordinary {}
    /// A window of its own, in seconds.
    #[derive(Debug)]
    pub enum For<const SECONDS: i64> {}
    /// Deleted once each delivery has succeeded or was cancelled. One that died keeps its event for the
    /// ordinary window.
    #[derive(Debug)]
    pub enum UntilSucceeded {}
    /// Deleted once each delivery is terminal, dead letters included.
    #[derive(Debug)]
    pub enum UntilSettled {}

    impl sealed::Sealed for Ordinary {}
    impl<const S: i64> sealed::Sealed for For<S> {}
    impl sealed::Sealed for UntilSucceeded {}
    impl sealed::Sealed for UntilSettled {}

    impl Retention for Ordinary {
        const RULE: RetentionRule = RetentionRule::Ordinary;
    }
    impl<const SECONDS: i64> Retention for For<SECONDS> {
        const RULE: RetentionRule = RetentionRule::Seconds(SECONDS);
    }
    impl Retention for UntilSucceeded {
        const RULE: RetentionRule = RetentionRule::Succeeded;
    }
    impl Retention for UntilSettled {
        const RULE: RetentionRule = RetentionRule::Settled;
    }
    impl Lasting for Ordinary {}
    impl<const SECONDS: i64> Lasting for For<SECONDS> {}
}

/// Which events a receiver is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listens {
    To(&'static str),
    ToEverything,
}

mod sealed {
    pub trait Sealed {}
    impl<E: super::Event> Sealed for E {}
    impl Sealed for super::AnyEvent {}
}

/// What a receiver can listen on: an [`Event`], or [`AnyEvent`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an event that a receiver can listen on",
    label = "needs #[derive(Event)], or use AnyEvent",
    note = "add `#[derive(Serialize, Deserialize, owed::Event)]` to `{Self}`"
)]
pub trait Subject: sealed::Sealed + Sized + Send + 'static {
    #[doc(hidden)]
    fn registration() -> Option<Registration>;
    #[doc(hidden)]
    fn of(row: &Arc<EventRow>) -> Result<Self, DecodeError>;
}

/// What is known about a declared event.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    pub(crate) name: &'static str,
    pub(crate) version: i32,
    pub(crate) type_name: &'static str,
    pub(crate) type_id: std::any::TypeId,
}

impl Registration {
    pub(crate) fn of<E: Event>() -> Self {
        Registration {
            name: E::NAME,
            version: E::VERSION,
            type_name: std::any::type_name::<E>(),
            type_id: std::any::TypeId::of::<E>(),
        }
    }
}

impl<E: Event> Subject for E {
    fn registration() -> Option<Registration> {
        Some(Registration::of::<E>())
    }

    fn of(row: &Arc<EventRow>) -> Result<Self, DecodeError> {
        codec::decode(row)
    }
}

/// Whatever was fired: what a receiver of every event is handed.
///
/// `Receiver::on::<AnyEvent>(key)` is owed every event that is fired, those declared after it included. Meant
/// for a transport that forwards events without knowing them.
#[derive(Clone, Debug)]
pub struct AnyEvent {
    row: Arc<EventRow>,
}

impl AnyEvent {
    /// The event's declared name.
    pub fn name(&self) -> &str {
        &self.row.name
    }

    /// The version that it was fired under.
    pub fn version(&self) -> i32 {
        self.row.version
    }

    /// The payload as it was encoded.
    pub fn payload(&self) -> &[u8] {
        &self.row.payload
    }

    /// How the payload was encoded: `cbor` or `json`.
    pub fn codec(&self) -> &str {
        &self.row.codec
    }

    /// The payload as the event `E`, upgraded if it is older.
    ///
    /// # Errors
    /// If it is another event, or can't be decoded as this one.
    pub fn decode<E: Event>(&self) -> Result<E, DecodeError> {
        if self.row.name != E::NAME {
            return Err(DecodeError::AnotherEvent { is: self.row.name.clone(), wanted: E::NAME });
        }
        codec::decode(&self.row)
    }

    /// The payload as JSON, whichever codec it was encoded with.
    ///
    /// # Errors
    /// If it can't be decoded, or holds what JSON can't (a map whose keys are no texts).
    #[cfg(feature = "json")]
    pub fn to_json(&self) -> Result<serde_json::Value, DecodeError> {
        codec::decode_as(&self.row)
    }
}

impl Subject for AnyEvent {
    fn registration() -> Option<Registration> {
        None
    }

    fn of(row: &Arc<EventRow>) -> Result<Self, DecodeError> {
        Ok(AnyEvent { row: row.clone() })
    }
}
