//! Delivering one row, step by step.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use owed::state::Bounded;
use owed::{
    Codec, DeliveryContext, DeliveryFailure, Event, Failure, Receiver, Status, Store, Tx, Value, limits,
    testing,
};
use serde::{Deserialize, Serialize};

use crate::bed::{Bed, Noted, Placed, Seen, failing, noted, on_every_store, place, settings, start};

on_every_store!(
    a_success_is_recorded_with_its_attempt_and_its_time,
    a_failure_waits_and_its_error_is_kept_with_its_sources,
    a_delivery_is_dead_once_its_budget_is_spent,
    a_failure_that_waits_is_not_delivered_before_its_time,
    a_permanent_failure_is_dead_at_once,
    retry_after_moves_the_next_attempt_and_counts,
    a_deferral_counts_nothing_and_sets_its_lane_aside,
    not_yet_moves_the_row_without_an_attempt,
    a_panic_is_a_failed_attempt,
    a_handler_past_its_timeout_has_failed,
    an_error_text_is_made_storable,
    a_payload_that_does_not_decode_is_dead_at_once_and_the_hook_is_not_called,
    an_older_payload_is_upgraded,
    an_upgrade_that_fails_is_dead_with_what_it_said,
    both_codecs_are_read_from_one_table,
    the_handlers_transaction_commits_with_its_acknowledgement,
    a_failed_handlers_transaction_is_undone_before_its_failure_is_recorded,
    a_handler_that_lost_its_row_has_its_work_undone,
    the_failure_hook_is_told_after_the_record_and_can_do_no_harm,
    a_context_tells_about_the_delivery,
    an_eager_delivery_is_attempted_by_the_process_that_fired,
    an_eager_delivery_that_fails_is_left_to_the_relay,
    an_unknown_receivers_rows_are_left_for_the_grace_period_and_then_orphaned,
    a_delivery_whose_claim_lapsed_is_taken_by_another,
    a_delivery_that_takes_its_process_down_again_and_again_is_buried,
    a_pass_delivers_its_lanes_and_its_limit_alone,
    a_pass_told_a_time_ahead_delivers_a_postponed_row_once,
);

async fn a_success_is_recorded_with_its_attempt_and_its_time<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run(async |_: Placed| Ok::<(), Failure>(())))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    bed.pass(Duration::from_secs(3));
    let delivered = testing::drain(&outbox).await;
    assert_eq!((delivered.succeeded, delivered.total()), (1, 1));
    let row = bed.delivery().await;
    let then = Some(start() + Duration::from_secs(3));
    assert_eq!((row.status, row.attempts, row.available_at), (Status::Succeeded, 1, None));
    assert_eq!((row.completed_at, row.succeeded_at, row.last_error), (then, then, None));
    assert_eq!((row.claimed_by, row.claimed_at), (None, None));
    assert_eq!(testing::drain(&outbox).await.total(), 0, "delivered twice");
}

#[derive(Debug)]
struct Outer(std::io::Error);
impl std::fmt::Display for Outer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the mail was not sent")
    }
}
impl std::error::Error for Outer {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

async fn a_failure_waits_and_its_error_is_kept_with_its_sources<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(failing(|| Outer(std::io::Error::other("connection refused")).into()))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    let delivered = outbox.deliver_pending().await.unwrap();
    assert_eq!((delivered.failed, delivered.total()), (1, 1));
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts), (Status::Failed, 1));
    assert_eq!(row.last_error.as_deref(), Some("the mail was not sent: connection refused"));
    assert_eq!((row.completed_at, row.claimed_by), (None, None));
    let waits = row.available_at.unwrap() - start();
    assert!(waits >= chrono::TimeDelta::zero() && waits <= chrono::TimeDelta::seconds(2), "{waits}");
}

async fn a_delivery_is_dead_once_its_budget_is_spent<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().receiver(failing(|| "no".into())).build().unwrap();
    place(&outbox, 1).await;
    let delivered = testing::drain(&outbox).await;
    assert_eq!((delivered.failed, delivered.dead), (4, 1));
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.available_at), (Status::Dead, 5, None));
    assert_eq!((row.completed_at, row.succeeded_at), (Some(start()), None));
    assert_eq!(row.last_error.as_deref(), Some("no"));
}

