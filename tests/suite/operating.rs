//! Cancel, requeue, replay, prune, health: what operators do and see.

use std::time::Duration;

use futures::TryStreamExt;
use owed::{
    Backlog, Cancelled, Declared, DeliveryFilter, Error, Event, EventFilter, EventId, Failure, Receiver,
    Replayed, Status, Store, Timestamp,
};
use serde::{Deserialize, Serialize};

use crate::bed::{Bed, Placed, Seen, on_every_store, place, settings, until};

on_every_store!(
    a_cancelled_delivery_never_runs,
    a_cancel_is_narrowed_by_receiver_lane_and_row,
    a_cancel_in_a_transaction_is_part_of_it,
    a_row_fired_in_the_same_transaction_can_be_cancelled_in_it,
    dead_letters_are_requeued_and_run_again,
    a_requeue_is_narrowed_by_what_the_error_says,
    a_limit_ends_an_operation_and_the_oldest_go_first,
    a_dry_run_counts_and_changes_nothing,
    progress_is_told_page_by_page,
    a_replay_reopens_what_ran_and_adds_new_receivers,
    a_replay_goes_to_the_targets_of_now,
    a_replay_resolves_due_times_again_and_never_before_now,
    a_replay_to_one_receiver_leaves_the_others,
    a_replay_measures_giving_up_from_the_replay,
    a_replay_of_what_cannot_be_decoded_says_so_and_changes_nothing,
    a_replay_delivers_what_was_suppressed,
    an_operation_in_a_transaction_that_is_dropped_can_only_be_rolled_back,
    relays_are_woken_by_what_is_owed_again,
    a_prune_deletes_what_is_past_its_retention_and_nothing_else,
    a_prunes_limit_counts_events,
    an_idle_relay_prunes,
    health_counts_what_is_owed_by_receiver_and_lane,
    a_receiver_that_has_succeeded_at_nothing_for_a_while_is_quiet,
);

#[derive(Clone, Debug, Serialize, Deserialize, Event)]
#[event(name = "test.Consumed", retention = succeeded)]
struct Consumed {
    n: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize, Event)]
#[event(name = "test.Brief", retention = hours(1))]
struct Brief {
    n: i64,
}

fn durable<S: Store>(key: &str, seen: &Seen<i64>) -> Declared<S> {
    let seen = seen.clone();
    Receiver::on::<Placed>(key).durable().run(move |event: Placed| {
        seen.see(event.n);
        async { Ok::<(), Failure>(()) }
    })
}

/// Dead at its first attempt.
fn dying<S: Store>(key: &str, error: &'static str) -> Declared<S> {
    Receiver::on::<Placed>(key)
        .durable()
        .run(move |_: Placed| async move { Err::<(), Failure>(Failure::permanent(error)) })
}

async fn statuses<S: Store>(bed: &Bed<S>) -> Vec<Status> {
    bed.deliveries().await.iter().map(|row| row.status).collect()
}

async fn a_cancelled_delivery_never_runs<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(durable("test.a", &seen)).build().unwrap();
    let fired = outbox.transaction(async |tx| tx.fire(Placed { n: 1 }).await).await.unwrap();
    place(&outbox, 2).await;
    let of_the_first = DeliveryFilter::of(EventFilter::ids(fired.id()));
    let cancelled = outbox.cancel(of_the_first.clone()).await.unwrap();
    assert_eq!((cancelled.cancelled, cancelled.in_flight), (1, 0));
    assert_eq!(outbox.cancel(of_the_first).await.unwrap(), Cancelled::default());
    outbox.deliver_pending().await.unwrap();
    assert_eq!(seen.all(), [2]);
    assert_eq!(statuses(&bed).await, [Status::Cancelled, Status::Succeeded]);
    let none = DeliveryFilter::of(EventFilter::ids([])).to(["test.a"]);
    assert_eq!(outbox.cancel(none).await.unwrap(), Cancelled::default(), "an empty list is no event");
}

