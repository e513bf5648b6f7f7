//! Delivering: claim, run, settle.
//!
//! | module | what it does |
//! | --- | --- |
//! | `run` | the relay: its options, its lanes, its end |
//! | `lane` | the loop of one lane: claims, keeps handlers running, hands back |
//! | `pass` | one pass over what is owed now |
//! | `attempt` | runs one delivery |
//! | `around` | what a service puts around each attempt |
//! | `task` | hands deliveries to a task engine, and runs them for its workers |
//! | `pool` | a task engine in this process |
//! | `verdict` | turns how it ended into an outcome: pure |
//! | `settler` | writes outcomes, many at once |
//! | `lease` | renews what is held, on a thread of its own |
//! | `eager` | attempts in the process that fired |
//! | `orphans` | rows whose receiver nobody declares |
//! | `wake` | shortens waits |

mod around;
mod attempt;
mod eager;
mod lane;
mod lease;
mod orphans;
mod pass;
mod pool;
mod run;
mod settler;
mod task;
mod verdict;
mod wake;

use std::{ops::AddAssign, sync::Arc};

use owed_core::{DeliveryId, EventId, Status};

pub use around::{AroundDelivery, Attempted, Next};
pub(crate) use eager::attempt_eagerly;
pub(crate) use lease::Leases;
pub use pass::Pass;
pub use pool::{TaskPool, TaskPoolHandle};
pub use run::{Relay, RelayHandle};
pub(crate) use task::Handoff;
pub use task::{Task, TaskBackend, TaskEnd};
pub use verdict::backoff;
pub(crate) use wake::Waker;

/// How many deliveries ended in which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivered {
    /// Their receiver ran to its end.
    pub succeeded: u64,
    /// They failed, and will be tried again.
    pub failed: u64,
    /// They failed for the last time.
    pub dead: u64,
    /// Their receiver is declared by nobody.
    pub orphaned: u64,
    /// They were not due yet, and were moved to the time when they are.
    pub postponed: u64,
    /// They were taken over by somebody else before their outcome was written.
    pub lost: u64,
    /// They were handed to the task backend.
    pub handed_off: u64,
    /// They were given back unrun: nobody here knows their event, or a version of it that is so new; or the task
    /// backend took nothing.
    pub left: u64,
}

impl Delivered {
    /// All of them.
    pub fn total(&self) -> u64 {
        let Delivered { succeeded, failed, dead, orphaned, postponed, lost, handed_off, left } = self;
        succeeded + failed + dead + orphaned + postponed + lost + handed_off + left
    }

    fn count(&mut self, status: Status) {
        match status {
            Status::Succeeded => self.succeeded += 1,
            Status::Failed => self.failed += 1,
            Status::Dead => self.dead += 1,
            Status::Orphaned => self.orphaned += 1,
            _ => self.postponed += 1,
        }
    }
}

impl AddAssign for Delivered {
    fn add_assign(&mut self, more: Self) {
        self.succeeded += more.succeeded;
        self.failed += more.failed;
        self.dead += more.dead;
        self.orphaned += more.orphaned;
        self.postponed += more.postponed;
        self.lost += more.lost;
        self.handed_off += more.handed_off;
        self.left += more.left;
    }
}

/// A failed attempt, as a receiver's `on_failure` hook is told about it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeliveryFailure {
    /// The delivery.
    pub delivery_id: DeliveryId,
    /// Its event.
    pub event_id: EventId,
    /// The event's name.
    pub event_name: String,
    /// The receiver.
    pub receiver: Arc<str>,
    /// Which target of a fan-out receiver; empty for any other.
    pub target: String,
    /// Which attempt it was, counted from one.
    pub attempt: u32,
    /// [`Status::Failed`] if it will be tried again, [`Status::Dead`] if not.
    pub status: Status,
    /// What was stored as the row's last error.
    pub error: String,
}
