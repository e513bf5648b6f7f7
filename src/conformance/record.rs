//! Recording, keys, limits, and reading back.

use std::time::Duration;

use owed_core::{
    Codec, DeliveryId, DeliveryQuery, EventId, EventQuery, NewDelivery, NewEvent, Recorded, RetentionRule,
    Status, Store, limits,
};
use uuid::Uuid;

use super::{Bed, event, keyed, new_of, owed_to, owing, still_waits};

pub(super) async fn an_event_comes_back_as_it_was_written<S: Store>(bed: Bed<S>) {
    let cause = new_of(&bed.fire(&[event(bed.now())]).await[0]).0;
    let full = NewEvent {
        name: "a.Näme".into(),
        version: i32::MAX,
        codec: Codec::Json,
        payload: (0..=255).collect(),
        dedupe_key: Some("schlüssel".into()),
        occurred_at: bed.now() - Duration::from_secs(1),
        actor_key: "user-1".into(),
        actor_label: "Zoë 𝔘".into(),
        scope: Some(vec![0xa0]),
        correlation_id: Uuid::from_u128(u128::MAX - 5),
        causation_id: Some(cause),
        suppressed: Some("import".into()),
        retention: RetentionRule::Seconds(i64::from(i32::MAX) * 10),
        trace_context: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into()),
        ..event(bed.now())
    };
    let (id, _) = new_of(&bed.fire(std::slice::from_ref(&full)).await[0]);
    let query = EventQuery { ids: Some(vec![id]), ..EventQuery::page(9) };
    let row = bed.store.events(&query).await.unwrap().remove(0);
    assert_eq!((row.id, &*row.name, row.version, &*row.codec), (id, "a.Näme", i32::MAX, "json"));
    assert_eq!((&row.payload, &row.dedupe_key, &row.scope), (&full.payload, &full.dedupe_key, &full.scope));
    assert_eq!((row.occurred_at, row.recorded_at), (full.occurred_at, full.recorded_at));
    assert_eq!((&row.actor_key, &row.actor_label), (&full.actor_key, &full.actor_label));
    assert_eq!((row.correlation_id, row.causation_id), (full.correlation_id, Some(cause)));
    assert_eq!((&row.suppressed, row.retention), (&full.suppressed, full.retention));
    assert_eq!(row.trace_context, full.trace_context);
    let plain =
        bed.store.events(&EventQuery { ids: Some(vec![cause]), ..EventQuery::page(9) }).await.unwrap();
    let plain = &plain[0];
    assert_eq!((&plain.dedupe_key, &plain.scope, plain.causation_id), (&None, &None, None));
    assert_eq!(
        (&plain.suppressed, plain.retention, &plain.trace_context),
        (&None, RetentionRule::Ordinary, &None)
    );
}

pub(super) async fn ids_are_answered_in_the_order_of_what_was_given<S: Store>(bed: Bed<S>) {
    let events: Vec<NewEvent> = (0..1_000)
        .map(|n| NewEvent {
            name: format!("n{n}").into(),
            deliveries: (0..n % 3)
                .map(|m| NewDelivery { target: format!("{n}-{m}"), ..owed_to("a", bed.now()) })
                .collect(),
            ..event(bed.now())
        })
        .collect();
    let recorded = bed.fire(&events).await;
    assert_eq!(recorded.len(), events.len());
    let rows = bed.rows().await;
    for (n, recorded) in recorded.iter().enumerate() {
        let (id, deliveries) = new_of(recorded);
        assert_eq!(deliveries.len(), n % 3);
        for (m, delivery) in deliveries.iter().enumerate() {
            let row = rows.iter().find(|row| row.id == *delivery).unwrap();
            assert_eq!((row.event_id, &*row.target), (id, &*format!("{n}-{m}")));
        }
    }
    let page = bed.store.events(&EventQuery::page(2_000)).await.unwrap();
    for recorded in recorded.iter().enumerate() {
        let (id, _) = new_of(recorded.1);
        assert_eq!(page.iter().find(|row| row.id == id).unwrap().name, format!("n{}", recorded.0));
    }
}

pub(super) async fn a_fan_out_of_thousands_is_written_whole<S: Store>(bed: Bed<S>) {
    let targets =
        (0..5_000).map(|n| NewDelivery { target: format!("endpoint-{n}"), ..owed_to("a", bed.now()) });
    let fan_out = NewEvent { deliveries: targets.collect(), ..event(bed.now()) };
    let (id, deliveries) = new_of(&bed.fire(&[fan_out]).await[0]);
    let rows = bed.rows().await;
    assert_eq!((deliveries.len(), rows.len()), (5_000, 5_000));
    for (n, delivery) in deliveries.iter().enumerate() {
        let row = rows.iter().find(|row| row.id == *delivery).unwrap();
        assert_eq!(
            (row.event_id, &*row.target, row.status),
            (id, &*format!("endpoint-{n}"), Status::Pending)
        );
    }
}

