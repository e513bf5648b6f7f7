//! What people are shown: pauses, and what a receiver is owed.

use std::time::Duration;

use owed_core::{NewEvent, Outcome, Pause, Settlement, Store};

use super::{Bed, MICRO, event, owed_to};

pub(super) async fn a_pause_is_seen_until_its_end_and_replaces_the_workers_own<S: Store>(bed: Bed<S>) {
    let minute = Duration::from_secs(60);
    let pause = |lane: &str, worker: &str, until| Pause {
        lane: lane.into(),
        worker: worker.into(),
        since: bed.now(),
        until,
    };
    let until = bed.now() + minute;
    let (a, b) = (pause("mail", "one", until), pause("mail", "two", until + minute));
    let c = pause("Mail", "one", until + minute);
    for one in [&b, &a, &c] {
        bed.store.pause(one).await.unwrap();
    }
    let mut all = vec![a, b.clone(), c.clone()];
    all.sort();
    let mut seen = bed.store.pauses(bed.now()).await.unwrap();
    seen.sort();
    assert_eq!(seen, all, "keys are compared by their bytes");
    bed.pass(minute - MICRO);
    assert_eq!(bed.store.pauses(bed.now()).await.unwrap().len(), 3);
    bed.pass(MICRO);
    assert_eq!(bed.store.pauses(bed.now()).await.unwrap().len(), 2, "seen past its end");
    let longer = Pause { since: bed.now(), until: bed.now() + 9 * minute, ..b };
    bed.store.pause(&longer).await.unwrap();
    let mut seen = bed.store.pauses(bed.now()).await.unwrap();
    seen.sort();
    let mut left = vec![longer, c];
    left.sort();
    assert_eq!(seen, left);
}

pub(super) async fn what_a_receiver_is_owed_is_read_soonest_first_without_what_is_settled<S: Store>(
    bed: Bed<S>,
) {
    let now = bed.now();
    let at = |seconds: u64| now + Duration::from_secs(seconds);
    let deliveries = [("a", 30), ("a", 10), ("b", 5), ("a", 20), ("a", 0)]
        .map(|(key, seconds)| NewEvent { deliveries: vec![owed_to(key, at(seconds))], ..event(now) });
    bed.fire(&deliveries).await;
    let settled = bed.claim_one("w").await;
    bed.store.settle_all(&[Settlement::new(settled.claim, Outcome::Succeeded)], now).await.unwrap();
    let owed = bed.store.owed("a", 2).await.unwrap();
    assert_eq!(owed.iter().map(|row| row.available_at).collect::<Vec<_>>(), [Some(at(10)), Some(at(20))]);
    assert_eq!(bed.store.owed("a", 9).await.unwrap().len(), 3);
    assert!(bed.store.owed("nobody", 9).await.unwrap().is_empty());
}