async fn a_failure_that_waits_is_not_delivered_before_its_time<S: Store>(bed: Bed<S>) {
    let outbox =
        bed.outbox().receiver(failing(|| Failure::retry_after(Duration::from_secs(60)))).build().unwrap();
    place(&outbox, 1).await;
    assert_eq!(outbox.deliver_pending().await.unwrap().failed, 1);
    bed.pass(Duration::from_secs(60) - Duration::from_micros(1));
    assert_eq!(outbox.deliver_pending().await.unwrap().total(), 0);
    bed.pass(Duration::from_micros(1));
    assert_eq!(outbox.deliver_pending().await.unwrap().failed, 1);
}

async fn a_permanent_failure_is_dead_at_once<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().receiver(failing(|| Failure::permanent("410 Gone"))).build().unwrap();
    place(&outbox, 1).await;
    assert_eq!(testing::drain(&outbox).await.dead, 1);
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.last_error.as_deref()), (Status::Dead, 1, Some("410 Gone")));
}

async fn retry_after_moves_the_next_attempt_and_counts<S: Store>(bed: Bed<S>) {
    let hours = |n| Duration::from_secs(n * 3_600);
    let asked = Arc::new(AtomicU32::new(1));
    let outbox = bed
        .outbox()
        .receiver(failing({
            let asked = asked.clone();
            move || Failure::retry_after(hours(u64::from(asked.load(Ordering::SeqCst)))).because("busy")
        }))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    let row = bed.delivery().await;
    assert_eq!((row.attempts, row.available_at), (1, Some(start() + hours(1))));
    assert_eq!(row.last_error.as_deref(), Some("busy"));
    bed.pass(hours(1));
    asked.store(100, Ordering::SeqCst);
    outbox.deliver_pending().await.unwrap();
    assert_eq!(bed.delivery().await.available_at, Some(start() + hours(1) + hours(24)), "cut to the longest");
}

async fn a_deferral_counts_nothing_and_sets_its_lane_aside<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(
            Receiver::on::<Placed>("test.throttled")
                .durable()
                .lane("slow")
                .give_up_after(Duration::from_secs(600))
                .run({
                    let seen = seen.clone();
                    move |_: Placed, context: DeliveryContext| {
                        seen.see(context.attempt);
                        async { Err::<(), Failure<Bounded>>(Failure::defer(Duration::from_secs(60))) }
                    }
                }),
        )
        .receiver(Receiver::on::<Placed>("test.b").durable().run(async |_: Placed| Ok::<(), Failure>(())))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    let delivered = outbox.deliver_pending().await.unwrap();
    assert_eq!((delivered.succeeded, delivered.failed), (1, 1), "the other lane goes on");
    let row = &bed.deliveries().await[0];
    assert_eq!((row.status, row.attempts), (Status::Failed, 0));
    let waits = row.available_at.unwrap() - start();
    assert!((60..=120).contains(&waits.num_seconds()), "{waits}");
    bed.pass(Duration::from_secs(600));
    assert_eq!(outbox.deliver_pending().await.unwrap().dead, 1);
    let row = &bed.deliveries().await[0];
    assert_eq!((row.status, row.attempts), (Status::Dead, 0));
    assert!(row.last_error.as_ref().unwrap().contains("600s"), "{row:?}");
    assert_eq!(seen.all(), [1, 1], "a deferral spent an attempt");
}

async fn not_yet_moves_the_row_without_an_attempt<S: Store>(bed: Bed<S>) {
    let moved = start() + Duration::from_secs(72 * 3_600);
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.expire").durable().due(Duration::from_secs(60)).run({
            let seen = seen.clone();
            move |_: Placed, context: DeliveryContext| {
                let early = context.due_at.unwrap() < moved;
                seen.see((context.due_at.unwrap(), context.attempt));
                async move { if early { Err(Failure::not_yet(moved)) } else { Ok(()) } }
            }
        }))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    bed.pass(Duration::from_secs(60));
    let delivered = testing::drain(&outbox).await;
    assert_eq!((delivered.postponed, delivered.total()), (1, 1));
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.last_error), (Status::Pending, 0, None));
    assert_eq!((row.available_at, row.due_at), (Some(moved), moved));
    bed.clock.set(moved);
    assert_eq!(testing::drain(&outbox).await.succeeded, 1);
    assert_eq!(seen.all(), [(start() + Duration::from_secs(60), 1), (moved, 1)]);
}