pub(super) async fn an_empty_batch_is_nothing<S: Store>(bed: Bed<S>) {
    assert!(bed.fire(&[]).await.is_empty());
    assert!(bed.store.settle_all(&[], bed.now()).await.unwrap().is_empty());
    assert!(bed.store.renew(&[], bed.now()).await.unwrap().is_empty());
    assert_eq!(bed.store.release(&[], bed.now()).await.unwrap(), 0);
    assert_eq!(bed.store.expedite(&[], bed.now()).await.unwrap(), 0);
    bed.owe(&["a"]).await;
    assert!(bed.claim("w", &[], 5).await.is_empty());
    assert!(bed.claim("w", &["a"], 0).await.is_empty());
}

pub(super) async fn a_duplicate_names_the_earlier_event_and_writes_nothing<S: Store>(bed: Bed<S>) {
    let (first, _) = new_of(&bed.fire(&[keyed(bed.now(), "k")]).await[0]);
    let tx = bed.store.begin().await.unwrap();
    let recorded = bed
        .store
        .record(&tx, &[keyed(bed.now(), "k"), keyed(bed.now(), "l"), owing(bed.now(), &["b"])])
        .await
        .unwrap();
    assert_eq!(recorded[0], Recorded::Duplicate { of: first });
    let (second, deliveries) = new_of(&recorded[1]);
    assert_eq!(deliveries.len(), 1);
    assert_eq!(new_of(&recorded[2]).1.len(), 1);
    let again = bed.store.record(&tx, &[keyed(bed.now(), "l")]).await.unwrap();
    assert_eq!(again[0], Recorded::Duplicate { of: second }, "written earlier in this transaction");
    bed.store.record(&tx, &[owing(bed.now(), &["c"])]).await.unwrap();
    bed.store.commit(tx).await.unwrap();
    let keys: Vec<String> = bed.rows().await.into_iter().map(|row| row.receiver_key).collect();
    assert_eq!(keys, ["a", "a", "b", "c"]);
}

pub(super) async fn a_duplicate_within_a_batch_names_the_first_of_it<S: Store>(bed: Bed<S>) {
    let batch =
        [keyed(bed.now(), "k"), keyed(bed.now(), "k"), owing(bed.now(), &["b"]), keyed(bed.now(), "k")];
    let recorded = bed.fire(&batch).await;
    let (first, _) = new_of(&recorded[0]);
    assert_eq!(recorded[1], Recorded::Duplicate { of: first });
    new_of(&recorded[2]);
    assert_eq!(recorded[3], Recorded::Duplicate { of: first });
    assert_eq!(bed.rows().await.len(), 2);
}

pub(super) async fn a_key_undone_by_a_savepoint_is_free_again<S: Store>(bed: Bed<S>) {
    let tx = bed.store.begin().await.unwrap();
    let savepoint = bed.store.savepoint(&tx).await.unwrap();
    new_of(&bed.store.record(&savepoint, &[keyed(bed.now(), "k")]).await.unwrap()[0]);
    bed.store.rollback(savepoint).await.unwrap();
    new_of(&bed.store.record(&tx, &[keyed(bed.now(), "k")]).await.unwrap()[0]);
    bed.store.commit(tx).await.unwrap();
    assert_eq!(bed.rows().await.len(), 1);
}

pub(super) async fn a_key_that_another_transaction_has_written_is_waited_for<S: Store>(bed: Bed<S>) {
    let (first, second) = (bed.store.begin().await.unwrap(), bed.store.begin().await.unwrap());
    let (id, _) = new_of(&bed.store.record(&first, &[keyed(bed.now(), "k")]).await.unwrap()[0]);
    let again = [keyed(bed.now(), "k")];
    let mut waiting = bed.store.record(&second, &again);
    still_waits(&mut waiting).await;
    bed.store.commit(first).await.unwrap();
    assert_eq!(waiting.await.unwrap()[0], Recorded::Duplicate { of: id });
    new_of(&bed.store.record(&second, &[owing(bed.now(), &["b"])]).await.unwrap()[0]);
    bed.store.commit(second).await.unwrap();
    assert_eq!(bed.rows().await.len(), 2);
}

