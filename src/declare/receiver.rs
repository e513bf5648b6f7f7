//! Receivers, built in states.

use std::{fmt, marker::PhantomData, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use owed_core::{EventRow, Store, Timestamp};

use super::{
    DEFAULT_LANE,
    failure::{BoxError, Failure, Verdict},
    handler::Handler,
    state::{
        AtOnce, Bounded, Due, Durable, Eager, FanOut, Immediate, Inline, OnCommit, One, Plain, Reach,
        Unbounded, Undecided, Verdicts, When,
    },
};
use crate::{
    codec::DecodeError,
    context::DeliveryContext,
    event::{Listens, Registration, Subject},
    fire::Tx,
    settings::Settings,
};

/// Declares who receives an event, and under which promise.
///
/// A declaration is made in this order, and each step has only the methods that mean something there:
///
/// ```
/// # use owed::{DeliveryContext, Event, Failure, MemoryStore, Outbox, Receiver, Refusal};
/// # use serde::{Deserialize, Serialize};
/// # use std::time::Duration;
/// # #[derive(Serialize, Deserialize, Event)] struct OrderPlaced { order: i64 }
/// # async fn reserve(_: OrderPlaced) -> Result<(), Refusal> { Ok(()) }
/// # async fn refresh(_: OrderPlaced) -> Result<(), Refusal> { Ok(()) }
/// # async fn receipt(_: OrderPlaced, _: DeliveryContext) -> Result<(), Failure> { Ok(()) }
/// # async fn expire(_: OrderPlaced) -> Result<(), Failure> { Ok(()) }
/// let outbox = Outbox::builder(MemoryStore::new())
///     // 1. which event, under which key; 2. its mode; 3. its options; 4. its handler
///     .receiver(Receiver::on::<OrderPlaced>("shop.reserve").inline().run(reserve))
///     .receiver(Receiver::on::<OrderPlaced>("shop.cache").on_commit().run(refresh))
///     .receiver(Receiver::on::<OrderPlaced>("shop.receipt").durable().lane("mail").max_attempts(8).run(receipt))
///     .receiver(Receiver::on::<OrderPlaced>("shop.expire").durable().due(Duration::from_secs(48 * 3600)).run(expire))
///     .build()?;
/// # Ok::<(), owed::BuildError>(())
/// ```
///
/// The type says what was decided: `Receiver<Durable, Due, One, Unbounded, OrderPlaced>`. What can't be said is
/// not a method: a `due` receiver has no `eager` and no `targets`, an inline one no `lane`.
///
/// The key names the receiver on its delivery rows; keep it when the function is renamed.
#[must_use = "a receiver does nothing until it is given a handler with `run` and added to an outbox"]
pub struct Receiver<M, W = AtOnce, R = One, B = Unbounded, E = ()> {
    declaring: Declaring<E>,
    state: PhantomData<fn() -> (M, W, R, B)>,
}

type FailureHook = dyn Fn(crate::relay::DeliveryFailure) -> BoxFuture<'static, ()> + Send + Sync;
type Targets<E> = dyn Fn(&E, &DeliveryContext) -> Vec<String> + Send + Sync;

struct Declaring<E> {
    key: String,
    lane: Option<String>,
    max_attempts: Option<u32>,
    lease: Option<Duration>,
    timeout: Option<Duration>,
    backoff_base: Option<Duration>,
    backoff_cap: Option<Duration>,
    give_up_after: Option<Duration>,
    on_failure: Option<Arc<FailureHook>>,
    task: bool,
    due: Option<DueSpec<E>>,
    targets: Option<Arc<Targets<E>>>,
}

enum DueSpec<E> {
    After(Duration),
    At(Arc<dyn Fn(&E) -> Timestamp + Send + Sync>),
}

impl<E> fmt::Debug for Declaring<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Declaring").field("key", &self.key).finish_non_exhaustive()
    }
}

impl<M, W, R, B, E> fmt::Debug for Receiver<M, W, R, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("key", &self.declaring.key).finish_non_exhaustive()
    }
}

impl Receiver<Undecided> {
    /// Declares a receiver of `E` (or of every event: [`AnyEvent`](crate::AnyEvent)) under a key of at most 255
    /// characters.
    pub fn on<E: Subject>(key: impl Into<String>) -> Receiver<Undecided, AtOnce, One, Unbounded, E> {
        Receiver {
            declaring: Declaring {
                key: key.into(),
                lane: None,
                max_attempts: None,
                lease: None,
                timeout: None,
                backoff_base: None,
                backoff_cap: None,
                give_up_after: None,
                on_failure: None,
                task: false,
                due: None,
                targets: None,
            },
            state: PhantomData,
        }
    }
}

