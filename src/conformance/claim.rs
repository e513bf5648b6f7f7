//! Claims.

use std::{collections::HashSet, sync::Arc, time::Duration};

use owed_core::{ClaimRequest, DeliveryId, NewDelivery, NewEvent, ReceiverLease, Status, Store};

use super::{Bed, LEASE, MICRO, event, new_of, owed_to, owing};

pub(super) async fn a_row_is_claimed_from_its_time_on_and_not_before<S: Store>(bed: Bed<S>) {
    let at = bed.now() + Duration::from_secs(60);
    bed.fire(&[NewEvent { deliveries: vec![owed_to("a", at)], ..event(bed.now()) }]).await;
    bed.clock.set(at - MICRO);
    assert!(bed.claim("w", &["a"], 1).await.is_empty());
    bed.pass(MICRO);
    assert_eq!(bed.claim("w", &["a"], 1).await.len(), 1);
}

pub(super) async fn a_claim_writes_who_when_and_until<S: Store>(bed: Bed<S>) {
    let id = bed.owe(&["a"]).await[0];
    bed.pass(Duration::from_secs(1));
    let claimed = bed.claim_one("worker-1").await;
    let row = bed.row(id).await;
    assert_eq!(claimed.delivery, row, "a claim answers the row as it stands after it");
    assert_eq!((row.status, row.claimed_by.as_deref()), (Status::Claimed, Some("worker-1")));
    assert_eq!((row.claimed_at, row.available_at), (Some(bed.now()), Some(bed.now() + LEASE)));
    assert_eq!((row.attempts, row.lapses, row.completed_at), (0, 0, None));
    let key = claimed.claim.key();
    assert_eq!((key.delivery, &*key.worker, key.at), (id, "worker-1", bed.now()));
    assert_eq!(claimed.event.unwrap().id, row.event_id);
    assert!(bed.claim("worker-2", &["a"], 1).await.is_empty(), "given to two");
}

pub(super) async fn receivers_are_served_in_the_order_given_and_the_oldest_first<S: Store>(bed: Bed<S>) {
    let at = |seconds: u64| bed.now() + Duration::from_secs(seconds);
    let owed = [("b", 5), ("a", 9), ("a", 1), ("b", 2), ("a", 4), ("c", 0)];
    let deliveries = owed
        .iter()
        .map(|(key, seconds)| NewDelivery { target: format!("{seconds}"), ..owed_to(key, at(*seconds)) })
        .collect();
    bed.fire(&[NewEvent { deliveries, ..event(bed.now()) }]).await;
    bed.pass(Duration::from_secs(10));
    let claimed = bed.claim("w", &["b", "a"], 4).await;
    let order: Vec<(&str, &str)> =
        claimed.iter().map(|one| (&*one.delivery.receiver_key, &*one.delivery.target)).collect();
    assert_eq!(order, [("b", "2"), ("b", "5"), ("a", "1"), ("a", "4")]);
}

pub(super) async fn no_more_than_the_limit_is_taken<S: Store>(bed: Bed<S>) {
    let events: Vec<NewEvent> = (0..30).map(|_| owing(bed.now(), &["a", "b"])).collect();
    bed.fire(&events).await;
    assert_eq!(bed.claim("w", &["a", "b"], 7).await.len(), 7);
    assert_eq!(bed.claim("w", &["a", "b"], 40).await.len(), 40);
    assert_eq!(bed.claim("w", &["a", "b"], 40).await.len(), 13);
    assert!(bed.claim("w", &["a", "b"], 40).await.is_empty());
}

pub(super) async fn nobody_is_given_what_was_not_asked_for<S: Store>(bed: Bed<S>) {
    bed.owe(&["a", "ab", "b"]).await;
    let claimed = bed.claim("w", &["a", "nobody"], 9).await;
    assert_eq!(claimed.len(), 1);
    assert_eq!(claimed[0].delivery.receiver_key, "a");
}

pub(super) async fn only_what_is_named_is_taken<S: Store>(bed: Bed<S>) {
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.extend(bed.owe(&["a", "b"]).await);
    }
    let mut request = bed.request("w", &["a"], 9);
    request.only = Some(vec![ids[2], ids[3], ids[6], DeliveryId(i64::MAX)]);
    let claimed: Vec<DeliveryId> =
        bed.store.claim(&request).await.unwrap().iter().map(|one| one.delivery.id).collect();
    assert_eq!(claimed, [ids[2], ids[6]], "b was not asked for");
    request.only = Some(Vec::new());
    assert!(bed.store.claim(&request).await.unwrap().is_empty(), "an empty list is no filter");
}

pub(super) async fn only_what_has_been_owed_for_long_enough_is_taken<S: Store>(bed: Bed<S>) {
    let since = bed.now();
    let old = bed.owe(&["a"]).await[0];
    bed.pass(MICRO);
    bed.owe(&["a"]).await;
    let mut request = bed.request("w", &["a"], 9);
    request.owed_before = Some(since - MICRO);
    assert!(bed.store.claim(&request).await.unwrap().is_empty());
    request.owed_before = Some(since);
    let claimed = bed.store.claim(&request).await.unwrap();
    assert_eq!(claimed.iter().map(|one| one.delivery.id).collect::<Vec<_>>(), [old]);
}