async fn a_panic_is_a_failed_attempt<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.a").durable().max_attempts(1).run(
            async |event: Placed, tx: Tx<S>| {
                tx.fire(Noted { of: event.n }).await?;
                if event.n > 0 {
                    panic!("out of cheese");
                }
                Ok::<(), Failure>(())
            },
        ))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    assert_eq!(testing::drain(&outbox).await.dead, 1);
    assert_eq!(bed.delivery().await.last_error.as_deref(), Some("it panicked: out of cheese"));
    assert!(noted(&outbox).await.is_empty());
}

async fn a_handler_past_its_timeout_has_failed<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(
            Receiver::on::<Placed>("test.a")
                .durable()
                .max_attempts(1)
                .timeout(Duration::from_millis(30))
                .run(async |_: Placed| std::future::pending::<Result<(), Failure>>().await),
        )
        .build()
        .unwrap();
    place(&outbox, 1).await;
    assert_eq!(testing::drain(&outbox).await.dead, 1);
    let error = bed.delivery().await.last_error.unwrap();
    assert!(error.contains("timeout of 30ms"), "{error}");
}

async fn an_error_text_is_made_storable<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(failing(|| Failure::permanent(format!("a\0b{}", "𝔘".repeat(5_000)))))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    assert_eq!(testing::drain(&outbox).await.dead, 1);
    let error = bed.delivery().await.last_error.unwrap();
    assert_eq!(error.chars().count(), limits::ERROR);
    assert!(error.starts_with("a\u{FFFD}b𝔘"), "{}", &error[..20]);
}

/// What `test.Placed` was before it had a number.
#[derive(Serialize, Deserialize, Event)]
#[event(name = "test.Placed")]
struct PlacedOnce {
    number: String,
}

async fn place_once<S: Store>(bed: &Bed<S>) {
    // Another process, of another release: the row has no receiver yet.
    let outbox = bed
        .outbox()
        .receiver(
            Receiver::on::<PlacedOnce>("test.a").durable().run(async |_: PlacedOnce| Ok::<(), Failure>(())),
        )
        .build()
        .unwrap();
    outbox.transaction(async |tx| tx.fire(PlacedOnce { number: "secret".into() }).await).await.unwrap();
}

async fn a_payload_that_does_not_decode_is_dead_at_once_and_the_hook_is_not_called<S: Store>(bed: Bed<S>) {
    place_once(&bed).await;
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(
            Receiver::on::<Placed>("test.a")
                .durable()
                .on_failure({
                    let seen = seen.clone();
                    move |failure: DeliveryFailure| {
                        seen.see(failure.attempt);
                        async {}
                    }
                })
                .run(async |_: Placed| Ok::<(), Failure>(())),
        )
        .build()
        .unwrap();
    assert_eq!(testing::drain(&outbox).await.dead, 1);
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts), (Status::Dead, 1));
    let error = row.last_error.unwrap();
    assert!(error.contains("test.Placed version 1") && !error.contains("secret"), "{error}");
    assert_eq!(seen.count(), 0);
}

#[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(name = "test.Placed", version = 2, upgrade = upgrade)]
struct PlacedUpgraded {
    n: i64,
}

fn upgrade(from: i32, payload: Value) -> Result<Value, String> {
    assert_eq!(from, 1);
    let fields = payload.into_map().map_err(|_| "no map".to_owned())?;
    let number =
        fields.into_iter().find_map(|(key, value)| (key.as_text() == Some("number")).then_some(value));
    match number.as_ref().and_then(Value::as_text) {
        Some("secret") => Ok(Value::Map(vec![(Value::from("n"), Value::from(42))])),
        _ => Err("nobody knows that number".into()),
    }
}

fn upgraded<S: Store>(seen: &Seen<i64>) -> owed::Declared<S> {
    let seen = seen.clone();
    Receiver::on::<PlacedUpgraded>("test.a").durable().run(move |event: PlacedUpgraded| {
        seen.see(event.n);
        async { Ok::<(), Failure>(()) }
    })
}

async fn an_older_payload_is_upgraded<S: Store>(bed: Bed<S>) {
    place_once(&bed).await;
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(upgraded(&seen)).build().unwrap();
    outbox.transaction(async |tx| tx.fire(PlacedUpgraded { n: 1 }).await).await.unwrap();
    assert_eq!(testing::drain(&outbox).await.succeeded, 2);
    assert_eq!(seen.all(), [42, 1]);
}