impl<M, W, R, B, E> Receiver<M, W, R, B, E> {
    fn become_<M2, W2, R2, B2>(self) -> Receiver<M2, W2, R2, B2, E> {
        Receiver { declaring: self.declaring, state: PhantomData }
    }

    fn with(mut self, change: impl FnOnce(&mut Declaring<E>)) -> Self {
        change(&mut self.declaring);
        self
    }
}

impl<E: Subject> Receiver<Undecided, AtOnce, One, Unbounded, E> {
    /// Runs inside the firing transaction. Failing refuses it: the fire fails, and the transaction can no longer
    /// be committed.
    pub fn inline(self) -> Receiver<Inline, AtOnce, One, Unbounded, E> {
        self.become_()
    }

    /// Runs after the commit, in the firing process. Best effort: a failure is logged, nothing is retried, and
    /// nobody who fires sees it.
    pub fn on_commit(self) -> Receiver<OnCommit, AtOnce, One, Unbounded, E> {
        self.become_()
    }

    /// Is owed the event by a row written in the firing transaction, and gets it at least once.
    pub fn durable(self) -> Receiver<Durable, AtOnce, One, Unbounded, E> {
        self.become_()
    }
}

impl<W: When, R: Reach, B: Verdicts, E: Subject> Receiver<Durable, W, R, B, E> {
    /// Puts its deliveries in a lane of their own (at most 255 characters), which a relay serves apart from
    /// others. Read when rows are claimed, not copied onto them: a receiver that moves takes its rows along.
    pub fn lane(self, lane: impl Into<String>) -> Self {
        self.with(|d| d.lane = Some(lane.into()))
    }

    /// How many attempts a delivery has, at least 1. Copied onto each row when it is fired. Default: the setting
    /// `max_attempts`, 5.
    pub fn max_attempts(self, attempts: u32) -> Self {
        self.with(|d| d.max_attempts = Some(attempts))
    }

    /// How long a claim on its rows holds without being renewed. A relay renews it while the handler runs, so
    /// this is how long a row waits after its relay has died. Default: the setting `lease`.
    pub fn lease(self, lease: Duration) -> Self {
        self.with(|d| d.lease = Some(lease))
    }

    /// How long one attempt may run. The handler is dropped at its next await after that, and the attempt has
    /// failed. Default: no bound.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.with(|d| d.timeout = Some(timeout))
    }

    /// The base of its backoff: the wait before retry `n` is drawn from zero up to `base * 2^(n-1)`. Read when
    /// an attempt fails. Default: the setting `backoff_base`, 2 s.
    pub fn backoff_base(self, base: Duration) -> Self {
        self.with(|d| d.backoff_base = Some(base))
    }

    /// The most that its backoff may come to. Default: the setting `backoff_cap`, an hour.
    pub fn backoff_cap(self, cap: Duration) -> Self {
        self.with(|d| d.backoff_cap = Some(cap))
    }

    /// Runs its handler where a task engine has it run: the relay claims its rows and hands them to the outbox's
    /// [`TaskBackend`](crate::TaskBackend), and a worker runs each under exactly that claim.
    pub fn task(self) -> Self {
        self.with(|d| d.task = true)
    }

    /// Called after each failed attempt has been recorded, outside the transaction that was rolled back. It
    /// can't change the outcome: a panic in it is logged and swallowed. Dropped with the relay's future.
    pub fn on_failure<F, Fut>(self, hook: F) -> Self
    where
        F: Fn(crate::relay::DeliveryFailure) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        self.with(|d| d.on_failure = Some(Arc::new(move |failure| Box::pin(hook(failure)))))
    }
}

impl<W: When, R: Reach, E: Subject> Receiver<Durable, W, R, Unbounded, E> {
    /// Ends a delivery that has been deferred (`Failure::defer`) for this long since it was owed. Declaring it
    /// is what makes deferring possible.
    pub fn give_up_after(self, bound: Duration) -> Receiver<Durable, W, R, Bounded, E> {
        self.with(|d| d.give_up_after = Some(bound)).become_()
    }
}

impl<R: Reach, B: Verdicts, E: Subject> Receiver<Durable, AtOnce, R, B, E> {
    /// Attempts each delivery right after the commit in the firing process as well. What that process loses, the
    /// relay has: the row is the same.
    pub fn eager(self) -> Receiver<Durable, Eager, R, B, E> {
        self.become_()
    }
}

impl<B: Verdicts, E: Subject> Receiver<Durable, AtOnce, One, B, E> {
    /// Runs `delay` after the event occurred. The row is written now and owed from then.
    pub fn due(self, delay: Duration) -> Receiver<Durable, Due, One, B, E> {
        self.with(|d| d.due = Some(DueSpec::After(delay))).become_()
    }

