//! What an operator does to rows: cancel, requeue, replay, prune.
//!
//! Each goes over what it selects a page at a time, in a short transaction each, so that it may be stopped anywhere:
//! what is done is done, and starting it again goes on with the rest.

mod filter;
mod prune;
mod run;

pub use filter::{DeliveryFilter, EventFilter};
pub use prune::Prune;
pub(crate) use prune::sweep;
pub use run::{Cancel, Operation, Replay, Replayed, Requeue};
