//! What operators do to rows: cancel, requeue, reopen, prune.

use std::time::Duration;

use owed_core::{
    Cancelled, DeliveryId, DeliveryQuery, DeliveryRow, EventId, EventQuery, NewDelivery, NewEvent, Outcome,
    Prunable, PruneMark, Recorded, Reopened, RetentionRule, Settled, Settlement, Status, Store, StoreError,
    Timestamp,
};

use super::{Bed, LEASE, MICRO, event, keyed, new_of, owed_to, owing, still_waits};

impl<S: Store> Bed<S> {
    async fn cancel(&self, rows: &[DeliveryId]) -> Cancelled {
        let tx = self.store.begin().await.unwrap();
        self.lock_those(&tx, rows).await;
        let cancelled = self.store.cancel(&tx, rows, self.now()).await.unwrap();
        self.store.commit(tx).await.unwrap();
        cancelled
    }

    async fn requeue(&self, rows: &[DeliveryId]) -> u64 {
        let tx = self.store.begin().await.unwrap();
        self.lock_those(&tx, rows).await;
        let requeued = self.store.requeue(&tx, rows, self.now()).await.unwrap();
        self.store.commit(tx).await.unwrap();
        requeued
    }

    async fn lock_those(&self, tx: &S::Tx, rows: &[DeliveryId]) {
        let query = DeliveryQuery { ids: Some(rows.to_vec()), ..DeliveryQuery::page(10_000) };
        let rows = self.store.deliveries_in(tx, &query).await.unwrap();
        let events: Vec<EventId> = rows.iter().map(|row| row.event_id).collect();
        self.store.lock_events(tx, &events).await.unwrap();
    }

    async fn reopen(&self, event: EventId, rows: &[NewDelivery]) -> Reopened {
        let tx = self.store.begin().await.unwrap();
        self.store.lock_events(&tx, &[event]).await.unwrap();
        let reopened = self.store.reopen(&tx, event, rows).await.unwrap();
        self.store.commit(tx).await.unwrap();
        reopened
    }

    /// Claims everything that these receivers are owed and settles it in this way.
    async fn settle_with(&self, receivers: &[&str], outcome: &Outcome) {
        let claimed = self.claim("settling", receivers, 10_000).await;
        let settlements: Vec<_> =
            claimed.into_iter().map(|one| Settlement::new(one.claim, outcome.clone())).collect();
        let settled = self.store.settle_all(&settlements, self.now()).await.unwrap();
        assert!(settled.iter().all(|one| *one == Settled::Applied));
    }

    async fn events_left(&self) -> Vec<EventId> {
        self.store.events(&EventQuery::page(100_000)).await.unwrap().into_iter().map(|row| row.id).collect()
    }

    async fn prunable(&self, kind: &Prunable) -> Vec<EventId> {
        self.store.prunable(kind, None, 10_000).await.unwrap().into_iter().map(|mark| mark.event).collect()
    }
}

fn dead() -> Outcome {
    Outcome::Dead { error: "no such mailbox".into(), counted: true }
}

fn failed(at: Timestamp) -> Outcome {
    Outcome::Failed { error: "busy".into(), available_at: at }
}

/// One row in each status, by the receivers `pending`, `failed`, .. of one event.
async fn one_of_each<S: Store>(bed: &Bed<S>) -> (EventId, Vec<DeliveryRow>) {
    let keys: Vec<&str> = Status::ALL.iter().map(|status| status.as_str()).collect();
    let (event, ids) = new_of(&bed.fire(&[owing(bed.now(), &keys)]).await[0]);
    bed.settle_with(&["failed"], &failed(bed.now() + LEASE)).await;
    bed.settle_with(&["succeeded"], &Outcome::Succeeded).await;
    bed.settle_with(&["dead"], &dead()).await;
    bed.settle_with(&["orphaned"], &Outcome::Orphaned { error: "unknown".into() }).await;
    let of = |key: &str| ids[keys.iter().position(|one| *one == key).unwrap()];
    assert_eq!(bed.cancel(&[of("cancelled")]).await, Cancelled::new(1, 0));
    bed.claim("holder", &["claimed"], 1).await;
    let rows = bed.rows().await;
    for row in &rows {
        assert_eq!(row.status.as_str(), row.receiver_key);
    }
    (event, rows)
}

