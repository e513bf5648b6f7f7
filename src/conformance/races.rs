//! Two who meet on one row, interleaved on purpose: an open transaction is the barrier.

use std::time::Duration;

use owed_core::{Claimed, Outcome, Settled, Settlement, Status, Store};

use super::{Bed, LEASE, still_waits};

pub(super) async fn a_wake_up_reaches_who_listens<S: Store>(bed: Bed<S>) {
    let mut listener = bed.store.listen().await.unwrap();
    for _ in 0..3 {
        bed.store.wake().await.unwrap();
        bed.store.wake().await.unwrap();
        tokio::time::timeout(Duration::from_secs(30), listener.wait()).await.expect("a wake-up").unwrap();
    }
}

/// A claim whose lease has ended while its handler's transaction, which has settled it, is still open.
async fn settled_and_open<S: Store>(bed: &Bed<S>) -> (S::Tx, Settlement) {
    bed.owe(&["a"]).await;
    let settlement = Settlement::new(bed.claim_one("holder").await.claim, Outcome::Succeeded);
    let tx = bed.store.begin().await.unwrap();
    assert_eq!(bed.store.settle(&tx, &settlement, bed.now()).await.unwrap(), Settled::Applied);
    bed.pass(LEASE);
    (tx, settlement)
}

pub(super) async fn a_row_settled_in_an_open_transaction_is_passed_over_by_a_claim<S: Store>(bed: Bed<S>) {
    let (tx, settlement) = settled_and_open(&bed).await;
    let other = bed.owe(&["a"]).await[0];
    let claimed: Vec<Claimed> = bed.claim("other", &["a"], 9).await;
    assert_eq!(claimed.iter().map(|one| one.delivery.id).collect::<Vec<_>>(), [other]);
    bed.store.commit(tx).await.unwrap();
    assert!(bed.claim("other", &["a"], 9).await.is_empty());
    assert_eq!(bed.row(settlement.key().delivery).await.status, Status::Succeeded);
}

pub(super) async fn a_renewal_does_not_wait_for_the_handlers_transaction<S: Store>(bed: Bed<S>) {
    let (tx, settlement) = settled_and_open(&bed).await;
    let key = settlement.key().clone();
    let renewing = bed.store.renew(std::slice::from_ref(&key), bed.now() + LEASE);
    let held =
        tokio::time::timeout(Duration::from_secs(20), renewing).await.expect("it must not wait").unwrap();
    assert_eq!(held, [key.delivery], "counted as lost while its own handler commits");
    bed.store.commit(tx).await.unwrap();
    assert!(bed.store.renew(std::slice::from_ref(&key), bed.now() + LEASE).await.unwrap().is_empty());
    assert_eq!(bed.row(key.delivery).await.available_at, None, "a renewal brought a settled row back");
}

pub(super) async fn a_batch_waits_for_the_transaction_that_has_its_row<S: Store>(bed: Bed<S>) {
    for committed in [true, false] {
        let (tx, settlement) = settled_and_open(&bed).await;
        let batch = std::slice::from_ref(&settlement);
        let mut waiting = bed.store.settle_all(batch, bed.now());
        still_waits(&mut waiting).await;
        if committed {
            bed.store.commit(tx).await.unwrap();
            assert_eq!(waiting.await.unwrap(), [Settled::Lost]);
        } else {
            bed.store.rollback(tx).await.unwrap();
            assert_eq!(waiting.await.unwrap(), [Settled::Applied]);
        }
        let row = bed.row(settlement.key().delivery).await;
        assert_eq!((row.status, row.attempts), (Status::Succeeded, 1));
    }
}

pub(super) async fn a_hand_back_waits_for_the_transaction_that_has_its_row<S: Store>(bed: Bed<S>) {
    for committed in [true, false] {
        let (tx, settlement) = settled_and_open(&bed).await;
        let keys = [settlement.key().clone()];
        let mut waiting = bed.store.release(&keys, bed.now() + LEASE);
        still_waits(&mut waiting).await;
        if committed {
            bed.store.commit(tx).await.unwrap()
        } else {
            bed.store.rollback(tx).await.unwrap()
        }
        assert_eq!(waiting.await.unwrap(), u64::from(!committed));
        let status = if committed { Status::Succeeded } else { Status::Pending };
        assert_eq!(bed.row(keys[0].delivery).await.status, status);
    }
}

pub(super) async fn a_take_over_waits_for_the_transaction_that_has_its_row<S: Store>(bed: Bed<S>) {
    for committed in [true, false] {
        let (tx, settlement) = settled_and_open(&bed).await;
        let key = settlement.key().clone();
        let mut waiting = bed.store.take(&key, "task", bed.now(), bed.now() + LEASE);
        still_waits(&mut waiting).await;
        if committed {
            bed.store.commit(tx).await.unwrap()
        } else {
            bed.store.rollback(tx).await.unwrap()
        }
        assert_eq!(waiting.await.unwrap().is_some(), !committed);
    }
}

pub(super) async fn batches_that_overlap_in_other_orders_never_deadlock_to_the_caller<S: Store>(bed: Bed<S>) {
    const ROWS: usize = 60;
    for _ in 0..5 {
        for _ in 0..ROWS {
            bed.owe(&["a"]).await;
        }
        let keys: Vec<_> = bed
            .claim("w", &["a"], ROWS as u32)
            .await
            .into_iter()
            .map(|one| one.claim.key().clone())
            .collect();
        assert_eq!(keys.len(), ROWS);
        let settlements = |backwards: bool| {
            let mut keys = keys.clone();
            if backwards {
                keys.reverse();
            }
            let settle = keys.into_iter().map(|key| {
                let claim = owed_core::Claim::granted(key.delivery, key.worker, key.at);
                Settlement::new(claim, Outcome::Succeeded)
            });
            settle.collect::<Vec<_>>()
        };
        let tasks: Vec<_> = [false, true, false, true]
            .into_iter()
            .map(|backwards| {
                let (store, batch, now) = (bed.store.clone(), settlements(backwards), bed.now());
                let keys: Vec<_> = batch.iter().map(|one| one.key().clone()).collect();
                tokio::spawn(async move {
                    store.renew(&keys, now + LEASE).await.unwrap();
                    let settled = store.settle_all(&batch, now).await.unwrap();
                    store.release(&keys, now).await.unwrap();
                    settled.iter().filter(|one| **one == Settled::Applied).count()
                })
            })
            .collect();
        let mut applied = 0;
        for task in tasks {
            applied += task.await.unwrap();
        }
        // A hand-back may come before another's settlement; whatever came first, nothing was written twice.
        let rows = bed.rows().await;
        assert!(rows.iter().all(|row| row.attempts <= 1 && row.status != Status::Claimed));
        assert!(applied <= ROWS);
        let left = bed.claim("sweep", &["a"], 1_000).await;
        let done: Vec<_> =
            left.into_iter().map(|one| Settlement::new(one.claim, Outcome::Succeeded)).collect();
        bed.store.settle_all(&done, bed.now()).await.unwrap();
    }
}
