//! Firing, step by step.

use std::time::Duration;

use owed::{
    AnyEvent, DeliveryContext, Error, Event, Failure, Fired, Receiver, Refusal, Status, Store, Tx, limits,
    testing,
};
use serde::{Deserialize, Serialize};

use crate::bed::{Bed, Noted, Placed, Seen, noted, on_every_store, place, start};

on_every_store!(
    an_event_and_what_it_owes_are_there_once_the_transaction_commits,
    nothing_is_there_after_a_rollback_or_a_dropped_transaction,
    an_event_that_nobody_declared_is_refused_with_the_way_out,
    a_duplicate_names_the_earlier_event_and_leaves_the_transaction_usable,
    a_dedupe_key_is_refused_over_its_limit_before_anything_is_written,
    a_payload_over_its_limit_is_refused_and_one_at_the_limit_is_not,
    a_time_that_a_database_cannot_store_is_refused,
    many_events_are_fired_at_once_in_order,
    nothing_is_no_event,
    occurred_at_is_kept_and_defaults_to_now,
    inline_receivers_work_in_the_firing_transaction,
    an_inline_refusal_that_is_swallowed_still_rolls_everything_back,
    an_inline_refusal_in_a_savepoint_leaves_the_rest_usable,
    inline_receivers_that_fire_in_a_circle_are_stopped,
    a_fire_that_is_dropped_halfway_cannot_be_committed,
    on_commit_receivers_run_after_the_commit_each_on_its_own,
    on_commit_receivers_of_undone_work_never_run,
    a_savepoint_that_is_released_counts_and_one_that_is_dropped_does_not,
    a_savepoint_that_is_dropped_on_its_way_leaves_all_or_nothing,
    a_joined_transaction_commits_with_the_services_own,
    a_joined_transaction_that_is_not_closed_leaves_nothing,
    what_a_receiver_fires_descends_from_its_event,
    targets_make_one_delivery_each_without_doubles,
    an_empty_target_refuses_the_fire,
    a_due_receiver_is_owed_from_its_time_and_never_before_now,
    an_event_keeps_how_long_it_is_kept,
    a_handler_that_keeps_its_transaction_is_found_out,
    a_wildcard_receiver_is_owed_every_event,
    a_commit_that_is_dropped_goes_on,
);

async fn nothing(_: Placed) -> Result<(), Failure> {
    Ok(())
}

async fn an_event_and_what_it_owes_are_there_once_the_transaction_commits<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().max_attempts(7).run(nothing))
        .receiver(Receiver::on::<Placed>("test.b").durable().run(nothing))
        .build()
        .unwrap();
    let tx = outbox.begin().await.unwrap();
    let fired = tx.fire(Placed { n: 1 }).await.unwrap();
    assert!(bed.events().await.is_empty(), "uncommitted, and seen by others");
    tx.commit().await.unwrap();
    let events = bed.events().await;
    assert_eq!(events.len(), 1);
    assert_eq!((Some(events[0].id), &*events[0].name), (fired.id(), "test.Placed"));
    assert_eq!((events[0].recorded_at, events[0].occurred_at, events[0].version), (start(), start(), 1));
    let rows = bed.deliveries().await;
    assert_eq!(rows.len(), 2);
    assert_eq!((&*rows[0].receiver_key, rows[0].max_attempts), ("test.a", 7));
    assert_eq!((&*rows[1].receiver_key, rows[1].max_attempts), ("test.b", 5));
    for row in rows {
        assert_eq!((row.status, row.attempts, row.available_at), (Status::Pending, 0, Some(start())));
        assert_eq!((row.event_id, row.due_at), (events[0].id, start()));
    }
}

