//! For the tests of services that use `owed`.
//!
//! ```
//! use owed::{Event, Failure, ManualClock, MemoryStore, Outbox, Receiver, testing};
//! use serde::{Deserialize, Serialize};
//! use std::time::Duration;
//!
//! #[derive(Serialize, Deserialize, Event)]
//! struct OrderPlaced { order: i64 }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let clock = ManualClock::at("2026-01-01T00:00:00Z".parse()?);
//! let outbox = Outbox::builder(MemoryStore::with_clock(clock.clone()))
//!     .receiver(
//!         Receiver::on::<OrderPlaced>("shop.expire")
//!             .durable()
//!             .due(Duration::from_secs(3_600))
//!             .run(async |_: OrderPlaced| Ok::<(), Failure>(())),
//!     )
//!     .build()?;
//!
//! outbox.transaction(async |tx| tx.fire(OrderPlaced { order: 42 }).await).await?;
//! let fired = testing::assert_fired::<OrderPlaced, _>(&outbox).await;
//! assert_eq!(fired[0].order, 42);
//!
//! assert_eq!(testing::drain(&outbox).await.succeeded, 0); // not due yet
//! clock.advance(Duration::from_secs(3_600)); // tests move time, they never wait for it
//! assert_eq!(testing::drain(&outbox).await.succeeded, 1);
//! # Ok(()) }
//! ```

use owed_core::{EventQuery, Store};

use crate::{Delivered, Outbox, codec, event::Event};

/// Delivers everything owed, by the same path as a relay: claimed, decoded, run, settled. Skips only the waiting
/// for backoffs, so a delivery that keeps failing is dead at its end. What is scheduled stays until its time: move
/// the clock, or use [`Pass::at`](crate::Pass::at).
///
/// # Panics
/// If the store fails.
pub async fn drain<S: Store>(outbox: &Outbox<S>) -> Delivered {
    outbox.idle().await;
    outbox.deliver_pending().ignoring_backoff().await.expect("the store works")
}

/// The events of one type that were fired and committed, decoded, in the order of their ids.
///
/// # Panics
/// If there is none, one can't be decoded, or the store fails.
pub async fn assert_fired<E: Event, S: Store>(outbox: &Outbox<S>) -> Vec<E> {
    let fired = fired::<E, S>(outbox).await;
    assert!(!fired.is_empty(), "no {} was fired", E::NAME);
    fired
}

/// The events of one type that were fired and committed, decoded, in the order of their ids.
///
/// # Panics
/// If one can't be decoded, or the store fails.
pub async fn fired<E: Event, S: Store>(outbox: &Outbox<S>) -> Vec<E> {
    let mut found = Vec::new();
    let mut after = None;
    loop {
        let query = EventQuery { name: Some(E::NAME.into()), after, ..EventQuery::page(500) };
        let page = outbox.store().events(&query).await.expect("the store works");
        let Some(last) = page.last() else { return found };
        after = Some(last.id);
        found.extend(page.iter().map(|row| match codec::decode::<E>(row) {
            Ok(event) => event,
            Err(error) => panic!("event {} does not come back as it was fired: {error}", row.id),
        }));
    }
}
