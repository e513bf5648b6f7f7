//! What is known about the code that fires, and what it keeps from being delivered.

use std::sync::{Arc, Mutex};

use owed::{
    DeliveryContext, Error, Event, Failure, Fired, Outbox, Receiver, Refusal, Scope, Store, Suppression, Tx,
    limits, testing,
};
use serde::{Deserialize, Serialize, Serializer};

use crate::bed::{Bed, Noted, Placed, Seen, noted, on_every_store, place};

on_every_store!(
    an_event_carries_the_scope_that_it_was_fired_in,
    scopes_layer_and_the_actor_is_one_thing,
    events_of_one_scope_share_a_correlation_id_and_others_do_not,
    an_actor_is_cut_at_its_limit,
    data_over_its_limit_or_not_serialisable_is_refused_where_it_is_given,
    layers_that_are_too_large_together_are_refused_before_anything_is_written,
    a_scope_ends_with_its_future_whatever_way_it_ends,
    a_spawned_task_and_a_thread_carry_the_scope_that_they_are_given,
    a_receiver_reads_the_scope_of_its_event,
    a_delivery_adds_nothing_of_the_code_that_delivers_it,
    inline_and_on_commit_receivers_fire_on_behalf_of_whoever_fired,
    a_trace_context_is_kept_and_anything_else_refused,
    a_suppressed_event_is_recorded_with_its_reason_and_nothing_runs,
    suppression_of_everything_spares_nothing,
    a_discarded_event_leaves_no_trace,
    nested_suppressions_accumulate,
    a_suppression_needs_a_reason_within_its_limit,
    a_suppressed_duplicate_is_a_duplicate,
    an_undeclared_event_is_refused_even_if_it_is_discarded,
);

fn fires<S: Store>(bed: &Bed<S>) -> Outbox<S> {
    bed.outbox().event::<Placed>().event::<Noted>().build().unwrap()
}

async fn an_event_carries_the_scope_that_it_was_fired_in<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let correlation = uuid::Uuid::now_v7();
    let scope =
        Scope::new().actor("user:7", "Ada").correlation_id(correlation).data("source", "import").unwrap();
    scope.run(place(&outbox, 1)).await;
    let event = bed.events().await.remove(0);
    assert_eq!((event.actor_key.as_str(), event.actor_label.as_str()), ("user:7", "Ada"));
    assert_eq!((event.correlation_id, event.causation_id), (correlation, None));
    assert!(event.scope.is_some());
}

async fn scopes_layer_and_the_actor_is_one_thing<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let seen = seen.clone();
            move |_: Placed, context: DeliveryContext| {
                let one: Option<i64> = context.scope.get("one").unwrap();
                let two: Option<i64> = context.scope.get("two").unwrap();
                seen.see((context.actor_key, context.actor_label, one, two));
                async { Ok::<(), Failure>(()) }
            }
        }))
        .build()
        .unwrap();
    let outer = Scope::new().actor("user:7", "Ada").data("one", 1).unwrap().data("two", 1).unwrap();
    let inner = Scope::new().data("two", 2).unwrap();
    let other = Scope::new().actor("job:3", "");
    outer
        .run(async {
            inner.run(place(&outbox, 1)).await;
            other.run(place(&outbox, 2)).await;
            place(&outbox, 3).await;
        })
        .await;
    testing::drain(&outbox).await;
    let row = |key: &str, label: &str, two| (key.to_owned(), label.to_owned(), Some(1), Some(two));
    assert_eq!(seen.all(), [row("user:7", "Ada", 2), row("job:3", "", 1), row("user:7", "Ada", 1)]);
}

async fn events_of_one_scope_share_a_correlation_id_and_others_do_not<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    Scope::new()
        .run(async {
            place(&outbox, 1).await;
            Scope::new().run(place(&outbox, 2)).await;
        })
        .await;
    place(&outbox, 3).await;
    place(&outbox, 4).await;
    let ids: Vec<_> = bed.events().await.iter().map(|event| event.correlation_id).collect();
    assert_eq!(ids[0], ids[1]);
    assert_ne!(ids[1], ids[2]);
    assert_ne!(ids[2], ids[3]);
}

async fn an_actor_is_cut_at_its_limit<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let long = "𝔘".repeat(limits::TEXT + 1);
    Scope::new().actor(&long, format!("nul\0{long}")).run(place(&outbox, 1)).await;
    let event = bed.events().await.remove(0);
    assert_eq!(event.actor_key, "𝔘".repeat(limits::TEXT));
    assert_eq!(event.actor_label.chars().count(), limits::TEXT);
    assert!(event.actor_label.starts_with("nul\u{FFFD}𝔘"));
}