async fn nothing_is_there_after_a_rollback_or_a_dropped_transaction<S: Store>(bed: Bed<S>) {
    let outbox =
        bed.outbox().receiver(Receiver::on::<Placed>("test.a").durable().run(nothing)).build().unwrap();
    let tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    tx.rollback().await.unwrap();
    let tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 2 }).await.unwrap();
    drop(tx);
    let failed: Result<(), Error> = outbox
        .transaction(async |tx| {
            tx.fire(Placed { n: 3 }).await?;
            Err(Error::Relay { why: "the service changed its mind".into() })
        })
        .await;
    assert!(failed.is_err());
    place(&outbox, 4).await;
    assert_eq!(testing::fired::<Placed, S>(&outbox).await, [Placed { n: 4 }]);
    assert_eq!(bed.deliveries().await.len(), 1);
}

async fn an_event_that_nobody_declared_is_refused_with_the_way_out<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Noted>().build().unwrap();
    let tx = outbox.begin().await.unwrap();
    let error = tx.fire(Placed { n: 1 }).await.unwrap_err().to_string();
    assert!(error.contains("test.Placed") && error.contains(".event::<"), "{error}");
    tx.fire(Noted { of: 1 }).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(noted(&outbox).await, [1]);
}

async fn a_duplicate_names_the_earlier_event_and_leaves_the_transaction_usable<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.inline").inline().run({
            let seen = seen.clone();
            move |event: Placed| {
                seen.see(event.n);
                async { Ok::<(), Refusal>(()) }
            }
        }))
        .receiver(Receiver::on::<Placed>("test.a").durable().run(nothing))
        .build()
        .unwrap();
    let first = outbox.transaction(async |tx| tx.fire(Placed { n: 1 }).dedupe_key("k").await).await.unwrap();
    let tx = outbox.begin().await.unwrap();
    let again = tx.fire(Placed { n: 2 }).dedupe_key("k").await.unwrap();
    assert_eq!(again, Fired::Duplicate { of: first.id().unwrap() });
    assert!(again.is_duplicate() && again.id().is_none());
    let third = tx.fire(Placed { n: 3 }).dedupe_key("l").await.unwrap();
    assert_eq!(
        tx.fire(Placed { n: 4 }).dedupe_key("l").await.unwrap(),
        Fired::Duplicate { of: third.id().unwrap() }
    );
    tx.commit().await.unwrap();
    assert_eq!(testing::fired::<Placed, S>(&outbox).await, [Placed { n: 1 }, Placed { n: 3 }]);
    assert_eq!(bed.deliveries().await.len(), 2);
    assert_eq!(seen.all(), [1, 3], "a duplicate ran an inline receiver");
}

async fn a_dedupe_key_is_refused_over_its_limit_before_anything_is_written<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Placed>().build().unwrap();
    let tx = outbox.begin().await.unwrap();
    let longest = "𝔘".repeat(limits::TEXT);
    let error = tx.fire(Placed { n: 1 }).dedupe_key(format!("{longest}x")).await.unwrap_err().to_string();
    assert_eq!(error, "the dedupe key is 256 characters long, and the limit is 255");
    let error = tx.fire(Placed { n: 1 }).dedupe_key("").await.unwrap_err().to_string();
    assert_eq!(error, "the dedupe key is empty");
    let error = tx.fire(Placed { n: 1 }).dedupe_key("private\0").await.unwrap_err().to_string();
    assert!(error.contains("NUL") && !error.contains("private"), "{error}");
    tx.fire(Placed { n: 2 }).dedupe_key(longest.clone()).await.unwrap();
    tx.commit().await.unwrap();
    let events = bed.events().await;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].dedupe_key.as_ref(), Some(&longest));
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
struct Blob {
    text: String,
}

async fn a_payload_over_its_limit_is_refused_and_one_at_the_limit_is_not<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Blob>().build().unwrap();
    let tx = outbox.begin().await.unwrap();
    // In CBOR: a map of one, a key of four letters, and the head of a long text.
    let around = 1 + 5 + 5;
    let error =
        tx.fire(Blob { text: "x".repeat(limits::PAYLOAD - around + 1) }).await.unwrap_err().to_string();
    assert_eq!(error, "the event's payload is 10485761 bytes long, and the limit is 10485760");
    let blob = Blob { text: "x".repeat(limits::PAYLOAD - around) };
    tx.fire(blob.clone()).await.unwrap();
    tx.commit().await.unwrap();
    assert!(testing::fired::<Blob, S>(&outbox).await == [blob]);
}