    /// Runs at the time that the event names. A time that has passed is due at once. If the function panics, so
    /// does the fire, and the transaction can't be committed.
    pub fn due_at<F>(self, at: F) -> Receiver<Durable, Due, One, B, E>
    where
        F: Fn(&E) -> Timestamp + Send + Sync + 'static,
    {
        self.with(|d| d.due = Some(DueSpec::At(Arc::new(at)))).become_()
    }
}

impl<W: When, B: Verdicts, E: Subject> Receiver<Durable, W, One, B, E> {
    /// Makes one delivery for each text that `targets` answers, each with its own attempts, backoff and dead
    /// letter; none at all if it answers none. Called in the firing transaction for each event. The same target
    /// twice is one delivery; an empty one refuses the fire.
    pub fn targets<F>(self, targets: F) -> Receiver<Durable, W, FanOut, B, E>
    where
        W: Immediate,
        F: Fn(&E, &DeliveryContext) -> Vec<String> + Send + Sync + 'static,
    {
        self.with(|d| d.targets = Some(Arc::new(targets))).become_()
    }
}

impl<E: Subject> Receiver<Inline, AtOnce, One, Unbounded, E> {
    /// Gives it its handler: an async function of `(E)`, `(E, DeliveryContext)`, `(E, Tx<S>)` or all three. The
    /// `Tx` is the firing transaction.
    pub fn run<S: Store, H, A>(self, handler: H) -> Declared<S>
    where
        H: Handler<E, S, Plain, A>,
        A: 'static,
    {
        declared(self.declaring, Mode::Inline, H::TAKES_TX, handler)
    }
}

impl<E: Subject> Receiver<OnCommit, AtOnce, One, Unbounded, E> {
    /// Gives it its handler: an async function of `(E)` or `(E, DeliveryContext)`. One that takes a transaction
    /// is given one of its own, committed when it succeeds.
    pub fn run<S: Store, H, A>(self, handler: H) -> Declared<S>
    where
        H: Handler<E, S, Plain, A>,
        A: 'static,
    {
        declared(self.declaring, Mode::OnCommit, H::TAKES_TX, handler)
    }
}

impl<W: When + StartsEager, R: Reach, B: Verdicts, E: Subject> Receiver<Durable, W, R, B, E> {
    /// Gives it its handler: an async function of `(E)`, `(E, DeliveryContext)`, `(E, Tx<S>)` or all three.
    ///
    /// One that takes the transaction commits its work and its acknowledgement together: what it does in this
    /// database happens exactly once. One that does not holds no connection while it runs.
    pub fn run<S: Store, H, A>(self, handler: H) -> Declared<S>
    where
        H: Handler<E, S, B, A>,
        A: 'static,
    {
        let mut declaring = self.declaring;
        let due = declaring.due.take().map(|due| match due {
            DueSpec::After(delay) => DueTime::After(delay),
            DueSpec::At(at) => DueTime::At(Arc::new(move |row: &Arc<EventRow>| Ok(at(&E::of(row)?)))),
        });
        let targets = declaring.targets.take().map(|targets| -> Arc<TargetList> {
            Arc::new(move |row: &Arc<EventRow>, context: &DeliveryContext| Ok(targets(&E::of(row)?, context)))
        });
        let spec = DurableSpec {
            lane: declaring.lane.take().map_or_else(|| DEFAULT_LANE.into(), Into::into),
            max_attempts: declaring.max_attempts,
            lease: declaring.lease,
            timeout: declaring.timeout,
            backoff_base: declaring.backoff_base,
            backoff_cap: declaring.backoff_cap,
            give_up_after: declaring.give_up_after,
            on_failure: declaring.on_failure.take(),
            task: declaring.task,
            eager: W::EAGER,
            due,
            targets,
        };
        declared(declaring, Mode::Durable(Box::new(spec)), H::TAKES_TX, handler)
    }
}

/// Whether a delivery starts out claimed by the process that fires it.
#[doc(hidden)]
pub trait StartsEager {
    const EAGER: bool;
}
impl StartsEager for AtOnce {
    const EAGER: bool = false;
}
impl StartsEager for Eager {
    const EAGER: bool = true;
}
impl StartsEager for Due {
    const EAGER: bool = false;
}

/// When a delivery of an event is due, with the event's type erased.
pub(crate) enum DueTime {
    After(Duration),
    At(Arc<dyn Fn(&Arc<EventRow>) -> Result<Timestamp, DecodeError> + Send + Sync>),
}

pub(crate) type TargetList =
    dyn Fn(&Arc<EventRow>, &DeliveryContext) -> Result<Vec<String>, DecodeError> + Send + Sync;