async fn a_cancel_is_narrowed_by_receiver_lane_and_row<S: Store>(bed: Bed<S>) {
    let in_lane = |key: &str, lane: &str| -> Declared<S> {
        let receiver = Receiver::on::<Placed>(key).durable().lane(lane);
        receiver.run(|_: Placed| async { Ok::<(), Failure>(()) })
    };
    let outbox = bed
        .outbox()
        .receiver(in_lane("test.a", "mail"))
        .receiver(in_lane("test.b", "mail"))
        .receiver(durable("test.c", &Seen::default()))
        .receiver(durable("test.d", &Seen::default()))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    let cancelled = async |filter: DeliveryFilter| {
        let done = outbox.cancel(filter).await.unwrap().cancelled;
        let rows = bed.deliveries().await;
        let gone = rows.into_iter().filter(|row| row.status == Status::Cancelled);
        (done, gone.map(|row| row.receiver_key).collect::<Vec<_>>())
    };
    let rows = bed.deliveries().await;
    let one = DeliveryFilter::lane("mail").to(["test.b", "test.c"]);
    assert_eq!(cancelled(one).await, (1, vec!["test.b".to_owned()]));
    let row_of_another = DeliveryFilter::receiver("test.a").rows([rows[3].id]);
    assert_eq!(cancelled(row_of_another).await.0, 0);
    let default = DeliveryFilter::lane("default").rows([rows[0].id, rows[3].id]);
    assert_eq!(cancelled(default).await, (1, vec!["test.b".to_owned(), "test.d".to_owned()]));
    let wrong = outbox.cancel(DeliveryFilter::lane("nowhere")).await.unwrap_err();
    assert_eq!(
        wrong.to_string(),
        "no receiver is declared in the lane \"nowhere\"; the lanes are default, mail"
    );
}

async fn a_cancel_in_a_transaction_is_part_of_it<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().receiver(durable("test.a", &Seen::default())).build().unwrap();
    place(&outbox, 1).await;
    for committed in [false, true] {
        let tx = outbox.begin().await.unwrap();
        let cancelled = tx.cancel(DeliveryFilter::receiver("test.a")).await.unwrap();
        assert_eq!(cancelled.cancelled, 1);
        if committed {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        assert_eq!(bed.delivery().await.status == Status::Cancelled, committed);
    }
}

async fn a_row_fired_in_the_same_transaction_can_be_cancelled_in_it<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(durable("test.a", &seen)).build().unwrap();
    let tx = outbox.begin().await.unwrap();
    let fired = tx.fire(Placed { n: 1 }).await.unwrap();
    let mine = DeliveryFilter::of(EventFilter::ids(fired.id()));
    assert_eq!(tx.cancel(mine).await.unwrap().cancelled, 1);
    tx.commit().await.unwrap();
    outbox.deliver_pending().await.unwrap();
    assert_eq!(seen.count(), 0);
}

async fn dead_letters_are_requeued_and_run_again<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().receiver(dying("test.a", "no")).build().unwrap();
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    assert_eq!(statuses(&bed).await, [Status::Dead]);
    bed.pass(Duration::from_secs(60));
    assert_eq!(outbox.requeue(DeliveryFilter::receiver("test.b")).await.unwrap(), 0);
    assert_eq!(outbox.requeue(DeliveryFilter::receiver("test.a")).await.unwrap(), 1);
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.last_error), (Status::Pending, 0, None));
    assert_eq!((row.due_at, row.available_at), (outbox.now(), Some(outbox.now())));
    let seen = Seen::default();
    let mended = bed.outbox().receiver(durable("test.a", &seen)).build().unwrap();
    mended.deliver_pending().await.unwrap();
    assert_eq!(seen.all(), [1]);
    assert_eq!(outbox.requeue(DeliveryFilter::all()).await.unwrap(), 0, "a success is no dead letter");
}

