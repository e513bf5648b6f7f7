//! Asking for work, and the claims that come back.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{DeliveryId, DeliveryRow, EventRow, Timestamp};

/// The plain values that name one claim. They can be stored, compared and sent to a task engine; they are not
/// the right to settle, which is [`Claim`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ClaimKey {
    /// The delivery that is held.
    pub delivery: DeliveryId,
    /// By whom.
    pub worker: Arc<str>,
    /// Since when, to the microsecond.
    pub at: Timestamp,
}

/// The right to settle one delivery, once.
///
/// A store hands it out and [`Settlement::new`](crate::Settlement::new) takes it away. It can't be copied, so
/// "settled twice" and "settled without a claim" can't be written:
///
/// ```compile_fail
/// # use owed_core::{Claim, Outcome, Settlement};
/// fn twice(claim: Claim) {
///     let _first = Settlement::new(claim, Outcome::Succeeded);
///     let _again = Settlement::new(claim, Outcome::Succeeded); // use of moved value: `claim`
/// }
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct Claim(ClaimKey);

impl Claim {
    /// For stores alone: the claim that a row was just given.
    pub fn granted(delivery: DeliveryId, worker: Arc<str>, at: Timestamp) -> Self {
        Claim(ClaimKey { delivery, worker, at })
    }

    /// The values that name this claim.
    pub fn key(&self) -> &ClaimKey {
        &self.0
    }
}

/// One receiver to claim for, and how long its claims hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiverLease {
    /// The receiver's key.
    pub key: Arc<str>,
    /// How long a claim on its rows holds.
    pub lease: Duration,
}

/// What a worker asks a store for.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// Who asks. Unique to one start of one process.
    pub worker: Arc<str>,
    /// Whose rows, in the order in which they are asked: the rows of the first receiver are taken first. A
    /// caller that rotates the list gives each receiver its turn, however much another one is owed.
    pub receivers: Vec<ReceiverLease>,
    /// The most rows to take.
    pub limit: u32,
    /// The moment of the claim: rows with `available_at <= now` are taken.
    pub now: Timestamp,
    /// Takes only rows that have been owed since this moment or longer.
    pub owed_before: Option<Timestamp>,
    /// Takes only these rows.
    pub only: Option<Vec<DeliveryId>>,
}

impl ClaimRequest {
    /// Asks for whatever these receivers may be given at `now`.
    pub fn new(worker: Arc<str>, receivers: Vec<ReceiverLease>, limit: u32, now: Timestamp) -> Self {
        ClaimRequest { worker, receivers, limit, now, owed_before: None, only: None }
    }
}

/// A row that was claimed, whole: delivering it needs no second read.
#[derive(Debug)]
pub struct Claimed {
    /// The right to settle it.
    pub claim: Claim,
    /// The row as it stands after the claim.
    pub delivery: DeliveryRow,
    /// Its event, or `None` where somebody deleted it by hand.
    pub event: Option<Arc<EventRow>>,
}
