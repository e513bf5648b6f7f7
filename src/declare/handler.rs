//! What can be a handler: a plain async function, told apart by its arguments.

use std::{future::Future, sync::Arc};

use async_trait::async_trait;
use futures::future::BoxFuture;
use owed_core::Store;

use super::{
    failure::Failure,
    state::{Unbounded, Verdicts},
};
use crate::{context::DeliveryContext, fire::Tx};

/// An async function that a receiver runs.
///
/// You never implement this: any of these shapes is one already, as a function or a closure that returns a
/// future, with `F` being [`Failure`], [`Failure<Bounded>`](crate::state::Bounded) or, for inline and on-commit
/// receivers, [`Refusal`](crate::Refusal):
///
/// | arguments | runs |
/// | --- | --- |
/// | `(E)` | without a transaction or a connection |
/// | `(E, DeliveryContext)` | the same, told about its delivery |
/// | `(E, Tx<S>)` | in a transaction that commits with its acknowledgement |
/// | `(E, DeliveryContext, Tx<S>)` | the same, told about its delivery |
///
/// A struct with dependencies implements [`Deliver`] and is passed as `Arc<dyn Deliver<E>>`.
#[diagnostic::on_unimplemented(
    message = "this is not a handler for the event `{E}`",
    label = "needs an async function of `{E}` that returns `Result<(), Failure>`",
    note = "the arguments can be (E), (E, DeliveryContext), (E, Tx<S>) or (E, DeliveryContext, Tx<S>)",
    note = "a durable receiver returns Result<(), Failure>, one with give_up_after Result<(), Failure<Bounded>>, an inline or on-commit one Result<(), Refusal>"
)]
pub trait Handler<E, S: Store, V: Verdicts, Args>: Send + Sync + 'static {
    /// Whether it works in the transaction that acknowledges it.
    #[doc(hidden)]
    const TAKES_TX: bool;

    #[doc(hidden)]
    fn call(&self, event: E, context: DeliveryContext, tx: Option<Tx<S>>) -> Running<V>;
}

#[doc(hidden)]
pub(super) type Running<V> = BoxFuture<'static, Result<(), Failure<V>>>;

fn no_tx<V: Verdicts>() -> Running<V> {
    // The engine opens a transaction for every handler that takes one, so this is a fault of ours; a failed
    // attempt that says so is better than a panic.
    Box::pin(async { Err("no transaction was opened for a handler that takes one".into()) })
}

impl<E, S, V, F, Fut> Handler<E, S, V, (E,)> for F
where
    S: Store,
    V: Verdicts,
    F: Fn(E) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure<V>>> + Send + 'static,
{
    const TAKES_TX: bool = false;

    fn call(&self, event: E, _: DeliveryContext, _: Option<Tx<S>>) -> Running<V> {
        Box::pin(self(event))
    }
}

impl<E, S, V, F, Fut> Handler<E, S, V, (E, DeliveryContext)> for F
where
    S: Store,
    V: Verdicts,
    F: Fn(E, DeliveryContext) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure<V>>> + Send + 'static,
{
    const TAKES_TX: bool = false;

    fn call(&self, event: E, context: DeliveryContext, _: Option<Tx<S>>) -> Running<V> {
        Box::pin(self(event, context))
    }
}

impl<E, S, V, F, Fut> Handler<E, S, V, (E, Tx<S>)> for F
where
    S: Store,
    V: Verdicts,
    F: Fn(E, Tx<S>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure<V>>> + Send + 'static,
{
    const TAKES_TX: bool = true;

    fn call(&self, event: E, _: DeliveryContext, tx: Option<Tx<S>>) -> Running<V> {
        tx.map_or_else(no_tx, |tx| Box::pin(self(event, tx)))
    }
}

impl<E, S, V, F, Fut> Handler<E, S, V, (E, DeliveryContext, Tx<S>)> for F
where
    S: Store,
    V: Verdicts,
    F: Fn(E, DeliveryContext, Tx<S>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure<V>>> + Send + 'static,
{
    const TAKES_TX: bool = true;

    fn call(&self, event: E, context: DeliveryContext, tx: Option<Tx<S>>) -> Running<V> {
        tx.map_or_else(no_tx, |tx| Box::pin(self(event, context, tx)))
    }
}

/// A handler as a trait object, for structs with dependencies (and for mocks of them).
///
/// ```
/// # use std::sync::Arc;
/// # use owed::{async_trait, Deliver, DeliveryContext, Event, Failure, MemoryStore, Outbox, Receiver};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize, Event)] struct OrderPlaced { order: i64 }
/// struct Mailer { from: String }
///
/// #[async_trait]
/// impl Deliver<OrderPlaced> for Mailer {
///     async fn deliver(&self, event: OrderPlaced, _: DeliveryContext) -> Result<(), Failure> {
///         println!("{} writes about order {}", self.from, event.order);
///         Ok(())
///     }
/// }
///
/// let mailer: Arc<dyn Deliver<OrderPlaced>> = Arc::new(Mailer { from: "shop@example.org".into() });
/// let outbox = Outbox::builder(MemoryStore::new())
///     .receiver(Receiver::on::<OrderPlaced>("shop.receipt").durable().run(mailer))
///     .build()?;
/// # Ok::<(), owed::BuildError>(())
/// ```
#[async_trait]
pub trait Deliver<E, V: Verdicts = Unbounded>: Send + Sync + 'static {
    /// Handles one event. Dropped when the receiver's timeout passes or its relay is dropped: the attempt then
    /// counts as failed, or its row is claimed again once its lease has ended.
    async fn deliver(&self, event: E, context: DeliveryContext) -> Result<(), Failure<V>>;
}

/// Tells the trait-object form from functions.
#[doc(hidden)]
#[derive(Debug)]
pub enum Object {}

impl<E, S, V, D> Handler<E, S, V, Object> for Arc<D>
where
    E: Send + 'static,
    S: Store,
    V: Verdicts,
    D: Deliver<E, V> + ?Sized,
{
    const TAKES_TX: bool = false;

    fn call(&self, event: E, context: DeliveryContext, _: Option<Tx<S>>) -> Running<V> {
        let this = self.clone();
        Box::pin(async move { this.deliver(event, context).await })
    }
}
