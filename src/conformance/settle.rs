//! Settlements.

use std::time::Duration;

use owed_core::{NewEvent, Outcome, Settled, Settlement, Status, Store, limits};

use super::{Bed, LEASE, owing};

fn outcomes<S: Store>(bed: &Bed<S>) -> Vec<Outcome> {
    let at = bed.now() + Duration::from_secs(60);
    vec![
        Outcome::Succeeded,
        Outcome::Failed { error: "failed".into(), available_at: at },
        Outcome::Deferred { error: "deferred".into(), available_at: at },
        Outcome::Dead { error: "dead".into(), counted: true },
        Outcome::Dead { error: "given up".into(), counted: false },
        Outcome::Orphaned { error: "orphaned".into() },
        Outcome::NotYet { until: at },
    ]
}

pub(super) async fn every_outcome_writes_its_columns<S: Store>(bed: Bed<S>) {
    for in_transaction in [true, false] {
        for outcome in outcomes(&bed) {
            let id = bed.owe(&["a"]).await[0];
            let before = bed.claim_one("w").await;
            let (due_at, settlement) = (before.delivery.due_at, Settlement::new(before.claim, outcome));
            bed.pass(Duration::from_micros(7));
            let now = bed.now();
            if in_transaction {
                let tx = bed.store.begin().await.unwrap();
                assert_eq!(bed.store.settle(&tx, &settlement, now).await.unwrap(), Settled::Applied);
                bed.store.commit(tx).await.unwrap();
            } else {
                assert_eq!(
                    bed.store.settle_all(std::slice::from_ref(&settlement), now).await.unwrap(),
                    [Settled::Applied]
                );
            }
            let (row, columns) = (bed.row(id).await, settlement.columns(now));
            assert_eq!(
                (row.status, row.attempts),
                (columns.status, columns.attempt),
                "{:?}",
                settlement.outcome()
            );
            assert_eq!(
                (row.available_at, row.due_at),
                (columns.available_at, columns.due_at.unwrap_or(due_at))
            );
            assert_eq!((row.completed_at, row.succeeded_at), (columns.completed_at, columns.succeeded_at));
            assert_eq!(row.last_error.as_deref(), columns.last_error);
            assert_eq!((row.claimed_by, row.claimed_at, row.lapses), (None, None, 0));
            assert_eq!(row.available_at.is_none(), row.status.is_terminal());
        }
    }
}

pub(super) async fn a_settlement_without_its_claim_writes_nothing<S: Store>(bed: Bed<S>) {
    let id = bed.owe(&["a"]).await[0];
    let lapsed = bed.claim_one("first").await;
    bed.pass(LEASE);
    let held = bed.claim_one("second").await;
    let before = bed.row(id).await;
    let late = Settlement::new(lapsed.claim, Outcome::Dead { error: "late".into(), counted: true });
    assert_eq!(bed.store.settle_all(std::slice::from_ref(&late), bed.now()).await.unwrap(), [Settled::Lost]);
    let tx = bed.store.begin().await.unwrap();
    assert_eq!(bed.store.settle(&tx, &late, bed.now()).await.unwrap(), Settled::Lost);
    bed.store.commit(tx).await.unwrap();
    assert_eq!(bed.row(id).await, before);
    let done = Settlement::new(held.claim, Outcome::Succeeded);
    assert_eq!(bed.store.settle_all(&[done], bed.now()).await.unwrap(), [Settled::Applied]);
}

pub(super) async fn a_settlement_is_written_once<S: Store>(bed: Bed<S>) {
    let id = bed.owe(&["a"]).await[0];
    let settlement = Settlement::new(bed.claim_one("w").await.claim, Outcome::Succeeded);
    let once = std::slice::from_ref(&settlement);
    assert_eq!(bed.store.settle_all(once, bed.now()).await.unwrap(), [Settled::Applied]);
    let row = bed.row(id).await;
    bed.pass(Duration::from_secs(1));
    assert_eq!(
        bed.store.settle_all(once, bed.now()).await.unwrap(),
        [Settled::Lost],
        "as after a lost answer"
    );
    assert_eq!(bed.row(id).await, row);
}

pub(super) async fn a_batch_settles_each_on_its_own_condition<S: Store>(bed: Bed<S>) {
    for _ in 0..7 {
        bed.owe(&["a"]).await;
    }
    let mut claimed = bed.claim("w", &["a"], 7).await;
    let gone = claimed.remove(3);
    bed.store.release(&[gone.claim.key().clone()], bed.now() + LEASE).await.unwrap();
    let ids: Vec<_> = claimed.iter().map(|one| one.delivery.id).collect();
    let mut batch: Vec<Settlement> = claimed
        .into_iter()
        .zip(outcomes(&bed))
        .map(|(one, outcome)| Settlement::new(one.claim, outcome))
        .collect();
    batch.insert(2, Settlement::new(gone.claim, Outcome::Succeeded));
    batch.reverse();
    let settled = bed.store.settle_all(&batch, bed.now()).await.unwrap();
    let lost: Vec<usize> =
        settled.iter().enumerate().filter(|(_, one)| **one == Settled::Lost).map(|(n, _)| n).collect();
    assert_eq!(lost, [4]);
    let mut statuses = Vec::new();
    for id in ids {
        statuses.push(bed.row(id).await.status);
    }
    use Status::{Dead, Failed, Orphaned, Succeeded};
    assert_eq!(statuses, [Succeeded, Failed, Failed, Dead, Dead, Orphaned]);
}