pub(super) async fn what_is_owed_is_withdrawn_and_what_is_claimed_or_settled_is_left<S: Store>(bed: Bed<S>) {
    let (_, before) = one_of_each(&bed).await;
    bed.pass(MICRO);
    let ids: Vec<_> = before.iter().rev().map(|row| row.id).collect();
    assert_eq!(bed.cancel(&ids).await, Cancelled::new(2, 1));
    let expected: Vec<_> = before
        .into_iter()
        .map(|row| match row.status {
            Status::Pending | Status::Failed => DeliveryRow {
                status: Status::Cancelled,
                available_at: None,
                completed_at: Some(bed.now()),
                ..row
            },
            _ => row,
        })
        .collect();
    assert_eq!(bed.rows().await, expected);
    assert_eq!(bed.cancel(&ids).await, Cancelled::new(0, 1), "it was withdrawn twice");
    assert_eq!(bed.cancel(&[]).await, Cancelled::default(), "an empty list is no row");
}

pub(super) async fn a_cancel_counts_with_its_transactions_commit<S: Store>(bed: Bed<S>) {
    let id = bed.owe(&["a"]).await[0];
    let before = bed.row(id).await;
    let tx = bed.store.begin().await.unwrap();
    bed.lock_those(&tx, &[id]).await;
    assert_eq!(bed.store.cancel(&tx, &[id], bed.now()).await.unwrap(), Cancelled::new(1, 0));
    let inside = DeliveryQuery { ids: Some(vec![id]), ..DeliveryQuery::page(1) };
    assert_eq!(bed.store.deliveries_in(&tx, &inside).await.unwrap()[0].status, Status::Cancelled);
    bed.store.rollback(tx).await.unwrap();
    assert_eq!(bed.row(id).await, before);
    assert_eq!(bed.claim("w", &["a"], 1).await.len(), 1);
}

pub(super) async fn the_dead_alone_are_given_their_budget_back<S: Store>(bed: Bed<S>) {
    let (_, before) = one_of_each(&bed).await;
    bed.pass(Duration::from_secs(7));
    let ids: Vec<_> = before.iter().map(|row| row.id).collect();
    assert_eq!(bed.requeue(&ids).await, 1);
    let now = bed.now();
    let expected: Vec<_> = before
        .into_iter()
        .map(|row| match row.status {
            Status::Dead => DeliveryRow {
                status: Status::Pending,
                attempts: 0,
                available_at: Some(now),
                due_at: now,
                last_error: None,
                completed_at: None,
                ..row
            },
            _ => row,
        })
        .collect();
    assert_eq!(bed.rows().await, expected);
    assert_eq!(bed.claim("w", &["dead"], 9).await.len(), 1);
    assert_eq!(bed.requeue(&[]).await, 0);
}

pub(super) async fn what_is_terminal_is_reopened_what_is_missing_is_added_and_what_is_owed_is_left<
    S: Store,
>(
    bed: Bed<S>,
) {
    let (event, before) = one_of_each(&bed).await;
    bed.pass(Duration::from_secs(7));
    let due = bed.now() + LEASE;
    let mut rows: Vec<_> = Status::ALL.iter().map(|status| owed_to(status.as_str(), due)).collect();
    rows.push(NewDelivery { max_attempts: 9, ..owed_to("new", bed.now()) });
    rows.push(NewDelivery { target: "t".into(), ..owed_to("succeeded", bed.now()) });
    assert_eq!(bed.reopen(event, &rows).await, Reopened::new(4, 2));
    let expected: Vec<_> = before
        .into_iter()
        .map(|row| match row.status.is_terminal() {
            true => DeliveryRow {
                status: Status::Pending,
                attempts: 0,
                available_at: Some(due),
                due_at: due,
                last_error: None,
                completed_at: None,
                ..row
            },
            false => row,
        })
        .collect();
    let mut after = bed.rows().await;
    let added = after.split_off(expected.len());
    assert_eq!(after, expected, "succeeded_at and the budget are kept");
    assert!(after.iter().any(|row| row.succeeded_at.is_some()));
    let written = |row: &DeliveryRow| {
        (
            row.receiver_key.clone(),
            row.target.clone(),
            row.max_attempts,
            row.available_at,
            row.due_at,
            row.status,
        )
    };
    let now = bed.now();
    assert_eq!(
        added.iter().map(written).collect::<Vec<_>>(),
        [
            ("new".into(), String::new(), 9, Some(now), now, Status::Pending),
            ("succeeded".into(), "t".into(), 5, Some(now), now, Status::Pending)
        ]
    );
    assert!(added.iter().all(|row| row.event_id == event && row.attempts == 0));
    assert_eq!(bed.reopen(event, &rows).await, Reopened::default());
}

