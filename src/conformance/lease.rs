//! Leases: renewed, handed back, taken over, noted.

use std::time::Duration;

use owed_core::{NewDelivery, NewEvent, Outcome, Settled, Settlement, Status, Store};

use super::{Bed, LEASE, MICRO, event, owed_to};

pub(super) async fn a_renewed_lease_ends_later_and_only_for_its_holder<S: Store>(bed: Bed<S>) {
    bed.owe(&["a"]).await;
    bed.owe(&["a"]).await;
    let claimed = bed.claim("w", &["a"], 2).await;
    let keys: Vec<_> = claimed.iter().map(|one| one.claim.key().clone()).collect();
    bed.pass(LEASE - MICRO);
    assert_eq!(bed.store.renew(&keys[..1], bed.now() + LEASE).await.unwrap(), [keys[0].delivery]);
    bed.pass(MICRO);
    let taken = bed.claim("other", &["a"], 9).await;
    assert_eq!(taken.iter().map(|one| one.delivery.id).collect::<Vec<_>>(), [keys[1].delivery]);
    let until = bed.now() + 2 * LEASE;
    assert_eq!(
        bed.store.renew(&keys, until).await.unwrap(),
        [keys[0].delivery],
        "renewed what another holds"
    );
    assert_eq!(bed.row(keys[0].delivery).await.available_at, Some(until));
    assert_eq!(bed.row(keys[1].delivery).await.available_at, Some(bed.now() + LEASE));
}

pub(super) async fn a_row_handed_back_is_what_it_was<S: Store>(bed: Bed<S>) {
    let pending = bed.owe(&["a"]).await[0];
    let claimed = bed.claim_one("w").await;
    assert_eq!(bed.store.release(&[claimed.claim.key().clone()], bed.now()).await.unwrap(), 1);
    let row = bed.row(pending).await;
    assert_eq!((row.status, row.claimed_by, row.claimed_at), (Status::Pending, None, None));
    assert_eq!((row.available_at, row.lapses), (Some(bed.now()), 0));
    assert_eq!(
        bed.store.release(&[claimed.claim.key().clone()], bed.now()).await.unwrap(),
        0,
        "handed back twice"
    );

    let claimed = bed.claim_one("w").await;
    let failed = Outcome::Failed { error: "no".into(), available_at: bed.now() };
    bed.store.settle_all(&[Settlement::new(claimed.claim, failed)], bed.now()).await.unwrap();
    let claimed = bed.claim_one("w").await;
    let at = bed.now() + Duration::from_secs(9);
    assert_eq!(bed.store.release(&[claimed.claim.key().clone()], at).await.unwrap(), 1);
    let row = bed.row(pending).await;
    assert_eq!((row.status, row.attempts, row.available_at), (Status::Failed, 1, Some(at)));
    assert_eq!(row.last_error.as_deref(), Some("no"));

    bed.clock.set(at);
    bed.claim_one("w").await;
    bed.pass(LEASE);
    let lapsed = bed.claim_one("w").await;
    assert_eq!(bed.store.release(&[lapsed.claim.key().clone()], bed.now()).await.unwrap(), 1);
    assert_eq!(bed.row(pending).await.lapses, 1, "a hand-back forgot that it had lapsed");
}

pub(super) async fn a_claim_that_is_taken_over_is_its_takers_alone<S: Store>(bed: Bed<S>) {
    let id = bed.owe(&["a"]).await[0];
    let claimed = bed.claim_one("relay").await;
    bed.pass(Duration::from_secs(5));
    let until = bed.now() + LEASE;
    let key = claimed.claim.key().clone();
    let taken = bed.store.take(&key, "task", bed.now(), until).await.unwrap().expect("it is still held");
    assert_eq!(
        (taken.delivery.claimed_by.as_deref(), taken.delivery.claimed_at),
        (Some("task"), Some(bed.now()))
    );
    assert_eq!((taken.delivery.available_at, taken.event.is_some()), (Some(until), true));
    assert_eq!(taken.delivery, bed.row(id).await);
    assert!(bed.store.take(&key, "copy", bed.now(), until).await.unwrap().is_none(), "a second copy took it");
    let late = Settlement::new(claimed.claim, Outcome::Succeeded);
    assert_eq!(bed.store.settle_all(&[late], bed.now()).await.unwrap(), [Settled::Lost]);
    let done = Settlement::new(taken.claim, Outcome::Succeeded);
    assert_eq!(bed.store.settle_all(&[done], bed.now()).await.unwrap(), [Settled::Applied]);
    assert!(
        bed.store.take(&key, "late", bed.now(), until).await.unwrap().is_none(),
        "a settled row was taken"
    );
}

pub(super) async fn a_lapsed_row_is_noted_once_for_each_run<S: Store>(bed: Bed<S>) {
    let id = bed.owe(&["a"]).await[0];
    bed.claim_one("w").await;
    for run in 0..3 {
        bed.pass(LEASE);
        let claimed = bed.claim_one("w").await;
        assert_eq!(claimed.delivery.lapses, 1 + run);
        assert_eq!(bed.store.suspect(claimed.claim.key()).await.unwrap(), Settled::Applied);
        assert_eq!(bed.row(id).await.lapses, 2 + run);
    }
    bed.pass(LEASE);
    let claimed = bed.claim_one("w").await;
    let old = owed_core::ClaimKey { at: bed.now() - LEASE, ..claimed.claim.key().clone() };
    assert_eq!(bed.store.suspect(&old).await.unwrap(), Settled::Lost);
    let failed = Outcome::Failed { error: "no".into(), available_at: bed.now() };
    bed.store.settle_all(&[Settlement::new(claimed.claim, failed)], bed.now()).await.unwrap();
    assert_eq!(bed.row(id).await.lapses, 0, "an outcome was reported, so its process lived");
}

pub(super) async fn ending_backoffs_never_comes_before_the_due_time<S: Store>(bed: Bed<S>) {
    let later = bed.now() + Duration::from_secs(600);
    let scheduled = NewDelivery { available_at: later, due_at: later, ..owed_to("a", later) };
    bed.fire(&[NewEvent { deliveries: vec![scheduled], ..event(bed.now()) }]).await;
    let failed = bed.owe(&["a"]).await[0];
    let others = bed.owe(&["b"]).await[0];
    for claimed in bed.claim("w", &["a", "b"], 9).await {
        let outcome = Outcome::Failed { error: "no".into(), available_at: later };
        bed.store.settle_all(&[Settlement::new(claimed.claim, outcome)], bed.now()).await.unwrap();
    }
    assert_eq!(bed.store.expedite(&["a"], bed.now()).await.unwrap(), 1);
    assert_eq!(bed.row(failed).await.available_at, Some(bed.now()));
    assert_eq!(bed.row(others).await.available_at, Some(later));
    assert_eq!(bed.claim("w", &["a"], 9).await.len(), 1, "a scheduled row came before its time");
    assert_eq!(bed.store.expedite(&["a"], bed.now()).await.unwrap(), 0);
}
