//! Ids, statuses, and the rows as they are written and read.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::Timestamp;

/// Names one recorded event. Assigned by the store; rows are never chosen by it, since a transaction that
/// holds a lower id can commit after one that holds a higher id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventId(pub i64);

/// Names one delivery: what one event owes to one receiver (and one target of it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeliveryId(pub i64);

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for DeliveryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The state of one delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Status {
    /// Owed, and never failed: waiting for its time or for a relay.
    Pending,
    /// Failed with attempts remaining: waiting out its backoff.
    Failed,
    /// A worker holds it under a lease.
    Claimed,
    /// The receiver ran and its acknowledgement committed.
    Succeeded,
    /// Will not be tried again on its own: its budget is spent, or its receiver said that it never can succeed.
    Dead,
    /// Addressed to a receiver that nobody declared for longer than the grace period.
    Orphaned,
    /// Withdrawn before it ran.
    Cancelled,
}

impl Status {
    /// Every status, in the order in which a delivery can meet them.
    pub const ALL: [Status; 7] = [
        Status::Pending,
        Status::Failed,
        Status::Claimed,
        Status::Succeeded,
        Status::Dead,
        Status::Orphaned,
        Status::Cancelled,
    ];

    /// The text that the status column holds.
    pub const fn as_str(self) -> &'static str {
        match self {
            Status::Pending => "pending",
            Status::Failed => "failed",
            Status::Claimed => "claimed",
            Status::Succeeded => "succeeded",
            Status::Dead => "dead",
            Status::Orphaned => "orphaned",
            Status::Cancelled => "cancelled",
        }
    }

    /// Whether nothing more happens to a row in this status unless somebody asks for it.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Status::Succeeded | Status::Dead | Status::Orphaned | Status::Cancelled)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A status column held a text that is none of [`Status::ALL`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a delivery status")]
pub struct UnknownStatus(pub String);

impl FromStr for Status {
    type Err = UnknownStatus;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Status::ALL.into_iter().find(|s| s.as_str() == text).ok_or_else(|| UnknownStatus(text.to_owned()))
    }
}

/// How a payload was encoded. Each row says which, so a table may hold both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Codec {
    /// CBOR (RFC 8949), the default: compact, and exact for every serde type.
    Cbor,
    /// JSON: larger, and readable with the database's own tools.
    Json,
}

impl Codec {
    /// The text that the codec column holds.
    pub const fn as_str(self) -> &'static str {
        match self {
            Codec::Cbor => "cbor",
            Codec::Json => "json",
        }
    }

    /// The codec that a column's text names, if it names one.
    pub fn parse(text: &str) -> Option<Codec> {
        match text {
            "cbor" => Some(Codec::Cbor),
            "json" => Some(Codec::Json),
            _ => None,
        }
    }
}

/// How long an event is kept, as copied onto its row when it is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum RetentionRule {
    /// The ordinary window, a setting.
    #[default]
    Ordinary,
    /// A window of its own, in whole seconds from its recording.
    Seconds(i64),
    /// Until each of its deliveries has succeeded or was cancelled.
    Succeeded,
    /// Until each of its deliveries is terminal, dead letters included.
    Settled,
}

impl RetentionRule {
    /// The rule as its two columns: `(retention_seconds, delete_when)`.
    pub const fn columns(self) -> (Option<i64>, Option<&'static str>) {
        match self {
            RetentionRule::Ordinary => (None, None),
            RetentionRule::Seconds(s) => (Some(s), None),
            RetentionRule::Succeeded => (None, Some("succeeded")),
            RetentionRule::Settled => (None, Some("settled")),
        }
    }

    /// The rule that two columns spell. A text that nobody wrote counts as the ordinary window, so that a row
    /// damaged by hand is kept rather than deleted.
    pub fn from_columns(seconds: Option<i64>, delete_when: Option<&str>) -> Self {
        match (seconds, delete_when) {
            (Some(s), _) => RetentionRule::Seconds(s),
            (None, Some("succeeded")) => RetentionRule::Succeeded,
            (None, Some("settled")) => RetentionRule::Settled,
            _ => RetentionRule::Ordinary,
        }
    }
}

