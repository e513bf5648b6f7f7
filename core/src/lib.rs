//! The vocabulary of `owed`, and the [`Store`] trait that a database backend implements.
//!
//! A service depends on the crate `owed` and never needs this one. Somebody who writes a store for another
//! database depends on this crate alone; the contract is written on [`Store`], and the feature
//! `conformance` of `owed` proves it.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`row`] | ids, statuses, and the rows as they are written and read |
//! | [`claim`] | asking for work, and the claims that come back |
//! | [`settle`] | what became of a delivery, and the columns that follow from it |
//! | [`operate`] | what an operator does to rows: cancel, reopen, prune |
//! | [`query`] | reading rows back: pages, filters, counts |
//! | [`clock`] | where time comes from |
//! | [`limits`] | how long a text or a payload may be, checked in one place for every store |
//! | [`wake`] | signals that shorten a wait and carry nothing |
//! | [`error`] | what can go wrong, by what the caller can do about it |
//! | [`store`] | the trait |

pub mod claim;
pub mod clock;
pub mod error;
pub mod limits;
pub mod operate;
pub mod query;
pub mod row;
pub mod settle;
pub mod store;
pub mod wake;

pub use claim::{Claim, ClaimKey, ClaimRequest, Claimed, ReceiverLease};
pub use clock::{Clock, ManualClock, SampledClock, Timestamp, micros};
pub use error::StoreError;
pub use limits::Refused;
pub use operate::{Cancelled, Prunable, PruneMark, Pruned, Reopened};
pub use query::{Backlog, DeliveryQuery, EventQuery, Pause, Tally};
pub use row::{
    Codec, DeliveryId, DeliveryRow, EventId, EventRow, NewDelivery, NewEvent, Recorded, RetentionRule, Status,
};
pub use settle::{Outcome, Settled, Settlement, SettlementColumns};
pub use store::{Capabilities, Store};
pub use wake::{Listener, Signal};