pub(super) async fn a_fan_out_of_thousands_is_reopened_whole<S: Store>(bed: Bed<S>) {
    let targets = |from: usize, to: usize| -> Vec<NewDelivery> {
        (from..to).map(|n| NewDelivery { target: format!("target {n}"), ..owed_to("a", bed.now()) }).collect()
    };
    let new = NewEvent { deliveries: targets(0, 2_500), ..event(bed.now()) };
    let (event, _) = new_of(&bed.fire(&[new]).await[0]);
    bed.settle_with(&["a"], &Outcome::Succeeded).await;
    assert_eq!(bed.reopen(event, &targets(500, 3_000)).await, Reopened::new(2_000, 500));
    let rows = bed.rows().await;
    assert_eq!(rows.len(), 3_000);
    assert_eq!(rows.iter().filter(|row| row.status == Status::Pending).count(), 2_500);
}

pub(super) async fn locked_events_are_read_in_order_and_those_that_are_not_there_left_out<S: Store>(
    bed: Bed<S>,
) {
    let recorded = bed.fire(&[event(bed.now()), event(bed.now()), keyed(bed.now(), "k")]).await;
    let ids: Vec<EventId> = recorded.iter().map(|one| new_of(one).0).collect();
    let tx = bed.store.begin().await.unwrap();
    let asked = [ids[2], EventId(i64::MAX), ids[0], ids[2]];
    let rows = bed.store.lock_events(&tx, &asked).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.id).collect::<Vec<_>>(), [ids[0], ids[2]]);
    assert_eq!(rows[1].dedupe_key.as_deref(), Some("k"));
    bed.store.rollback(tx).await.unwrap();
}

pub(super) async fn a_lock_on_an_event_is_waited_for<S: Store>(bed: Bed<S>) {
    let (id, _) = new_of(&bed.fire(&[owing(bed.now(), &["a"])]).await[0]);
    let (first, second) = (bed.store.begin().await.unwrap(), bed.store.begin().await.unwrap());
    bed.store.lock_events(&first, &[id]).await.unwrap();
    let ids = [id];
    let mut waiting = bed.store.lock_events(&second, &ids);
    still_waits(&mut waiting).await;
    // Claims and settlements don't ask for it.
    bed.settle_with(&["a"], &Outcome::Succeeded).await;
    bed.store.commit(first).await.unwrap();
    assert_eq!(waiting.await.unwrap().len(), 1);
    bed.store.commit(second).await.unwrap();
}

pub(super) async fn a_cancel_does_not_wait_for_the_transaction_of_a_handler<S: Store>(bed: Bed<S>) {
    let ids = [bed.owe(&["a"]).await[0], bed.owe(&["b"]).await[0]];
    let settlement = Settlement::new(bed.claim_one("holder").await.claim, Outcome::Succeeded);
    let tx = bed.store.begin().await.unwrap();
    bed.store.settle(&tx, &settlement, bed.now()).await.unwrap();
    let cancelled = tokio::time::timeout(Duration::from_secs(20), bed.cancel(&ids)).await;
    assert_eq!(cancelled.expect("it waits"), Cancelled::new(1, 1));
    bed.store.commit(tx).await.unwrap();
    assert_eq!(bed.row(ids[0]).await.status, Status::Succeeded);
}

pub(super) async fn a_duplicate_in_an_open_transaction_keeps_nobody_from_the_earlier_event<S: Store>(
    bed: Bed<S>,
) {
    let (_, rows) = new_of(&bed.fire(&[keyed(bed.now(), "k")]).await[0]);
    let tx = bed.store.begin().await.unwrap();
    let again = bed.store.record(&tx, &[keyed(bed.now(), "k")]).await.unwrap();
    assert!(matches!(again[0], Recorded::Duplicate { .. }));
    let cancelled = tokio::time::timeout(Duration::from_secs(20), bed.cancel(&rows)).await;
    assert_eq!(cancelled.expect("it waits"), Cancelled::new(1, 0));
    bed.store.commit(tx).await.unwrap();
}

