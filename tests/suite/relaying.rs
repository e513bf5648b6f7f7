//! The relay: what it does in its own time.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use owed::{DeliveryContext, Failure, Receiver, Status, Store, Tx};
use tokio::sync::Semaphore;

use crate::bed::{Bed, Noted, Placed, Seen, noted, on_every_store, place, settings, start, until};

on_every_store!(
    a_relay_delivers_what_was_owed_before_and_what_is_fired_while_it_runs,
    a_relay_is_woken_without_waiting_for_its_poll,
    a_relay_works_a_backlog_off_without_waiting_for_its_poll,
    a_relay_runs_as_many_handlers_at_once_as_it_may,
    a_relay_that_stops_finishes_what_runs_and_hands_the_rest_back,
    two_relays_deliver_everything_once,
    a_busy_receiver_does_not_keep_another_waiting,
    a_handler_that_blocks_its_thread_keeps_its_lease,
    a_handler_without_a_transaction_holds_no_connection,
    a_relay_refuses_what_it_cannot_serve,
    a_deferral_pauses_its_lane_and_hands_its_rows_back,
    a_dropped_relay_leaves_its_rows_to_their_leases,
    rows_that_lapsed_are_run_one_at_a_time,
    lanes_have_their_own_concurrency_and_batch,
    the_last_event_of_a_burst_is_not_late,
);

fn counting<S: Store>(seen: &Seen<i64>) -> owed::Declared<S> {
    let seen = seen.clone();
    Receiver::on::<Placed>("test.a").durable().run(move |event: Placed| {
        seen.see(event.n);
        async { Ok::<(), Failure>(()) }
    })
}

async fn a_relay_delivers_what_was_owed_before_and_what_is_fired_while_it_runs<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(counting(&seen)).build().unwrap();
    place(&outbox, 1).await;
    let relay = outbox.relay().spawn().unwrap();
    until("the first delivery", || async { seen.count() == 1 }).await;
    place(&outbox, 2).await;
    until("the second delivery", || async { seen.count() == 2 }).await;
    assert_eq!(relay.stop().await.succeeded, 2);
    assert!(bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded));
}

async fn a_relay_is_woken_without_waiting_for_its_poll<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let mut settings = settings();
    settings.poll_interval = Duration::from_secs(3_600);
    let outbox = bed.outbox().settings(settings).receiver(counting(&seen)).build().unwrap();
    place(&outbox, 0).await;
    let relay = outbox.relay().spawn().unwrap();
    until("what was there at the start", || async { seen.count() == 1 }).await;
    for n in 1..=50 {
        place(&outbox, n).await;
        if n % 10 == 0 {
            until("a wake-up, or the one at the end of a burst", || async { seen.count() == 1 + n as usize })
                .await;
        }
    }
    relay.stop().await;
}

async fn a_relay_works_a_backlog_off_without_waiting_for_its_poll<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let mut settings = settings();
    settings.poll_interval = Duration::from_secs(3_600);
    let outbox = bed.outbox().settings(settings).receiver(counting(&seen)).build().unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..300).map(|n| Placed { n })).await).await.unwrap();
    let relay = outbox.relay().concurrency(4).batch_size(10).spawn().unwrap();
    until("thirty batches", || async { seen.count() == 300 }).await;
    assert_eq!(relay.stop().await.succeeded, 300);
}

async fn a_relay_runs_as_many_handlers_at_once_as_it_may<S: Store>(bed: Bed<S>) {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let gate = Arc::new(Semaphore::new(0));
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let (running, most, gate) = (running.clone(), most.clone(), gate.clone());
            move |_: Placed| {
                let (running, most, gate) = (running.clone(), most.clone(), gate.clone());
                async move {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    let _open = gate.acquire().await?;
                    running.fetch_sub(1, Ordering::SeqCst);
                    Ok::<(), Failure>(())
                }
            }
        }))
        .build()
        .unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..20).map(|n| Placed { n })).await).await.unwrap();
    let relay = outbox.relay().concurrency(5).spawn().unwrap();
    until("five at once", || async { running.load(Ordering::SeqCst) == 5 }).await;
    gate.add_permits(20);
    until("all to end", || async {
        bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded)
    })
    .await;
    assert_eq!(relay.stop().await.succeeded, 20);
    assert_eq!(most.load(Ordering::SeqCst), 5);
}