async fn a_requeue_is_narrowed_by_what_the_error_says<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(dying("test.a", "mailbox full"))
        .receiver(dying("test.b", "no such mailbox"))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    assert_eq!(outbox.requeue(DeliveryFilter::all().error("mailbox full")).await.unwrap(), 1);
    assert_eq!(statuses(&bed).await, [Status::Pending, Status::Dead]);
}

async fn a_limit_ends_an_operation_and_the_oldest_go_first<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().receiver(dying("test.a", "no")).build().unwrap();
    for n in 0..5 {
        place(&outbox, n).await;
    }
    outbox.deliver_pending().await.unwrap();
    assert_eq!(outbox.requeue(DeliveryFilter::all()).limit(0).await.unwrap(), 0);
    assert_eq!(outbox.requeue(DeliveryFilter::all()).limit(2).await.unwrap(), 2);
    use Status::{Dead, Pending};
    assert_eq!(statuses(&bed).await, [Pending, Pending, Dead, Dead, Dead]);
    assert_eq!(outbox.cancel(DeliveryFilter::all()).limit(1).await.unwrap().cancelled, 1);
    assert_eq!(statuses(&bed).await, [Status::Cancelled, Pending, Dead, Dead, Dead]);
}

async fn a_dry_run_counts_and_changes_nothing<S: Store>(bed: Bed<S>) {
    let outbox =
        bed.outbox().receiver(dying("test.a", "no")).receiver(durable("test.b", &Seen::default())).build();
    let outbox = outbox.unwrap();
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    place(&outbox, 2).await;
    let more = bed.outbox().receiver(dying("test.a", "no")).receiver(durable("test.c", &Seen::default()));
    let more = more.build().unwrap();
    let before = bed.deliveries().await;
    bed.pass(settings().retention + Duration::from_secs(1));
    let would = more.replay(EventFilter::all()).dry_run().await.unwrap();
    assert_eq!((would.events, would.reopened, would.added), (2, 1, 2));
    assert_eq!(outbox.requeue(DeliveryFilter::all()).dry_run().await.unwrap(), 1);
    assert_eq!(outbox.cancel(DeliveryFilter::all()).dry_run().await.unwrap().cancelled, 2);
    assert_eq!(outbox.prune().dry_run().await.unwrap().events, 1);
    assert_eq!(bed.deliveries().await, before);
    let done = more.replay(EventFilter::all()).await.unwrap();
    assert_eq!(done, would);
}

async fn progress_is_told_page_by_page<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().receiver(dying("test.a", "no")).build().unwrap();
    let placed = (0..1_100).map(|n| Placed { n });
    outbox.transaction(async |tx| tx.fire_all(placed).await).await.unwrap();
    outbox.deliver_pending().concurrency(50).await.unwrap();
    let told: Vec<u64> =
        outbox.requeue(DeliveryFilter::all()).progress().try_collect::<Vec<_>>().await.unwrap();
    assert_eq!(told, [500, 1_000, 1_100]);
    let told = outbox.replay(EventFilter::all()).limit(3).progress().try_collect::<Vec<_>>().await.unwrap();
    assert_eq!(told.iter().map(|done| done.events).collect::<Vec<_>>(), [1, 2, 3]);
}

async fn a_replay_reopens_what_ran_and_adds_new_receivers<S: Store>(bed: Bed<S>) {
    let (seen, new) = (Seen::default(), Seen::default());
    let outbox = bed.outbox().receiver(durable("test.a", &seen)).build().unwrap();
    let fired = outbox.transaction(async |tx| tx.fire(Placed { n: 1 }).await).await.unwrap();
    outbox.deliver_pending().await.unwrap();
    let succeeded_at = bed.delivery().await.succeeded_at;
    bed.pass(Duration::from_secs(3_600));
    let deployed = bed.outbox().receiver(durable("test.a", &seen)).receiver(durable("test.new", &new));
    let deployed = deployed.build().unwrap();
    let gone = [EventId(i64::MAX)];
    let ids = EventFilter::ids(fired.id().into_iter().chain(gone));
    let replayed = deployed.replay(ids).await.unwrap();
    assert_eq!((replayed.events, replayed.reopened, replayed.added), (1, 1, 1));
    let rows = bed.deliveries().await;
    assert!(rows.iter().all(|row| row.due_at == outbox.now() && row.attempts == 0));
    assert_eq!(rows[0].succeeded_at, succeeded_at, "when it last succeeded is kept");
    deployed.deliver_pending().await.unwrap();
    assert_eq!((seen.all(), new.all()), (vec![1, 1], vec![1]));
}

