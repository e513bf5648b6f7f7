//! The outbox: a store, what was declared, and the settings.

use std::{fmt, sync::Arc, time::Duration};

use owed_core::{Pause, Store, StoreError};

use crate::{
    check::Finding,
    declare::{BuildError, Declared, Registry},
    error::Error,
    event::{Event, Registration},
    fire::{Joined, Transaction, Tx},
    inspect::{Health, Quiet},
    operate::{Cancel, DeliveryFilter, EventFilter, Operation, Prune, Replay, Requeue},
    relay::{AroundDelivery, Handoff, Leases, Pass, Relay, TaskBackend, Waker},
    settings::Settings,
};

/// Where a service fires its events, and what delivers them. Clones share everything.
///
/// ```
/// use owed::{Event, Failure, MemoryStore, Outbox, Receiver};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(name = "shop.OrderPlaced")]
/// struct OrderPlaced { order: i64 }
///
/// async fn send_receipt(event: OrderPlaced) -> Result<(), Failure> {
///     println!("receipt for order {}", event.order);
///     Ok(())
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let outbox = Outbox::builder(MemoryStore::new())
///     .receiver(Receiver::on::<OrderPlaced>("shop.receipt").durable().run(send_receipt))
///     .build()?;
///
/// let tx = outbox.begin().await?;
/// tx.fire(OrderPlaced { order: 42 }).dedupe_key("order-42").await?;
/// tx.commit().await?;
///
/// let delivered = outbox.deliver_pending().await?;
/// assert_eq!(delivered.succeeded, 1);
/// # Ok(()) }
/// ```
pub struct Outbox<S: Store> {
    inner: Arc<Inner<S>>,
}

struct Inner<S: Store> {
    store: S,
    registry: Arc<Registry<S>>,
    handoff: Option<Arc<Handoff>>,
    around: Option<Arc<dyn AroundDelivery>>,
    settings: Settings,
    worker: Arc<str>,
    leases: Leases<S>,
    waker: Waker<S>,
}

impl<S: Store> Clone for Outbox<S> {
    fn clone(&self) -> Self {
        Outbox { inner: self.inner.clone() }
    }
}

impl<S: Store> fmt::Debug for Outbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").field("worker", &self.inner.worker).finish_non_exhaustive()
    }
}

/// Puts an [`Outbox`] together.
#[must_use = "nothing is declared until `build` is called"]
pub struct OutboxBuilder<S: Store> {
    store: S,
    receivers: Vec<Declared<S>>,
    events: Vec<Registration>,
    handoff: Option<Arc<Handoff>>,
    around: Option<Arc<dyn AroundDelivery>>,
    settings: Settings,
}

impl<S: Store> fmt::Debug for OutboxBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxBuilder").field("receivers", &self.receivers).finish_non_exhaustive()
    }
}

impl<S: Store> OutboxBuilder<S> {
    /// Adds a receiver, and declares the event that it listens on.
    pub fn receiver(mut self, receiver: Declared<S>) -> Self {
        self.receivers.push(receiver);
        self
    }

    /// Declares an event that no receiver here listens on, so that it can be fired.
    pub fn event<E: Event>(mut self) -> Self {
        self.events.push(Registration::of::<E>());
        self
    }

    /// Where the deliveries of receivers declared with [`task`](crate::Receiver::task) are handed to.
    pub fn task_backend(mut self, backend: impl TaskBackend) -> Self {
        self.handoff = Some(Arc::new(Handoff::new(backend)));
        self
    }

    /// What is called around each delivery's attempt.
    pub fn around_delivery(mut self, around: impl AroundDelivery) -> Self {
        self.around = Some(Arc::new(around));
        self
    }

    /// Replaces the settings.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// Checks everything that was declared. Does no I/O.
    ///
    /// # Errors
    /// With every mistake at once, each naming what it is about.
    pub fn build(self) -> Result<Outbox<S>, BuildError> {
        let registry = Registry::build(self.receivers, self.events, &self.settings, self.handoff.is_some())?;
        // Unique to this start of this process: a restart with the same pid is another worker.
        let worker: Arc<str> = format!("{}-{:016x}", std::process::id(), rand::random::<u64>()).into();
        let inner = Inner {
            leases: Leases::new(self.store.clone()),
            waker: Waker::new(self.store.clone(), &self.settings),
            store: self.store,
            registry: Arc::new(registry),
            handoff: self.handoff,
            around: self.around,
            settings: self.settings,
            worker,
        };
        Ok(Outbox { inner: Arc::new(inner) })
    }
}

impl<S: Store> Outbox<S> {
    /// Starts an outbox on a store.
    pub fn builder(store: S) -> OutboxBuilder<S> {
        OutboxBuilder {
            store,
            receivers: Vec::new(),
            events: Vec::new(),
            handoff: None,
            around: None,
            settings: Settings::default(),
        }
    }

    /// The store beneath.
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// The settings that it was built with.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Opens a transaction to change the service's own tables in, and to fire from.
    ///
    /// # Errors
    /// If the store can't open one.
    ///
    /// # Cancel safety
    /// Dropped, no transaction stays open.
    pub async fn begin(&self) -> Result<Transaction<S>, Error> {
        Ok(Transaction::new(self.clone(), self.store().begin().await?))
    }