async fn a_time_that_a_database_cannot_store_is_refused<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Placed>().build().unwrap();
    let tx = outbox.begin().await.unwrap();
    let far = "+12026-01-01T00:00:00Z".parse().unwrap();
    let error = tx.fire(Placed { n: 1 }).occurred_at(far).await.unwrap_err().to_string();
    assert!(error.contains("12026") && error.contains("9999"), "{error}");
    for at in ["1000-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"] {
        tx.fire(Placed { n: 1 }).occurred_at(at.parse().unwrap()).await.unwrap();
    }
    tx.commit().await.unwrap();
    let kept: Vec<String> = bed.events().await.iter().map(|event| event.occurred_at.to_rfc3339()).collect();
    assert_eq!(kept, ["1000-01-01T00:00:00+00:00", "9999-12-31T23:59:59.999999+00:00"]);
}

async fn many_events_are_fired_at_once_in_order<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run(nothing))
        .receiver(Receiver::on::<Placed>("test.b").durable().run(nothing))
        .build()
        .unwrap();
    let fired =
        outbox.transaction(async |tx| tx.fire_all((0..1_000).map(|n| Placed { n })).await).await.unwrap();
    assert_eq!(fired.len(), 1_000);
    let events = bed.events().await;
    assert_eq!(events.iter().map(|event| Fired::Recorded(event.id)).collect::<Vec<_>>(), fired);
    let numbers: Vec<i64> =
        testing::fired::<Placed, S>(&outbox).await.into_iter().map(|event| event.n).collect();
    assert_eq!(numbers, (0..1_000).collect::<Vec<_>>());
    let rows = bed.deliveries().await;
    assert_eq!(rows.len(), 2_000);
    for event in &events[..10] {
        let owed: Vec<_> = rows.iter().filter(|row| row.event_id == event.id).collect();
        assert_eq!(owed.len(), 2);
    }
}

async fn nothing_is_no_event<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Placed>().build().unwrap();
    let fired = outbox.transaction(async |tx| tx.fire_all(Vec::<Placed>::new()).await).await.unwrap();
    assert!(fired.is_empty() && bed.events().await.is_empty());
}

async fn occurred_at_is_kept_and_defaults_to_now<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Placed>().build().unwrap();
    bed.pass(Duration::from_micros(1_500_000));
    let before = start() - Duration::from_secs(86_400);
    outbox
        .transaction(async |tx| {
            tx.fire(Placed { n: 1 }).occurred_at(before).await?;
            tx.fire(Placed { n: 2 }).await
        })
        .await
        .unwrap();
    let events = bed.events().await;
    let now = start() + Duration::from_micros(1_500_000);
    assert_eq!((events[0].occurred_at, events[0].recorded_at), (before, now));
    assert_eq!((events[1].occurred_at, events[1].recorded_at), (now, now));
}

fn inline_notes<S: Store>() -> owed::Declared<S> {
    Receiver::on::<Placed>("test.inline").inline().run(
        async |event: Placed, _: DeliveryContext, tx: Tx<S>| {
            tx.fire(Noted { of: event.n }).await?;
            if event.n < 0 { Err(Refusal::from("no such thing in stock")) } else { Ok(()) }
        },
    )
}

async fn inline_receivers_work_in_the_firing_transaction<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Noted>().receiver(inline_notes()).build().unwrap();
    let tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    tx.rollback().await.unwrap();
    assert!(noted(&outbox).await.is_empty());
    place(&outbox, 2).await;
    assert_eq!(noted(&outbox).await, [2]);
}

async fn an_inline_refusal_that_is_swallowed_still_rolls_everything_back<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Noted>().receiver(inline_notes()).build().unwrap();
    let tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    let refused = tx.fire(Placed { n: -1 }).await.unwrap_err();
    assert!(matches!(&refused, Error::Inline { receiver, .. } if receiver == "test.inline"), "{refused}");
    let source = std::error::Error::source(&refused).expect("what it failed with");
    assert_eq!(source.to_string(), "no such thing in stock");
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(&error, Error::Poisoned { because } if because.contains("test.inline")), "{error}");
    assert!(bed.events().await.is_empty());
}