async fn an_upgrade_that_fails_is_dead_with_what_it_said<S: Store>(bed: Bed<S>) {
    let older = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run(async |_: Placed| Ok::<(), Failure>(())))
        .build()
        .unwrap();
    place(&older, 1).await;
    let outbox = bed.outbox().receiver(upgraded(&Seen::default())).build().unwrap();
    assert_eq!(testing::drain(&outbox).await.dead, 1);
    let error = bed.delivery().await.last_error.unwrap();
    assert_eq!(error, "test.Placed could not be upgraded from version 1 to 2: nobody knows that number");
}

async fn both_codecs_are_read_from_one_table<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = |codec| {
        let mut settings = settings();
        settings.codec = codec;
        let seen = seen.clone();
        bed.outbox()
            .settings(settings)
            .receiver(Receiver::on::<Placed>("test.a").durable().run(move |event: Placed| {
                seen.see(event.n);
                async { Ok::<(), Failure>(()) }
            }))
            .build()
            .unwrap()
    };
    place(&outbox(Codec::Json), 1).await;
    place(&outbox(Codec::Cbor), 2).await;
    assert_eq!(testing::drain(&outbox(Codec::Cbor)).await.succeeded, 2);
    let mut numbers = seen.all();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2]);
    let codecs: Vec<String> = bed.events().await.into_iter().map(|event| event.codec).collect();
    assert_eq!(codecs, ["json", "cbor"]);
}

async fn the_handlers_transaction_commits_with_its_acknowledgement<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.a").durable().run(async |event: Placed, tx: Tx<S>| {
            tx.fire(Noted { of: event.n }).await?;
            Ok::<(), Failure>(())
        }))
        .build()
        .unwrap();
    for n in 0..3 {
        place(&outbox, n).await;
    }
    assert_eq!(testing::drain(&outbox).await.succeeded, 3);
    assert_eq!(noted(&outbox).await, [0, 1, 2]);
    assert!(bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded && row.attempts == 1));
}

async fn a_failed_handlers_transaction_is_undone_before_its_failure_is_recorded<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.a").durable().run(
            async |event: Placed, context: DeliveryContext, tx: Tx<S>| {
                tx.fire(Noted { of: event.n }).await?;
                if context.attempt < 3 { Err(Failure::from("not yet")) } else { Ok(()) }
            },
        ))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    let delivered = testing::drain(&outbox).await;
    assert_eq!((delivered.failed, delivered.succeeded), (2, 1));
    assert_eq!(noted(&outbox).await, [1], "work of a failed attempt was kept");
    assert_eq!(bed.delivery().await.attempts, 3);
}

async fn a_handler_that_lost_its_row_has_its_work_undone<S: Store>(bed: Bed<S>) {
    let (clock, first) = (bed.clock.clone(), Arc::new(AtomicBool::new(true)));
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            move |event: Placed| {
                // Stands still for longer than its lease, the first time.
                if first.swap(false, Ordering::SeqCst) {
                    clock.advance(Duration::from_secs(31));
                }
                let _ = event;
                async { Ok::<(), Failure>(()) }
            }
        }))
        .receiver(Receiver::on::<Noted>("test.b").durable().run({
            let (clock, store) = (bed.clock.clone(), bed.store.clone());
            move |_: Noted, context: DeliveryContext, tx: Tx<S>| {
                let (clock, store) = (clock.clone(), store.clone());
                async move {
                    clock.advance(Duration::from_secs(31));
                    // Somebody else finds the lapsed lease and takes the row.
                    let receivers = vec![owed_lease("test.b")];
                    let request = owed_request("other", receivers, 1, store.now());
                    assert_eq!(store.claim(&request).await?.len(), 1);
                    tx.fire(Placed { n: 77 }).await?;
                    let _ = context;
                    Ok::<(), Failure>(())
                }
            }
        }))
        .build()
        .unwrap();
    // On a store with one writer, claiming inside an open transaction would wait for itself.
    if bed.store.capabilities().database.starts_with("SQLite") {
        return lost_between_statements(bed, outbox).await;
    }
    outbox.transaction(async |tx| tx.fire(Noted { of: 1 }).await).await.unwrap();
    let delivered = outbox.deliver_pending().lanes(["default"]).await.unwrap();
    assert_eq!((delivered.lost, delivered.succeeded), (1, 0));
    assert!(testing::fired::<Placed, S>(&outbox).await.is_empty(), "the loser's work was kept");
    let row = bed.delivery().await;
    assert_eq!((row.status, row.claimed_by.as_deref()), (Status::Claimed, Some("other")));
    assert_eq!((row.attempts, row.lapses), (0, 1));
}