pub(super) async fn an_event_is_pruned_at_the_end_of_its_window_and_not_before<S: Store>(bed: Bed<S>) {
    let kept = |retention| NewEvent { retention, ..event(bed.now()) };
    let recorded = bed
        .fire(&[
            kept(RetentionRule::Ordinary),
            kept(RetentionRule::Seconds(60)),
            kept(RetentionRule::Seconds(3_600)),
            NewEvent { deliveries: vec![owed_to("a", bed.now())], ..kept(RetentionRule::Succeeded) },
            kept(RetentionRule::Settled),
        ])
        .await;
    let ids: Vec<EventId> = recorded.iter().map(|one| new_of(one).0).collect();
    assert_eq!(bed.store.retention_windows().await.unwrap(), [60, 3_600]);
    let until = bed.now();
    bed.settle_with(&["a"], &dead()).await;
    let window = |seconds, until| Prunable::Window { seconds, until };
    for seconds in [None, Some(60), Some(3_600)] {
        assert!(bed.prunable(&window(seconds, until - MICRO)).await.is_empty(), "{seconds:?}");
        assert_eq!(bed.store.prune(&window(seconds, until - MICRO), &ids, 99).await.unwrap().events, 0);
    }
    assert_eq!(bed.prunable(&window(Some(60), until)).await, ids[1..2]);
    assert_eq!(bed.prunable(&window(Some(3_600), until)).await, ids[2..3]);
    assert!(bed.prunable(&window(Some(61), until)).await.is_empty());
    // A dead letter keeps its event under the ordinary window, and not for ever.
    assert!(bed.prunable(&Prunable::Succeeded).await.is_empty());
    assert_eq!(bed.prunable(&window(None, until)).await, [ids[0], ids[3], ids[4]]);
    assert_eq!(bed.prunable(&Prunable::Settled).await, ids[4..5]);
    let pruned = bed.store.prune(&window(Some(60), until), &ids, 99).await.unwrap();
    assert_eq!((pruned.events, pruned.deliveries, pruned.more), (1, 0, false));
    assert_eq!(bed.store.prune(&Prunable::Settled, &ids, 99).await.unwrap().events, 1);
    assert_eq!(bed.store.prune(&window(None, until), &ids, 99).await.unwrap().events, 2);
    assert_eq!(bed.events_left().await, ids[2..3]);
    assert!(bed.rows().await.is_empty());
    assert_eq!(bed.store.retention_windows().await.unwrap(), [3_600]);
}

pub(super) async fn an_event_that_owes_anything_is_never_pruned<S: Store>(bed: Bed<S>) {
    for retention in [RetentionRule::Succeeded, RetentionRule::Settled, RetentionRule::Ordinary] {
        let kind = match retention {
            RetentionRule::Succeeded => Prunable::Succeeded,
            RetentionRule::Settled => Prunable::Settled,
            _ => Prunable::Window { seconds: None, until: bed.now() },
        };
        let keeping = |keys: &[&str]| NewEvent { retention, ..owing(bed.now(), keys) };
        let done = bed.fire(&[keeping(&["done"]), keeping(&[])]).await;
        let owed =
            bed.fire(&[keeping(&["done", "pending"]), keeping(&["failed"]), keeping(&["claimed"])]).await;
        let buried = new_of(&bed.fire(&[keeping(&["dead", "done"])]).await[0]).0;
        let withdrawn = new_of(&bed.fire(&[keeping(&["withdrawn"])]).await[0]);
        bed.settle_with(&["done"], &Outcome::Succeeded).await;
        bed.settle_with(&["dead"], &dead()).await;
        bed.settle_with(&["failed"], &failed(bed.now() + LEASE)).await;
        bed.claim("holder", &["claimed"], 9).await;
        bed.cancel(&withdrawn.1).await;
        let mut due: Vec<EventId> = done.iter().map(|one| new_of(one).0).chain([withdrawn.0]).collect();
        if kind != Prunable::Succeeded {
            due.push(buried);
        }
        due.sort_unstable();
        assert_eq!(bed.prunable(&kind).await, due, "{kind:?}");
        let all = bed.events_left().await;
        assert_eq!(bed.store.prune(&kind, &all, 999).await.unwrap().events, due.len() as u64);
        let left = bed.events_left().await;
        assert!(owed.iter().all(|one| left.contains(&new_of(one).0)), "{kind:?}");
        assert!(due.iter().all(|id| !left.contains(id)));
        // Out of the next one's way.
        let rows: Vec<_> = bed.rows().await.iter().map(|row| row.id).collect();
        bed.cancel(&rows).await;
        bed.settle_with(&["claimed"], &Outcome::Succeeded).await;
        bed.pass(2 * LEASE);
        bed.settle_with(&["claimed"], &Outcome::Succeeded).await;
        let rest = Prunable::Window { seconds: None, until: bed.now() };
        bed.store.prune(&rest, &left, 999).await.unwrap();
        assert!(bed.events_left().await.is_empty());
    }
}