pub(super) async fn a_settlement_in_a_transaction_counts_with_its_commit<S: Store>(bed: Bed<S>) {
    let id = bed.owe(&["a"]).await[0];
    let settlement = Settlement::new(bed.claim_one("w").await.claim, Outcome::Succeeded);
    let before = bed.row(id).await;
    for drop_it in [true, false] {
        let tx = bed.store.begin().await.unwrap();
        assert_eq!(bed.store.settle(&tx, &settlement, bed.now()).await.unwrap(), Settled::Applied);
        assert_eq!(
            bed.store.settle(&tx, &settlement, bed.now()).await.unwrap(),
            Settled::Lost,
            "settled twice"
        );
        assert_eq!(bed.row(id).await, before, "seen before its commit");
        if drop_it { drop(tx) } else { bed.store.rollback(tx).await.unwrap() }
    }
    let tx = bed.store.begin().await.unwrap();
    assert_eq!(bed.store.settle(&tx, &settlement, bed.now()).await.unwrap(), Settled::Applied);
    let savepoint = bed.store.savepoint(&tx).await.unwrap();
    bed.store.record(&savepoint, &[owing(bed.now(), &["b"])]).await.unwrap();
    bed.store.rollback(savepoint).await.unwrap();
    bed.store.commit(tx).await.unwrap();
    let row = bed.row(id).await;
    assert_eq!((row.status, row.attempts, row.succeeded_at), (Status::Succeeded, 1, Some(bed.now())));
}

pub(super) async fn an_error_text_is_made_storable<S: Store>(bed: Bed<S>) {
    let text = format!("\0NUL {}", "𝔘".repeat(limits::ERROR));
    for in_transaction in [true, false] {
        let id = bed.owe(&["a"]).await[0];
        let dead = Outcome::Dead { error: text.clone(), counted: true };
        let settlement = Settlement::new(bed.claim_one("w").await.claim, dead);
        if in_transaction {
            let tx = bed.store.begin().await.unwrap();
            bed.store.settle(&tx, &settlement, bed.now()).await.unwrap();
            bed.store.commit(tx).await.unwrap();
        } else {
            bed.store.settle_all(&[settlement], bed.now()).await.unwrap();
        }
        let kept = bed.row(id).await.last_error.unwrap();
        assert!(kept.ends_with('𝔘') && kept.chars().count() == limits::ERROR && !kept.contains('\0'));
    }
}

pub(super) async fn counts_are_by_receiver_and_status<S: Store>(bed: Bed<S>) {
    assert!(bed.store.tally().await.unwrap().is_empty());
    for _ in 0..3 {
        bed.owe(&["a", "b"]).await;
    }
    let claimed = bed.claim("w", &["a"], 2).await;
    let done: Vec<_> =
        claimed.into_iter().map(|one| Settlement::new(one.claim, Outcome::Succeeded)).collect();
    bed.store.settle_all(&done, bed.now()).await.unwrap();
    let counts: Vec<_> = bed
        .store
        .tally()
        .await
        .unwrap()
        .into_iter()
        .map(|one| (one.receiver_key, one.status, one.count, one.attempts))
        .collect();
    let expected =
        [("a", Status::Pending, 1, 0), ("a", Status::Succeeded, 2, 2), ("b", Status::Pending, 3, 0)];
    assert_eq!(
        counts,
        expected.map(|(key, status, count, attempts)| (key.to_owned(), status, count, attempts))
    );
}

pub(super) async fn large_batches_are_settled_whole<S: Store>(bed: Bed<S>) {
    const ROWS: u32 = 2_500;
    let events: Vec<NewEvent> = (0..ROWS).map(|_| owing(bed.now(), &["a"])).collect();
    bed.fire(&events).await;
    let claimed = bed.claim("w", &["a"], ROWS).await;
    assert_eq!(claimed.len(), ROWS as usize);
    let keys: Vec<_> = claimed.iter().map(|one| one.claim.key().clone()).collect();
    assert_eq!(bed.store.renew(&keys, bed.now() + 2 * LEASE).await.unwrap().len(), ROWS as usize);
    assert_eq!(bed.store.release(&keys[..1_200], bed.now()).await.unwrap(), 1_200);
    let batch: Vec<_> =
        claimed.into_iter().map(|one| Settlement::new(one.claim, Outcome::Succeeded)).collect();
    let settled = bed.store.settle_all(&batch, bed.now()).await.unwrap();
    assert!(settled[..1_200].iter().all(|one| *one == Settled::Lost));
    assert!(settled[1_200..].iter().all(|one| *one == Settled::Applied));
}
