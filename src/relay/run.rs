//! The relay: its options, its lanes, its end.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use owed_core::Store;
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::Instant,
};
use tracing::{info, warn};

use super::{Delivered, lane::Lane, orphans, settler::Settler, wake};
use crate::{declare::DEFAULT_LANE, error::Error, outbox::Outbox, settings::Wake};

/// Delivers what is owed, until it is told to stop. Made by [`Outbox::relay`].
///
/// ```
/// # use owed::{MemoryStore, Outbox};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
/// let relay = outbox.relay().concurrency(64).spawn()?;
/// // ... the service runs ...
/// let delivered = relay.stop().await;
/// println!("{} delivered", delivered.succeeded);
/// # Ok(()) }
/// ```
///
/// For each lane it claims a batch ahead, runs up to `concurrency` handlers at once, and writes their outcomes
/// in batches. Any number of relays may run, in one process or many; no row is held by two at once. It outlives its
/// database: whatever fails is logged and tried again.
#[must_use = "a relay does nothing until it is run"]
pub struct Relay<S: Store> {
    outbox: Outbox<S>,
    lanes: Option<Vec<String>>,
    concurrency: usize,
    batch: Option<u32>,
    own: BTreeMap<String, Own>,
    grace: Duration,
    single: bool,
}

impl<S: Store> fmt::Debug for Relay<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("lanes", &self.lanes)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

/// What one lane has of its own.
#[derive(Clone, Copy, Debug, Default)]
struct Own {
    concurrency: Option<usize>,
    batch: Option<u32>,
}

/// How often rows of unknown receivers are looked for, and the store's clock is compared with the database's.
const SWEEP: Duration = Duration::from_secs(60);

impl<S: Store> Relay<S> {
    pub(crate) fn new(outbox: Outbox<S>) -> Self {
        Relay {
            outbox,
            lanes: None,
            concurrency: 16,
            batch: None,
            own: BTreeMap::new(),
            grace: Duration::from_secs(30),
            single: false,
        }
    }

    /// Serves these lanes alone. Default: every lane that is declared. Each lane has its own handlers, so a slow
    /// one does not hold up another even within one relay.
    pub fn lanes<L: Into<String>>(mut self, lanes: impl IntoIterator<Item = L>) -> Self {
        self.lanes = Some(lanes.into_iter().map(Into::into).collect());
        self
    }