    /// Runs `work` in a transaction: committed if it answers `Ok`, rolled back if it answers an error or is
    /// dropped.
    ///
    /// ```
    /// # use owed::{Event, MemoryStore, Outbox};
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, Event)] struct OrderPlaced { order: i64 }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).event::<OrderPlaced>().build()?;
    /// let fired = outbox
    ///     .transaction(async |tx| {
    ///         // the service's own statements go here, on `tx`
    ///         tx.fire(OrderPlaced { order: 42 }).await
    ///     })
    ///     .await?;
    /// assert!(fired.id().is_some());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// What `work` answered, or what the store said, turned into the same type.
    ///
    /// # Cancel safety
    /// Dropped while `work` runs, it rolls back. Once the commit has begun, that goes on.
    pub async fn transaction<T, E>(&self, work: impl AsyncFnOnce(&mut Tx<S>) -> Result<T, E>) -> Result<T, E>
    where
        E: From<Error>,
    {
        let mut tx = self.begin().await?;
        match work(&mut tx).await {
            Ok(value) => {
                tx.commit().await?;
                Ok(value)
            }
            Err(error) => {
                tx.rollback().await?;
                Err(error)
            }
        }
    }

    /// Fires from a transaction that the service opened itself, by a savepoint in it.
    ///
    /// ```
    /// # use owed::{Event, MemoryStore, Outbox, Store};
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, Event)] struct OrderPlaced { order: i64 }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).event::<OrderPlaced>().build()?;
    /// # let db = outbox.store().clone();
    /// let db_tx = db.begin().await?; // with SeaORM: a `DatabaseTransaction`
    ///
    /// let joined = outbox.join(&db_tx).await?;
    /// joined.fire(OrderPlaced { order: 42 }).await?;
    /// let after = joined.close().await?;
    ///
    /// db.commit(db_tx).await?; // with SeaORM: `db_tx.commit()`
    /// after.committed().await; // on-commit receivers, eager attempts, the wake-up
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the store can't make a savepoint.
    ///
    /// # Cancel safety
    /// Dropped, the service's transaction stays usable, except on a runtime of one thread (`current_thread`) with
    /// PostgreSQL or MySQL: there it has to be rolled back, since nobody is left to take the server's answer.
    pub async fn join<'t>(&self, tx: &'t S::Tx) -> Result<Joined<'t, S>, Error> {
        Ok(Joined::new(self.clone(), self.store().savepoint(tx).await?))
    }

    /// Looks for rows that wait for what is not known here: receivers that nobody declares, events that their receiver
    /// does not listen on, payloads that can't be decoded. At most 20 rows of each receiver are looked at, so it is
    /// cheap at any size. Relays log what it finds when they start.
    ///
    /// ```
    /// # use owed::{MemoryStore, Outbox};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
    /// for finding in outbox.check().await? {
    ///     eprintln!("{finding}");
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the database can't be reached.
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn check(&self) -> Result<Vec<Finding>, Error> {
        crate::check::check(self).await
    }

    /// Which lanes are paused now, because a receiver in them deferred: by which relay, since when and until when.
    ///
    /// # Errors
    /// If the database can't be reached.
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn pauses(&self) -> Result<Vec<Pause>, Error> {
        Ok(self.store().pauses(self.now()).await?)
    }

    /// Withdraws what is owed, so that it never runs: what is pending or waits out a backoff becomes cancelled. What a
    /// worker holds is left to run, and counted; what is settled keeps its outcome. See [`Tx::cancel`] for part of a
    /// transaction.
    ///
    /// ```
    /// # use owed::{DeliveryFilter, Event, EventFilter, Failure, MemoryStore, Outbox, Receiver};
    /// # use serde::{Deserialize, Serialize};
    /// # use std::time::Duration;
    /// # #[derive(Serialize, Deserialize, Event)] struct OfferMade { offer: i64 }
    /// # async fn expire(_: OfferMade) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let outbox = Outbox::builder(MemoryStore::new())
    ///     .receiver(Receiver::on::<OfferMade>("shop.expire").durable().due(Duration::from_secs(3_600)).run(expire))
    ///     .build()?;
    /// let fired = outbox.transaction(async |tx| tx.fire(OfferMade { offer: 1 }).await).await?;
    ///
    /// // The offer was accepted: it must not expire.
    /// let offer = EventFilter::ids(fired.id());
    /// let cancelled = outbox.cancel(DeliveryFilter::of(offer).to(["shop.expire"])).await?;
    /// assert_eq!((cancelled.cancelled, cancelled.in_flight), (1, 0));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If a lane is named that nobody declares, or the database can't be reached.
    pub fn cancel(&self, filter: DeliveryFilter) -> Operation<'static, S, Cancel> {
        Operation::new(self.clone(), None, Cancel::new(filter))
    }

    /// Gives dead letters their budget of attempts back, owed from now, and answers how many. Oldest first. What is
    /// not dead is left alone.
    ///
    /// ```
    /// # use owed::{DeliveryFilter, MemoryStore, Outbox};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
    /// let refused = DeliveryFilter::receiver("shop.receipt").error("mailbox full");
    /// let would = outbox.requeue(refused.clone()).dry_run().await?;
    /// let requeued = outbox.requeue(refused).per_second(100).await?;
    /// # assert_eq!((would, requeued), (0, 0));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If a lane is named that nobody declares, or the database can't be reached.
    pub fn requeue(&self, filter: DeliveryFilter) -> Operation<'static, S, Requeue> {
        Operation::new(self.clone(), None, Requeue::new(filter))
    }

    /// Owes events again, to the receivers and targets that are declared now: settled deliveries are reopened, those of
    /// receivers that had none are added, what is owed or claimed is left alone. Due times and targets are resolved
    /// anew. Each event is a transaction of its own.
    ///
    /// ```
    /// # use owed::{EventFilter, MemoryStore, Outbox};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
    /// // A receiver that was deployed today is given what it missed.
    /// let missed = EventFilter::named("shop.OrderPlaced");
    /// let replayed = outbox.replay(missed).receivers(["shop.loyalty"]).await?;
    /// println!("{} added", replayed.added);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Owing`] if a receiver's targets or due time can't be told, such as for a payload that it can't decode:
    /// the events before it are replayed. Else if the database can't be reached.
    pub fn replay(&self, filter: EventFilter) -> Operation<'static, S, Replay> {
        Operation::new(self.clone(), None, Replay::new(filter))
    }

    /// Deletes the events whose retention has ended, with their deliveries. Relays do it by themselves: see the setting
    /// `prune_interval`.
    ///
    /// ```
    /// # use owed::{MemoryStore, Outbox};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
    /// let pruned = outbox.prune().limit(10_000).await?;
    /// println!("{} events and {} deliveries deleted", pruned.events, pruned.deliveries);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the database can't be reached.
    pub fn prune(&self) -> Prune<S> {
        Prune::new(self.clone())
    }

    /// How far behind the outbox is: what each receiver and each lane is owed, dead letters, pauses. Cheap at any size:
    /// no more than 10,000 rows of each receiver are counted, and where there are more that is said.
    ///
    /// ```
    /// # use owed::{MemoryStore, Outbox};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
    /// let health = outbox.health().await?;
    /// if let Some(oldest) = health.total.oldest_owed {
    ///     println!("{} owed, since {oldest}; {} dead", health.total.owed, health.dead);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the database can't be reached.
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn health(&self) -> Result<Health, Error> {
        crate::inspect::health(self).await
    }

    /// The durable receivers that have succeeded at nothing within this time, or never, those that are silent for
    /// longest first. What was pruned since counts. Reads the whole table of deliveries.
    ///
    /// # Errors
    /// If the database can't be reached.
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn quiet(&self, within: Duration) -> Result<Vec<Quiet>, Error> {
        crate::inspect::quiet(self, within).await
    }

    /// A relay: the loop that delivers what is owed, until it is told to stop.
    pub fn relay(&self) -> Relay<S> {
        Relay::new(self.clone())
    }

    /// Delivers what is owed now, once, and says how it went. For tests, scripts and cron jobs; a service runs a
    /// [`relay`](Outbox::relay).
    pub fn deliver_pending(&self) -> Pass<S> {
        Pass::new(self.clone())
    }

    pub(crate) fn registry(&self) -> &Registry<S> {
        &self.inner.registry
    }

    pub(crate) fn handoff(&self) -> Option<&Handoff> {
        self.inner.handoff.as_deref()
    }

    pub(crate) fn around(&self) -> Option<&dyn AroundDelivery> {
        self.inner.around.as_deref()
    }

    /// The same declarations over another handle on the same database.
    pub(crate) fn over(&self, store: S) -> Self {
        let Inner { registry, handoff, around, settings, worker, .. } = &*self.inner;
        let inner = Inner {
            leases: Leases::new(store.clone()),
            waker: Waker::new(store.clone(), settings),
            store,
            registry: registry.clone(),
            handoff: handoff.clone(),
            around: around.clone(),
            settings: settings.clone(),
            worker: worker.clone(),
        };
        Outbox { inner: Arc::new(inner) }
    }

    pub(crate) fn worker(&self) -> &Arc<str> {
        &self.inner.worker
    }

    pub(crate) fn leases(&self) -> &Leases<S> {
        &self.inner.leases
    }

    pub(crate) fn waker(&self) -> &Waker<S> {
        &self.inner.waker
    }

    /// Waits until no eager attempt of this process is under way any more. For tests, and before a process ends.
    ///
    /// # Cancel safety
    /// Dropped, it only stops waiting.
    pub async fn idle(&self) {
        self.inner.leases.idle().await;
    }

    /// The time by the store's clock.
    pub fn now(&self) -> owed_core::Timestamp {
        self.store().now()
    }

    /// Compares the store's clock with the database's. Relays do it now and then.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn sync_clock(&self) -> Result<(), StoreError> {
        self.store().sync_clock().await
    }
}
