//! Pruning: deleting the events whose retention has ended.

use std::{collections::VecDeque, future::IntoFuture, time::Duration};

use futures::{
    future::BoxFuture,
    stream::{self, BoxStream, StreamExt},
};
use owed_core::{EventId, Prunable, PruneMark, Pruned, Store, Timestamp};
use tracing::{info, warn};

use crate::{error::Error, outbox::Outbox};

/// Events that are looked for at once.
const PAGE: u32 = 1_000;

/// Deletes the events whose retention has ended: await it, or follow it with [`progress`](Prune::progress). Made by
/// [`Outbox::prune`].
///
/// An event that is owed to anybody stays, whatever its age. Each receiver's newest success is kept when its rows go.
///
/// # Cancel safety
/// Dropped, the batches that are done stay done, and the one under way is done or not.
#[must_use = "nothing is deleted until it is awaited"]
pub struct Prune<S: Store> {
    outbox: Outbox<S>,
    older_than: Option<Duration>,
    limit: Option<u64>,
    dry_run: bool,
}

impl<S: Store> std::fmt::Debug for Prune<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prune").field("dry_run", &self.dry_run).finish_non_exhaustive()
    }
}

impl<S: Store> Prune<S> {
    pub(crate) fn new(outbox: Outbox<S>) -> Self {
        Prune { outbox, older_than: None, limit: None, dry_run: false }
    }

    /// The ordinary window, in place of the setting `retention`. Events with a window of their own keep it.
    pub fn older_than(mut self, window: Duration) -> Self {
        self.older_than = Some(window);
        self
    }

    /// Deletes at most so many events.
    pub fn limit(mut self, events: u64) -> Self {
        self.limit = Some(events);
        self
    }

    /// Deletes nothing, and counts the events that would go. Their deliveries are not counted.
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }

    /// The total so far, after each batch. Ends with the prune, or with its first error.
    pub fn progress(self) -> BoxStream<'static, Result<Pruned, Error>> {
        stream::try_unfold(Run::new(self), async |mut run| Ok(run.step().await?.map(|total| (total, run))))
            .boxed()
    }
}

impl<S: Store> IntoFuture for Prune<S> {
    type Output = Result<Pruned, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let mut run = Run::new(self);
            while run.step().await?.is_some() {}
            Ok(run.total)
        })
    }
}

struct Run<S: Store> {
    prune: Prune<S>,
    now: Timestamp,
    /// What is still to be gone through; `None` before the first step.
    kinds: Option<VecDeque<Prunable>>,
    after: Option<PruneMark>,
    /// Events that were found due, and not all of them deleted yet.
    found: Vec<EventId>,
    total: Pruned,
}

impl<S: Store> Run<S> {
    fn new(prune: Prune<S>) -> Self {
        let now = prune.outbox.now();
        Run { prune, now, kinds: None, after: None, found: Vec::new(), total: Pruned::default() }
    }

    async fn kinds(&self) -> Result<VecDeque<Prunable>, Error> {
        let Prune { outbox, older_than, .. } = &self.prune;
        let before =
            |window: chrono::TimeDelta| self.now.checked_sub_signed(window).unwrap_or(Timestamp::MIN_UTC);
        let mut kinds = VecDeque::from([Prunable::Succeeded, Prunable::Settled]);
        for seconds in outbox.store().retention_windows().await? {
            let window = chrono::TimeDelta::try_seconds(seconds).unwrap_or(chrono::TimeDelta::MAX);
            kinds.push_back(Prunable::Window { seconds: Some(seconds), until: before(window) });
        }
        let ordinary = older_than.unwrap_or(outbox.settings().retention);
        let ordinary = chrono::TimeDelta::from_std(ordinary).unwrap_or(chrono::TimeDelta::MAX);
        kinds.push_back(Prunable::Window { seconds: None, until: before(ordinary) });
        // Before the time that every database can store, nothing was recorded.
        kinds.retain(|kind| {
            !matches!(kind, Prunable::Window { until, .. } if owed_core::limits::time("the window", *until).is_err())
        });
        Ok(kinds)
    }

    /// Does the next batch. Answers the total so far; `None` at the end.
    async fn step(&mut self) -> Result<Option<Pruned>, Error> {
        if self.kinds.is_none() {
            self.kinds = Some(self.kinds().await?);
        }
        let Prune { outbox, limit, dry_run, .. } = &self.prune;
        let (store, rows) = (outbox.store(), outbox.settings().prune_batch);
        loop {
            let Some(kind) = self.kinds.as_ref().and_then(|kinds| kinds.front()).copied() else {
                return Ok(None);
            };
            let left = limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.total.events));
            if left == 0 {
                return Ok(None);
            }
            if self.found.is_empty() {
                let page = PAGE.min(rows.max(1)).min(u32::try_from(left).unwrap_or(u32::MAX));
                let page = store.prunable(&kind, self.after, page).await?;
                let Some(last) = page.last() else {
                    self.after = None;
                    if let Some(kinds) = &mut self.kinds {
                        kinds.pop_front();
                    }
                    continue;
                };
                self.after = Some(*last);
                self.found = page.into_iter().map(|mark| mark.event).collect();
            }
            let step = if *dry_run {
                Pruned::new(self.found.len() as u64, 0, false)
            } else {
                store.prune(&kind, &self.found, rows).await?
            };
            if !step.more {
                self.found.clear();
            }
            self.total += step;
            return Ok(Some(self.total));
        }
    }
}

/// A relay's own sweeps, one after each interval. Ends by being dropped.
pub(crate) async fn sweep<S: Store>(outbox: Outbox<S>) {
    let every = outbox.settings().prune_interval;
    if every.is_zero() {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(every).await;
        match outbox.prune().await {
            Ok(Pruned { events: 0, deliveries: 0, .. }) => {}
            Ok(pruned) => {
                info!(events = pruned.events, deliveries = pruned.deliveries, "events were pruned");
            }
            Err(error) => warn!(%error, "events could not be pruned: the next try is an interval away"),
        }
    }
}
