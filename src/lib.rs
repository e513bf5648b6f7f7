//! Transactional outbox and durable domain events.
//!
//! A service changes its own tables and fires an event in one database transaction. What the event owes to each
//! receiver is written as rows of the same transaction, and a relay delivers it at least once: the obligation
//! exists if and only if the business change committed.
//!
//! ```
//! use owed::{Event, Failure, MemoryStore, Outbox, Receiver};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize, Event)]
//! #[event(name = "shop.OrderPlaced")]
//! struct OrderPlaced { order: i64, email: String }
//!
//! async fn send_receipt(event: OrderPlaced) -> Result<(), Failure> {
//!     println!("to {}: thank you for order {}", event.email, event.order);
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // With a feature: SqliteStore::connect("sqlite://shop.db"), PostgresStore::connect(url), MysqlStore::connect(url)
//! let outbox = Outbox::builder(MemoryStore::new())
//!     .receiver(Receiver::on::<OrderPlaced>("shop.receipt").durable().run(send_receipt))
//!     .build()?;
//! let relay = outbox.relay().spawn()?;
//!
//! let tx = outbox.begin().await?;
//! // the service's own statements go here, on the same transaction
//! tx.fire(OrderPlaced { order: 42, email: "ada@example.org".into() }).dedupe_key("order-42").await?;
//! tx.commit().await?;
//!
//! relay.stop().await;
//! # Ok(()) }
//! ```
//!
//! # From here
//!
//! | to | see |
//! | --- | --- |
//! | declare an event | [`Event`] |
//! | declare who receives it | [`Receiver`], [`state`], [`Handler`] |
//! | fire it | [`Outbox::begin`], [`Tx::fire`], [`Fired`] |
//! | deliver it | [`Relay`], [`Failure`], [`DeliveryContext`] |
//! | cancel, requeue, replay, prune | [`Outbox::cancel`], [`Outbox::requeue`], [`Outbox::replay`], [`Outbox::prune`] |
//! | see how it is | [`Outbox::health`], [`Outbox::quiet`], [`Outbox::check`] |
//! | test a service | [`testing`] |
//! | set the numbers | [`Settings`] |
//! | write a store | [`Store`] |
//!
//! # Features
//!
//! | feature | what it brings |
//! | --- | --- |
//! | `memory` (default) | [`MemoryStore`], for unit tests |
//! | `sqlite`, `postgres`, `mysql` | the store of that database (`mysql` serves MariaDB as well) |
//! | `json` | the JSON codec, and any payload as JSON |
//! | `signal` | [`shutdown`], for relays that end with their process |
//! | `otel` | OpenTelemetry: deliveries link to the trace that fired their event |
//! | `conformance` | the contract of [`Store`] as checks to run |
//! | `tls` | TLS to the database |
//!
//! # What is promised
//!
//! Each durable delivery that committed is run at least once, and what its handler does in the transaction that it
//! was lent happens exactly once. Work outside of this database may happen twice: when its process dies between
//! doing it and writing that down. There is no promise of order between deliveries.

mod check;
mod codec;
#[cfg(feature = "conformance")]
pub mod conformance;
mod context;
mod declare;
mod error;
mod event;
mod fire;
mod inspect;
mod operate;
mod outbox;
mod relay;
mod scope;
mod settings;
#[cfg(feature = "signal")]
mod shutdown;
#[cfg(feature = "_sql")]
mod sql;
mod task;
pub mod testing;
mod trace;

#[doc(no_inline)]
pub use async_trait::async_trait;
pub use check::Finding;
pub use codec::{DecodeError, Value};
pub use context::{DeliveryContext, ScopeData, ScopeDataError};
pub use declare::{
    BoxError, BuildError, DEFAULT_LANE, Declared, Deliver, Failure, Handler, Mistake, Receiver, Refusal,
    state,
};
pub use error::Error;
pub use event::{AnyEvent, Event, Subject, retention};
pub use fire::{AfterCommit, Fire, FireAll, Fired, Joined, Savepoint, Transaction, Tx};
pub use inspect::{Health, LaneHealth, Quiet, ReceiverHealth};
pub use operate::{Cancel, DeliveryFilter, EventFilter, Operation, Prune, Replay, Replayed, Requeue};
pub use outbox::{Outbox, OutboxBuilder};
pub use owed_core::{
    Backlog, Cancelled, Capabilities, Clock, Codec, DeliveryId, DeliveryQuery, DeliveryRow, EventId,
    EventQuery, EventRow, ManualClock, Pause, Pruned, Refused, Reopened, Status, Store, StoreError, Tally,
    Timestamp, limits,
};
pub use owed_macros::Event;
pub use relay::{
    AroundDelivery, Attempted, Delivered, DeliveryFailure, Next, Pass, Relay, RelayHandle, Task, TaskBackend,
    TaskEnd, TaskPool, TaskPoolHandle, backoff,
};
pub use scope::{Scope, Suppression};
pub use settings::{Settings, SettingsError, Wake};
#[cfg(feature = "signal")]
pub use shutdown::shutdown;

#[cfg(feature = "memory")]
pub use owed_memory::{MemoryStore, MemoryTx};
#[cfg(feature = "mysql")]
pub use owed_mysql::{MysqlBuilder, MysqlStore};
#[cfg(feature = "postgres")]
pub use owed_postgres::{PostgresBuilder, PostgresStore};
#[cfg(feature = "sqlite")]
pub use owed_sqlite::{SqliteBuilder, SqliteStore};

/// What a [`Store`] speaks: for whoever writes one, or drives one by hand in a test.
pub mod store {
    pub use owed_core::{
        Claim, ClaimKey, ClaimRequest, Claimed, EventRow, Listener, NewDelivery, NewEvent, Outcome, Prunable,
        PruneMark, ReceiverLease, Recorded, RetentionRule, SampledClock, Settled, Settlement,
        SettlementColumns, Signal, micros, row::target_digest,
    };
}