pub(super) async fn a_row_that_was_born_claimed_is_its_workers_until_the_lease_ends<S: Store>(bed: Bed<S>) {
    let born = NewDelivery {
        claimed_by: Some("firing".into()),
        available_at: bed.now() + LEASE,
        due_at: bed.now(),
        ..owed_to("a", bed.now())
    };
    let (_, ids) = new_of(&bed.fire(&[NewEvent { deliveries: vec![born], ..event(bed.now()) }]).await[0]);
    let row = bed.row(ids[0]).await;
    assert_eq!((row.status, row.claimed_by.as_deref()), (Status::Claimed, Some("firing")));
    assert_eq!(
        (row.claimed_at, row.available_at, row.due_at),
        (Some(bed.now()), Some(bed.now() + LEASE), bed.now())
    );
    assert!(bed.claim("relay", &["a"], 1).await.is_empty());
    bed.pass(LEASE);
    let claimed = bed.claim("relay", &["a"], 1).await;
    assert_eq!((claimed.len(), claimed[0].delivery.lapses), (1, 1));
}

pub(super) async fn a_claim_lapses_at_its_end_and_not_before<S: Store>(bed: Bed<S>) {
    bed.owe(&["a"]).await;
    bed.claim_one("first").await;
    bed.pass(LEASE - MICRO);
    assert!(bed.claim("second", &["a"], 1).await.is_empty());
    bed.pass(MICRO);
    let claimed = bed.claim_one("second").await;
    assert_eq!((claimed.delivery.lapses, claimed.delivery.attempts), (1, 0));
    assert_eq!(claimed.delivery.claimed_by.as_deref(), Some("second"));
    bed.pass(LEASE);
    assert_eq!(bed.claim_one("third").await.delivery.lapses, 1, "only a run that was noted adds to it");
}

pub(super) async fn each_receiver_has_its_own_lease<S: Store>(bed: Bed<S>) {
    bed.owe(&["short", "long"]).await;
    let lease =
        |key: &str, seconds| ReceiverLease { key: Arc::from(key), lease: Duration::from_secs(seconds) };
    let receivers = vec![lease("short", 1), lease("long", 100)];
    let claimed = bed.store.claim(&ClaimRequest::new("w".into(), receivers, 9, bed.now())).await.unwrap();
    let until: Vec<_> = claimed.iter().map(|one| one.delivery.available_at.unwrap() - bed.now()).collect();
    assert_eq!(until, [chrono::TimeDelta::seconds(1), chrono::TimeDelta::seconds(100)]);
}

pub(super) async fn deliveries_of_one_event_share_it<S: Store>(bed: Bed<S>) {
    bed.owe(&["a", "b"]).await;
    let claimed = bed.claim("w", &["a", "b"], 9).await;
    assert!(Arc::ptr_eq(claimed[0].event.as_ref().unwrap(), claimed[1].event.as_ref().unwrap()));
}

pub(super) async fn the_receivers_that_are_owed_something_are_known<S: Store>(bed: Bed<S>) {
    assert!(bed.store.owed_receivers().await.unwrap().is_empty());
    bed.owe(&["b", "a", "c"]).await;
    bed.owe(&["a"]).await;
    let claimed = bed.claim("w", &["c"], 1).await;
    assert_eq!(bed.store.owed_receivers().await.unwrap(), ["a", "b", "c"], "what is claimed is still owed");
    let done =
        claimed.into_iter().map(|one| owed_core::Settlement::new(one.claim, owed_core::Outcome::Succeeded));
    bed.store.settle_all(&done.collect::<Vec<_>>(), bed.now()).await.unwrap();
    assert_eq!(bed.store.owed_receivers().await.unwrap(), ["a", "b"]);
}

pub(super) async fn workers_that_claim_at_once_are_never_given_one_row<S: Store>(bed: Bed<S>) {
    const ROWS: usize = 300;
    let events: Vec<NewEvent> = (0..ROWS / 2).map(|_| owing(bed.now(), &["a", "b"])).collect();
    bed.fire(&events).await;
    let workers = (0..4).map(|n| {
        let (store, request) = (bed.store.clone(), bed.request(&format!("w{n}"), &["a", "b"], 7));
        tokio::spawn(async move {
            let mut mine = Vec::new();
            loop {
                let claimed = store.claim(&request).await.unwrap();
                if claimed.is_empty() {
                    return mine;
                }
                mine.extend(claimed.into_iter().map(|one| one.delivery.id));
            }
        })
    });
    let mut all = Vec::new();
    for worker in workers.collect::<Vec<_>>() {
        all.extend(worker.await.unwrap());
    }
    // A worker that found only rows which others were just claiming stops early; nothing may be lost by that.
    all.extend(bed.claim("last", &["a", "b"], 1_000).await.into_iter().map(|one| one.delivery.id));
    assert_eq!(all.len(), ROWS);
    assert_eq!(all.into_iter().collect::<HashSet<_>>().len(), ROWS, "a row was given to two");
}
