//! Several versions of a service at once, and several services on one set of tables.

use std::time::Duration;

use owed::{AnyEvent, Declared, Event, Failure, Finding, Outbox, Receiver, Settings, Status, Store, testing};
use serde::{Deserialize, Serialize};

use crate::bed::{Bed, Placed, Seen, on_every_store, place, settings, start};

on_every_store!(
    a_row_for_an_event_that_its_receiver_does_not_know_is_left_for_one_that_does,
    a_row_for_an_event_that_nobody_knows_is_dead_after_the_grace_period,
    a_newer_payload_is_left_for_a_relay_that_knows_it,
    a_newer_payload_that_nobody_knows_is_read_as_it_is_after_the_grace_period,
    a_row_that_is_left_is_looked_at_ever_less_often,
    a_wildcard_receiver_knows_every_event_and_version,
    rows_of_other_services_are_left_alone_for_good,
    a_receiver_outside_of_the_own_ones_is_refused,
    a_check_finds_rows_that_nobody_here_knows,
    a_check_of_a_service_on_shared_tables_looks_at_its_own_rows_alone,
    a_check_counts_rows_of_one_kind_together,
);

/// The same event as [`Placed`], one version on.
#[derive(Clone, Debug, Serialize, Deserialize, Event)]
#[event(name = "test.Placed", version = 2)]
struct Newer {
    n: i64,
    #[serde(default)]
    more: String,
}

/// What another version of the service listens on under the same key.
#[derive(Clone, Debug, Serialize, Deserialize, Event)]
#[event(name = "test.Renamed")]
struct Renamed {
    n: i64,
}

fn seeing<S: Store, E: Event>(key: &str, seen: &Seen<&'static str>, what: &'static str) -> Declared<S> {
    let seen = seen.clone();
    Receiver::on::<E>(key).durable().run(move |_: E| {
        seen.see(what);
        async { Ok::<(), Failure>(()) }
    })
}

fn grace() -> Duration {
    Settings::default().unknown_grace
}

async fn a_row_for_an_event_that_its_receiver_does_not_know_is_left_for_one_that_does<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let old = bed.outbox().receiver(seeing::<S, Placed>("test.a", &seen, "old")).build().unwrap();
    let new = bed.outbox().receiver(seeing::<S, Renamed>("test.a", &seen, "new")).build().unwrap();
    place(&old, 1).await;
    let delivered = new.deliver_pending().await.unwrap();
    assert_eq!((delivered.left, delivered.total()), (1, 1));
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.lapses, row.last_error), (Status::Pending, 0, 0, None));
    bed.pass(settings().poll_interval);
    assert_eq!(old.deliver_pending().await.unwrap().succeeded, 1);
    assert_eq!(seen.all(), ["old"]);
}

async fn a_row_for_an_event_that_nobody_knows_is_dead_after_the_grace_period<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let old = bed.outbox().receiver(seeing::<S, Placed>("test.a", &seen, "old")).build().unwrap();
    let new = bed.outbox().receiver(seeing::<S, Renamed>("test.a", &seen, "new")).build().unwrap();
    place(&old, 1).await;
    bed.pass(grace() - Duration::from_micros(1));
    assert_eq!(new.deliver_pending().await.unwrap().left, 1);
    bed.pass(Duration::from_secs(15));
    assert_eq!(new.deliver_pending().await.unwrap().dead, 1);
    let row = bed.delivery().await;
    let error = row.last_error.unwrap();
    for part in ["test.Placed", "test.Renamed", "2026-03-01 12:00:00 UTC", "3600s"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(row.attempts, 1);
}

async fn fire_newer<S: Store>(bed: &Bed<S>, seen: &Seen<&'static str>) -> Outbox<S> {
    let new = bed.outbox().receiver(seeing::<S, Newer>("test.a", seen, "new")).build().unwrap();
    new.transaction(async |tx| tx.fire(Newer { n: 1, more: "more".into() }).await).await.unwrap();
    new
}

async fn a_newer_payload_is_left_for_a_relay_that_knows_it<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let new = fire_newer(&bed, &seen).await;
    let old = bed.outbox().receiver(seeing::<S, Placed>("test.a", &seen, "old")).build().unwrap();
    assert_eq!(old.deliver_pending().await.unwrap().left, 1);
    bed.pass(settings().poll_interval);
    assert_eq!(new.deliver_pending().await.unwrap().succeeded, 1);
    assert_eq!(seen.all(), ["new"]);
}

async fn a_newer_payload_that_nobody_knows_is_read_as_it_is_after_the_grace_period<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    fire_newer(&bed, &seen).await;
    let old = bed.outbox().receiver(seeing::<S, Placed>("test.a", &seen, "old")).build().unwrap();
    bed.pass(grace());
    assert_eq!(old.deliver_pending().await.unwrap().succeeded, 1);
    assert_eq!(seen.all(), ["old"]);
}

async fn a_row_that_is_left_is_looked_at_ever_less_often<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    fire_newer(&bed, &seen).await;
    let old = bed.outbox().receiver(seeing::<S, Placed>("test.a", &seen, "old")).build().unwrap();
    for (age, wait) in [
        (Duration::ZERO, settings().poll_interval),
        (Duration::from_secs(4), Duration::from_secs(2)),
        (Duration::from_secs(1_000), Duration::from_secs(15)),
    ] {
        bed.clock.set(start() + age);
        assert_eq!(old.deliver_pending().await.unwrap().left, 1);
        assert_eq!(bed.delivery().await.available_at, Some(start() + age + wait));
    }
}