async fn an_inline_refusal_in_a_savepoint_leaves_the_rest_usable<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Noted>().receiver(inline_notes()).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    let savepoint = tx.savepoint().await.unwrap();
    assert!(savepoint.fire(Placed { n: -1 }).await.is_err());
    assert!(matches!(savepoint.release().await.unwrap_err(), Error::Poisoned { .. }));
    tx.fire(Placed { n: 2 }).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(noted(&outbox).await, [1, 2]);
}

async fn inline_receivers_that_fire_in_a_circle_are_stopped<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.circle").inline().run(async |event: Placed, tx: Tx<S>| {
            tx.fire(Placed { n: event.n + 1 }).await?;
            Ok::<(), Refusal>(())
        }))
        .build()
        .unwrap();
    let tx = outbox.begin().await.unwrap();
    let error = tx.fire(Placed { n: 0 }).await.unwrap_err();
    let mut said = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        said = error.to_string();
        source = error.source();
    }
    assert!(said.contains("circle") && said.contains("32"), "{said}");
    assert!(tx.commit().await.is_err());
    assert!(bed.events().await.is_empty());
}

async fn a_fire_that_is_dropped_halfway_cannot_be_committed<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.never").inline().run(async |event: Placed, tx: Tx<S>| {
            tx.fire(Noted { of: event.n }).await?;
            std::future::pending::<Result<(), Refusal>>().await
        }))
        .build()
        .unwrap();
    let tx = outbox.begin().await.unwrap();
    let fire = async { tx.fire(Placed { n: 1 }).await };
    assert!(tokio::time::timeout(Duration::from_millis(50), fire).await.is_err());
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, Error::Poisoned { .. } | Error::StillShared), "{error}");
    assert!(bed.events().await.is_empty());
    outbox.transaction(async |tx| tx.fire(Noted { of: 2 }).await).await.unwrap();
    assert_eq!(noted(&outbox).await, [2]);
}

fn on_commit<S: Store>(
    key: &str,
    seen: &Seen<String>,
    end: fn() -> Result<(), Refusal>,
) -> owed::Declared<S> {
    let (seen, key) = (seen.clone(), key.to_owned());
    Receiver::on::<Placed>(key.clone()).on_commit().run(move |event: Placed| {
        seen.see(format!("{key} {}", event.n));
        async move { end() }
    })
}

async fn on_commit_receivers_run_after_the_commit_each_on_its_own<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(on_commit("fails", &seen, || Err("no".into())))
        .receiver(on_commit("panics", &seen, || panic!("on purpose")))
        .receiver(on_commit("works", &seen, || Ok(())))
        .build()
        .unwrap();
    let tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    assert_eq!(seen.count(), 0, "before the commit");
    tx.commit().await.unwrap();
    assert_eq!(seen.all(), ["fails 1", "panics 1", "works 1"]);
    assert_eq!(bed.events().await.len(), 1);
}

async fn on_commit_receivers_of_undone_work_never_run<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(on_commit("works", &seen, || Ok(()))).build().unwrap();
    let tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    tx.rollback().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let savepoint = tx.savepoint().await.unwrap();
    savepoint.fire(Placed { n: 2 }).await.unwrap();
    savepoint.rollback().await.unwrap();
    let savepoint = tx.savepoint().await.unwrap();
    savepoint.fire(Placed { n: 3 }).await.unwrap();
    drop(savepoint);
    tx.commit().await.unwrap();
    assert_eq!(seen.count(), 0);
}

