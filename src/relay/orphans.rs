//! Rows whose receiver nobody here declares. Another process may know it (a deploy that is rolling out, another
//! service on the same tables), so they are left alone for a grace period; then they are orphaned.

use std::sync::Arc;

use owed_core::{ClaimRequest, Outcome, ReceiverLease, Settlement, Status, Store, StoreError};
use tokio::task::JoinSet;

use super::{Delivered, attempt::Unsettled, settler};
use crate::outbox::Outbox;

/// Orphans what has been owed to unknown receivers for longer than the grace period.
pub(super) async fn sweep<S: Store>(outbox: &Outbox<S>, worker: &Arc<str>) -> Result<Delivered, StoreError> {
    let known = outbox.registry().durable_keys();
    let grace = outbox.settings().unknown_grace;
    let lease = outbox.settings().lease;
    let mut swept = Delivered::default();
    let unknown: Vec<ReceiverLease> = outbox
        .store()
        .owed_receivers()
        .await?
        .into_iter()
        .filter(|key| !known.contains(key.as_str()) && outbox.settings().owns(key))
        .map(|key| ReceiverLease { key: key.into(), lease })
        .collect();
    if unknown.is_empty() {
        return Ok(swept);
    }
    let limit = outbox.settings().batch_size;
    loop {
        let now = outbox.now();
        let mut request = ClaimRequest::new(worker.clone(), unknown.clone(), limit, now);
        request.owed_before = Some(now - grace);
        let claimed = outbox.store().claim(&request).await?;
        let last = claimed.len() < limit as usize;
        let orphaned = claimed.into_iter().map(|claimed| Unsettled {
            held: outbox.leases().keep(claimed.claim.key().clone(), lease),
            status: Status::Orphaned,
            settlement: Settlement::new(
                claimed.claim,
                Outcome::Orphaned {
                    error: format!(
                        "nobody has declared the receiver {} since this became owed at {}, longer than the grace period of {grace:?}",
                        claimed.delivery.receiver_key, claimed.delivery.due_at
                    ),
                },
            ),
            failure: None,
            pause: None,
        });
        swept += settler::write(outbox, orphaned, &mut JoinSet::new()).await;
        if last {
            return Ok(swept);
        }
    }
}