async fn a_replay_goes_to_the_targets_of_now<S: Store>(bed: Bed<S>) {
    let fan_out = |targets: &'static [&'static str]| {
        let receiver = Receiver::on::<Placed>("test.fan")
            .durable()
            .targets(move |_: &Placed, _| targets.iter().map(|one| (*one).to_owned()).collect());
        let receiver = receiver.run(|_: Placed| async { Ok::<(), Failure>(()) });
        bed.outbox().receiver(receiver).build().unwrap()
    };
    let before = fan_out(&["x", "y"]);
    place(&before, 1).await;
    before.deliver_pending().await.unwrap();
    let now = fan_out(&["y", "z", "z"]);
    let replayed = now.replay(EventFilter::named("test.Placed")).await.unwrap();
    assert_eq!((replayed.reopened, replayed.added), (1, 1));
    let rows = bed.deliveries().await;
    let pending: Vec<_> =
        rows.iter().filter(|row| row.status == Status::Pending).map(|row| row.target.as_str()).collect();
    assert_eq!(pending, ["y", "z"]);
}

async fn a_replay_resolves_due_times_again_and_never_before_now<S: Store>(bed: Bed<S>) {
    let due = |delay: u64| {
        let receiver = Receiver::on::<Placed>("test.due").durable().due(Duration::from_secs(delay));
        let receiver = receiver.run(|_: Placed| async { Ok::<(), Failure>(()) });
        bed.outbox().receiver(receiver).build().unwrap()
    };
    let outbox = due(60);
    place(&outbox, 1).await;
    let recorded: Timestamp = bed.events().await[0].recorded_at;
    bed.pass(Duration::from_secs(100));
    outbox.deliver_pending().await.unwrap();
    outbox.replay(EventFilter::all()).await.unwrap();
    assert_eq!(bed.delivery().await.available_at, Some(outbox.now()), "its time has passed: it is due now");
    outbox.deliver_pending().await.unwrap();
    due(500).replay(EventFilter::all()).await.unwrap();
    let row = bed.delivery().await;
    let at = recorded + Duration::from_secs(500);
    assert_eq!((row.available_at, row.due_at), (Some(at), at));
}

async fn a_replay_to_one_receiver_leaves_the_others<S: Store>(bed: Bed<S>) {
    let (a, b) = (Seen::default(), Seen::default());
    let outbox =
        bed.outbox().receiver(durable("test.a", &a)).receiver(durable("test.b", &b)).build().unwrap();
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    let replayed = outbox.replay(EventFilter::all()).receivers(["test.b", "test.unknown"]).await.unwrap();
    assert_eq!((replayed.reopened, replayed.added), (1, 0));
    outbox.deliver_pending().await.unwrap();
    assert_eq!((a.count(), b.count()), (1, 2));
}

async fn a_replay_measures_giving_up_from_the_replay<S: Store>(bed: Bed<S>) {
    let bound = Duration::from_secs(3_600);
    let receiver = Receiver::on::<Placed>("test.a").durable().give_up_after(bound);
    let receiver = receiver.run(|_: Placed| async {
        Err::<(), _>(Failure::<owed::state::Bounded>::defer(Duration::from_secs(1)))
    });
    let outbox = bed.outbox().receiver(receiver).build().unwrap();
    place(&outbox, 1).await;
    outbox.cancel(DeliveryFilter::all()).await.unwrap();
    bed.pass(30 * 24 * bound);
    outbox.replay(EventFilter::all()).await.unwrap();
    outbox.deliver_pending().await.unwrap();
    assert_eq!(bed.delivery().await.status, Status::Failed, "it was given up at its first deferral");
}