pub(super) async fn a_prune_keeps_the_newest_success_of_each_receiver<S: Store>(bed: Bed<S>) {
    let consumed = |keys: &[&str]| NewEvent { retention: RetentionRule::Settled, ..owing(bed.now(), keys) };
    let first = bed.now();
    bed.fire(&[consumed(&["a", "b", "never"])]).await;
    bed.settle_with(&["never"], &dead()).await;
    bed.settle_with(&["a", "b"], &Outcome::Succeeded).await;
    bed.pass(LEASE);
    let second = bed.now();
    let (later, _) = new_of(&bed.fire(&[consumed(&["a"])]).await[0]);
    bed.settle_with(&["a"], &Outcome::Succeeded).await;
    let expected = vec![("a".to_owned(), second), ("b".to_owned(), first)];
    assert_eq!(bed.store.last_successes().await.unwrap(), expected);
    // The newer one goes first: the older one must not take its place.
    bed.store.prune(&Prunable::Settled, &[later], 99).await.unwrap();
    assert_eq!(bed.store.last_successes().await.unwrap(), expected);
    bed.store.prune(&Prunable::Settled, &bed.events_left().await, 99).await.unwrap();
    assert!(bed.rows().await.is_empty());
    assert_eq!(bed.store.last_successes().await.unwrap(), expected);
    bed.pass(LEASE);
    bed.owe(&["b"]).await;
    bed.settle_with(&["b"], &Outcome::Succeeded).await;
    assert_eq!(bed.store.last_successes().await.unwrap()[1], ("b".to_owned(), bed.now()));
}

pub(super) async fn a_prune_is_bounded_and_goes_on_where_it_was<S: Store>(bed: Bed<S>) {
    let targets = (0..2_500).map(|n| NewDelivery { target: n.to_string(), ..owed_to("a", bed.now()) });
    let wide =
        NewEvent { retention: RetentionRule::Settled, deliveries: targets.collect(), ..event(bed.now()) };
    let small = NewEvent { retention: RetentionRule::Settled, ..owing(bed.now(), &["a"]) };
    bed.fire(&[small.clone(), wide, small.clone(), small]).await;
    bed.settle_with(&["a"], &Outcome::Succeeded).await;
    let ids = bed.events_left().await;
    let (mut steps, mut events, mut deliveries) = (0, 0, 0);
    loop {
        let pruned = bed.store.prune(&Prunable::Settled, &ids, 400).await.unwrap();
        assert!(pruned.events + pruned.deliveries <= 400, "{pruned:?}");
        assert!(pruned.events + pruned.deliveries > 0, "a step that does nothing");
        (steps, events, deliveries) = (steps + 1, events + pruned.events, deliveries + pruned.deliveries);
        let rows = bed.rows().await;
        assert_eq!(rows.len() as u64, 2_503 - deliveries);
        let left = bed.events_left().await;
        assert!(rows.iter().all(|row| left.contains(&row.event_id)), "a delivery without its event");
        if !pruned.more {
            break;
        }
    }
    assert_eq!((events, deliveries), (4, 2_503));
    assert!((7..=9).contains(&steps), "{steps} steps");
    assert!(bed.store.prune(&Prunable::Settled, &ids, 400).await.unwrap() == Default::default());
    // However small the bound is, it comes to its end.
    bed.fire(&[NewEvent { retention: RetentionRule::Settled, ..owing(bed.now(), &["a", "b"]) }]).await;
    bed.settle_with(&["a", "b"], &Outcome::Succeeded).await;
    let ids = bed.events_left().await;
    for _ in 0..9 {
        if !bed.store.prune(&Prunable::Settled, &ids, 1).await.unwrap().more {
            break;
        }
    }
    assert!(bed.events_left().await.is_empty());
}

pub(super) async fn a_pruned_events_dedupe_key_is_free_again<S: Store>(bed: Bed<S>) {
    let settled = |key: &str| NewEvent { retention: RetentionRule::Settled, ..keyed(bed.now(), key) };
    let kept =
        new_of(&bed.fire(&[NewEvent { deliveries: Vec::new(), ..keyed(bed.now(), "kept") }]).await[0]).0;
    bed.fire(&[settled("k"), settled("l")]).await;
    bed.settle_with(&["a"], &Outcome::Succeeded).await;
    let ids = bed.events_left().await;
    assert_eq!(bed.store.prune(&Prunable::Settled, &ids, 99).await.unwrap().events, 2);
    let again = bed.fire(&[settled("k"), settled("l"), keyed(bed.now(), "kept")]).await;
    new_of(&again[0]);
    new_of(&again[1]);
    assert_eq!(again[2], Recorded::Duplicate { of: kept });
}