/// An event to record, with what it owes.
#[derive(Clone, Debug)]
pub struct NewEvent {
    /// The declared name, at most [`limits::TEXT`](crate::limits::TEXT) characters.
    pub name: Arc<str>,
    /// The declared version of the payload's shape.
    pub version: i32,
    /// How `payload` is encoded.
    pub codec: Codec,
    /// The encoded event.
    pub payload: Vec<u8>,
    /// Unique over all events that are kept.
    pub dedupe_key: Option<String>,
    /// When it happened, in the domain's own time.
    pub occurred_at: Timestamp,
    /// When it was fired, by the store's clock.
    pub recorded_at: Timestamp,
    /// Who did it: a stable key, or empty.
    pub actor_key: String,
    /// Who did it: a text for people, or empty.
    pub actor_label: String,
    /// Free data of the scope, as CBOR.
    pub scope: Option<Vec<u8>>,
    /// Shared by everything that one request led to.
    pub correlation_id: Uuid,
    /// The event whose receiver fired this one.
    pub causation_id: Option<EventId>,
    /// Why it was recorded without being delivered.
    pub suppressed: Option<String>,
    /// How long it is kept.
    pub retention: RetentionRule,
    /// W3C trace context of the code that fired it (`traceparent`).
    pub trace_context: Option<String>,
    /// One row for each receiver and target that it is owed to.
    pub deliveries: Vec<NewDelivery>,
}

impl NewEvent {
    /// The row that this becomes under `id`.
    pub fn into_row(self, id: EventId) -> EventRow {
        EventRow {
            id,
            name: self.name.to_string(),
            version: self.version,
            codec: self.codec.as_str().to_owned(),
            payload: self.payload,
            dedupe_key: self.dedupe_key,
            occurred_at: self.occurred_at,
            recorded_at: self.recorded_at,
            actor_key: self.actor_key,
            actor_label: self.actor_label,
            scope: self.scope,
            correlation_id: self.correlation_id,
            causation_id: self.causation_id,
            suppressed: self.suppressed,
            retention: self.retention,
            trace_context: self.trace_context,
        }
    }
}

/// One delivery to write together with its event.
#[derive(Clone, Debug)]
pub struct NewDelivery {
    /// The receiver's key.
    pub receiver_key: Arc<str>,
    /// Which target of a fan-out receiver; empty for any other.
    pub target: String,
    /// The attempt budget, copied from the declaration.
    pub max_attempts: i32,
    /// When the row may first be taken.
    pub available_at: Timestamp,
    /// When it is owed from: its due time, or the moment of recording.
    pub due_at: Timestamp,
    /// For a row that is attempted by the firing process right after the commit: the worker that holds it from
    /// the start, under a claim made at the event's `recorded_at` whose lease ends at `available_at`.
    pub claimed_by: Option<Arc<str>>,
}

impl NewDelivery {
    /// The row that this becomes under `id`, owed by an event that was recorded at `recorded_at`.
    pub fn row(&self, id: DeliveryId, event_id: EventId, recorded_at: Timestamp) -> DeliveryRow {
        let born = self.claimed_by.as_deref();
        DeliveryRow {
            id,
            event_id,
            receiver_key: self.receiver_key.to_string(),
            target: self.target.clone(),
            status: if born.is_some() { Status::Claimed } else { Status::Pending },
            attempts: 0,
            max_attempts: self.max_attempts,
            available_at: Some(self.available_at),
            due_at: self.due_at,
            claimed_by: born.map(str::to_owned),
            claimed_at: born.map(|_| recorded_at),
            lapses: 0,
            last_error: None,
            completed_at: None,
            succeeded_at: None,
        }
    }
}

