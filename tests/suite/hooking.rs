//! What a service puts around each attempt.

use std::sync::{Arc, Mutex};

use owed::{
    AroundDelivery, Attempted, BoxError, DeliveryContext, Failure, Next, Outbox, Receiver, Status, Store, Tx,
    async_trait,
};

use crate::bed::{Bed, Noted, Placed, Seen, noted, on_every_store, place};

on_every_store!(
    a_hook_is_around_the_handler_and_is_told_how_it_ended,
    a_hook_that_fails_before_the_handler_fails_the_attempt,
    a_hook_that_panics_before_the_handler_fails_the_attempt,
    a_hook_that_does_not_run_the_handler_fails_the_attempt,
    a_hook_that_drops_the_handler_halfway_fails_the_attempt_and_undoes_it,
    a_hook_that_fails_or_panics_after_the_handler_changes_nothing,
    a_hook_sees_a_transactions_work_committed,
    a_hook_around_a_failed_attempt_cannot_make_it_succeed,
    a_hook_runs_around_eager_attempts_and_not_around_inline_receivers,
);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Nothing,
    FailsBefore,
    PanicsBefore,
    RunsNothing,
    DropsHalfway,
    FailsAfter,
    PanicsAfter,
}

struct Hook {
    does: Does,
    seen: Seen<String>,
}

#[async_trait]
impl AroundDelivery for Hook {
    async fn around(&self, context: &DeliveryContext, next: Next<'_>) -> Result<(), BoxError> {
        self.seen.see(format!("before {} attempt {}", context.receiver, context.attempt));
        match self.does {
            Does::FailsBefore => return Err("no tenant".into()),
            Does::PanicsBefore => panic!("no tenant at all"),
            Does::RunsNothing => return Ok(()),
            Does::DropsHalfway => {
                let mut running = Box::pin(next.run());
                // Polled until its handler waits for what never comes.
                for _ in 0..1_000 {
                    let polled =
                        std::future::poll_fn(|cx| std::task::Poll::Ready(running.as_mut().poll(cx))).await;
                    assert!(polled.is_pending());
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                    if self.seen.all().iter().any(|what| what == "handler") {
                        break;
                    }
                }
                return Ok(());
            }
            Does::Nothing | Does::FailsAfter | Does::PanicsAfter => {}
        }
        let attempted = next.run().await;
        self.seen.see(format!("after {attempted:?}"));
        match self.does {
            Does::FailsAfter => Err("could not be measured".into()),
            Does::PanicsAfter => panic!("could not be measured at all"),
            _ => Ok(()),
        }
    }
}

/// An outbox with the hook, whose handler notes what it does in its transaction and then ends as it is told.
fn hooked<S: Store>(bed: &Bed<S>, does: Does, ends: Result<(), &'static str>) -> (Outbox<S>, Seen<String>) {
    let seen = Seen::default();
    let receiver = Receiver::on::<Placed>("test.a").durable().run({
        let seen = seen.clone();
        move |event: Placed, tx: Tx<S>| {
            let seen = seen.clone();
            async move {
                tx.fire(Noted { of: event.n }).await?;
                seen.see("handler".to_owned());
                if does == Does::DropsHalfway {
                    std::future::pending::<()>().await;
                }
                Ok::<(), Failure>(ends?)
            }
        }
    });
    let hook = Hook { does, seen: seen.clone() };
    (bed.outbox().event::<Noted>().around_delivery(hook).receiver(receiver).build().unwrap(), seen)
}

async fn a_hook_is_around_the_handler_and_is_told_how_it_ended<S: Store>(bed: Bed<S>) {
    let (outbox, seen) = hooked(&bed, Does::Nothing, Ok(()));
    place(&outbox, 1).await;
    assert_eq!(outbox.deliver_pending().await.unwrap().succeeded, 1);
    assert_eq!(seen.all(), ["before test.a attempt 1", "handler", "after Succeeded"]);
}

async fn fails_before<S: Store>(bed: Bed<S>, does: Does, says: &str) {
    let (outbox, seen) = hooked(&bed, does, Ok(()));
    place(&outbox, 1).await;
    assert_eq!(outbox.deliver_pending().await.unwrap().failed, 1);
    let row = bed.deliveries().await.remove(0);
    assert_eq!((row.status, row.attempts), (Status::Failed, 1));
    let error = row.last_error.unwrap();
    assert_eq!(error, says);
    assert_eq!(noted(&outbox).await, [] as [i64; 0]);
    assert_eq!(seen.all()[0], "before test.a attempt 1");
}

