//! Writes outcomes, as many at once as have come up while the last ones were written.

use std::time::Duration;

use owed_core::{Settled, Settlement, Status, Store};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::{JoinHandle, JoinSet},
};
use tracing::{Instrument, debug_span, error, info, warn};

use super::{
    Delivered,
    attempt::{Told, Unsettled},
    lease::Held,
};
use crate::outbox::Outbox;

/// The most outcomes that one statement writes.
const BATCH: usize = 1_000;

/// Takes outcomes to be written. Unbounded, since what comes in was claimed, and claims are bounded.
#[derive(Clone)]
pub(super) struct Settler(UnboundedSender<Box<Unsettled>>);

impl Settler {
    /// Starts one. The task ends when every clone is dropped and everything is written, and answers the counts.
    pub(super) fn start<S: Store>(outbox: Outbox<S>) -> (Settler, JoinHandle<Delivered>) {
        let (sender, receiver) = unbounded_channel();
        (Settler(sender), tokio::spawn(run(outbox, receiver)))
    }

    pub(super) fn submit(&self, unsettled: Box<Unsettled>) {
        // The task lives as long as this does.
        let _ = self.0.send(unsettled);
    }
}

async fn run<S: Store>(outbox: Outbox<S>, mut coming: UnboundedReceiver<Box<Unsettled>>) -> Delivered {
    let mut batch = Vec::with_capacity(BATCH);
    let mut delivered = Delivered::default();
    let mut hooks = JoinSet::new();
    while coming.recv_many(&mut batch, BATCH).await > 0 {
        delivered += write(&outbox, batch.drain(..).map(|unsettled| *unsettled), &mut hooks).await;
        while hooks.try_join_next().is_some() {}
    }
    while hooks.join_next().await.is_some() {}
    delivered
}

/// Writes outcomes until the store takes them, then tells about the failures among them.
pub(super) async fn write<S: Store>(
    outbox: &Outbox<S>,
    unsettled: impl IntoIterator<Item = Unsettled>,
    hooks: &mut JoinSet<()>,
) -> Delivered {
    let mut settlements: Vec<Settlement> = Vec::new();
    let mut rest: Vec<(Status, Option<Told>, Held)> = Vec::new();
    for one in unsettled {
        settlements.push(one.settlement);
        rest.push((one.status, one.failure, one.held));
    }
    let settled = settle(outbox, &settlements).await;
    let mut delivered = Delivered::default();
    for ((settled, settlement), (status, told, held)) in settled.iter().zip(&settlements).zip(rest) {
        drop(held);
        if *settled == Settled::Lost {
            delivered.lost += 1;
            warn!(
                delivery = %settlement.key().delivery,
                outcome = %status,
                "a delivery was taken over before its outcome was written; whoever has it now will run it again"
            );
            continue;
        }
        delivered.count(status);
        if let Some(told) = told {
            tell(outbox, told, hooks);
        }
    }
    delivered
}

/// Tries until the store answers: a settlement finds its claim or does not, so trying again is safe, and a lease
/// that runs out in the meantime makes it find none.
async fn settle<S: Store>(outbox: &Outbox<S>, settlements: &[Settlement]) -> Vec<Settled> {
    let span = debug_span!("owed.settle", count = settlements.len());
    let writing = async {
        let mut wait = Duration::from_millis(50);
        let mut failing = false;
        loop {
            match outbox.store().settle_all(settlements, outbox.now()).await {
                Ok(settled) => {
                    if failing {
                        info!(count = settlements.len(), "outcomes are being written again");
                    }
                    return settled;
                }
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        warn!(%error, count = settlements.len(), "outcomes could not be written; trying on");
                    }
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(outbox.settings().poll_interval.max(wait));
        }
    };
    writing.instrument(span).await
}

/// One warning for each failed attempt, then the receiver's hook. The error's text is on the row alone: it may
/// quote what is private.
fn tell<S: Store>(outbox: &Outbox<S>, told: Told, hooks: &mut JoinSet<()>) {
    let Told { failure, kind, tell_hook } = told;
    warn!(
        receiver = &*failure.receiver,
        delivery = %failure.delivery_id,
        event = failure.event_name.as_str(),
        attempt = failure.attempt,
        failure = kind,
        status = %failure.status,
        "a delivery failed"
    );
    let receiver = outbox.registry().receiver(&failure.receiver);
    let hook = receiver.and_then(|receiver| receiver.durable()).and_then(|spec| spec.on_failure.clone());
    if let Some(hook) = hook.filter(|_| tell_hook) {
        let key = failure.receiver.clone();
        hooks.spawn(async move {
            // Called inside the task, so that a hook that panics before its first await harms nobody either.
            let told = tokio::spawn(async move { hook(failure).await }).await;
            if told.is_err_and(|ended| ended.is_panic()) {
                error!(receiver = &*key, "an on_failure hook panicked");
            }
        });
    }
}