/// The same where one connection writes: the row is taken before the handler asks for its transaction.
async fn lost_between_statements<S: Store>(bed: Bed<S>, outbox: owed::Outbox<S>) {
    place(&outbox, 1).await;
    let delivered = outbox.deliver_pending().await.unwrap();
    assert_eq!(delivered.succeeded, 1, "nobody took it meanwhile, so its late outcome still counts");
    assert_eq!(bed.delivery().await.attempts, 1);
}

fn owed_lease(key: &str) -> owed::store::ReceiverLease {
    owed::store::ReceiverLease { key: key.into(), lease: Duration::from_secs(30) }
}

fn owed_request(
    worker: &str,
    receivers: Vec<owed::store::ReceiverLease>,
    limit: u32,
    now: owed::Timestamp,
) -> owed::store::ClaimRequest {
    owed::store::ClaimRequest::new(worker.into(), receivers, limit, now)
}

async fn the_failure_hook_is_told_after_the_record_and_can_do_no_harm<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(
            Receiver::on::<Placed>("test.a")
                .durable()
                .max_attempts(2)
                .on_failure({
                    let (seen, store) = (seen.clone(), bed.store.clone());
                    move |failure: DeliveryFailure| {
                        let (seen, store) = (seen.clone(), store.clone());
                        async move {
                            let query = owed::DeliveryQuery {
                                ids: Some(vec![failure.delivery_id]),
                                ..owed::DeliveryQuery::page(1)
                            };
                            let row = store.deliveries(&query).await.unwrap().remove(0);
                            let recorded = row.attempts.unsigned_abs() >= failure.attempt;
                            seen.see((failure.attempt, failure.status, recorded, failure.error));
                            panic!("a hook that fails");
                        }
                    }
                })
                .run(async |_: Placed| Err::<(), Failure>("no".into())),
        )
        .build()
        .unwrap();
    place(&outbox, 1).await;
    let delivered = testing::drain(&outbox).await;
    assert_eq!((delivered.failed, delivered.dead), (1, 1));
    let mut told = seen.all();
    told.sort_unstable_by_key(|told| told.0);
    assert_eq!(told.len(), 2);
    assert_eq!((told[0].0, told[0].1, &*told[0].3), (1, Status::Failed, "no"));
    assert_eq!((told[1].0, told[1].1), (2, Status::Dead));
    assert!(told.iter().all(|told| told.2), "told before it was recorded");
}

async fn a_context_tells_about_the_delivery<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().max_attempts(4).run({
            let seen = seen.clone();
            move |_: Placed, context: DeliveryContext| {
                seen.see(context);
                async { Err::<(), Failure>("no".into()) }
            }
        }))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    testing::drain(&outbox).await;
    let (event, row) = (bed.events().await.remove(0), bed.delivery().await);
    let told = seen.all();
    assert_eq!(told.iter().map(|context| context.attempt).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let context = &told[0];
    assert_eq!(
        (&*context.receiver, context.event_id, &*context.event_name),
        ("test.a", event.id, "test.Placed")
    );
    assert_eq!((context.delivery_id, context.due_at, context.max_attempts), (Some(row.id), Some(start()), 4));
    assert_eq!((context.correlation_id, context.causation_id), (event.correlation_id, None));
    assert_eq!((context.occurred_at, context.recorded_at), (start(), start()));
}

fn eager<S: Store>(seen: &Seen<i64>, end: fn() -> Result<(), Failure>) -> owed::Declared<S> {
    let seen = seen.clone();
    Receiver::on::<Placed>("test.eager").durable().eager().run(move |event: Placed| {
        seen.see(event.n);
        async move { end() }
    })
}

async fn an_eager_delivery_is_attempted_by_the_process_that_fired<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(eager(&seen, || Ok(())))
        .receiver(Receiver::on::<Placed>("test.other").durable().run(async |_: Placed| Ok::<(), Failure>(())))
        .build()
        .unwrap();
    let tx = outbox.begin().await.unwrap();
    tx.fire(Placed { n: 0 }).await.unwrap();
    tx.rollback().await.unwrap();
    place(&outbox, 1).await;
    outbox.idle().await;
    assert_eq!(seen.all(), [1]);
    let statuses: Vec<Status> = bed.deliveries().await.into_iter().map(|row| row.status).collect();
    assert_eq!(statuses, [Status::Succeeded, Status::Pending], "another receiver's row was touched");
}