async fn a_savepoint_that_is_released_counts_and_one_that_is_dropped_does_not<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(on_commit("works", &seen, || Ok(())))
        .receiver(Receiver::on::<Placed>("test.a").durable().run(nothing))
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    let mut outer = tx.savepoint().await.unwrap();
    outer.fire(Placed { n: 2 }).await.unwrap();
    let inner = outer.savepoint().await.unwrap();
    inner.fire(Placed { n: 3 }).await.unwrap();
    drop(inner);
    let inner = outer.savepoint().await.unwrap();
    inner.fire(Placed { n: 4 }).await.unwrap();
    inner.release().await.unwrap();
    outer.release().await.unwrap();
    tx.commit().await.unwrap();
    let numbers: Vec<i64> =
        testing::fired::<Placed, S>(&outbox).await.into_iter().map(|event| event.n).collect();
    assert_eq!(numbers, [1, 2, 4]);
    assert_eq!(bed.deliveries().await.len(), 3);
    assert_eq!(seen.all(), ["works 1", "works 2", "works 4"]);
}

async fn a_savepoint_that_is_dropped_on_its_way_leaves_all_or_nothing<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Placed>().build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    let mut opening = Box::pin(tx.savepoint());
    let on_its_way = futures_poll_once(opening.as_mut()).await.is_pending();
    drop(opening);
    let after = tx.fire(Placed { n: 2 }).await;
    match tx.commit().await {
        Ok(()) => {
            assert!(!on_its_way && after.is_ok());
            assert_eq!(bed.events().await.len(), 2);
        }
        Err(error) => {
            assert!(
                on_its_way && matches!(&error, Error::Poisoned { because } if because.contains("savepoint")),
                "{error}"
            );
            assert!(bed.events().await.is_empty());
        }
    }
}

async fn a_joined_transaction_commits_with_the_services_own<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(on_commit("works", &seen, || Ok(()))).build().unwrap();
    let services = bed.store.begin().await.unwrap();
    let joined = outbox.join(&services).await.unwrap();
    joined.fire(Placed { n: 1 }).await.unwrap();
    let after = joined.close().await.unwrap();
    assert!(bed.events().await.is_empty() && seen.count() == 0);
    bed.store.commit(services).await.unwrap();
    after.committed().await;
    assert_eq!(bed.events().await.len(), 1);
    assert_eq!(seen.all(), ["works 1"]);

    let services = bed.store.begin().await.unwrap();
    let joined = outbox.join(&services).await.unwrap();
    joined.fire(Placed { n: 2 }).await.unwrap();
    let after = joined.close().await.unwrap();
    bed.store.rollback(services).await.unwrap();
    after.rolled_back();
    assert_eq!((bed.events().await.len(), seen.count()), (1, 1));
}

async fn a_joined_transaction_that_is_not_closed_leaves_nothing<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Noted>().receiver(inline_notes()).build().unwrap();
    let services = bed.store.begin().await.unwrap();
    let joined = outbox.join(&services).await.unwrap();
    joined.fire(Placed { n: 1 }).await.unwrap();
    drop(joined);
    let joined = outbox.join(&services).await.unwrap();
    assert!(joined.fire(Placed { n: -1 }).await.is_err());
    assert!(matches!(joined.close().await.unwrap_err(), Error::Poisoned { .. }));
    bed.store.commit(services).await.unwrap();
    assert!(bed.events().await.is_empty());
}

async fn what_a_receiver_fires_descends_from_its_event<S: Store>(bed: Bed<S>) {
    async fn note<S: Store>(event: Placed, tx: Tx<S>) -> Result<(), Failure> {
        tx.fire(Noted { of: event.n }).await?;
        Ok(())
    }
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(inline_notes())
        .receiver(Receiver::on::<Placed>("test.durable").durable().run(note::<S>))
        .receiver(Receiver::on::<Placed>("test.on_commit").on_commit().run(
            async |event: Placed, context: DeliveryContext, tx: Tx<S>| {
                assert_eq!(&*context.receiver, "test.on_commit");
                tx.fire(Noted { of: event.n }).await?;
                Ok::<(), Refusal>(())
            },
        ))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    place(&outbox, 2).await;
    testing::drain(&outbox).await;
    let events = bed.events().await;
    let placed: Vec<_> = events.iter().filter(|event| event.name == "test.Placed").collect();
    let notes: Vec<_> = events.iter().filter(|event| event.name == "test.Noted").collect();
    assert_eq!((placed.len(), notes.len()), (2, 6));
    assert_ne!(placed[0].correlation_id, placed[1].correlation_id);
    for parent in placed {
        assert_eq!(parent.causation_id, None);
        let children: Vec<_> = notes.iter().filter(|note| note.causation_id == Some(parent.id)).collect();
        assert_eq!(children.len(), 3, "inline, on commit and durable");
        assert!(children.iter().all(|child| child.correlation_id == parent.correlation_id));
    }
}

