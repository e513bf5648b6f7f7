//! One pass over what is owed now.

use std::{
    collections::{BTreeSet, HashSet},
    fmt,
    future::IntoFuture,
    sync::Arc,
};

use futures::{StreamExt, future::BoxFuture, stream};
use owed_core::{ClaimKey, ClaimRequest, Claimed, DeliveryId, Store, Timestamp};
use tokio::task::JoinSet;

use super::{
    Delivered,
    attempt::{Conclusion, Work},
    eager::lease_of,
    orphans, settler,
    task::dispatch,
};
use crate::{declare::DEFAULT_LANE, error::Error, outbox::Outbox};

/// One pass over what is owed now: await it. Made by [`Outbox::deliver_pending`].
///
/// Lane by lane, in order of their names, it claims and delivers until nothing is left that may be taken.
/// Deliveries take the same path as in a relay: claimed, decoded, run, settled.
#[must_use = "nothing is delivered until it is awaited"]
pub struct Pass<S: Store> {
    outbox: Outbox<S>,
    lanes: Option<Vec<String>>,
    limit: Option<u64>,
    concurrency: usize,
    now: Option<Timestamp>,
    ignore_backoff: bool,
}

impl<S: Store> fmt::Debug for Pass<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass").field("lanes", &self.lanes).field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl<S: Store> Pass<S> {
    pub(crate) fn new(outbox: Outbox<S>) -> Self {
        Pass { outbox, lanes: None, limit: None, concurrency: 1, now: None, ignore_backoff: false }
    }

    /// Delivers these lanes alone. Default: all.
    pub fn lanes<L: Into<String>>(mut self, lanes: impl IntoIterator<Item = L>) -> Self {
        self.lanes = Some(lanes.into_iter().map(Into::into).collect());
        self
    }

    /// Delivers at most so many.
    pub fn limit(mut self, deliveries: u64) -> Self {
        self.limit = Some(deliveries);
        self
    }

    /// Runs so many handlers at once. Default 1: in the order in which they are owed.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers.max(1);
        self
    }

    /// Claims as if it were `now`: what is due by then, whose backoff or lease has ended by then. Attempts run,
    /// and are recorded, on the store's own clock.
    pub fn at(mut self, now: Timestamp) -> Self {
        self.now = Some(now);
        self
    }

    /// Does not wait for backoffs: what failed is tried again in this pass until it succeeds or is dead. Rows that
    /// are scheduled are still left until their time.
    pub fn ignoring_backoff(mut self) -> Self {
        self.ignore_backoff = true;
        self
    }

    async fn run(self) -> Result<Delivered, Error> {
        let outbox = &self.outbox;
        let registry = outbox.registry();
        let lanes: BTreeSet<Arc<str>> = match &self.lanes {
            None => registry.lanes().cloned().collect(),
            Some(named) => named.iter().map(|lane| lane.as_str().into()).collect(),
        };
        if let Some(lane) = lanes.iter().find(|lane| registry.lane(lane).is_none()) {
            return Err(Error::Relay { why: format!("no receiver is declared in the lane {lane:?}") });
        }
        let worker: Arc<str> = format!("{}-{:04x}", outbox.worker(), rand::random::<u16>()).into();
        let mut delivered = Delivered::default();
        let mut hooks = JoinSet::new();
        for lane in &lanes {
            self.lane(&worker, lane, &mut delivered, &mut hooks).await?;
        }
        if lanes.contains(DEFAULT_LANE) {
            delivered += orphans::sweep(outbox, &worker).await?;
        }
        while hooks.join_next().await.is_some() {}
        Ok(delivered)
    }

    async fn lane(
        &self,
        worker: &Arc<str>,
        lane: &str,
        delivered: &mut Delivered,
        hooks: &mut JoinSet<()>,
    ) -> Result<(), Error> {
        let outbox = &self.outbox;
        let mut receivers = outbox.registry().lane(lane).map(<[_]>::to_vec).unwrap_or_default();
        if receivers.is_empty() {
            return Ok(());
        }
        // Told a time ahead of the clock, a row that was moved to a time before it would come straight back.
        let mut postponed: HashSet<DeliveryId> = HashSet::new();
        loop {
            let left = self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(delivered.total()));
            let limit = u32::try_from(left).unwrap_or(u32::MAX).min(outbox.settings().batch_size);
            if limit == 0 {
                return Ok(());
            }
            let now = self.now.unwrap_or_else(|| outbox.now());
            if self.ignore_backoff {
                let keys: Vec<&str> = receivers.iter().map(|receiver| &*receiver.key).collect();
                outbox.store().expedite(&keys, now).await?;
            }
            receivers.rotate_left(1);
            let request = ClaimRequest::new(worker.clone(), receivers.clone(), limit, now);
            let claimed = outbox.store().claim(&request).await?;
            let (again, fresh): (Vec<Claimed>, Vec<Claimed>) =
                claimed.into_iter().partition(|claimed| postponed.contains(&claimed.delivery.id));
            if !again.is_empty() {
                let keys: Vec<ClaimKey> = again.iter().map(|claimed| claimed.claim.key().clone()).collect();
                outbox.store().release(&keys, now).await?;
            }
            if fresh.is_empty() {
                return Ok(());
            }
            let mut running = stream::iter(fresh.into_iter().map(|claimed| {
                let lease = lease_of(outbox, &claimed.delivery.receiver_key);
                let held = outbox.leases().keep(claimed.claim.key().clone(), lease);
                let (id, outbox) = (claimed.delivery.id, outbox.clone());
                async move { (id, dispatch(&outbox, Work { claimed, held }).await) }
            }))
            .buffered(self.concurrency);
            let mut unsettled = Vec::new();
            let mut paused = false;
            while let Some((id, conclusion)) = running.next().await {
                match conclusion {
                    Conclusion::Acknowledged => delivered.succeeded += 1,
                    Conclusion::Lost => delivered.lost += 1,
                    Conclusion::HandedOff => {
                        delivered.handed_off += 1;
                        postponed.insert(id);
                    }
                    Conclusion::Left => {
                        delivered.left += 1;
                        postponed.insert(id);
                    }
                    Conclusion::Unsettled(one) => {
                        paused |= one.pause.is_some();
                        if one.status == owed_core::Status::Pending {
                            postponed.insert(id);
                        }
                        unsettled.push(*one);
                    }
                }
            }
            drop(running);
            *delivered += settler::write(outbox, unsettled, hooks).await;
            if paused {
                return Ok(());
            }
        }
    }
}

impl<S: Store> IntoFuture for Pass<S> {
    type Output = Result<Delivered, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    /// # Cancel safety
    /// Dropped, running handlers are dropped and their transactions roll back; every row in hand is claimed
    /// again once its lease ends.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
