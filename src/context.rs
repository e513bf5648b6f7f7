//! What a handler is told about its delivery.

use std::{collections::BTreeMap, fmt, sync::Arc};

use owed_core::{DeliveryId, EventId, EventRow, Timestamp};
use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::codec::Value;

/// The free data of the scope that an event was fired in. See [`Scope::data`](crate::Scope::data).
///
/// ```
/// # use owed::{DeliveryContext, Event, Failure};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize, Event)] struct OrderPlaced { order: i64 }
/// async fn notify(event: OrderPlaced, context: DeliveryContext) -> Result<(), Failure> {
///     let source: Option<String> = context.scope.get("source")?;
///     println!("order {} came by {}", event.order, source.as_deref().unwrap_or("hand"));
///     Ok(())
/// }
/// ```
#[derive(Clone, Default)]
pub struct ScopeData {
    row: Option<Arc<EventRow>>,
}

impl ScopeData {
    /// The value under a key, as a type; `None` where there is none.
    ///
    /// # Errors
    /// If it is of another type, or the row's scope is damaged. Without the value, which may be private.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ScopeDataError> {
        let wrong = |reason: String| ScopeDataError { key: key.to_owned(), reason };
        match self.map().map_err(|_| wrong("its row can't be decoded".into()))?.remove(key) {
            None => Ok(None),
            Some(value) => value
                .deserialized()
                .map(Some)
                .map_err(|_| wrong(format!("it is no {}", std::any::type_name::<T>()))),
        }
    }

    /// The keys that are there, in order; none where the row's scope is damaged.
    pub fn keys(&self) -> Vec<String> {
        self.map().unwrap_or_default().into_keys().collect()
    }

    fn map(&self) -> Result<BTreeMap<String, Value>, ciborium::de::Error<std::io::Error>> {
        match self.row.as_ref().and_then(|row| row.scope.as_deref()) {
            None => Ok(BTreeMap::new()),
            Some(bytes) => ciborium::from_reader(bytes),
        }
    }
}

impl fmt::Debug for ScopeData {
    /// The keys alone: values may be private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.keys()).finish()
    }
}

/// A value of a scope is not what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the scope's data {key:?} can't be read: {reason}")]
pub struct ScopeDataError {
    key: String,
    reason: String,
}

/// What a handler is told about the event and the delivery that it runs for. Plain data, read off the rows: a
/// delivery can run in another process, hours after the code that fired it ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeliveryContext {
    /// The receiver that this is for.
    pub receiver: Arc<str>,
    /// The event.
    pub event_id: EventId,
    /// The event's name.
    pub event_name: Arc<str>,
    /// The version it was fired under.
    pub event_version: i32,
    /// When it happened, in the domain's own time.
    pub occurred_at: Timestamp,
    /// When it was fired.
    pub recorded_at: Timestamp,
    /// Shared by everything that one request led to.
    pub correlation_id: Uuid,
    /// The event whose receiver fired this one.
    pub causation_id: Option<EventId>,
    /// Who did it: a stable key, or empty.
    pub actor_key: String,
    /// Who did it: a text for people, or empty.
    pub actor_label: String,
    /// The notes of the scope that it was fired in.
    pub scope: ScopeData,
    /// The W3C trace context (`traceparent`) of the code that fired it.
    pub trace_context: Option<String>,
    /// The delivery row; `None` for inline and on-commit receivers, which have none.
    pub delivery_id: Option<DeliveryId>,
    /// Which attempt this is, counted from one.
    pub attempt: u32,
    /// The attempts that the row may have.
    pub max_attempts: u32,
    /// Which target of a fan-out receiver; empty for any other.
    pub target: String,
    /// When the delivery became due; `None` where there is no row.
    pub due_at: Option<Timestamp>,
}

impl DeliveryContext {
    pub(crate) fn of_event(receiver: Arc<str>, event: &Arc<EventRow>) -> Self {
        DeliveryContext {
            receiver,
            event_id: event.id,
            event_name: event.name.as_str().into(),
            event_version: event.version,
            occurred_at: event.occurred_at,
            recorded_at: event.recorded_at,
            correlation_id: event.correlation_id,
            causation_id: event.causation_id,
            actor_key: event.actor_key.clone(),
            actor_label: event.actor_label.clone(),
            scope: ScopeData { row: event.scope.is_some().then(|| event.clone()) },
            trace_context: event.trace_context.clone(),
            delivery_id: None,
            attempt: 1,
            max_attempts: 1,
            target: String::new(),
            due_at: None,
        }
    }
}