async fn targets_make_one_delivery_each_without_doubles<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(
            Receiver::on::<Placed>("test.hooks")
                .durable()
                .targets(|event, context| {
                    assert_eq!((&*context.receiver, &*context.event_name), ("test.hooks", "test.Placed"));
                    let long = "x".repeat(limits::TARGET);
                    if event.n == 0 {
                        vec![]
                    } else {
                        vec!["b".into(), "a".into(), "b".into(), "A".into(), long]
                    }
                })
                .run({
                    let seen = seen.clone();
                    move |_: Placed, context: DeliveryContext| {
                        seen.see(context.target);
                        async { Ok::<(), Failure>(()) }
                    }
                }),
        )
        .build()
        .unwrap();
    place(&outbox, 0).await;
    assert!(bed.deliveries().await.is_empty(), "no target, and a delivery");
    place(&outbox, 1).await;
    let targets: Vec<String> = bed.deliveries().await.into_iter().map(|row| row.target).collect();
    assert_eq!(targets, ["b", "a", "A", &"x".repeat(limits::TARGET)]);
    testing::drain(&outbox).await;
    assert_eq!(seen.count(), 4);
}

async fn an_empty_target_refuses_the_fire<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(
            Receiver::on::<Placed>("test.hooks")
                .durable()
                .targets(|event, _| vec!["private".into(), "x".repeat(usize::try_from(event.n).unwrap())])
                .run(nothing),
        )
        .build()
        .unwrap();
    let tx = outbox.begin().await.unwrap();
    let error = tx.fire(Placed { n: 0 }).await.unwrap_err().to_string();
    assert!(
        error.contains("test.hooks") && error.contains("target 2 of 2") && error.contains("empty"),
        "{error}"
    );
    let error = tx.fire(Placed { n: 2_001 }).await.unwrap_err().to_string();
    assert!(error.contains("2001") && error.contains("2000") && !error.contains("xx"), "{error}");
    tx.fire(Placed { n: 1 }).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(bed.deliveries().await.len(), 2);
}

async fn a_due_receiver_is_owed_from_its_time_and_never_before_now<S: Store>(bed: Bed<S>) {
    let hour = Duration::from_secs(3_600);
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.after").durable().due(hour).run({
            let seen = seen.clone();
            move |event: Placed, context: DeliveryContext| {
                seen.see((event.n, context.due_at.unwrap()));
                async { Ok::<(), Failure>(()) }
            }
        }))
        .receiver(
            Receiver::on::<Placed>("test.at")
                .durable()
                .due_at(|event| start() + Duration::from_secs(u64::try_from(event.n).unwrap()))
                .run(nothing),
        )
        .build()
        .unwrap();
    outbox
        .transaction(async |tx| {
            tx.fire(Placed { n: 60 }).await?;
            tx.fire(Placed { n: 0 }).occurred_at(start() - 2 * hour).await
        })
        .await
        .unwrap();
    let due: Vec<_> = bed
        .deliveries()
        .await
        .into_iter()
        .map(|row| {
            assert_eq!(row.available_at, Some(row.due_at));
            (row.receiver_key, row.due_at - start())
        })
        .collect();
    let seconds = |n| chrono::TimeDelta::seconds(n);
    assert_eq!(due[0], ("test.after".into(), seconds(3_600)));
    assert_eq!(due[1], ("test.at".into(), seconds(60)));
    assert_eq!(due[2], ("test.after".into(), seconds(0)), "past, so at once");
    assert_eq!(due[3], ("test.at".into(), seconds(0)));
    assert_eq!(testing::drain(&outbox).await.succeeded, 2);
    bed.pass(hour - Duration::from_micros(1));
    assert_eq!(testing::drain(&outbox).await.succeeded, 1);
    bed.pass(Duration::from_micros(1));
    assert_eq!(testing::drain(&outbox).await.succeeded, 1);
    assert_eq!(seen.all(), [(0, start()), (60, start() + hour)]);
}