async fn a_replay_of_what_cannot_be_decoded_says_so_and_changes_nothing<S: Store>(bed: Bed<S>) {
    #[derive(Serialize, Deserialize, Event)]
    #[event(name = "test.Placed")]
    struct Changed {
        m: i64,
    }
    let outbox = bed.outbox().event::<Placed>().build().unwrap();
    place(&outbox, 1).await;
    let receiver = Receiver::on::<Changed>("test.fan")
        .durable()
        .targets(|event: &Changed, _| vec![event.m.to_string()])
        .run(|_: Changed| async { Ok::<(), Failure>(()) });
    let changed = bed.outbox().receiver(receiver).build().unwrap();
    let refused = changed.replay(EventFilter::all()).await.unwrap_err();
    assert!(matches!(&refused, Error::Owing { receiver, .. } if receiver == "test.fan"), "{refused}");
    assert!(bed.deliveries().await.is_empty());
}

async fn a_replay_delivers_what_was_suppressed<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed.outbox().receiver(durable("test.a", &seen)).build().unwrap();
    let suppression = owed::Suppression::everything("an import").unwrap();
    owed::Scope::new().suppressing(suppression).run(place(&outbox, 1)).await;
    assert!(bed.deliveries().await.is_empty());
    assert_eq!(outbox.replay(EventFilter::all()).await.unwrap().added, 1);
    outbox.deliver_pending().await.unwrap();
    assert_eq!(seen.all(), [1]);
}

async fn an_operation_in_a_transaction_that_is_dropped_can_only_be_rolled_back<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().receiver(durable("test.a", &Seen::default())).build().unwrap();
    place(&outbox, 1).await;
    let tx = outbox.begin().await.unwrap();
    {
        let mut cancelling = tx.cancel(DeliveryFilter::all()).into_future();
        let polled = futures::poll!(&mut cancelling);
        // The store in memory may be done at once; the others ask their database first.
        if polled.is_ready() {
            drop(cancelling);
            tx.commit().await.unwrap();
            return;
        }
    }
    let refused = tx.commit().await.unwrap_err();
    assert!(matches!(refused, Error::Poisoned { .. }), "{refused}");
    assert_eq!(bed.delivery().await.status, Status::Pending);
}

async fn relays_are_woken_by_what_is_owed_again<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let mut slow = settings();
    slow.poll_interval = Duration::from_secs(3_600);
    let outbox = bed.outbox().settings(slow).receiver(durable("test.a", &seen)).build().unwrap();
    place(&outbox, 1).await;
    let relay = outbox.relay().spawn().unwrap();
    until("the first delivery", async || seen.count() == 1).await;
    until("its outcome", async || bed.delivery().await.status == Status::Succeeded).await;
    outbox.replay(EventFilter::all()).await.unwrap();
    until("the replay's delivery", async || seen.count() == 2).await;
    until("its outcome", async || bed.delivery().await.status == Status::Succeeded).await;
    let tx = outbox.begin().await.unwrap();
    let replayed: Replayed = tx.replay(EventFilter::all()).await.unwrap();
    assert_eq!(replayed.reopened, 1);
    tx.commit().await.unwrap();
    until("that of the one in a transaction", async || seen.count() == 3).await;
    relay.stop().await;
}