    /// How many handlers of each lane may run at once, at least 1. Default 16.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers;
        self
    }

    /// The most rows that a lane holds ahead of its handlers, from 1 to 10,000. Default: the setting
    /// `batch_size`, or twice the concurrency if that is more.
    pub fn batch_size(mut self, rows: u32) -> Self {
        self.batch = Some(rows);
        self
    }

    /// How many handlers of this lane may run at once, in place of [`concurrency`](Relay::concurrency).
    pub fn lane_concurrency(mut self, lane: impl Into<String>, handlers: usize) -> Self {
        self.own.entry(lane.into()).or_default().concurrency = Some(handlers);
        self
    }

    /// The most rows that this lane holds ahead of its handlers, in place of [`batch_size`](Relay::batch_size). A small
    /// number leaves more of a slow lane to other relays.
    pub fn lane_batch_size(mut self, lane: impl Into<String>, rows: u32) -> Self {
        self.own.entry(lane.into()).or_default().batch = Some(rows);
        self
    }

    /// How long handlers may go on once the relay is told to stop. Default 30 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Says that no other relay runs on this database: needed where its claims are not atomic between processes
    /// (none of the stores that come with `owed`).
    pub fn single_relay(mut self) -> Self {
        self.single = true;
        self
    }

    /// Runs until `shutdown` completes, then stops cleanly: takes nothing more, hands back what it did not
    /// start, lets running handlers end within the grace period, and writes their outcomes.
    ///
    /// # Errors
    /// [`Error::Relay`] for a lane that nobody declares, no lane at all, or a number out of its range. Once it
    /// runs, it does not fail.
    ///
    /// # Cancel safety
    /// Dropped, running handlers are dropped at their next await and their transactions roll back; every row in
    /// hand is claimed again once its lease ends. Prefer `shutdown`.
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) -> Result<Delivered, Error> {
        let (stop, stopped) = watch::channel(false);
        let running = self.start(stopped)?;
        tokio::pin!(running);
        tokio::select! {
            delivered = &mut running => return Ok(delivered),
            () = shutdown => {}
        }
        stop.send_replace(true);
        Ok(running.await)
    }

    /// Runs in a task of its own.
    ///
    /// # Errors
    /// As [`run_until`](Relay::run_until).
    pub fn spawn(self) -> Result<RelayHandle, Error> {
        let (stop, stopped) = watch::channel(false);
        let running = self.start(stopped)?;
        Ok(RelayHandle { stop, running: Some(tokio::spawn(running)) })
    }

    fn start(self, stopped: watch::Receiver<bool>) -> Result<impl Future<Output = Delivered>, Error> {
        let lanes = self.check()?;
        Ok(self.run(lanes, stopped))
    }

    /// The lanes to serve, in order.
    fn check(&self) -> Result<BTreeSet<Arc<str>>, Error> {
        let wrong = |why: String| Err(Error::Relay { why });
        let registry = self.outbox.registry();
        let own = self.own.iter().map(|(lane, own)| (format!("the lane {lane:?}'s"), *own));
        let all = Own { concurrency: Some(self.concurrency), batch: self.batch };
        for (whose, Own { concurrency, batch }) in own.chain([("its".to_owned(), all)]) {
            if concurrency == Some(0) {
                return wrong(format!("{whose} concurrency is 0, and must be at least 1"));
            }
            if let Some(batch) = batch
                && !(1..=10_000).contains(&batch)
            {
                return wrong(format!("{whose} batch size is {batch}, and must be from 1 to 10,000"));
            }
        }
        let can = self.outbox.store().capabilities();
        if !can.atomic_claims && !self.single {
            return wrong(format!(
                "claims of {} are not atomic between processes: say `.single_relay()` if this is the only relay",
                can.database
            ));
        }
        if self.lanes.as_ref().is_some_and(Vec::is_empty) {
            return wrong("it was given no lane to serve".into());
        }
        for lane in self.lanes.iter().flatten().chain(self.own.keys()) {
            if registry.lane(lane).is_none() {
                let declared: Vec<&str> = registry.lanes().map(|lane| &**lane).collect();
                return wrong(format!(
                    "no receiver is declared in the lane {lane:?}; the lanes are {}",
                    declared.join(", ")
                ));
            }
        }
        let Some(named) = &self.lanes else { return Ok(registry.lanes().cloned().collect()) };
        if let Some(lane) = self.own.keys().find(|lane| !named.contains(lane)) {
            return wrong(format!("it is told about the lane {lane:?}, and does not serve it"));
        }
        Ok(named.iter().map(|lane| lane.as_str().into()).collect())
    }

    async fn run(self, lanes: BTreeSet<Arc<str>>, mut stopped: watch::Receiver<bool>) -> Delivered {
        let outbox = &self.outbox;
        // Of its own, so that two relays of one process never take each other's claims for theirs.
        let worker: Arc<str> = format!("{}-{:04x}", outbox.worker(), rand::random::<u16>()).into();
        let names: Vec<&str> = lanes.iter().map(|lane| &**lane).collect();
        info!(
            worker = &*worker,
            lanes = names.join(","),
            concurrency = self.concurrency,
            database = outbox.store().capabilities().database,
            "a relay starts"
        );
        let (waker, woken) = watch::channel(0);
        let mut helpers = JoinSet::new();
        if outbox.settings().wake == Wake::Notify {
            helpers.spawn(wake::listen(outbox.clone(), waker));
        } else {
            // Kept open, so that lanes wait for their poll.
            helpers.spawn(async move { waker.closed().await });
        }
        helpers.spawn(crate::operate::sweep(outbox.clone()));
        let (settler, settling) = Settler::start(outbox.clone());
        let mut serving = JoinSet::new();
        for name in &lanes {
            let own = self.own.get(&**name).copied().unwrap_or_default();
            let concurrency = own.concurrency.unwrap_or(self.concurrency);
            let ahead = u32::try_from(concurrency.saturating_mul(2)).unwrap_or(u32::MAX);
            let batch = own.batch.or(self.batch);
            let batch = batch.unwrap_or(outbox.settings().batch_size.max(ahead).min(10_000));
            let lane = Lane {
                outbox: outbox.clone(),
                name: name.clone(),
                worker: worker.clone(),
                receivers: outbox.registry().lane(name).map(<[_]>::to_vec).unwrap_or_default(),
                concurrency,
                batch,
                settler: settler.clone(),
                grace: self.grace,
            };
            serving.spawn(lane.run(stopped.clone(), woken.clone()));
        }
        drop((settler, woken));
        let mut delivered = Delivered::default();
        let sweeps = lanes.contains(DEFAULT_LANE);
        let mut next_sweep = Instant::now();
        tokio::select! {
            checked = outbox.check() => match checked {
                Ok(findings) => findings.iter().for_each(|finding| warn!("{finding}")),
                Err(error) => warn!(%error, "rows that wait for what is not known here could not be looked for"),
            },
            _ = stopped.changed() => {}
        }
        loop {
            tokio::select! {
                ended = serving.join_next() => match ended {
                    None => break,
                    Some(Ok(counts)) => delivered += counts,
                    Some(Err(error)) => tracing::error!(%error, "a relay's lane ended by a fault of its own"),
                },
                () = tokio::time::sleep_until(next_sweep), if !*stopped.borrow() => {
                    next_sweep = Instant::now() + SWEEP;
                    if let Err(error) = outbox.sync_clock().await {
                        warn!(%error, "the store's clock could not be compared with the database's");
                    }
                    if sweeps {
                        match orphans::sweep(outbox, &worker).await {
                            Ok(counts) => delivered += counts,
                            Err(error) => warn!(%error, "rows of unknown receivers could not be looked for"),
                        }
                    }
                }
                _ = stopped.changed() => {}
            }
        }
        match settling.await {
            Ok(counts) => delivered += counts,
            Err(error) => {
                tracing::error!(%error, "outcomes could not be written: the task that does it ended")
            }
        }
        helpers.shutdown().await;
        info!(
            worker = &*worker,
            succeeded = delivered.succeeded,
            failed = delivered.failed,
            dead = delivered.dead,
            "a relay has stopped"
        );
        delivered
    }
}

/// A relay that runs in a task of its own. Dropped, it stops cleanly without being waited for.
#[derive(Debug)]
pub struct RelayHandle {
    stop: watch::Sender<bool>,
    running: Option<JoinHandle<Delivered>>,
}

impl RelayHandle {
    /// Stops it cleanly, as [`Relay::run_until`] does, and says what it delivered.
    ///
    /// # Cancel safety
    /// Dropped, the relay stops all the same.
    pub async fn stop(mut self) -> Delivered {
        self.stop.send_replace(true);
        match self.running.take() {
            Some(running) => crate::task::join(running).await,
            None => Delivered::default(),
        }
    }
}

impl Drop for RelayHandle {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}
