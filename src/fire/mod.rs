//! Firing: transactions, what is written in them, and what runs after their commit.

mod after;
mod owe;
mod record;
mod tx;

pub use after::AfterCommit;
pub(crate) use after::{After, run_after};
pub(crate) use owe::again;
pub use record::{Fire, FireAll, Fired};
pub(crate) use tx::Halfway;
pub use tx::{Joined, Savepoint, Transaction, Tx};
