//! What the SQL stores of `owed` share. A service never needs this crate.
//!
//! Only what is truly the same on each database is here; the statements that must be fast are each store's own.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`names`] | table names: prefix and schema, checked and quoted |
//! | [`dialect`] | what differs in values: times, uuids, placeholders |
//! | [`statement`] | SQL text with its values |
//! | [`migrate`] | migrations, to run, to compose or to print |
//! | [`error`] | what a driver's error means to a caller |
//! | [`fresh`] | which connections of a pool are still worth using |
//! | [`tx`] | transactions that no dropped future can leave open |
//! | [`record`] | the INSERTs of events and deliveries |
//! | [`row`] | rows as they are read back |
//! | [`operate`] | cancel, requeue, reopen, prune |
//! | [`read`] | pages, counts, and who is owed something |
//! | [`settle`] | the conditional writes of a settlement |
//! | [`steps`] | claims, leases and batches for a database whose UPDATE can't answer rows or take arrays |

pub mod dialect;
pub mod error;
pub mod fresh;
pub mod migrate;
pub mod names;
pub mod operate;
pub mod pause;
pub mod read;
pub mod record;
pub mod row;
pub mod settle;
pub mod statement;
pub mod steps;
pub mod tx;
mod whole;

pub use dialect::Dialect;
pub use error::{classify, classify_sqlx, retrying};
pub use fresh::Fresh;
pub use migrate::{Migration, Migrator};
pub use names::{TableNames, Tables};
pub use operate::Operator;
pub use statement::Sql;