/// The digest of a target that, with the event and the receiver, makes a delivery unique. Empty for no target.
pub fn target_digest(target: &str) -> Vec<u8> {
    if target.is_empty() { Vec::new() } else { Sha256::digest(target.as_bytes()).to_vec() }
}

/// What became of one event handed to [`Store::record`](crate::Store::record).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// Written, with its deliveries in the order given.
    New {
        /// The event's id.
        event: EventId,
        /// The ids of its deliveries.
        deliveries: Vec<DeliveryId>,
    },
    /// An event with that dedupe key is there already; nothing was written for this one.
    Duplicate {
        /// The earlier event.
        of: EventId,
    },
}

/// One event as the store holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct EventRow {
    /// Its id.
    pub id: EventId,
    /// See [`NewEvent::name`].
    pub name: String,
    /// See [`NewEvent::version`].
    pub version: i32,
    /// The codec column as it stands, so that a row written by a newer version can still be read.
    pub codec: String,
    /// See [`NewEvent::payload`].
    pub payload: Vec<u8>,
    /// See [`NewEvent::dedupe_key`].
    pub dedupe_key: Option<String>,
    /// See [`NewEvent::occurred_at`].
    pub occurred_at: Timestamp,
    /// See [`NewEvent::recorded_at`].
    pub recorded_at: Timestamp,
    /// See [`NewEvent::actor_key`].
    pub actor_key: String,
    /// See [`NewEvent::actor_label`].
    pub actor_label: String,
    /// See [`NewEvent::scope`].
    pub scope: Option<Vec<u8>>,
    /// See [`NewEvent::correlation_id`].
    pub correlation_id: Uuid,
    /// See [`NewEvent::causation_id`].
    pub causation_id: Option<EventId>,
    /// See [`NewEvent::suppressed`].
    pub suppressed: Option<String>,
    /// See [`NewEvent::retention`].
    pub retention: RetentionRule,
    /// See [`NewEvent::trace_context`].
    pub trace_context: Option<String>,
}

/// One delivery as the store holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryRow {
    /// Its id.
    pub id: DeliveryId,
    /// The event that owes it.
    pub event_id: EventId,
    /// To whom it is owed.
    pub receiver_key: String,
    /// Which target of a fan-out receiver; empty for any other.
    pub target: String,
    /// Its state.
    pub status: Status,
    /// Attempts that reported an outcome and counted.
    pub attempts: i32,
    /// The budget copied at fire time.
    pub max_attempts: i32,
    /// The one column that says when the row may be taken: its due time, then the end of its backoff, then,
    /// while claimed, the end of its lease. `None` once it is settled, which takes it out of the claim's index.
    pub available_at: Option<Timestamp>,
    /// When it is owed from: what its age is measured from.
    pub due_at: Timestamp,
    /// The worker that holds it.
    pub claimed_by: Option<String>,
    /// When that worker took it.
    pub claimed_at: Option<Timestamp>,
    /// Claims in a row that ended without an outcome: their process died or stalled.
    pub lapses: i32,
    /// What the last failure said.
    pub last_error: Option<String>,
    /// When it became terminal.
    pub completed_at: Option<Timestamp>,
    /// When it last succeeded; kept by a replay.
    pub succeeded_at: Option<Timestamp>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_reads_back_from_its_own_text() {
        for status in Status::ALL {
            assert_eq!(status.as_str().parse::<Status>().unwrap(), status);
        }
        assert!("Pending".parse::<Status>().is_err());
    }

    #[test]
    fn every_retention_rule_reads_back_from_its_columns() {
        for rule in [
            RetentionRule::Ordinary,
            RetentionRule::Seconds(0),
            RetentionRule::Succeeded,
            RetentionRule::Settled,
        ] {
            let (seconds, when) = rule.columns();
            assert_eq!(RetentionRule::from_columns(seconds, when), rule);
        }
        assert_eq!(RetentionRule::from_columns(None, Some("whenever")), RetentionRule::Ordinary);
    }
}