async fn a_prune_deletes_what_is_past_its_retention_and_nothing_else<S: Store>(bed: Bed<S>) {
    let consumer = Receiver::on::<Consumed>("test.consumer").durable();
    let consumer = consumer.run(|_: Consumed| async { Ok::<(), Failure>(()) });
    let later = Receiver::on::<Brief>("test.later").durable().due(Duration::from_secs(30 * 86_400));
    let later = later.run(|_: Brief| async { Ok::<(), Failure>(()) });
    let outbox = bed
        .outbox()
        .receiver(consumer)
        .receiver(later)
        .receiver(durable("test.a", &Seen::default()))
        .build()
        .unwrap();
    let names = async || -> Vec<String> { bed.events().await.into_iter().map(|row| row.name).collect() };
    place(&outbox, 1).await;
    outbox.transaction(async |tx| tx.fire(Consumed { n: 1 }).await).await.unwrap();
    outbox.transaction(async |tx| tx.fire(Brief { n: 1 }).await).await.unwrap();
    assert_eq!(outbox.prune().await.unwrap().events, 0, "all of them are owed");
    outbox.deliver_pending().await.unwrap();
    let pruned = outbox.prune().await.unwrap();
    assert_eq!((pruned.events, pruned.deliveries), (1, 1));
    assert_eq!(names().await, ["test.Placed", "test.Brief"]);
    bed.pass(Duration::from_secs(29 * 86_400));
    assert_eq!(outbox.prune().await.unwrap().events, 0, "past its window, and still owed");
    bed.pass(Duration::from_secs(86_400));
    outbox.deliver_pending().await.unwrap();
    assert_eq!(outbox.prune().await.unwrap().events, 1);
    assert_eq!(names().await, ["test.Placed"]);
    let shorter = outbox.prune().older_than(Duration::from_secs(30 * 86_400 + 1));
    assert_eq!(shorter.await.unwrap().events, 0);
    bed.pass(Duration::from_secs(60 * 86_400) - Duration::from_micros(1));
    assert_eq!(outbox.prune().await.unwrap().events, 0, "a microsecond before its 90 days");
    bed.pass(Duration::from_micros(1));
    assert_eq!(outbox.prune().await.unwrap().events, 1);
    assert!(bed.deliveries().await.is_empty());
    assert!(outbox.quiet(Duration::from_secs(100 * 86_400)).await.unwrap().is_empty(), "successes are kept");
}

async fn a_prunes_limit_counts_events<S: Store>(bed: Bed<S>) {
    let outbox = bed.outbox().event::<Consumed>().build().unwrap();
    let consumed = (0..5).map(|n| Consumed { n });
    outbox.transaction(async |tx| tx.fire_all(consumed).await).await.unwrap();
    assert_eq!(outbox.prune().limit(0).await.unwrap().events, 0);
    assert_eq!(outbox.prune().limit(2).await.unwrap().events, 2);
    assert_eq!(outbox.prune().dry_run().await.unwrap().events, 3);
    let mut small = settings();
    small.prune_batch = 1;
    let outbox = bed.outbox().settings(small).event::<Consumed>().build().unwrap();
    let told: Vec<_> = outbox.prune().progress().try_collect().await.unwrap();
    assert_eq!(told.last().unwrap().events, 3);
    assert_eq!(told.len(), 3, "a step for each batch");
}

async fn an_idle_relay_prunes<S: Store>(bed: Bed<S>) {
    let mut often = settings();
    often.prune_interval = Duration::from_millis(10);
    let outbox = bed.outbox().settings(often).event::<Consumed>().build().unwrap();
    outbox.transaction(async |tx| tx.fire(Consumed { n: 1 }).await).await.unwrap();
    let relay = outbox.relay().spawn().unwrap();
    until("a sweep", async || bed.events().await.is_empty()).await;
    relay.stop().await;
}