async fn a_relay_that_stops_finishes_what_runs_and_hands_the_rest_back<S: Store>(bed: Bed<S>) {
    let gate = Arc::new(Semaphore::new(0));
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let (gate, seen) = (gate.clone(), seen.clone());
            move |event: Placed| {
                let gate = gate.clone();
                seen.see(event.n);
                async move {
                    let _open = gate.acquire().await?;
                    Ok::<(), Failure>(())
                }
            }
        }))
        .build()
        .unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..10).map(|n| Placed { n })).await).await.unwrap();
    let relay = outbox.relay().concurrency(2).batch_size(10).spawn().unwrap();
    until("two to run", || async { seen.count() == 2 }).await;
    let stopping = tokio::spawn(relay.stop());
    until("the rest to be handed back", || async {
        bed.deliveries().await.iter().filter(|row| row.status == Status::Pending).count() == 8
    })
    .await;
    gate.add_permits(2);
    assert_eq!(stopping.await.unwrap().succeeded, 2);
    assert_eq!(seen.count(), 2, "started after it was told to stop");
    let rows = bed.deliveries().await;
    assert_eq!(rows.iter().filter(|row| row.status == Status::Succeeded).count(), 2);
    assert!(rows.iter().all(|row| row.claimed_by.is_none() && row.lapses == 0));
    gate.add_permits(8);
    assert_eq!(outbox.deliver_pending().await.unwrap().succeeded, 8, "may be taken by anybody at once");
}

async fn two_relays_deliver_everything_once<S: Store>(bed: Bed<S>) {
    const EVENTS: i64 = 400;
    let seen: Seen<i64> = Seen::default();
    let outbox = || {
        let seen = seen.clone();
        bed.outbox()
            .event::<Noted>()
            .receiver(counting(&seen))
            .receiver(Receiver::on::<Placed>("test.tx").durable().run(async |event: Placed, tx: Tx<S>| {
                tx.fire(Noted { of: event.n }).await?;
                Ok::<(), Failure>(())
            }))
            .build()
            .unwrap()
    };
    let (one, two) = (outbox(), outbox());
    let relays = [one.relay().spawn().unwrap(), two.relay().spawn().unwrap()];
    for n in 0..EVENTS / 20 {
        one.transaction(async |tx| tx.fire_all((n * 20..(n + 1) * 20).map(|n| Placed { n })).await)
            .await
            .unwrap();
    }
    until("everything to be delivered", || async {
        bed.deliveries().await.iter().filter(|row| row.status == Status::Succeeded).count()
            == 2 * EVENTS as usize
    })
    .await;
    for relay in relays {
        let delivered = relay.stop().await;
        assert_eq!((delivered.failed, delivered.lost), (0, 0));
    }
    let mut plain = seen.all();
    plain.sort_unstable();
    assert_eq!(plain, (0..EVENTS).collect::<Vec<_>>());
    let mut in_transactions = noted(&one).await;
    in_transactions.sort_unstable();
    assert_eq!(in_transactions, (0..EVENTS).collect::<Vec<_>>());
}

async fn a_busy_receiver_does_not_keep_another_waiting<S: Store>(bed: Bed<S>) {
    let gate = Arc::new(Semaphore::new(0));
    let other = Arc::new(AtomicBool::new(false));
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.busy").durable().run({
            let gate = gate.clone();
            move |_: Placed| {
                let gate = gate.clone();
                async move {
                    let _open = gate.acquire().await?;
                    Ok::<(), Failure>(())
                }
            }
        }))
        .receiver(Receiver::on::<Noted>("test.other").durable().run({
            let other = other.clone();
            move |_: Noted| {
                other.store(true, Ordering::SeqCst);
                async { Ok::<(), Failure>(()) }
            }
        }))
        .build()
        .unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..200).map(|n| Placed { n })).await).await.unwrap();
    outbox.transaction(async |tx| tx.fire(Noted { of: 1 }).await).await.unwrap();
    let relay = outbox.relay().concurrency(4).batch_size(8).spawn().unwrap();
    // A few of the busy ones end, so that the relay claims again: each claim gives the other its turn.
    gate.add_permits(12);
    until("the other receiver", || async { other.load(Ordering::SeqCst) }).await;
    gate.add_permits(10_000);
    relay.stop().await;
}

async fn a_handler_that_blocks_its_thread_keeps_its_lease<S: Store>(bed: Bed<S>) {
    let mut settings = settings();
    settings.lease = Duration::from_millis(900);
    let outbox = bed
        .outbox()
        .settings(settings)
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let clock = bed.clock.clone();
            move |event: Placed| {
                // Both threads of the runtime, for more than two leases: nothing on it can renew anything.
                for _ in 0..40 {
                    std::thread::sleep(Duration::from_millis(50));
                    if event.n == 0 {
                        clock.advance(Duration::from_millis(50));
                    }
                }
                async { Ok::<(), Failure>(()) }
            }
        }))
        .build()
        .unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..2).map(|n| Placed { n })).await).await.unwrap();
    let relay = outbox.relay().concurrency(2).spawn().unwrap();
    until("both to end", || async {
        bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded)
    })
    .await;
    let delivered = relay.stop().await;
    assert_eq!((delivered.succeeded, delivered.lost), (2, 0));
    assert!(bed.deliveries().await.iter().all(|row| row.attempts == 1));
}

