//! Attempts in the process that fired, right after the commit. The rows were born claimed by it.

use std::time::Duration;

use owed_core::{Claimed, Store};
use tokio::task::JoinSet;

use super::{
    attempt::{Conclusion, Work},
    settler,
    task::dispatch,
};
use crate::outbox::Outbox;

/// Starts an attempt and does not wait for it. Whatever this process loses, the relay finds by its lease.
pub(crate) fn attempt_eagerly<S: Store>(outbox: &Outbox<S>, claimed: Claimed) {
    let lease = lease_of(outbox, &claimed.delivery.receiver_key);
    let held = outbox.leases().keep(claimed.claim.key().clone(), lease);
    let under_way = outbox.leases().eager();
    let outbox = outbox.clone();
    tokio::spawn(async move {
        if let Conclusion::Unsettled(unsettled) = dispatch(&outbox, Work { claimed, held }).await {
            let mut hooks = JoinSet::new();
            settler::write(&outbox, [*unsettled], &mut hooks).await;
            while hooks.join_next().await.is_some() {}
        }
        drop(under_way);
    });
}

/// How long the claim of whoever claims holds.
pub(super) fn lease_of<S: Store>(outbox: &Outbox<S>, receiver: &str) -> Duration {
    let settings = outbox.settings();
    let declared = outbox.registry().receiver(receiver).and_then(|receiver| receiver.durable());
    declared.map_or(settings.lease, |spec| spec.claim_lease(settings))
}

/// How long the claim of whoever runs it holds.
pub(super) fn run_lease<S: Store>(outbox: &Outbox<S>, receiver: &str) -> Duration {
    let settings = outbox.settings();
    let declared = outbox.registry().receiver(receiver).and_then(|receiver| receiver.durable());
    declared.map_or(settings.lease, |spec| spec.run_lease(settings))
}