struct Unserialisable;

impl Serialize for Unserialisable {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("a socket is no data"))
    }
}

async fn data_over_its_limit_or_not_serialisable_is_refused_where_it_is_given<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let refused = Scope::new().data("socket", Unserialisable).unwrap_err();
    assert_eq!(refused.to_string(), r#"the scope's data "socket" can't be kept"#);
    let source = std::error::Error::source(&refused).unwrap().to_string();
    assert!(source.contains("a socket is no data"), "{source}");

    let mut deep = serde_json::json!(1);
    for _ in 0..300 {
        deep = serde_json::json!([deep]);
    }
    assert!(matches!(Scope::new().data("deep", deep), Err(Error::ScopeData { .. })));

    // A map of one key: {"k": "..."}; the text's head takes 3 bytes, the key 2, the map 1.
    let fits = "x".repeat(limits::SCOPE - 6);
    assert!(Scope::new().data("k", format!("{fits}x")).unwrap_err().to_string().contains("65537 bytes long"));
    Scope::new().data("k", fits).unwrap().run(place(&outbox, 1)).await;
    assert_eq!(bed.events().await[0].scope.as_ref().unwrap().len(), limits::SCOPE);
}

async fn layers_that_are_too_large_together_are_refused_before_anything_is_written<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let half = "x".repeat(limits::SCOPE / 2);
    let outer = Scope::new().data("one", &half).unwrap();
    let inner = Scope::new().data("two", &half).unwrap();
    outer
        .run(inner.run(async {
            let tx = outbox.begin().await.unwrap();
            let refused = tx.fire(Placed { n: 1 }).await.unwrap_err();
            assert!(refused.to_string().starts_with("the scope's data is 655"), "{refused}");
            tx.commit().await.unwrap();
        }))
        .await;
    assert!(bed.events().await.is_empty());
}

async fn a_scope_ends_with_its_future_whatever_way_it_ends<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let scope = Scope::new().actor("user:7", "");
    let failing = scope.clone().run(async { Err::<(), &str>("no") });
    assert!(failing.await.is_err());
    place(&outbox, 1).await;
    let panicking =
        tokio::spawn(async { Scope::new().actor("x", "").run(async { panic!("on purpose") }).await });
    assert!(panicking.await.is_err());
    place(&outbox, 2).await;
    {
        let mut dropped = Box::pin(scope.run(std::future::pending::<()>()));
        assert!(futures_poll(&mut dropped).await.is_pending());
    }
    place(&outbox, 3).await;
    assert!(bed.events().await.iter().all(|event| event.actor_key.is_empty()));
}

async fn futures_poll<F: Future + Unpin>(future: &mut F) -> std::task::Poll<F::Output> {
    std::future::poll_fn(|cx| std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(cx))).await
}

async fn a_spawned_task_and_a_thread_carry_the_scope_that_they_are_given<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let bare = outbox.clone();
    Scope::new()
        .actor("user:7", "")
        .run(async {
            let (a, b) = (outbox.clone(), outbox.clone());
            tokio::spawn(async move { place(&bare, 1).await }).await.unwrap();
            tokio::spawn(Scope::current().run(async move { place(&a, 2).await })).await.unwrap();
            let runtime = tokio::runtime::Handle::current();
            let work = Scope::current().wrap(move || runtime.block_on(place(&b, 3)));
            tokio::task::spawn_blocking(work).await.unwrap();
        })
        .await;
    let actors: Vec<_> = bed.events().await.into_iter().map(|event| event.actor_key).collect();
    assert_eq!(actors, ["", "user:7", "user:7"]);
}

