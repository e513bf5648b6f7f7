//! What a handler is told about its delivery.

use std::sync::Arc;

use owed_core::{DeliveryId, EventId, EventRow, Timestamp};
use uuid::Uuid;

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
    pub(crate) fn of_event(receiver: Arc<str>, event: &EventRow) -> Self {
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
            delivery_id: None,
            attempt: 1,
            max_attempts: 1,
            target: String::new(),
            due_at: None,
        }
    }
}