pub(super) async fn pages_of_what_may_be_pruned_follow_each_other<S: Store>(bed: Bed<S>) {
    let at = bed.now();
    // Two of each moment, and later ids recorded earlier.
    let recorded =
        |n: u64, retention| NewEvent { retention, recorded_at: at - Duration::from_secs(n / 2), ..event(at) };
    let kinds = [
        (RetentionRule::Ordinary, Prunable::Window { seconds: None, until: at }),
        (RetentionRule::Seconds(60), Prunable::Window { seconds: Some(60), until: at }),
        (RetentionRule::Settled, Prunable::Settled),
        (RetentionRule::Succeeded, Prunable::Succeeded),
    ];
    for (retention, kind) in kinds {
        let events: Vec<_> = (0..25).map(|n| recorded(n, retention)).collect();
        let mut expected: Vec<PruneMark> = bed
            .fire(&events)
            .await
            .iter()
            .zip(&events)
            .map(|(one, event)| PruneMark { recorded_at: event.recorded_at, event: new_of(one).0 })
            .collect();
        if matches!(kind, Prunable::Window { .. }) {
            expected.sort_unstable();
        } else {
            expected.sort_unstable_by_key(|mark| mark.event);
        }
        let mut found = Vec::new();
        loop {
            let page = bed.store.prunable(&kind, found.last().copied(), 4).await.unwrap();
            assert!(page.len() <= 4);
            if page.is_empty() {
                break;
            }
            found.extend(page);
        }
        assert_eq!(found, expected, "{kind:?}");
        let ids: Vec<_> = found.iter().map(|mark| mark.event).collect();
        assert_eq!(bed.store.prune(&kind, &ids, 999).await.unwrap().events, 25);
    }
}

pub(super) async fn an_event_that_somebody_holds_is_passed_over_by_a_prune<S: Store>(bed: Bed<S>) {
    let consumed = NewEvent { retention: RetentionRule::Settled, ..event(bed.now()) };
    let recorded = bed.fire(&[consumed.clone(), consumed]).await;
    let ids: Vec<EventId> = recorded.iter().map(|one| new_of(one).0).collect();
    let tx = bed.store.begin().await.unwrap();
    bed.store.lock_events(&tx, &ids[..1]).await.unwrap();
    let pruning = bed.store.prune(&Prunable::Settled, &ids, 99);
    let pruned = tokio::time::timeout(Duration::from_secs(20), pruning).await.expect("it waits").unwrap();
    assert_eq!(pruned.events, 1);
    assert_eq!(bed.events_left().await, ids[..1]);
    bed.store.reopen(&tx, ids[0], &[owed_to("a", bed.now())]).await.unwrap();
    bed.store.commit(tx).await.unwrap();
    // What a replay added since the prune looked is owed: the event stays.
    assert_eq!(bed.store.prune(&Prunable::Settled, &ids, 99).await.unwrap().events, 0);
    assert_eq!(bed.claim("w", &["a"], 1).await.len(), 1);
}

pub(super) async fn a_backlog_is_counted_up_to_its_bound<S: Store>(bed: Bed<S>) {
    let now = bed.now();
    let at = |seconds: u64| now + Duration::from_secs(seconds);
    let rows = [("a", 0), ("a", 0), ("a", 0), ("a", 100), ("b", 50)];
    bed.fire(&rows.map(|(key, s)| NewEvent { deliveries: vec![owed_to(key, at(s))], ..event(now) })).await;
    bed.fire(&[owing(now, &["done"])]).await;
    bed.settle_with(&["done"], &Outcome::Succeeded).await;
    bed.claim("gone", &["a"], 1).await;
    bed.pass(LEASE);
    // `a`: one lapsed, one held, one waiting out its backoff, one scheduled.
    bed.claim("holder", &["a"], 1).await;
    let failing = bed.claim("w", &["a"], 1).await.remove(0);
    bed.store.settle_all(&[Settlement::new(failing.claim, failed(at(90)))], bed.now()).await.unwrap();
    let all = bed.store.backlog("a", bed.now(), 4).await.unwrap();
    assert_eq!((all.owed, all.scheduled, all.claimed, all.lapsed), (3, 1, 2, 1));
    assert_eq!((all.oldest_owed, all.bounded), (Some(now), false));
    assert!(bed.store.backlog("a", bed.now(), 3).await.unwrap().bounded);
    let scheduled = bed.store.backlog("b", bed.now(), 9).await.unwrap();
    assert_eq!((scheduled.owed, scheduled.scheduled, scheduled.oldest_owed), (0, 1, None));
    let due = bed.store.backlog("b", at(50), 9).await.unwrap();
    assert_eq!((due.owed, due.scheduled, due.oldest_owed), (1, 0, Some(at(50))));
    assert_eq!(bed.store.backlog("done", bed.now(), 9).await.unwrap(), Default::default());
}