async fn a_hook_that_fails_before_the_handler_fails_the_attempt<S: Store>(bed: Bed<S>) {
    fails_before(bed, Does::FailsBefore, "the around-delivery hook failed: no tenant").await;
}

async fn a_hook_that_panics_before_the_handler_fails_the_attempt<S: Store>(bed: Bed<S>) {
    fails_before(bed, Does::PanicsBefore, "the around-delivery hook failed: it panicked").await;
}

async fn a_hook_that_does_not_run_the_handler_fails_the_attempt<S: Store>(bed: Bed<S>) {
    let says = "the around-delivery hook ended without running the receiver to its end";
    fails_before(bed, Does::RunsNothing, says).await;
}

async fn a_hook_that_drops_the_handler_halfway_fails_the_attempt_and_undoes_it<S: Store>(bed: Bed<S>) {
    let says = "the around-delivery hook ended without running the receiver to its end";
    fails_before(bed, Does::DropsHalfway, says).await;
}

async fn a_hook_that_fails_or_panics_after_the_handler_changes_nothing<S: Store>(bed: Bed<S>) {
    for (n, does) in [(1, Does::FailsAfter), (2, Does::PanicsAfter)] {
        let (outbox, _) = hooked(&bed, does, Ok(()));
        place(&outbox, n).await;
        assert_eq!(outbox.deliver_pending().await.unwrap().succeeded, 1, "{does:?}");
        assert_eq!(noted(&outbox).await.last(), Some(&n));
    }
    assert!(
        bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded && row.last_error.is_none())
    );
}

async fn a_hook_sees_a_transactions_work_committed<S: Store>(bed: Bed<S>) {
    struct Looks<S: Store>(S, Arc<Mutex<Option<usize>>>);
    #[async_trait]
    impl<S: Store> AroundDelivery for Looks<S> {
        async fn around(&self, _: &DeliveryContext, next: Next<'_>) -> Result<(), BoxError> {
            assert_eq!(next.run().await, Attempted::Succeeded);
            *self.1.lock().unwrap() = Some(self.0.events(&owed::EventQuery::page(10)).await?.len());
            Ok(())
        }
    }
    let events = Arc::default();
    let receiver = Receiver::on::<Placed>("test.a").durable().run(|event: Placed, tx: Tx<S>| async move {
        tx.fire(Noted { of: event.n }).await?;
        Ok::<(), Failure>(())
    });
    let looks = Looks(bed.store.clone(), Arc::clone(&events));
    let outbox = bed.outbox().event::<Noted>().around_delivery(looks).receiver(receiver).build().unwrap();
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    assert_eq!(*events.lock().unwrap(), Some(2));
}

async fn a_hook_around_a_failed_attempt_cannot_make_it_succeed<S: Store>(bed: Bed<S>) {
    let (outbox, seen) = hooked(&bed, Does::Nothing, Err("no"));
    place(&outbox, 1).await;
    assert_eq!(outbox.deliver_pending().await.unwrap().failed, 1);
    assert_eq!(seen.all(), ["before test.a attempt 1", "handler", r#"after Failed("no")"#]);
    assert_eq!(bed.delivery().await.last_error.as_deref(), Some("no"));
    assert_eq!(noted(&outbox).await, [] as [i64; 0]);
}

async fn a_hook_runs_around_eager_attempts_and_not_around_inline_receivers<S: Store>(bed: Bed<S>) {
    let seen = Seen::default();
    let hook = Hook { does: Does::Nothing, seen: seen.clone() };
    let outbox = bed
        .outbox()
        .around_delivery(hook)
        .receiver(
            Receiver::on::<Placed>("test.inline").inline().run(async |_: Placed| Ok::<(), owed::Refusal>(())),
        )
        .receiver(
            Receiver::on::<Placed>("test.eager")
                .durable()
                .eager()
                .run(async |_: Placed| Ok::<(), Failure>(())),
        )
        .build()
        .unwrap();
    place(&outbox, 1).await;
    outbox.idle().await;
    assert_eq!(seen.all(), ["before test.eager attempt 1", "after Succeeded"]);
    assert_eq!(bed.delivery().await.status, Status::Succeeded);
}
