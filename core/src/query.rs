//! Reading rows back: pages, filters, counts.

use uuid::Uuid;

use crate::{DeliveryId, DeliveryRow, EventId, EventRow, Status, Timestamp};

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
    /// Only those recorded at this time or later.
    pub recorded_from: Option<Timestamp>,
    /// Only those recorded before this time.
    pub recorded_until: Option<Timestamp>,
}

impl EventQuery {
    /// The first `limit` events.
    pub fn page(limit: u32) -> Self {
        EventQuery { limit, ..EventQuery::default() }
    }

    /// Whether an event matches every filter but the page's.
    pub fn matches(&self, row: &EventRow) -> bool {
        self.ids.as_ref().is_none_or(|ids| ids.contains(&row.id))
            && self.name.as_ref().is_none_or(|name| *name == row.name)
            && self.correlation_id.is_none_or(|id| id == row.correlation_id)
            && self.recorded_from.is_none_or(|from| row.recorded_at >= from)
            && self.recorded_until.is_none_or(|until| row.recorded_at < until)
    }
}

/// Which deliveries to read: those that match every filter, in ascending order of id, a page at a time.
///
/// ```
/// # use owed_core::{DeliveryQuery, Status};
/// let dead = DeliveryQuery { statuses: vec![Status::Dead], ..DeliveryQuery::page(50) };
/// assert_eq!(dead.limit, 50);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryQuery {
    /// The most rows to read.
    pub limit: u32,
    /// Only those after this id: the last one of the page before.
    pub after: Option<DeliveryId>,
    /// Only these.
    pub ids: Option<Vec<DeliveryId>>,
    /// Only those of these receivers.
    pub receivers: Option<Vec<String>>,
    /// None of these receivers.
    pub receivers_except: Vec<String>,
    /// Only those in one of these statuses; empty for any.
    pub statuses: Vec<Status>,
    /// Only those to this target.
    pub target: Option<String>,
    /// Only those whose last error holds this text, letter for letter.
    pub error: Option<String>,
    /// Only those of events that match these filters. Its own page is not looked at.
    pub of: EventQuery,
}

impl DeliveryQuery {
    /// The first `limit` deliveries.
    pub fn page(limit: u32) -> Self {
        DeliveryQuery { limit, ..DeliveryQuery::default() }
    }

    /// Whether a filter looks at more of the event than its id.
    pub fn needs_event(&self) -> bool {
        let EventQuery { name, correlation_id, recorded_from, recorded_until, .. } = &self.of;
        name.is_some() || correlation_id.is_some() || recorded_from.is_some() || recorded_until.is_some()
    }

    /// Whether a delivery matches every filter but the page's and the event's, its id apart.
    pub fn matches(&self, row: &DeliveryRow) -> bool {
        self.ids.as_ref().is_none_or(|ids| ids.contains(&row.id))
            && self.of.ids.as_ref().is_none_or(|ids| ids.contains(&row.event_id))
            && self.receivers.as_ref().is_none_or(|keys| keys.contains(&row.receiver_key))
            && !self.receivers_except.contains(&row.receiver_key)
            && (self.statuses.is_empty() || self.statuses.contains(&row.status))
            && self.target.as_ref().is_none_or(|target| *target == row.target)
            && self
                .error
                .as_ref()
                .is_none_or(|text| row.last_error.as_ref().is_some_and(|error| error.contains(text.as_str())))
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

/// What one receiver is owed, counted up to a bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Backlog {
    /// Pending, failed or claimed, with their due time come. What waits out a backoff is among them.
    pub owed: u64,
    /// Pending, failed or claimed, with their due time ahead.
    pub scheduled: u64,
    /// How many of both a worker holds.
    pub claimed: u64,
    /// How many of those claims have ended without an outcome: their worker died or stalled.
    pub lapsed: u64,
    /// The due time of the oldest one that is owed.
    pub oldest_owed: Option<Timestamp>,
    /// Whether the bound was reached, so that there may be more of each.
    pub bounded: bool,
}

impl Backlog {
    /// Counts a row that is not settled.
    pub fn count(&mut self, row: &DeliveryRow, now: Timestamp) {
        if row.due_at <= now {
            self.owed += 1;
            self.oldest_owed = Some(self.oldest_owed.map_or(row.due_at, |oldest| oldest.min(row.due_at)));
        } else {
            self.scheduled += 1;
        }
        if row.status == Status::Claimed {
            self.claimed += 1;
            self.lapsed += u64::from(row.available_at.is_some_and(|until| until <= now));
        }
    }
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