async fn an_eager_delivery_that_fails_is_left_to_the_relay<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(eager(&seen, || Err("no".into()))).build().unwrap();
    place(&outbox, 1).await;
    outbox.idle().await;
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts), (Status::Failed, 1));
    let delivered = testing::drain(&outbox).await;
    assert_eq!((delivered.failed, delivered.dead), (3, 1));
}

async fn an_unknown_receivers_rows_are_left_for_the_grace_period_and_then_orphaned<S: Store>(bed: Bed<S>) {
    let newer = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.new").durable().run(async |_: Placed| Ok::<(), Failure>(())))
        .build()
        .unwrap();
    place(&newer, 1).await;
    let older = bed.outbox().build().unwrap();
    bed.pass(Duration::from_secs(3_600) - Duration::from_micros(1));
    assert_eq!(testing::drain(&older).await.total(), 0);
    assert_eq!(bed.delivery().await.status, Status::Pending, "left as it was for whoever knows it");
    bed.pass(Duration::from_micros(1));
    assert_eq!(testing::drain(&older).await.orphaned, 1);
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.available_at), (Status::Orphaned, 0, None));
    let error = row.last_error.unwrap();
    assert!(error.contains("test.new") && error.contains("2026-03-01 12:00:00"), "{error}");
}

async fn a_delivery_whose_claim_lapsed_is_taken_by_another<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run(async |_: Placed| Ok::<(), Failure>(())))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    // A worker that claims, and is never heard of again.
    let request = owed_request("gone", vec![owed_lease("test.a")], 9, bed.store.now());
    assert_eq!(bed.store.claim(&request).await.unwrap().len(), 1);
    assert_eq!(testing::drain(&outbox).await.total(), 0);
    bed.pass(Duration::from_secs(30));
    assert_eq!(testing::drain(&outbox).await.succeeded, 1);
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.lapses), (Status::Succeeded, 1, 0));
}

async fn a_delivery_that_takes_its_process_down_again_and_again_is_buried<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run(async |_: Placed| {
            // What a process that dies in the middle leaves behind: a claim and nothing else.
            std::future::pending::<Result<(), Failure>>().await
        }))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    for lapses in [0, 2, 3, 4, 5, 6] {
        let pass = async { outbox.deliver_pending().await };
        assert!(tokio::time::timeout(Duration::from_millis(100), pass).await.is_err());
        assert_eq!(bed.delivery().await.lapses, lapses);
        bed.pass(Duration::from_secs(31));
    }
    assert_eq!(outbox.deliver_pending().await.unwrap().dead, 1);
    let error = bed.delivery().await.last_error.unwrap();
    assert!(error.contains("6 times in a row") && error.contains("limit is 5"), "{error}");
}

async fn a_pass_delivers_its_lanes_and_its_limit_alone<S: Store>(bed: Bed<S>) {
    let receiver = |key: &str, lane: &str| {
        Receiver::on::<Placed>(key).durable().lane(lane).run(async |_: Placed| Ok::<(), Failure>(()))
    };
    let outbox = bed
        .outbox()
        .receiver(receiver("test.mail", "mail"))
        .receiver(receiver("test.other", "default"))
        .build()
        .unwrap();
    for n in 0..5 {
        place(&outbox, n).await;
    }
    assert_eq!(outbox.deliver_pending().lanes(["mail"]).limit(3).await.unwrap().succeeded, 3);
    let rows = bed.deliveries().await;
    let done = |key: &str| {
        rows.iter().filter(|row| row.receiver_key == key && row.status == Status::Succeeded).count()
    };
    assert_eq!((done("test.mail"), done("test.other")), (3, 0));
    assert!(outbox.deliver_pending().lanes(["nobody"]).await.unwrap_err().to_string().contains("nobody"));
    assert_eq!(outbox.deliver_pending().concurrency(4).await.unwrap().succeeded, 7);
}

async fn a_pass_told_a_time_ahead_delivers_a_postponed_row_once<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let seen = seen.clone();
            move |event: Placed| {
                seen.see(event.n);
                async { Err::<(), Failure>(Failure::not_yet(start() + Duration::from_secs(60))) }
            }
        }))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    let delivered = outbox.deliver_pending().at(start() + Duration::from_secs(3_600)).await.unwrap();
    assert_eq!((delivered.postponed, seen.count()), (1, 1));
}