async fn a_handler_without_a_transaction_holds_no_connection<S: Store>(bed: Bed<S>) {
    // More handlers than any store's pool has connections, all waiting at once, each for all the others.
    const HANDLERS: usize = 40;
    let all = Arc::new(tokio::sync::Barrier::new(HANDLERS));
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let (all, store) = (all.clone(), bed.store.clone());
            move |_: Placed| {
                let (all, store) = (all.clone(), store.clone());
                async move {
                    all.wait().await;
                    store.tally().await?;
                    Ok::<(), Failure>(())
                }
            }
        }))
        .build()
        .unwrap();
    outbox
        .transaction(async |tx| tx.fire_all((0..HANDLERS as i64).map(|n| Placed { n })).await)
        .await
        .unwrap();
    let relay = outbox.relay().concurrency(HANDLERS).spawn().unwrap();
    until("all to end", || async {
        bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded)
    })
    .await;
    relay.stop().await;
}

async fn a_relay_refuses_what_it_cannot_serve<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().receiver(counting(&Seen::default())).build().unwrap();
    let why = |relay: owed::Relay<S>| relay.spawn().unwrap_err().to_string();
    let said = why(outbox.relay().lanes(["mial"]));
    assert!(said.contains("\"mial\"") && said.contains("the lanes are default"), "{said}");
    assert!(why(outbox.relay().lanes(Vec::<String>::new())).contains("no lane"));
    assert!(why(outbox.relay().batch_size(0)).contains("batch size is 0"));
    assert!(why(outbox.relay().concurrency(0)).contains("concurrency is 0"));
    let own = why(outbox.relay().lane_batch_size("default", 0));
    assert!(own.contains("the lane \"default\"'s batch size is 0"), "{own}");
    assert!(why(outbox.relay().lane_concurrency("default", 0)).contains("concurrency is 0"));
    assert!(why(outbox.relay().lane_batch_size("nobody", 1)).contains("\"nobody\""));
}

async fn a_deferral_pauses_its_lane_and_hands_its_rows_back<S: Store>(bed: Bed<S>) {
    use owed::state::Bounded;
    let calls = Arc::new(AtomicUsize::new(0));
    let throttled = Arc::new(AtomicBool::new(true));
    let other = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(
            Receiver::on::<Placed>("test.throttled")
                .durable()
                .lane("slow")
                .give_up_after(Duration::from_secs(86_400))
                .run({
                    let (calls, throttled) = (calls.clone(), throttled.clone());
                    move |_: Placed| {
                        calls.fetch_add(1, Ordering::SeqCst);
                        let throttled = throttled.load(Ordering::SeqCst);
                        async move {
                            let later = Failure::<Bounded>::defer(Duration::from_secs(60));
                            if throttled { Err(later) } else { Ok(()) }
                        }
                    }
                }),
        )
        .receiver(counting(&other))
        .build()
        .unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..10).map(|n| Placed { n })).await).await.unwrap();
    let relay = outbox.relay().concurrency(1).spawn().unwrap();
    until("the other lane, all of it", || async { other.count() == 10 }).await;
    until("the pause to be seen", || async { !outbox.pauses().await.unwrap().is_empty() }).await;
    let pauses = outbox.pauses().await.unwrap();
    assert_eq!((pauses.len(), pauses[0].lane.as_str()), (1, "slow"));
    assert_eq!((pauses[0].since, pauses[0].until), (start(), start() + Duration::from_secs(60)));
    until("the lane's rows to be handed back", || async {
        let rows = bed.deliveries().await;
        rows.iter()
            .filter(|row| row.receiver_key == "test.throttled" && row.status == Status::Pending)
            .count()
            == 9
    })
    .await;
    assert_eq!(calls.load(Ordering::SeqCst), 1, "a call for each row to learn what the first had said");
    throttled.store(false, Ordering::SeqCst);
    bed.pass(Duration::from_secs(121));
    assert_eq!(outbox.pauses().await.unwrap(), []);
    until("the lane to go on", || async {
        bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded)
    })
    .await;
    relay.stop().await;
}