pub(super) async fn a_key_whose_writer_rolls_back_is_free<S: Store>(bed: Bed<S>) {
    let (first, second) = (bed.store.begin().await.unwrap(), bed.store.begin().await.unwrap());
    bed.store.record(&first, &[keyed(bed.now(), "k")]).await.unwrap();
    let again = [keyed(bed.now(), "k")];
    let mut waiting = bed.store.record(&second, &again);
    still_waits(&mut waiting).await;
    bed.store.rollback(first).await.unwrap();
    new_of(&waiting.await.unwrap()[0]);
    bed.store.commit(second).await.unwrap();
    assert_eq!(bed.rows().await.len(), 1);
}

pub(super) async fn keys_are_compared_by_their_bytes<S: Store>(bed: Bed<S>) {
    let keys = ["a", "A", "ä", "a\u{308}", "a ", " a", "ａ", "ß", "ss", "a\t", "𝔘", "'; --", "%", "_"];
    for key in keys {
        new_of(&bed.fire(&[NewEvent { dedupe_key: Some(key.into()), ..owing(bed.now(), &[key]) }]).await[0]);
    }
    for key in keys {
        let claimed = bed.claim("w", &[key], 99).await;
        assert_eq!(claimed.len(), 1, "{key:?}");
        assert_eq!(claimed[0].delivery.receiver_key, key);
        let query = DeliveryQuery { receivers: Some(vec![key.into()]), ..DeliveryQuery::page(9) };
        assert_eq!(bed.store.deliveries(&query).await.unwrap().len(), 1, "{key:?}");
    }
    let mut sorted: Vec<&str> = keys.to_vec();
    sorted.sort_unstable();
    assert_eq!(bed.store.owed_receivers().await.unwrap(), sorted);
    let targets = keys
        .iter()
        .map(|key| NewDelivery { target: (*key).into(), ..owed_to("fan-out", bed.now()) })
        .collect();
    bed.fire(&[NewEvent { deliveries: targets, ..event(bed.now()) }]).await;
}

pub(super) async fn texts_at_their_limits_are_kept<S: Store>(bed: Bed<S>) {
    let wide = "𝔘".repeat(limits::TEXT);
    let target = "𝔘".repeat(limits::TARGET);
    let widest = NewEvent {
        name: wide.as_str().into(),
        dedupe_key: Some(wide.clone()),
        actor_key: wide.clone(),
        actor_label: wide.clone(),
        suppressed: Some(wide.clone()),
        scope: Some(vec![7; limits::SCOPE]),
        deliveries: vec![NewDelivery { target: target.clone(), ..owed_to(&wide, bed.now()) }],
        ..event(bed.now())
    };
    bed.fire(&[widest]).await;
    let claimed = bed.claim(&wide, &[&wide], 1).await.remove(0);
    let event = claimed.event.unwrap();
    assert_eq!((&event.name, event.dedupe_key.as_ref()), (&wide, Some(&wide)));
    assert_eq!(
        (&event.actor_key, &event.actor_label, event.suppressed.as_ref()),
        (&wide, &wide, Some(&wide))
    );
    assert_eq!(event.scope.as_ref().map(Vec::len), Some(limits::SCOPE));
    assert_eq!((&claimed.delivery.target, &claimed.delivery.receiver_key), (&target, &wide));
    assert_eq!(claimed.delivery.claimed_by.as_ref(), Some(&wide));
}

pub(super) async fn a_large_payload_is_kept<S: Store>(bed: Bed<S>) {
    let payload: Vec<u8> = (0..limits::PAYLOAD).map(|n| (n % 251) as u8).collect();
    let large = NewEvent { payload: payload.clone(), ..owing(bed.now(), &["a"]) };
    bed.fire(&[large.clone(), event(bed.now()), large]).await;
    let claimed = bed.claim("w", &["a"], 2).await;
    assert_eq!(claimed.len(), 2);
    assert!(claimed.iter().all(|claimed| claimed.event.as_ref().unwrap().payload == payload));
}

pub(super) async fn times_are_kept_to_the_microsecond<S: Store>(bed: Bed<S>) {
    for at in [
        "1000-01-01T00:00:00Z",
        "1969-12-31T23:59:59.999999Z",
        "2026-03-29T01:30:00.000001Z",
        "9999-12-31T23:59:59.999999Z",
    ] {
        let at = at.parse().unwrap();
        let timed = NewEvent {
            occurred_at: at,
            deliveries: vec![NewDelivery { due_at: at, available_at: at, ..owed_to("a", at) }],
            ..event(bed.now())
        };
        let (id, deliveries) = new_of(&bed.fire(&[timed]).await[0]);
        let events =
            bed.store.events(&EventQuery { ids: Some(vec![id]), ..EventQuery::page(1) }).await.unwrap();
        let row = bed.row(deliveries[0]).await;
        assert_eq!((events[0].occurred_at, row.due_at, row.available_at), (at, at, Some(at)));
    }
}