async fn a_wildcard_receiver_knows_every_event_and_version<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let wildcard = |seen: &Seen<(String, i32)>| {
        let seen = seen.clone();
        Receiver::on::<AnyEvent>("test.any").durable().run(move |event: AnyEvent| {
            seen.see((event.name().to_owned(), event.version()));
            async { Ok::<(), Failure>(()) }
        })
    };
    let new = bed.outbox().event::<Newer>().receiver(wildcard(&seen)).build().unwrap();
    new.transaction(async |tx| tx.fire(Newer { n: 1, more: String::new() }).await).await.unwrap();
    let old = bed.outbox().receiver(wildcard(&seen)).build().unwrap();
    assert_eq!(old.deliver_pending().await.unwrap().succeeded, 1);
    assert_eq!(seen.all(), [("test.Placed".to_owned(), 2)]);
}

/// A service that shares its tables.
fn service<S: Store>(bed: &Bed<S>, own: &str, receiver: Declared<S>) -> Outbox<S> {
    let mut settings = settings();
    settings.own_receivers = vec![own.to_owned()];
    bed.outbox().settings(settings).receiver(receiver).build().unwrap()
}

async fn rows_of_other_services_are_left_alone_for_good<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let shop = service(&bed, "shop.", seeing::<S, Placed>("shop.a", &seen, "shop"));
    let mail = service(&bed, "mail.", seeing::<S, Renamed>("mail.a", &seen, "mail"));
    place(&shop, 1).await;
    bed.pass(grace() * 24 * 365);
    assert_eq!(mail.deliver_pending().await.unwrap().total(), 0);
    assert_eq!(bed.delivery().await.status, Status::Pending);
    assert_eq!(testing::drain(&shop).await.succeeded, 1);
    // Its own that nobody declares any more are orphaned all the same.
    let old = service(&bed, "mail.", seeing::<S, Placed>("mail.old", &seen, "old"));
    place(&old, 2).await;
    bed.pass(grace());
    assert_eq!(shop.deliver_pending().await.unwrap().orphaned, 0);
    assert_eq!(mail.deliver_pending().await.unwrap().orphaned, 1);
}

async fn a_receiver_outside_of_the_own_ones_is_refused<S: Store>(bed: Bed<S>) {
    let mut settings = settings();
    settings.own_receivers = vec!["shop.".into(), "till.".into()];
    let receiver = seeing::<S, Placed>("mail.a", &Seen::default(), "mail");
    let refused = bed.outbox().settings(settings).receiver(receiver).build().unwrap_err().to_string();
    assert!(refused.contains("mail.a") && refused.contains("shop., till."), "{refused}");
}

async fn a_check_finds_rows_that_nobody_here_knows<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let old = bed
        .outbox()
        .receiver(seeing::<S, Placed>("test.gone", &seen, ""))
        .receiver(seeing::<S, Placed>("test.moved", &seen, ""))
        .receiver(seeing::<S, Placed>("test.same", &seen, ""))
        .receiver(seeing::<S, Placed>("test.typed", &seen, ""))
        .build()
        .unwrap();
    place(&old, 1).await;
    assert_eq!(old.check().await.unwrap(), []);

    #[derive(Clone, Debug, Serialize, Deserialize, Event)]
    #[event(name = "test.Placed")]
    struct Changed {
        n: String,
    }
    let new = bed
        .outbox()
        .receiver(seeing::<S, Renamed>("test.moved", &seen, ""))
        .receiver(
            Receiver::on::<AnyEvent>("test.same").durable().run(async |_: AnyEvent| Ok::<(), Failure>(())),
        )
        .receiver(seeing::<S, Changed>("test.typed", &seen, ""))
        .build()
        .unwrap();
    let found = new.check().await.unwrap();
    let told: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), 3, "{told:#?}");
    assert!(matches!(&found[0], Finding::UnknownReceiver { receiver, rows: 1, oldest, .. }
        if receiver == "test.gone" && *oldest == start()));
    assert!(matches!(&found[1], Finding::UnknownEvent { receiver, event, rows: 1, .. }
        if receiver == "test.moved" && event == "test.Placed"));
    assert!(matches!(&found[2], Finding::Undecodable { receiver, error, .. }
        if receiver == "test.typed" && error.contains("expected")));
    assert!(told[0].starts_with("1 row is owed to the receiver test.gone"), "{}", told[0]);
}

async fn a_check_of_a_service_on_shared_tables_looks_at_its_own_rows_alone<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let shop = service(&bed, "shop.", seeing::<S, Placed>("shop.a", &seen, ""));
    let mail = service(&bed, "mail.", seeing::<S, Placed>("mail.a", &seen, ""));
    place(&shop, 1).await;
    assert_eq!(mail.check().await.unwrap(), []);
}

async fn a_check_counts_rows_of_one_kind_together<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let old = bed.outbox().receiver(seeing::<S, Placed>("test.a", &seen, "")).build().unwrap();
    let new = bed.outbox().receiver(seeing::<S, Renamed>("test.a", &seen, "")).build().unwrap();
    old.transaction(async |tx| tx.fire_all((0..30).map(|n| Placed { n })).await).await.unwrap();
    let found = new.check().await.unwrap();
    assert!(matches!(&found[..], [Finding::UnknownEvent { rows: 20, .. }]), "{found:?}");
    assert!(found[0].to_string().starts_with("20 rows or more are"), "{}", found[0]);
}