async fn a_receiver_reads_the_scope_of_its_event<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let seen = seen.clone();
            move |_: Placed, context: DeliveryContext| {
                let wrong = context.scope.get::<i64>("source").unwrap_err().to_string();
                let none = context.scope.get::<String>("nothing").unwrap();
                seen.see((
                    context.scope.get::<String>("source").unwrap(),
                    none,
                    wrong,
                    format!("{:?}", context.scope),
                    context.scope.keys(),
                ));
                async { Ok::<(), Failure>(()) }
            }
        }))
        .build()
        .unwrap();
    Scope::new().data("source", "secret").unwrap().run(place(&outbox, 1)).await;
    assert_eq!(testing::drain(&outbox).await.succeeded, 1);
    let (source, none, wrong, debug, keys) = seen.all().remove(0);
    assert_eq!((source.as_deref(), none), (Some("secret"), None));
    assert_eq!(wrong, r#"the scope's data "source" can't be read: it is no i64"#);
    assert_eq!((debug.as_str(), keys), (r#"{"source"}"#, vec!["source".to_owned()]));
}

async fn a_delivery_adds_nothing_of_the_code_that_delivers_it<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.a").durable().run(|event: Placed, tx: Tx<S>| async move {
            tx.fire(Noted { of: event.n }).await?;
            Ok::<(), Failure>(())
        }))
        .build()
        .unwrap();
    place(&outbox, 1).await;
    let all = Suppression::everything("a test").unwrap();
    let delivering = Scope::new().actor("operator:1", "").data("why", "by hand").unwrap().suppressing(all);
    delivering.run(async { outbox.deliver_pending().await.unwrap() }).await;
    let events = bed.events().await;
    let (placed, noted) = (&events[0], &events[1]);
    assert_eq!((noted.actor_key.as_str(), &noted.scope, &noted.suppressed), ("", &None, &None));
    assert_eq!((noted.causation_id, noted.correlation_id), (Some(placed.id), placed.correlation_id));
}

async fn inline_and_on_commit_receivers_fire_on_behalf_of_whoever_fired<S: Store>(bed: Bed<S>) {
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.inline").inline().run(|event: Placed, tx: Tx<S>| async move {
            tx.fire(Noted { of: event.n }).await?;
            Ok::<(), Refusal>(())
        }))
        .receiver(Receiver::on::<Placed>("test.after").on_commit().run(
            |event: Placed, tx: Tx<S>| async move {
                tx.fire(Noted { of: event.n + 100 }).await?;
                Ok::<(), Refusal>(())
            },
        ))
        .build()
        .unwrap();
    Scope::new().actor("user:7", "Ada").data("source", "import").unwrap().run(place(&outbox, 1)).await;
    assert_eq!(noted(&outbox).await, [1, 101]);
    let events = bed.events().await;
    for event in &events[1..] {
        assert_eq!((event.actor_key.as_str(), event.causation_id), ("user:7", Some(events[0].id)));
        assert_eq!((event.correlation_id, &event.scope), (events[0].correlation_id, &events[0].scope));
    }
}

async fn a_trace_context_is_kept_and_anything_else_refused<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let outbox = bed
        .outbox()
        .receiver(Receiver::on::<Placed>("test.a").durable().run({
            let seen = seen.clone();
            move |_: Placed, context: DeliveryContext| {
                seen.see(context.trace_context);
                async { Ok::<(), Failure>(()) }
            }
        }))
        .build()
        .unwrap();
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    Scope::new().trace_context(trace).unwrap().run(place(&outbox, 1)).await;
    testing::drain(&outbox).await;
    assert_eq!(seen.all(), [Some(trace.to_owned())]);
    let refused = Scope::new().trace_context("secret").unwrap_err().to_string();
    assert!(refused.contains("of 6 bytes") && !refused.contains("secret"), "{refused}");
}

/// An outbox with a receiver of every mode, and what they saw.
fn all_modes<S: Store>(bed: &Bed<S>) -> (Outbox<S>, Seen<i64>) {
    let seen = Seen::default();
    let see = |seen: &Seen<i64>| {
        let seen = seen.clone();
        move |event: Placed| {
            seen.see(event.n);
            async { Ok::<(), Refusal>(()) }
        }
    };
    let outbox = bed
        .outbox()
        .event::<Noted>()
        .receiver(Receiver::on::<Placed>("test.inline").inline().run(see(&seen)))
        .receiver(Receiver::on::<Placed>("test.after").on_commit().run(see(&seen)))
        .receiver(Receiver::on::<Placed>("test.durable").durable().run({
            let seen = seen.clone();
            move |event: Placed| {
                seen.see(event.n);
                async { Ok::<(), Failure>(()) }
            }
        }))
        .build()
        .unwrap();
    (outbox, seen)
}

async fn fire<S: Store, E: Event>(outbox: &Outbox<S>, event: E) -> Fired {
    outbox.transaction(async |tx| tx.fire(event).await).await.unwrap()
}

async fn a_suppressed_event_is_recorded_with_its_reason_and_nothing_runs<S: Store>(bed: Bed<S>) {
    let (outbox, seen) = all_modes(&bed);
    let import = Suppression::of::<Placed>("import of 2019").unwrap();
    Scope::new()
        .suppressing(import)
        .run(async {
            let fired = fire(&outbox, Placed { n: 1 }).await;
            assert_eq!(fired, Fired::Suppressed(fired.id().unwrap()));
            assert!(matches!(fire(&outbox, Noted { of: 1 }).await, Fired::Recorded(_)));
        })
        .await;
    let events = bed.events().await;
    assert_eq!(events[0].suppressed.as_deref(), Some("import of 2019"));
    assert_eq!(events[1].suppressed, None);
    assert!(bed.deliveries().await.is_empty());
    assert_eq!(seen.all(), [] as [i64; 0]);
}

