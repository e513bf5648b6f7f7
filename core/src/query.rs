//! Reading rows back: pages, filters, counts.

use uuid::Uuid;

use crate::{DeliveryId, EventId, Status, Timestamp};

/// Which events to read: those that match every filter, in ascending order of id, a page at a time.
///
/// ```
/// # use owed_core::EventQuery;
/// let page = EventQuery { name: Some("shop.OrderPlaced".into()), ..EventQuery::page(100) };
/// assert_eq!(page.limit, 100);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventQuery {
    /// The most rows to read.
    pub limit: u32,
    /// Only those after this id: the last one of the page before.
    pub after: Option<EventId>,
    /// Only these.
    pub ids: Option<Vec<EventId>>,
    /// Only those of this name.
    pub name: Option<String>,
    /// Only those of this correlation id.
    pub correlation_id: Option<Uuid>,
}

impl EventQuery {
    /// The first `limit` events.
    pub fn page(limit: u32) -> Self {
        EventQuery { limit, ..EventQuery::default() }
    }
}

/// Which deliveries to read: those that match every filter, in ascending order of id, a page at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryQuery {
    /// The most rows to read.
    pub limit: u32,
    /// Only those after this id: the last one of the page before.
    pub after: Option<DeliveryId>,
    /// Only these.
    pub ids: Option<Vec<DeliveryId>>,
    /// Only those of this event.
    pub event_id: Option<EventId>,
    /// Only those of this receiver.
    pub receiver_key: Option<String>,
    /// Only those in this status.
    pub status: Option<Status>,
}

impl DeliveryQuery {
    /// The first `limit` deliveries.
    pub fn page(limit: u32) -> Self {
        DeliveryQuery { limit, ..DeliveryQuery::default() }
    }
}

/// How many deliveries of one receiver are in one status.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tally {
    /// The receiver.
    pub receiver_key: String,
    /// The status.
    pub status: Status,
    /// How many rows.
    pub count: u64,
    /// How many attempts those rows have counted, all together.
    pub attempts: u64,
}

/// A lane that a relay leaves alone, because a receiver in it deferred. For people to see: no relay reads another's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pause {
    /// The lane.
    pub lane: String,
    /// The worker that pauses it.
    pub worker: String,
    /// Since when.
    pub since: Timestamp,
    /// Until when.
    pub until: Timestamp,
}
