//! The loop of one lane: claims ahead of its handlers, keeps as many of them running as it may, and hands back
//! what it did not start.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use owed_core::{ClaimKey, ClaimRequest, Claimed, Pause, ReceiverLease, Store, StoreError, Timestamp};
use tokio::{
    sync::watch,
    task::{JoinError, JoinSet},
    time::Instant,
};
use tracing::{Instrument, debug_span, error, info, warn};

use super::{
    Delivered,
    attempt::{Conclusion, Work},
    eager::lease_of,
    settler::{self, Settler},
    task::dispatch,
};
use crate::outbox::Outbox;

pub(super) struct Lane<S: Store> {
    pub(super) outbox: Outbox<S>,
    pub(super) name: Arc<str>,
    pub(super) worker: Arc<str>,
    /// Rotated by one with each claim, so that each receiver has its turn, however much another is owed.
    pub(super) receivers: Vec<ReceiverLease>,
    pub(super) concurrency: usize,
    pub(super) batch: u32,
    pub(super) settler: Settler,
    pub(super) grace: Duration,
}

/// How long a claimed row may wait for its turn here while others may have capacity for it.
const WAITS_AT_MOST: Duration = Duration::from_secs(30);

struct Waiting {
    work: Work,
    since: Instant,
}

enum Ran {
    Attempted(Conclusion),
    /// A row that had lapsed before: settled already, so that it can't be charged for the next one's crash.
    Suspect(Delivered),
}

type Claiming = BoxFuture<'static, Result<Vec<Claimed>, StoreError>>;

impl<S: Store> Lane<S> {
    pub(super) async fn run(
        mut self,
        mut stop: watch::Receiver<bool>,
        mut woken: watch::Receiver<u64>,
    ) -> Delivered {
        let poll = self.outbox.settings().poll_interval;
        let mut delivered = Delivered::default();
        let mut waiting: VecDeque<Waiting> = VecDeque::new();
        let mut suspects: VecDeque<Waiting> = VecDeque::new();
        let mut running: JoinSet<Ran> = JoinSet::new();
        let mut suspect_running = false;
        let mut claiming: Option<Claiming> = None;
        let mut asked = 0;
        let mut look = true;
        let mut listening = true;
        let mut next_poll = Instant::now() + poll;
        let mut not_before = Instant::now();
        let mut backoff = poll;
        let mut paused_until: Option<Timestamp> = None;

        while !*stop.borrow() {
            if paused_until.is_some_and(|until| self.outbox.now() >= until) {
                info!(lane = &*self.name, "a paused lane goes on");
                paused_until = None;
                look = true;
            }
            while running.len() < self.concurrency && paused_until.is_none() {
                if !suspect_running && let Some(suspect) = suspects.pop_front() {
                    suspect_running = true;
                    running.spawn(run_suspect(self.outbox.clone(), suspect.work));
                } else if let Some(next) = waiting.pop_front() {
                    let outbox = self.outbox.clone();
                    running.spawn(async move { Ran::Attempted(dispatch(&outbox, next.work).await) });
                } else {
                    break;
                }
            }
            if waiting.front().is_some_and(|first| first.since.elapsed() > WAITS_AT_MOST) {
                self.hand_back(waiting.drain(..).chain(suspects.drain(..))).await;
            }
            let here = u32::try_from(waiting.len() + suspects.len()).unwrap_or(u32::MAX);
            if claiming.is_none()
                && look
                && paused_until.is_none()
                && here <= self.batch / 2
                && Instant::now() >= not_before
                && !self.receivers.is_empty()
            {
                look = false;
                asked = self.batch - here;
                claiming = Some(self.claim(asked));
            }
            tokio::select! {
                Some(ran) = running.join_next() => {
                    let mut next = Some(ran);
                    while let Some(ran) = next {
                        let pause = self.ended(ran, &mut delivered, &mut suspect_running);
                        if let Some(pause) = pause {
                            let until = self.outbox.now() + pause;
                            if paused_until.is_none_or(|before| before < until) {
                                warn!(lane = &*self.name, %until, "a receiver deferred: its lane is paused in this relay");
                                paused_until = Some(until);
                                self.show_pause(until);
                            }
                        }
                        next = running.try_join_next();
                    }
                    if paused_until.is_some() {
                        self.hand_back(waiting.drain(..).chain(suspects.drain(..))).await;
                    }
                }
                claimed = async { claiming.as_mut().expect("polled only while there is one").await }, if claiming.is_some() => {
                    claiming = None;
                    match claimed {
                        Ok(claimed) => {
                            if backoff != poll {
                                info!(lane = &*self.name, "rows are being claimed again");
                                backoff = poll;
                            }
                            // As many as were asked for: there may be more.
                            look |= claimed.len() >= asked as usize;
                            for claimed in claimed {
                                let suspect = claimed.delivery.lapses > 0;
                                let next = self.wait(claimed);
                                if suspect { suspects.push_back(next) } else { waiting.push_back(next) }
                            }
                            if paused_until.is_some() {
                                self.hand_back(waiting.drain(..).chain(suspects.drain(..))).await;
                            }
                        }
                        Err(error) => {
                            if backoff == poll {
                                warn!(lane = &*self.name, %error, "rows can't be claimed; trying on, at intervals of up to {:?}", self.outbox.settings().claim_backoff_cap);
                            }
                            look = true;
                            not_before = Instant::now() + backoff;
                            backoff = (backoff * 2).min(self.outbox.settings().claim_backoff_cap.max(poll));
                            next_poll = not_before;
                        }
                    }
                }
                changed = woken.changed(), if listening => {
                    look = true;
                    // Once nobody listens any more, the poll alone goes on.
                    listening = changed.is_ok();
                }
                () = tokio::time::sleep_until(next_poll) => {
                    look = true;
                    next_poll = Instant::now() + poll;
                }
                _ = stop.changed() => {}
            }
        }

        if let Some(claiming) = claiming
            && let Ok(claimed) = claiming.await
        {
            waiting.extend(claimed.into_iter().map(|claimed| self.wait(claimed)));
        }
        self.hand_back(waiting.drain(..).chain(suspects.drain(..))).await;
        let until = Instant::now() + self.grace;
        while !running.is_empty() {
            match tokio::time::timeout_at(until, running.join_next()).await {
                Ok(Some(ran)) => {
                    self.ended(ran, &mut delivered, &mut suspect_running);
                }
                Ok(None) => break,
                Err(_) => {
                    warn!(
                        lane = &*self.name,
                        running = running.len(),
                        "handlers are still running after the grace period of {:?}: they are dropped, and their rows are claimed again once their leases end",
                        self.grace
                    );
                    running.abort_all();
                    break;
                }
            }
        }
        delivered
    }