async fn a_dropped_relay_leaves_its_rows_to_their_leases<S: Store>(bed: Bed<S>) {
    let started = Arc::new(Semaphore::new(0));
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let started = started.clone();
            move |event: Placed, context: DeliveryContext, tx: Tx<S>| {
                let started = started.clone();
                async move {
                    tx.fire(Noted { of: event.n }).await?;
                    started.add_permits(1);
                    if context.attempt == 1 && event.n == 1 {
                        std::future::pending::<()>().await;
                    }
                    Ok::<(), Failure>(())
                }
            }
        }))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    {
        let running = outbox.relay().run_until(std::future::pending());
        tokio::pin!(running);
        tokio::select! {
            _ = &mut running => panic!("nobody told it to stop"),
            _ = started.acquire() => {}
        }
    }
    let row = bed.delivery().await;
    assert_eq!((row.status, row.lapses), (Status::Claimed, 0));
    assert!(noted(&outbox).await.is_empty(), "half of a dropped handler's work was kept");
    place(&outbox, 2).await;
    assert_eq!(outbox.deliver_pending().await.unwrap().succeeded, 1, "the pool still works");
}

async fn rows_that_lapsed_are_run_one_at_a_time<S: Store>(bed: Bed<S>) {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let lapses = Arc::new(std::sync::Mutex::new(BTreeMap::new()));
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let (running, most, lapses, store) =
                (running.clone(), most.clone(), lapses.clone(), bed.store.clone());
            move |event: Placed, context: DeliveryContext| {
                let (running, most) = (running.clone(), most.clone());
                let (lapses, store) = (lapses.clone(), store.clone());
                async move {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    let id = context.delivery_id.ok_or("a durable delivery has a row")?;
                    let query = owed::DeliveryQuery { ids: Some(vec![id]), ..owed::DeliveryQuery::page(1) };
                    let row = store.deliveries(&query).await?.remove(0);
                    lapses.lock().unwrap().insert(event.n, row.lapses);
                    running.fetch_sub(1, Ordering::SeqCst);
                    Ok::<(), Failure>(())
                }
            }
        }))
        .build()
        .unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..8).map(|n| Placed { n })).await).await.unwrap();
    let receivers = vec![owed::store::ReceiverLease { key: "test.a".into(), lease: Duration::from_secs(1) }];
    let request = owed::store::ClaimRequest::new("gone".into(), receivers, 8, bed.store.now());
    assert_eq!(bed.store.claim(&request).await.unwrap().len(), 8);
    bed.pass(Duration::from_secs(1));
    let relay = outbox.relay().concurrency(8).spawn().unwrap();
    until("all to end", || async {
        bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded)
    })
    .await;
    relay.stop().await;
    assert_eq!(most.load(Ordering::SeqCst), 1);
    assert_eq!(lapses.lock().unwrap().values().copied().collect::<Vec<_>>(), [2; 8], "noted before it ran");
}

async fn lanes_have_their_own_concurrency_and_batch<S: Store>(bed: Bed<S>) {
    let gate = Arc::new(Semaphore::new(0));
    let started = Seen::default();
    let in_lane = |lane: &'static str| {
        let (gate, started) = (gate.clone(), started.clone());
        Receiver::on::<Placed>(format!("test.{lane}")).durable().lane(lane).run(move |_: Placed| {
            let (gate, started) = (gate.clone(), started.clone());
            async move {
                started.see(lane);
                gate.acquire().await?.forget();
                Ok::<(), Failure>(())
            }
        })
    };
    let outbox = bed.outbox().receiver(in_lane("narrow")).receiver(in_lane("wide")).build().unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..20).map(|n| Placed { n })).await).await.unwrap();
    let relay = outbox
        .relay()
        .concurrency(8)
        .lane_concurrency("narrow", 1)
        .lane_batch_size("narrow", 3)
        .spawn()
        .unwrap();
    let claimed = |key: &'static str| {
        let bed = &bed;
        async move {
            let rows = bed.deliveries().await;
            rows.iter().filter(|row| row.receiver_key == key && row.status == Status::Claimed).count()
        }
    };
    until("both lanes to be full", || async {
        started.count() >= 9 && claimed("test.wide").await == 20 && claimed("test.narrow").await >= 3
    })
    .await;
    let running = |lane| started.all().iter().filter(|one| **one == lane).count();
    assert_eq!((running("narrow"), running("wide")), (1, 8));
    // One runs, and as many wait as the lane holds ahead.
    assert!(claimed("test.narrow").await <= 1 + 3);
    gate.add_permits(40);
    until("everything", || async { started.count() == 40 }).await;
    relay.stop().await;
}

async fn the_last_event_of_a_burst_is_not_late<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let mut settings = settings();
    // Only wake-ups can bring these in time.
    settings.poll_interval = Duration::from_secs(600);
    settings.notify_coalescing = Duration::from_millis(50);
    let outbox = bed.outbox().settings(settings).receiver(counting(&seen)).build().unwrap();
    let relay = outbox.relay().spawn().unwrap();
    until("the relay to listen", || async {
        place(&outbox, 0).await;
        seen.count() > 0
    })
    .await;
    for n in 1..=20 {
        place(&outbox, n).await;
    }
    until("the last of the burst", || async { seen.all().contains(&20) }).await;
    relay.stop().await;
}