/// A receiver with its handler, ready for [`OutboxBuilder::receiver`](crate::OutboxBuilder::receiver).
pub struct Declared<S: Store> {
    pub(crate) key: Arc<str>,
    pub(crate) listens: Listens,
    pub(crate) registration: Option<Registration>,
    pub(crate) mode: Mode,
    pub(crate) takes_tx: bool,
    run: Box<dyn Run<S>>,
}

impl<S: Store> fmt::Debug for Declared<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Declared")
            .field("key", &self.key)
            .field("listens", &self.listens)
            .finish_non_exhaustive()
    }
}

pub(crate) enum Mode {
    Inline,
    OnCommit,
    Durable(Box<DurableSpec>),
}

pub(crate) struct DurableSpec {
    pub(crate) lane: Arc<str>,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) lease: Option<Duration>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) backoff_base: Option<Duration>,
    pub(crate) backoff_cap: Option<Duration>,
    pub(crate) give_up_after: Option<Duration>,
    pub(crate) on_failure: Option<Arc<FailureHook>>,
    /// Handed to the task backend instead of being run by who claims it.
    pub(crate) task: bool,
    pub(crate) eager: bool,
    pub(crate) due: Option<DueTime>,
    pub(crate) targets: Option<Arc<TargetList>>,
}

impl DurableSpec {
    /// How long a handler's claim holds without being renewed.
    pub(crate) fn run_lease(&self, settings: &Settings) -> Duration {
        self.lease.unwrap_or(settings.lease)
    }

    /// How long the claim of a relay holds: that of a row which is handed off has to cover its time in the queue.
    pub(crate) fn claim_lease(&self, settings: &Settings) -> Duration {
        let lease = self.run_lease(settings);
        if self.task { lease.max(settings.task_lease) } else { lease }
    }
}

/// How a handler ended, with its types erased.
pub(crate) enum Ran {
    Succeeded,
    Failed { verdict: Verdict, error: BoxError },
    Undecodable(DecodeError),
}

impl<S: Store> Declared<S> {
    pub(crate) fn durable(&self) -> Option<&DurableSpec> {
        match &self.mode {
            Mode::Durable(spec) => Some(spec),
            _ => None,
        }
    }

    pub(crate) fn decodes(&self, row: &Arc<EventRow>) -> Result<(), DecodeError> {
        self.run.decodes(row)
    }

    pub(crate) fn run(
        &self,
        row: &Arc<EventRow>,
        context: DeliveryContext,
        tx: Option<Tx<S>>,
    ) -> BoxFuture<'static, Ran> {
        self.run.run(row, context, tx)
    }
}

trait Run<S: Store>: Send + Sync {
    fn decodes(&self, row: &Arc<EventRow>) -> Result<(), DecodeError>;

    fn run(
        &self,
        row: &Arc<EventRow>,
        context: DeliveryContext,
        tx: Option<Tx<S>>,
    ) -> BoxFuture<'static, Ran>;
}

struct Runner<E, V, A, H> {
    handler: H,
    types: PhantomData<fn() -> (E, V, A)>,
}

impl<S, E, V, A, H> Run<S> for Runner<E, V, A, H>
where
    S: Store,
    E: Subject,
    V: Verdicts,
    A: 'static,
    H: Handler<E, S, V, A>,
{
    fn decodes(&self, row: &Arc<EventRow>) -> Result<(), DecodeError> {
        E::of(row).map(drop)
    }

    fn run(
        &self,
        row: &Arc<EventRow>,
        context: DeliveryContext,
        tx: Option<Tx<S>>,
    ) -> BoxFuture<'static, Ran> {
        let event = match E::of(row) {
            Ok(event) => event,
            Err(error) => return Box::pin(async { Ran::Undecodable(error) }),
        };
        let running = self.handler.call(event, context, tx);
        Box::pin(async {
            match running.await {
                Ok(()) => Ran::Succeeded,
                Err(Failure { verdict, error, .. }) => Ran::Failed { verdict, error },
            }
        })
    }
}

fn declared<S, E, V, A, H>(declaring: Declaring<E>, mode: Mode, takes_tx: bool, handler: H) -> Declared<S>
where
    S: Store,
    E: Subject,
    V: Verdicts,
    A: 'static,
    H: Handler<E, S, V, A>,
{
    let registration = E::registration();
    Declared {
        key: declaring.key.into(),
        listens: registration.map_or(Listens::ToEverything, |known| Listens::To(known.name)),
        registration,
        mode,
        takes_tx,
        run: Box::new(Runner { handler, types: PhantomData::<fn() -> (E, V, A)> }),
    }
}