    fn claim(&mut self, limit: u32) -> Claiming {
        self.receivers.rotate_left(1);
        let outbox = self.outbox.clone();
        let request = ClaimRequest::new(self.worker.clone(), self.receivers.clone(), limit, outbox.now());
        let span = debug_span!("owed.claim", lane = &*self.name, limit);
        Box::pin(async move { outbox.store().claim(&request).await }.instrument(span))
    }

    fn wait(&self, claimed: Claimed) -> Waiting {
        let lease = lease_of(&self.outbox, &claimed.delivery.receiver_key);
        let held = self.outbox.leases().keep(claimed.claim.key().clone(), lease);
        Waiting { work: Work { claimed, held }, since: Instant::now() }
    }

    /// Takes up how an attempt ended; answers for how long the lane has to pause.
    fn ended(
        &self,
        ran: Result<Ran, JoinError>,
        delivered: &mut Delivered,
        suspect_running: &mut bool,
    ) -> Option<Duration> {
        match ran {
            Ok(Ran::Attempted(Conclusion::Acknowledged)) => delivered.succeeded += 1,
            Ok(Ran::Attempted(Conclusion::Lost)) => delivered.lost += 1,
            Ok(Ran::Attempted(Conclusion::HandedOff)) => delivered.handed_off += 1,
            Ok(Ran::Attempted(Conclusion::Left)) => delivered.left += 1,
            Ok(Ran::Attempted(Conclusion::Unsettled(unsettled))) => {
                let pause = unsettled.pause;
                self.settler.submit(unsettled);
                return pause;
            }
            Ok(Ran::Suspect(counts)) => {
                *suspect_running = false;
                *delivered += counts;
            }
            Err(ended) => {
                // Handlers' panics are caught where they run, so this one is ours.
                *suspect_running = false;
                error!(error = %ended, lane = &*self.name, "an attempt ended without an outcome; its row is claimed again once its lease ends");
            }
        }
        None
    }

    /// Records the pause for people to see. Not waited for: nothing here depends on it.
    fn show_pause(&self, until: Timestamp) {
        let store = self.outbox.store().clone();
        let pause =
            Pause { lane: self.name.to_string(), worker: self.worker.to_string(), since: store.now(), until };
        tokio::spawn(async move {
            if let Err(error) = store.pause(&pause).await {
                warn!(%error, lane = pause.lane, "the pause of a lane could not be recorded");
            }
        });
    }

    /// Gives rows that were not started to whoever asks next.
    async fn hand_back(&self, rows: impl Iterator<Item = Waiting>) {
        let rows: Vec<Waiting> = rows.collect();
        if rows.is_empty() {
            return;
        }
        let keys: Vec<ClaimKey> = rows.iter().map(|row| row.work.claimed.claim.key().clone()).collect();
        drop(rows);
        if let Err(error) = self.outbox.store().release(&keys, self.outbox.now()).await {
            warn!(%error, lane = &*self.name, rows = keys.len(), "rows could not be handed back; they are claimed again once their leases end");
        }
    }
}

async fn run_suspect<S: Store>(outbox: Outbox<S>, work: Work) -> Ran {
    match dispatch(&outbox, work).await {
        Conclusion::Unsettled(unsettled) => {
            let mut hooks = JoinSet::new();
            let delivered = settler::write(&outbox, [*unsettled], &mut hooks).await;
            while hooks.join_next().await.is_some() {}
            Ran::Suspect(delivered)
        }
        Conclusion::Acknowledged => Ran::Suspect(Delivered { succeeded: 1, ..Delivered::default() }),
        Conclusion::Lost => Ran::Suspect(Delivered { lost: 1, ..Delivered::default() }),
        Conclusion::HandedOff => Ran::Suspect(Delivered { handed_off: 1, ..Delivered::default() }),
        Conclusion::Left => Ran::Suspect(Delivered { left: 1, ..Delivered::default() }),
    }
}