pub(super) async fn dead_letters_are_counted_up_to_their_bound<S: Store>(bed: Bed<S>) {
    for _ in 0..3 {
        bed.owe(&["a", "b", "fine"]).await;
    }
    bed.settle_with(&["b"], &dead()).await;
    bed.settle_with(&["fine"], &Outcome::Succeeded).await;
    let claimed = bed.claim("w", &["a"], 1).await.remove(0);
    bed.store.settle_all(&[Settlement::new(claimed.claim, dead())], bed.now()).await.unwrap();
    let expected = vec![("a".to_owned(), 1), ("b".to_owned(), 3)];
    assert_eq!(bed.store.dead_letters(99).await.unwrap(), expected);
    let bounded = bed.store.dead_letters(2).await.unwrap();
    assert_eq!(bounded.iter().map(|(_, count)| count).sum::<u64>(), 2);
    let query = DeliveryQuery { statuses: vec![Status::Dead], ..DeliveryQuery::page(2) };
    let page = bed.store.deliveries(&query).await.unwrap();
    let next = DeliveryQuery { after: Some(page[1].id), ..DeliveryQuery { limit: 9, ..query } };
    assert_eq!(page.len() + bed.store.deliveries(&next).await.unwrap().len(), 4);
}

pub(super) async fn filters_of_deliveries_hold_together<S: Store>(bed: Bed<S>) {
    let now = bed.now();
    let correlation = uuid::Uuid::from_u128(99);
    let to = |key: &str, target: &str| NewDelivery { target: target.into(), ..owed_to(key, now) };
    bed.fire(&[
        NewEvent { deliveries: vec![to("a", "x"), to("a", "y"), to("b", "x")], ..event(now) },
        NewEvent {
            name: "other".into(),
            correlation_id: correlation,
            recorded_at: now + LEASE,
            deliveries: vec![to("a", "x"), to("c", "")],
            ..event(now)
        },
    ])
    .await;
    bed.settle_with(&["b"], &Outcome::Dead { error: "50% of Ünits_ refused".into(), counted: true }).await;
    let rows = bed.rows().await;
    let of = async |query: DeliveryQuery| -> Vec<usize> {
        let found = bed.store.deliveries(&DeliveryQuery { limit: 99, ..query.clone() }).await.unwrap();
        let tx = bed.store.begin().await.unwrap();
        let inside = bed.store.deliveries_in(&tx, &DeliveryQuery { limit: 99, ..query }).await.unwrap();
        bed.store.rollback(tx).await.unwrap();
        assert_eq!(found, inside);
        found.iter().map(|row| rows.iter().position(|one| one.id == row.id).unwrap()).collect()
    };
    let base = DeliveryQuery::default;
    let keys = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
    assert_eq!(of(DeliveryQuery { receivers: Some(keys(&["a", "c"])), ..base() }).await, [0, 1, 3, 4]);
    assert_eq!(of(DeliveryQuery { receivers: Some(vec![]), ..base() }).await, [0_usize; 0]);
    assert_eq!(of(DeliveryQuery { receivers_except: keys(&["a", "b"]), ..base() }).await, [4]);
    assert_eq!(of(DeliveryQuery { target: Some("x".into()), ..base() }).await, [0, 2, 3]);
    assert_eq!(of(DeliveryQuery { target: Some(String::new()), ..base() }).await, [4]);
    let both = vec![Status::Dead, Status::Pending];
    assert_eq!(of(DeliveryQuery { statuses: both, ..base() }).await, [0, 1, 2, 3, 4]);
    assert_eq!(of(DeliveryQuery { statuses: vec![Status::Dead], ..base() }).await, [2]);
    // Letter for letter: no pattern, no folding of case.
    for (text, found) in [("% of Ü", true), ("Ünits_", true), ("ünits", false), ("%", true), ("50_", false)]
    {
        let rows = of(DeliveryQuery { error: Some(text.into()), ..base() }).await;
        assert_eq!(rows, if found { vec![2] } else { vec![] }, "{text}");
    }
    let of_events = |of: EventQuery| DeliveryQuery { of, ..base() };
    let name = EventQuery { name: Some("other".into()), ..EventQuery::default() };
    assert_eq!(of(of_events(name)).await, [3, 4]);
    let related = EventQuery { correlation_id: Some(correlation), ..EventQuery::default() };
    let narrower = DeliveryQuery { receivers: Some(keys(&["c"])), ..of_events(related) };
    assert_eq!(of(narrower).await, [4]);
    let early = EventQuery { recorded_until: Some(now + LEASE), ..EventQuery::default() };
    assert_eq!(of(of_events(early)).await, [0, 1, 2], "the end of a range is not in it");
    let late = EventQuery { recorded_from: Some(now + LEASE), ..EventQuery::default() };
    assert_eq!(of(of_events(late.clone())).await, [3, 4]);
    assert_eq!(bed.store.events(&EventQuery { limit: 9, ..late }).await.unwrap().len(), 1);
    let ids = EventQuery { ids: Some(vec![rows[0].event_id]), ..EventQuery::default() };
    assert_eq!(of(of_events(ids)).await, [0, 1, 2]);
    let none = EventQuery { ids: Some(vec![]), ..EventQuery::default() };
    assert_eq!(of(of_events(none)).await, [0_usize; 0], "an empty list is no filter");
}