async fn suppression_of_everything_spares_nothing<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let all = Suppression::everything("migration").unwrap();
    Scope::new()
        .suppressing(all)
        .run(async {
            place(&outbox, 1).await;
            fire(&outbox, Noted { of: 1 }).await;
        })
        .await;
    assert!(bed.events().await.iter().all(|event| event.suppressed.as_deref() == Some("migration")));
}

async fn a_discarded_event_leaves_no_trace<S: Store>(bed: Bed<S>) {
    let (outbox, seen) = all_modes(&bed);
    let import = Suppression::of::<Placed>("import").unwrap().discard();
    Scope::new()
        .suppressing(import)
        .run(async {
            assert_eq!(fire(&outbox, Placed { n: 1 }).await, Fired::Discarded);
            let many = outbox.transaction(async |tx| tx.fire_all([Placed { n: 2 }, Placed { n: 3 }]).await);
            assert_eq!(many.await.unwrap(), [Fired::Discarded; 2]);
        })
        .await;
    assert!(bed.events().await.is_empty());
    assert_eq!(seen.count(), 0);
}

async fn nested_suppressions_accumulate<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let suppress = |suppression| Scope::new().suppressing(suppression);
    let placed = Suppression::of::<Placed>("outer").unwrap();
    let noted = Suppression::of::<Noted>("inner").unwrap();
    let both = Suppression::of::<Placed>("innermost").unwrap().and::<Noted>();
    let discarding = Suppression::of::<Noted>("never").unwrap().discard();
    suppress(placed)
        .run(suppress(noted).run(async {
            // An inner one for another type does not re-enable the outer one's.
            place(&outbox, 1).await;
            fire(&outbox, Noted { of: 1 }).await;
            suppress(both.clone()).run(place(&outbox, 2)).await;
            // A matching one that discards wins, wherever it stands.
            let fired = suppress(discarding).run(suppress(both).run(fire(&outbox, Noted { of: 2 }))).await;
            assert_eq!(fired, Fired::Discarded);
        }))
        .await;
    let reasons: Vec<_> = bed.events().await.into_iter().map(|event| event.suppressed.unwrap()).collect();
    assert_eq!(reasons, ["outer", "inner", "innermost"]);
}

async fn a_suppression_needs_a_reason_within_its_limit<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let why = |reason: &str| Suppression::of::<Placed>(reason).unwrap_err().to_string();
    assert_eq!(why(""), "the suppression reason is empty");
    let long = "𝔘".repeat(limits::TEXT);
    assert_eq!(
        why(&format!("{long}x")),
        "the suppression reason is 256 characters long, and the limit is 255"
    );
    assert!(why("a\0").contains("NUL"));
    let at_its_limit = Suppression::everything(&long).unwrap();
    Scope::new().suppressing(at_its_limit).run(place(&outbox, 1)).await;
    assert_eq!(bed.events().await[0].suppressed.as_deref(), Some(long.as_str()));
}

async fn a_suppressed_duplicate_is_a_duplicate<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let first = outbox
        .transaction(async |tx| tx.fire(Placed { n: 1 }).dedupe_key("one").await)
        .await
        .unwrap()
        .id()
        .unwrap();
    let again = Scope::new()
        .suppressing(Suppression::everything("again").unwrap())
        .run(outbox.transaction(async |tx| tx.fire(Placed { n: 1 }).dedupe_key("one").await))
        .await;
    assert_eq!(again.unwrap(), Fired::Duplicate { of: first });
}

#[derive(Serialize, Deserialize, Event)]
#[event(name = "test.Stranger")]
struct Stranger;

async fn an_undeclared_event_is_refused_even_if_it_is_discarded<S: Store>(bed: Bed<S>) {
    let outbox = fires(&bed);
    let refused = Arc::new(Mutex::new(None));
    Scope::new()
        .suppressing(Suppression::everything("import").unwrap().discard())
        .run(async {
            let tx = outbox.begin().await.unwrap();
            *refused.lock().unwrap() = tx.fire(Stranger).await.err();
            tx.rollback().await.unwrap();
        })
        .await;
    assert!(matches!(*refused.lock().unwrap(), Some(Error::NotDeclared { name: "test.Stranger", .. })));
}