async fn an_event_keeps_how_long_it_is_kept<S: Store>(bed: Bed<S>) {
    #[derive(Serialize, Deserialize, Event)]
    #[event(name = "test.Kept", retention = days(2))]
    struct Kept {}
    #[derive(Serialize, Deserialize, Event)]
    #[event(name = "test.Consumed", retention = succeeded)]
    struct Consumed {}
    #[derive(Serialize, Deserialize, Event)]
    #[event(name = "test.Settled", retention = settled)]
    struct Settled {}
    let outbox = bed
        .outbox()
        .event::<Kept>()
        .event::<Consumed>()
        .event::<Settled>()
        .event::<Placed>()
        .build()
        .unwrap();
    outbox
        .transaction(async |tx| {
            tx.fire(Kept {}).await?;
            tx.fire(Consumed {}).await?;
            tx.fire(Settled {}).await?;
            tx.fire(Placed { n: 1 }).await
        })
        .await
        .unwrap();
    let rules: Vec<_> = bed.events().await.into_iter().map(|event| event.retention.columns()).collect();
    assert_eq!(
        rules,
        [(Some(172_800), None), (None, Some("succeeded")), (None, Some("settled")), (None, None)]
    );
}

async fn a_handler_that_keeps_its_transaction_is_found_out<S: Store>(bed: Bed<S>) {
    let kept: std::sync::Arc<std::sync::Mutex<Option<Tx<S>>>> = std::sync::Arc::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.keeps").inline().run({
            let kept = kept.clone();
            move |_: Placed, tx: Tx<S>| {
                *kept.lock().unwrap() = Some(tx);
                async { Ok::<(), Refusal>(()) }
            }
        }))
        .build()
        .unwrap();
    let tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 1 }).await.unwrap();
    assert!(matches!(tx.commit().await.unwrap_err(), Error::StillShared));
    kept.lock().unwrap().take();
    assert!(bed.events().await.is_empty());
}

async fn a_wildcard_receiver_is_owed_every_event<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .event::<Placed>()
        .event::<Noted>()
        .receiver(Receiver::on::<AnyEvent>("test.any").durable().run({
            let seen = seen.clone();
            move |event: AnyEvent| {
                seen.see((event.name().to_owned(), event.to_json().unwrap().to_string()));
                let wrong = event.decode::<Noted>().is_err();
                assert_eq!(wrong, event.name() != "test.Noted");
                async { Ok::<(), Failure>(()) }
            }
        }))
        .build()
        .unwrap();
    outbox
        .transaction(async |tx| {
            tx.fire(Placed { n: 1 }).await?;
            tx.fire(Noted { of: 2 }).await
        })
        .await
        .unwrap();
    assert_eq!(testing::drain(&outbox).await.succeeded, 2);
    assert_eq!(
        seen.all(),
        [("test.Placed".into(), r#"{"n":1}"#.into()), ("test.Noted".into(), r#"{"of":2}"#.into())]
    );
}

async fn a_commit_that_is_dropped_goes_on<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(on_commit("works", &seen, || Ok(()))).build().unwrap();
    for n in 0..5 {
        let tx = outbox.begin().await.unwrap();
        tx.fire(Placed { n }).await.unwrap();
        let mut committing = Box::pin(tx.commit());
        // Polled once, which begins it, and dropped.
        let _ = futures_poll_once(committing.as_mut()).await;
        drop(committing);
    }
    crate::bed::until("every commit to end", || async { seen.count() == 5 }).await;
    assert_eq!(bed.events().await.len(), 5);
}

async fn futures_poll_once<F: Future + Unpin>(mut future: F) -> std::task::Poll<F::Output> {
    std::future::poll_fn(|context| std::task::Poll::Ready(std::pin::Pin::new(&mut future).poll(context)))
        .await
}
