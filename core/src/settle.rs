//! What became of a delivery, and the columns that follow from it.

use crate::{Claim, ClaimKey, Status, Timestamp};

/// The outcome of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The receiver ran to its end.
    Succeeded,
    /// It failed with budget left: to be tried again at `available_at`.
    Failed {
        /// What to store as the last error.
        error: String,
        /// When it may be tried again.
        available_at: Timestamp,
    },
    /// It asked to wait without spending an attempt.
    Deferred {
        /// What to store as the last error.
        error: String,
        /// When it may be tried again.
        available_at: Timestamp,
    },
    /// It will not be tried again on its own.
    Dead {
        /// What to store as the last error.
        error: String,
        /// Whether the attempt counts.
        counted: bool,
    },
    /// Nobody declared its receiver for longer than the grace period.
    Orphaned {
        /// What to store as the last error.
        error: String,
    },
    /// It is not due before `until`: moved there, with no attempt spent and no error kept.
    NotYet {
        /// When it is due.
        until: Timestamp,
    },
}

/// A claim and what became of it. Making one consumes the claim.
#[derive(Debug, PartialEq, Eq)]
pub struct Settlement {
    claim: Claim,
    outcome: Outcome,
}

impl Settlement {
    /// Settles `claim` with `outcome`, once a store writes it.
    pub fn new(claim: Claim, outcome: Outcome) -> Self {
        Settlement { claim, outcome }
    }

    /// The claim that the write is conditioned on.
    pub fn key(&self) -> &ClaimKey {
        self.claim.key()
    }

    /// What became of it.
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Gets the claim back from a settlement whose transaction did not commit.
    pub fn unwritten(self) -> Claim {
        self.claim
    }

    /// The columns to write, for a settlement made at `now`. Every store writes exactly these, where the row
    /// is still claimed under [`Settlement::key`].
    pub fn columns(&self, now: Timestamp) -> SettlementColumns<'_> {
        let unsettled = |status, attempt, at, error| SettlementColumns {
            status,
            attempt,
            available_at: Some(at),
            due_at: None,
            last_error: error,
            completed_at: None,
            succeeded_at: None,
        };
        let settled = |status, attempt, error| SettlementColumns {
            status,
            attempt,
            available_at: None,
            due_at: None,
            last_error: error,
            completed_at: Some(now),
            succeeded_at: None,
        };
        match &self.outcome {
            Outcome::Succeeded => {
                SettlementColumns { succeeded_at: Some(now), ..settled(Status::Succeeded, 1, None) }
            }
            Outcome::Failed { error, available_at } => {
                unsettled(Status::Failed, 1, *available_at, Some(error.as_str()))
            }
            Outcome::Deferred { error, available_at } => {
                unsettled(Status::Failed, 0, *available_at, Some(error.as_str()))
            }
            Outcome::Dead { error, counted } => {
                settled(Status::Dead, i32::from(*counted), Some(error.as_str()))
            }
            Outcome::Orphaned { error } => settled(Status::Orphaned, 0, Some(error.as_str())),
            Outcome::NotYet { until } => {
                SettlementColumns { due_at: Some(*until), ..unsettled(Status::Pending, 0, *until, None) }
            }
        }
    }
}

/// The columns that a settlement writes. `claimed_by` and `claimed_at` become null and `lapses` zero with
/// each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettlementColumns<'a> {
    /// The new status.
    pub status: Status,
    /// What to add to `attempts`: 0 or 1.
    pub attempt: i32,
    /// The new `available_at`, null once settled.
    pub available_at: Option<Timestamp>,
    /// The new `due_at`; `None` leaves it.
    pub due_at: Option<Timestamp>,
    /// The new `last_error`; `None` leaves it.
    pub last_error: Option<&'a str>,
    /// The new `completed_at`.
    pub completed_at: Option<Timestamp>,
    /// The new `succeeded_at`; `None` leaves it.
    pub succeeded_at: Option<Timestamp>,
}

/// Whether a conditional write found its claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Written.
    Applied,
    /// The row is no longer claimed under that claim: its lease lapsed and somebody else has it, or it was
    /// settled already. Nothing was written. An ordinary outcome, not a fault.
    Lost,
}
