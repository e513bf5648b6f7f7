//! Futures dropped at every point: after k polls, for each k until the call comes to its end.

use std::{future::Future, pin::Pin, task::Poll, time::Duration};

use owed_core::{
    Claimed, EventQuery, NewEvent, Outcome, Prunable, RetentionRule, Settled, Settlement, Status, Store,
};

use super::{Bed, LEASE, event, new_of, owing};

/// Polls a call at most `polls` times, then drops it. Answers what it came to, if it came to its end.
async fn dropped_after<F: Future>(polls: usize, call: F) -> Option<F::Output> {
    let mut call = Box::pin(call);
    let mut left = polls;
    let ended = std::future::poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match Pin::new(&mut call).poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => {
                // Again at once as well, so that the count does not hang on how often it is woken.
                context.waker().wake_by_ref();
                Poll::Pending
            }
        }
    });
    // A call that waits for its connection may need many more polls than those that matter.
    tokio::time::timeout(Duration::from_secs(30), ended).await.expect("a call that never ends")
}

/// The numbers of polls to try: each of the first, then further and further apart.
const POLLS: [usize; 12] = [0, 1, 2, 3, 4, 5, 7, 10, 20, 50, 200, 2_000];

/// Whatever was dropped, work goes on as if it had never been, more often than a pool has connections.
async fn all_is_well<S: Store>(bed: &Bed<S>) {
    for _ in 0..3 {
        let tx = bed.store.begin().await.unwrap();
        bed.store.record(&tx, &[owing(bed.now(), &["well"])]).await.unwrap();
        bed.store.rollback(tx).await.unwrap();
        let visible = bed
            .store
            .events(&EventQuery { name: Some("leaked".into()), ..EventQuery::page(9) })
            .await
            .unwrap();
        assert!(visible.is_empty(), "what was rolled back is visible");
    }
}

