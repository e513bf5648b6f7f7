//! What an operator does to rows: what each operation asks of a store, and what it answers.

use crate::{EventId, RetentionRule, Timestamp};

/// What became of the rows that were to be withdrawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cancelled {
    /// Withdrawn: they were pending or failed, and will not run.
    pub cancelled: u64,
    /// Left alone: a worker holds them, and may be running them now.
    pub in_flight: u64,
}

impl Cancelled {
    /// Counts.
    pub fn new(cancelled: u64, in_flight: u64) -> Self {
        Cancelled { cancelled, in_flight }
    }
}

impl std::ops::AddAssign for Cancelled {
    fn add_assign(&mut self, more: Self) {
        self.cancelled += more.cancelled;
        self.in_flight += more.in_flight;
    }
}

/// What became of the rows that were to be owed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reopened {
    /// They were terminal, and are pending again.
    pub reopened: u64,
    /// They were not there: the receiver did not exist when the event was fired.
    pub added: u64,
}

impl Reopened {
    /// Counts.
    pub fn new(reopened: u64, added: u64) -> Self {
        Reopened { reopened, added }
    }
}

impl std::ops::AddAssign for Reopened {
    fn add_assign(&mut self, more: Self) {
        self.reopened += more.reopened;
        self.added += more.added;
    }
}

/// One kind of event that a prune may delete. An event is due under it while it has no delivery that is pending,
/// failed or claimed, and what is said here holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prunable {
    /// Kept until each delivery has succeeded or was cancelled ([`RetentionRule::Succeeded`]), and that is so.
    Succeeded,
    /// Kept until each delivery is terminal ([`RetentionRule::Settled`]).
    Settled,
    /// Recorded at or before `until`, and kept for a window: its own of so many seconds ([`RetentionRule::Seconds`]),
    /// or the ordinary one, which is every event's that has none of its own.
    Window {
        /// The event's own window; `None` for the ordinary one.
        seconds: Option<i64>,
        /// The window's end.
        until: Timestamp,
    },
}

impl Prunable {
    /// Whether an event of this retention, recorded then, is of this kind: everything but the state of its
    /// deliveries.
    pub fn is_due(&self, retention: RetentionRule, recorded_at: Timestamp) -> bool {
        match *self {
            Prunable::Succeeded => retention == RetentionRule::Succeeded,
            Prunable::Settled => retention == RetentionRule::Settled,
            Prunable::Window { seconds, until } => retention.columns().0 == seconds && recorded_at <= until,
        }
    }
}

/// Where a page of prunable events ended: the next one starts after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PruneMark {
    /// When the event was recorded.
    pub recorded_at: Timestamp,
    /// The event.
    pub event: EventId,
}

/// What one step of a prune deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pruned {
    /// Events.
    pub events: u64,
    /// Their deliveries.
    pub deliveries: u64,
    /// Whether some of the events that it was given are still due: it came to its bound before them.
    pub more: bool,
}

impl Pruned {
    /// Counts.
    pub fn new(events: u64, deliveries: u64, more: bool) -> Self {
        Pruned { events, deliveries, more }
    }
}

impl std::ops::AddAssign for Pruned {
    fn add_assign(&mut self, step: Self) {
        self.events += step.events;
        self.deliveries += step.deliveries;
        self.more = step.more;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_event_is_due_under_its_own_rule_and_at_the_end_of_its_window() {
        let at: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let late = at + Duration::from_micros(1);
        let ordinary = Prunable::Window { seconds: None, until: at };
        assert!(ordinary.is_due(RetentionRule::Ordinary, at));
        assert!(!ordinary.is_due(RetentionRule::Ordinary, late));
        assert!(ordinary.is_due(RetentionRule::Succeeded, at), "a dead letter is kept for the window alone");
        assert!(!ordinary.is_due(RetentionRule::Seconds(60), at), "one with a window of its own keeps it");
        let own = Prunable::Window { seconds: Some(60), until: at };
        assert!(own.is_due(RetentionRule::Seconds(60), at));
        assert!(!own.is_due(RetentionRule::Seconds(61), at));
        assert!(!own.is_due(RetentionRule::Ordinary, at));
        assert!(Prunable::Succeeded.is_due(RetentionRule::Succeeded, late));
        assert!(!Prunable::Settled.is_due(RetentionRule::Succeeded, at));
    }
}