pub(super) async fn pages_follow_each_other_and_filters_hold<S: Store>(bed: Bed<S>) {
    let correlation = |n: usize| Uuid::from_u128(n as u128 % 3);
    let events: Vec<NewEvent> = (0..25)
        .map(|n| NewEvent {
            name: ["even", "odd"][n % 2].into(),
            correlation_id: correlation(n),
            ..owing(bed.now(), &[["x", "y"][n % 2]])
        })
        .collect();
    let recorded = bed.fire(&events).await;
    let mut found = Vec::new();
    let mut after = None;
    loop {
        let page = bed.store.events(&EventQuery { after, ..EventQuery::page(10) }).await.unwrap();
        assert!(page.len() <= 10);
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        found.extend(page.into_iter().map(|row| row.id));
    }
    let mut ids: Vec<EventId> = recorded.iter().map(|one| new_of(one).0).collect();
    ids.sort_unstable();
    assert_eq!(found, ids);
    let named = EventQuery { name: Some("odd".into()), ..EventQuery::page(99) };
    assert_eq!(bed.store.events(&named).await.unwrap().len(), 12);
    let both = EventQuery { correlation_id: Some(correlation(0)), ..named };
    assert_eq!(bed.store.events(&both).await.unwrap().len(), 4);
    let none = EventQuery { ids: Some(vec![]), ..EventQuery::page(9) };
    assert!(bed.store.events(&none).await.unwrap().is_empty(), "an empty list is no filter");

    let rows = bed.rows().await;
    let page = DeliveryQuery { after: Some(rows[9].id), ..DeliveryQuery::page(5) };
    assert_eq!(bed.store.deliveries(&page).await.unwrap(), rows[10..15]);
    let store = &bed.store;
    let of = |query: DeliveryQuery| async move { store.deliveries(&query).await.unwrap() };
    let all = || DeliveryQuery::page(99);
    assert_eq!(of(DeliveryQuery { receivers: Some(vec!["x".into()]), ..all() }).await.len(), 13);
    assert_eq!(
        of(DeliveryQuery {
            of: EventQuery { ids: Some(vec![rows[3].event_id]), ..EventQuery::default() },
            ..all()
        })
        .await,
        rows[3..4]
    );
    assert_eq!(of(DeliveryQuery { statuses: vec![Status::Dead], ..all() }).await.len(), 0);
    assert_eq!(of(DeliveryQuery { statuses: vec![Status::Pending], ..all() }).await.len(), 25);
    let some = DeliveryQuery { ids: Some(vec![rows[7].id, rows[2].id, rows[7].id]), ..all() };
    assert_eq!(of(some).await, [rows[2].clone(), rows[7].clone()]);
    assert!(of(DeliveryQuery { ids: Some(vec![]), ..all() }).await.is_empty());
    let many = (0..5_000).map(DeliveryId).chain(rows.iter().map(|row| row.id)).collect();
    assert_eq!(of(DeliveryQuery { ids: Some(many), ..all() }).await.len(), 25);
}

pub(super) async fn ids_past_two_to_the_thirty_first_can_be_asked_for<S: Store>(bed: Bed<S>) {
    bed.owe(&["a"]).await;
    for far in [i64::from(i32::MAX) + 1, i64::from(u32::MAX) + 1, i64::MAX] {
        let events = EventQuery {
            ids: Some(vec![EventId(far)]),
            after: Some(EventId(far - 1)),
            ..EventQuery::page(1)
        };
        assert!(bed.store.events(&events).await.unwrap().is_empty());
        let rows = DeliveryQuery { after: Some(DeliveryId(far)), ..DeliveryQuery::page(1) };
        assert!(bed.store.deliveries(&rows).await.unwrap().is_empty());
        let caused = NewEvent { causation_id: Some(EventId(far)), ..event(bed.now()) };
        let (id, _) = new_of(&bed.fire(&[caused]).await[0]);
        let row = bed.store.events(&EventQuery { ids: Some(vec![id]), ..EventQuery::page(1) }).await.unwrap();
        assert_eq!(row[0].causation_id, Some(EventId(far)));
    }
}