/// Claims until this many rows came. A dropped call may go on in the server for a while with its rows locked, and a
/// claim rightly passes those over.
async fn claim_all<S: Store>(bed: &Bed<S>, worker: &str, rows: usize) -> Vec<Claimed> {
    let mut claimed = bed.claim(worker, &["a"], 9).await;
    for _ in 0..3_000 {
        if claimed.len() >= rows {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        claimed.extend(bed.claim(worker, &["a"], 9).await);
    }
    assert_eq!(
        claimed.len(),
        rows,
        "rows that are due can be claimed once a dropped call has let go of them"
    );
    claimed
}

pub(super) async fn a_dropped_begin_leaves_no_transaction_open<S: Store>(bed: Bed<S>) {
    for round in 0..3 {
        for polls in POLLS {
            drop(dropped_after(polls + round, bed.store.begin()).await);
            // In a stranger's open transaction this would not be committed.
            bed.owe(&["a"]).await;
        }
    }
    all_is_well(&bed).await;
    assert_eq!(bed.rows().await.len(), 3 * POLLS.len());
}

pub(super) async fn a_dropped_commit_goes_on_or_never_began<S: Store>(bed: Bed<S>) {
    for polls in POLLS {
        let tx = bed.store.begin().await.unwrap();
        bed.store.record(&tx, &[owing(bed.now(), &["a"])]).await.unwrap();
        drop(dropped_after(polls, bed.store.commit(tx)).await);
        let tx = bed.store.begin().await.unwrap();
        bed.store.record(&tx, &[owing(bed.now(), &["never"])]).await.unwrap();
        drop(dropped_after(polls, bed.store.rollback(tx)).await);
    }
    all_is_well(&bed).await;
    // Those that had begun come to their end without anybody waiting.
    let mut rows = bed.rows().await;
    for _ in 0..200 {
        if rows.len() >= POLLS.len() - 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        rows = bed.rows().await;
    }
    assert!(rows.iter().all(|row| row.receiver_key == "a"), "a dropped rollback committed");
    assert!(rows.len() >= POLLS.len() - 1, "{} of {} commits that had begun", rows.len(), POLLS.len() - 1);
}

pub(super) async fn a_dropped_record_leaves_all_or_nothing<S: Store>(bed: Bed<S>) {
    for polls in POLLS {
        let tx = bed.store.begin().await.unwrap();
        let events = [owing(bed.now(), &["a", "b"]), owing(bed.now(), &["a", "b"])];
        drop(dropped_after(polls, bed.store.record(&tx, &events)).await);
        drop(tx);
    }
    all_is_well(&bed).await;
    assert!(bed.rows().await.is_empty());
    for polls in POLLS {
        let tx = bed.store.begin().await.unwrap();
        bed.store.record(&tx, &[owing(bed.now(), &["before"])]).await.unwrap();
        let savepoint = dropped_after(polls, bed.store.savepoint(&tx)).await;
        drop(savepoint);
        bed.store.record(&tx, &[owing(bed.now(), &["a"])]).await.unwrap();
        bed.store.commit(tx).await.unwrap();
    }
    assert_eq!(
        bed.rows().await.len(),
        2 * POLLS.len(),
        "a savepoint that was dropped took the transaction along"
    );
}

pub(super) async fn a_dropped_claim_leaves_rows_claimed_or_free<S: Store>(bed: Bed<S>) {
    for polls in POLLS {
        let ids = [bed.owe(&["a"]).await[0], bed.owe(&["a"]).await[0]];
        let request = bed.request("w", &["a"], 9);
        drop(dropped_after(polls, bed.store.claim(&request)).await);
        all_is_well(&bed).await;
        bed.pass(LEASE);
        let claimed = claim_all(&bed, "next", ids.len()).await;
        let done: Vec<_> =
            claimed.into_iter().map(|one| Settlement::new(one.claim, Outcome::Succeeded)).collect();
        let settled = bed.store.settle_all(&done, bed.now()).await.unwrap();
        assert!(settled.iter().all(|one| *one == Settled::Applied));
    }
}

pub(super) async fn a_dropped_settlement_is_written_or_not<S: Store>(bed: Bed<S>) {
    for polls in POLLS {
        bed.owe(&["a"]).await;
        bed.owe(&["a"]).await;
        let claimed = bed.claim("w", &["a"], 9).await;
        let at = bed.now() + LEASE;
        let outcomes = [Outcome::Succeeded, Outcome::Failed { error: "no".into(), available_at: at }];
        let batch: Vec<_> = claimed
            .into_iter()
            .zip(outcomes)
            .map(|(one, outcome)| Settlement::new(one.claim, outcome))
            .collect();
        drop(dropped_after(polls, bed.store.settle_all(&batch, bed.now())).await);
        all_is_well(&bed).await;
        bed.store.settle_all(&batch, bed.now()).await.unwrap();
        let rows = [bed.row(batch[0].key().delivery).await, bed.row(batch[1].key().delivery).await];
        assert_eq!(
            rows.clone().map(|row| (row.status, row.attempts)),
            [(Status::Succeeded, 1), (Status::Failed, 1)]
        );
        bed.pass(LEASE);
        let again = claim_all(&bed, "w", 1).await.remove(0).claim;
        bed.store.settle_all(&[Settlement::new(again, Outcome::Succeeded)], bed.now()).await.unwrap();
    }
}

pub(super) async fn a_dropped_renewal_or_hand_back_harms_nothing<S: Store>(bed: Bed<S>) {
    let id = bed.owe(&["a"]).await[0];
    for polls in POLLS {
        let key = claim_all(&bed, "w", 1).await[0].claim.key().clone();
        let keys = std::slice::from_ref(&key);
        drop(dropped_after(polls, bed.store.renew(keys, bed.now() + LEASE)).await);
        drop(dropped_after(polls, bed.store.suspect(&key)).await);
        all_is_well(&bed).await;
        assert_eq!(bed.row(id).await.status, Status::Claimed);
        drop(dropped_after(polls, bed.store.release(keys, bed.now())).await);
        all_is_well(&bed).await;
        bed.store.release(keys, bed.now()).await.unwrap();
        assert_eq!(bed.row(id).await.status, Status::Pending);
        let key = claim_all(&bed, "w", 1).await[0].claim.key().clone();
        let taken = dropped_after(polls, bed.store.take(&key, "task", bed.now(), bed.now() + LEASE)).await;
        drop(taken);
        all_is_well(&bed).await;
        bed.pass(LEASE);
        let key = claim_all(&bed, "w", 1).await[0].claim.key().clone();
        bed.store.release(&[key], bed.now()).await.unwrap();
    }
}

pub(super) async fn a_dropped_prune_deletes_whole_events_or_none<S: Store>(bed: Bed<S>) {
    for polls in POLLS {
        let consumed = |new| NewEvent { retention: RetentionRule::Settled, ..new };
        bed.fire(&[consumed(owing(bed.now(), &["a"])), consumed(event(bed.now()))]).await;
        let done = claim_all(&bed, "w", 1).await.remove(0).claim;
        bed.store.settle_all(&[Settlement::new(done, Outcome::Succeeded)], bed.now()).await.unwrap();
        let events = async || -> Vec<_> {
            bed.store.events(&EventQuery::page(9)).await.unwrap().into_iter().map(|row| row.id).collect()
        };
        let ids = events().await;
        drop(dropped_after(polls, bed.store.prune(&Prunable::Settled, &ids, 99)).await);
        all_is_well(&bed).await;
        // It may go on in the server for a while, and what it has locked is rightly passed over.
        for _ in 0..3_000 {
            bed.store.prune(&Prunable::Settled, &ids, 99).await.unwrap();
            if events().await.is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(events().await.is_empty() && bed.rows().await.is_empty());
        let (id, _) = new_of(&bed.fire(&[consumed(event(bed.now()))]).await[0]);
        let tx = bed.store.begin().await.unwrap();
        drop(dropped_after(polls, bed.store.lock_events(&tx, &[id])).await);
        drop(tx);
        for _ in 0..3_000 {
            if bed.store.prune(&Prunable::Settled, &[id], 99).await.unwrap().events == 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(events().await.is_empty(), "a dropped lock is held for ever");
    }
}