pub(super) async fn a_transaction_reads_what_it_has_written<S: Store>(bed: Bed<S>) {
    let tx = bed.store.begin().await.unwrap();
    let (id, rows) = new_of(&bed.store.record(&tx, &[owing(bed.now(), &["a"])]).await.unwrap()[0]);
    let events = bed.store.events_in(&tx, &EventQuery::page(9)).await.unwrap();
    assert_eq!(events.iter().map(|row| row.id).collect::<Vec<_>>(), [id]);
    bed.store.lock_events(&tx, &[id]).await.unwrap();
    assert_eq!(bed.store.cancel(&tx, &rows, bed.now()).await.unwrap(), Cancelled::new(1, 0));
    assert_eq!(bed.store.reopen(&tx, id, &[owed_to("a", bed.now())]).await.unwrap(), Reopened::new(1, 0));
    bed.store.commit(tx).await.unwrap();
    assert_eq!(bed.claim("w", &["a"], 9).await.len(), 1);
}

pub(super) async fn operations_that_meet_on_the_same_rows_never_deadlock_to_the_caller<S: Store>(
    bed: Bed<S>,
) {
    const EVENTS: usize = 24;
    let consumed = NewEvent { retention: RetentionRule::Settled, ..owing(bed.now(), &["a", "b"]) };
    let ids: Vec<EventId> = bed.fire(&vec![consumed; EVENTS]).await.iter().map(|one| new_of(one).0).collect();
    let operators = (0..4u64).map(|operator| {
        let (store, ids, now) = (bed.store.clone(), ids.clone(), bed.now());
        tokio::spawn(async move {
            for round in 0..12u64 {
                // A different stretch each time, and the wrong way round.
                let from = ((operator * 7 + round * 5) as usize) % EVENTS;
                let mut some: Vec<EventId> = ids.iter().cycle().skip(from).take(10).copied().collect();
                some.reverse();
                let query = DeliveryQuery {
                    of: EventQuery { ids: Some(some.clone()), ..EventQuery::default() },
                    ..DeliveryQuery::page(999)
                };
                let work = async || -> Result<(), StoreError> {
                    if (operator + round) % 4 == 3 {
                        return store.prune(&Prunable::Settled, &some, 7).await.map(|_| ());
                    }
                    let tx = store.begin().await?;
                    let there = store.lock_events(&tx, &some).await?;
                    let rows: Vec<_> =
                        store.deliveries_in(&tx, &query).await?.iter().rev().map(|row| row.id).collect();
                    match (operator + round) % 4 {
                        0 => drop(store.cancel(&tx, &rows, now).await?),
                        1 => drop(store.requeue(&tx, &rows, now).await?),
                        _ => {
                            for event in there {
                                store.reopen(&tx, event.id, &[owed_to("a", now), owed_to("b", now)]).await?;
                            }
                        }
                    }
                    store.commit(tx).await
                };
                work().await.unwrap();
            }
        })
    });
    let workers = (0..2).map(|worker| {
        let (store, request) = (bed.store.clone(), bed.request(&format!("w{worker}"), &["a", "b"], 9));
        tokio::spawn(async move {
            for round in 0..24 {
                let claimed = store.claim(&request).await.unwrap();
                let outcome = || if round % 3 == 0 { dead() } else { Outcome::Succeeded };
                let settlements: Vec<_> =
                    claimed.into_iter().map(|one| Settlement::new(one.claim, outcome())).collect();
                let settled = store.settle_all(&settlements, request.now).await.unwrap();
                assert!(settled.iter().all(|one| *one == Settled::Applied), "a claimed row was taken away");
            }
        })
    });
    for task in operators.chain(workers).collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let left = bed.events_left().await;
    assert!(bed.rows().await.iter().all(|row| left.contains(&row.event_id)), "a delivery without its event");
}