async fn health_counts_what_is_owed_by_receiver_and_lane<S: Store>(bed: Bed<S>) {
    let mail = Receiver::on::<Placed>("test.mail").durable().lane("mail");
    let mail = mail.run(|_: Placed| async { Err::<(), Failure>("busy".into()) });
    let later = Receiver::on::<Placed>("test.later").durable().due(Duration::from_secs(60));
    let later = later.run(|_: Placed| async { Ok::<(), Failure>(()) });
    let known =
        bed.outbox().receiver(mail).receiver(later).receiver(dying("test.dying", "no")).build().unwrap();
    let other = bed.outbox().receiver(durable("test.other", &Seen::default())).build().unwrap();
    let empty = known.health().await.unwrap();
    assert_eq!((empty.total, empty.dead, empty.receivers.len()), (Backlog::default(), 0, 3));
    let since = known.now();
    place(&known, 1).await;
    place(&known, 2).await;
    place(&other, 3).await;
    known.deliver_pending().lanes(["default", "mail"]).await.unwrap();
    bed.pass(Duration::from_secs(5));
    let health = known.health().await.unwrap();
    let of = |key: &str| health.receivers.iter().find(|one| one.receiver == key).unwrap().clone();
    assert_eq!(
        health.receivers.iter().map(|one| one.receiver.as_str()).collect::<Vec<_>>(),
        ["test.mail", "test.other", "test.dying", "test.later"]
    );
    assert_eq!((of("test.mail").backlog.owed, of("test.mail").lane.as_str()), (2, "mail"));
    assert_eq!((of("test.later").backlog.owed, of("test.later").backlog.scheduled), (0, 2));
    assert_eq!((of("test.dying").dead, health.dead, health.dead_bounded), (2, 2, false));
    assert!(!of("test.other").declared);
    assert_eq!(health.unknown, 1);
    assert_eq!((health.total.owed, health.total.scheduled, health.total.oldest_owed), (3, 2, Some(since)));
    let lanes: Vec<_> =
        health.lanes.iter().map(|lane| (lane.lane.as_str(), lane.backlog.owed, lane.dead)).collect();
    assert_eq!(lanes, [("default", 1, 2), ("mail", 2, 0)]);
}

async fn a_receiver_that_has_succeeded_at_nothing_for_a_while_is_quiet<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .receiver(durable("test.a", &Seen::default()))
        .receiver(dying("test.b", "no"))
        .receiver(Receiver::on::<Placed>("test.inline").inline().run(async |_: Placed| Ok(())))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    let at = outbox.now();
    outbox.deliver_pending().await.unwrap();
    let quiet = async |seconds| -> Vec<(String, Option<Timestamp>)> {
        let found = outbox.quiet(Duration::from_secs(seconds)).await.unwrap();
        found.into_iter().map(|one| (one.receiver, one.last_success)).collect()
    };
    assert_eq!(quiet(60).await, [("test.b".to_owned(), None)]);
    bed.pass(Duration::from_secs(60));
    assert_eq!(quiet(60).await, [("test.b".to_owned(), None)], "at the window's end it is not quiet yet");
    bed.pass(Duration::from_micros(1));
    assert_eq!(quiet(60).await, [("test.b".to_owned(), None), ("test.a".to_owned(), Some(at))]);
    outbox.replay(EventFilter::all()).receivers(["test.a"]).await.unwrap();
    assert_eq!(quiet(61).await, [("test.b".to_owned(), None)], "a replay does not forget a success");
}

/// The engine's own, so on one store, and on a clock of tokio's that goes on when nothing else is to be done.
#[tokio::test(start_paused = true)]
async fn an_operation_goes_no_faster_and_no_slower_than_its_rate() {
    let outbox =
        owed::Outbox::builder(owed::MemoryStore::new()).receiver(dying("test.a", "no")).build().unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..7).map(|n| Placed { n })).await).await.unwrap();
    outbox.deliver_pending().await.unwrap();
    let started = tokio::time::Instant::now();
    assert_eq!(outbox.requeue(DeliveryFilter::all()).per_second(3).await.unwrap(), 7);
    assert_eq!(started.elapsed().as_secs(), 2, "three at once, and at the end of each second three more");
    outbox.cancel(DeliveryFilter::all()).await.unwrap();
    let started = tokio::time::Instant::now();
    assert_eq!(outbox.replay(EventFilter::all()).per_second(2).await.unwrap().reopened, 7);
    assert_eq!(started.elapsed().as_secs(), 3, "an event at a time, half a second apart");
}
