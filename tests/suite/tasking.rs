//! Deliveries that a task engine runs: under exactly the claim that the relay handed over.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use owed::{
    BoxError, Failure, Outbox, Receiver, Settings, Status, Store, Task, TaskBackend, TaskEnd, TaskPool, Tx,
    async_trait, state::Bounded, testing,
};

use crate::bed::{Bed, Noted, Placed, Seen, noted, on_every_store, place, settings, until};

on_every_store!(
    a_relay_hands_the_claim_over_and_the_worker_runs_under_it,
    a_copy_of_a_task_is_turned_away,
    two_copies_at_once_run_once,
    a_late_task_is_turned_away_once_somebody_else_has_the_row,
    a_task_of_a_settled_row_is_turned_away,
    a_lost_task_is_handed_off_again_once_its_claim_ends,
    a_task_waits_longer_than_the_lease_of_a_handler,
    what_the_engine_refuses_is_given_back_and_tried_again,
    verdicts_of_a_tasks_worker_count_as_anywhere,
    a_tasks_work_commits_with_its_acknowledgement,
    a_task_for_a_receiver_that_the_worker_does_not_know_is_given_back,
    an_eager_task_is_handed_off_after_the_commit,
    a_task_receiver_without_a_backend_is_refused,
    a_taken_task_that_is_dropped_is_run_again,
    a_pool_runs_tasks_on_threads_of_its_own_and_finishes_them_when_it_stops,
    a_full_pool_refuses_and_nothing_is_lost,
    a_pool_refuses_to_be_served_twice_or_by_nobody,
);

/// A queue that a test looks into.
#[derive(Clone, Default)]
struct Queue {
    tasks: Arc<Mutex<Vec<Task>>>,
    full: Arc<AtomicBool>,
}

#[async_trait]
impl TaskBackend for Queue {
    async fn enqueue(&self, task: Task) -> Result<(), BoxError> {
        if self.full.load(Ordering::SeqCst) {
            return Err("the queue is full".into());
        }
        self.tasks.lock().unwrap().push(task);
        Ok(())
    }
}

impl Queue {
    fn pop(&self) -> Task {
        self.tasks.lock().unwrap().pop().expect("something was handed off")
    }
}

/// An outbox whose only receiver is a task that sees its events.
fn with_queue<S: Store>(bed: &Bed<S>) -> (Outbox<S>, Queue, Seen<i64>) {
    let (queue, seen) = (Queue::default(), Seen::default());
    let receiver = Receiver::on::<Placed>("test.task").durable().task().run({
        let seen = seen.clone();
        move |event: Placed| {
            seen.see(event.n);
            async { Ok::<(), Failure>(()) }
        }
    });
    (bed.outbox().task_backend(queue.clone()).receiver(receiver).build().unwrap(), queue, seen)
}

async fn a_relay_hands_the_claim_over_and_the_worker_runs_under_it<S: Store>(bed: Bed<S>) {
    let (outbox, queue, seen) = with_queue(&bed);
    place(&outbox, 7).await;
    let relay = outbox.relay().spawn().unwrap();
    until("the relay to hand it off", || async { !queue.tasks.lock().unwrap().is_empty() }).await;
    let delivered = relay.stop().await;
    assert_eq!((delivered.handed_off, delivered.total()), (1, 1));
    let (row, task) = (bed.delivery().await, queue.pop());
    assert_eq!(row.status, Status::Claimed, "a stopping relay took a row back that it had handed off");
    assert_eq!(
        (row.claimed_by.as_deref(), row.claimed_at),
        (Some(task.claimed_by.as_str()), Some(task.claimed_at))
    );
    assert_eq!(task.delivery_id, row.id);
    let carried: Task = serde_json::from_str(&serde_json::to_string(&task).unwrap()).unwrap();
    assert_eq!(outbox.run_task(&carried).await.unwrap(), TaskEnd::Recorded(Status::Succeeded));
    assert_eq!((seen.all(), bed.delivery().await.status), (vec![7], Status::Succeeded));
}

async fn a_copy_of_a_task_is_turned_away<S: Store>(bed: Bed<S>) {
    let queue = Queue::default();
    let copies = Seen::default();
    let workers: Arc<Mutex<Option<(Outbox<S>, Task)>>> = Arc::default();
    let receiver = Receiver::on::<Placed>("test.task").durable().task().run({
        let (copies, workers) = (copies.clone(), workers.clone());
        move |_: Placed| {
            let (copies, workers) = (copies.clone(), workers.clone());
            async move {
                // The copy comes while the first one runs.
                let (outbox, task) = workers.lock().unwrap().take().expect("a handler that runs once");
                copies.see(outbox.run_task(&task).await?);
                Ok::<(), Failure>(())
            }
        }
    });
    let outbox = bed.outbox().task_backend(queue.clone()).receiver(receiver).build().unwrap();
    place(&outbox, 1).await;
    assert_eq!(outbox.deliver_pending().await.unwrap().handed_off, 1);
    let task = queue.pop();
    *workers.lock().unwrap() = Some((outbox.clone(), task.clone()));
    assert_eq!(outbox.run_task(&task).await.unwrap(), TaskEnd::Recorded(Status::Succeeded));
    assert_eq!(copies.all(), [TaskEnd::TurnedAway]);
}

async fn two_copies_at_once_run_once<S: Store>(bed: Bed<S>) {
    let (outbox, queue, seen) = with_queue(&bed);
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    let task = queue.pop();
    let copies: Vec<_> = (0..4)
        .map(|_| {
            let (outbox, task) = (outbox.clone(), task.clone());
            tokio::spawn(async move { outbox.run_task(&task).await.unwrap() })
        })
        .collect();
    let mut ends = Vec::new();
    for copy in copies {
        ends.push(copy.await.unwrap());
    }
    assert_eq!(
        ends.iter().filter(|end| **end == TaskEnd::Recorded(Status::Succeeded)).count(),
        1,
        "{ends:?}"
    );
    assert_eq!(ends.iter().filter(|end| **end == TaskEnd::TurnedAway).count(), 3, "{ends:?}");
    assert_eq!(seen.count(), 1);
}

async fn a_late_task_is_turned_away_once_somebody_else_has_the_row<S: Store>(bed: Bed<S>) {
    let (outbox, queue, seen) = with_queue(&bed);
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    let late = queue.pop();
    bed.pass(Settings::default().task_lease);
    assert_eq!(outbox.deliver_pending().await.unwrap().handed_off, 1, "handed off anew");
    assert_eq!(outbox.run_task(&late).await.unwrap(), TaskEnd::TurnedAway);
    assert_eq!(outbox.run_task(&queue.pop()).await.unwrap(), TaskEnd::Recorded(Status::Succeeded));
    assert_eq!(seen.count(), 1);
}

async fn a_task_of_a_settled_row_is_turned_away<S: Store>(bed: Bed<S>) {
    let (outbox, queue, seen) = with_queue(&bed);
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    let task = queue.pop();
    outbox.run_task(&task).await.unwrap();
    assert_eq!(outbox.run_task(&task).await.unwrap(), TaskEnd::TurnedAway);
    assert_eq!(seen.count(), 1);
}

async fn a_lost_task_is_handed_off_again_once_its_claim_ends<S: Store>(bed: Bed<S>) {
    let (outbox, queue, seen) = with_queue(&bed);
    place(&outbox, 1).await;
    for _ in 0..20 {
        assert_eq!(outbox.deliver_pending().await.unwrap().handed_off, 1);
        queue.pop();
        bed.pass(Settings::default().task_lease);
    }
    // A queue that loses messages is no handler that takes its process down.
    assert_eq!(outbox.deliver_pending().await.unwrap().handed_off, 1);
    assert_eq!(outbox.run_task(&queue.pop()).await.unwrap(), TaskEnd::Recorded(Status::Succeeded));
    assert_eq!(seen.count(), 1);
}

async fn a_task_waits_longer_than_the_lease_of_a_handler<S: Store>(bed: Bed<S>) {
    let (outbox, queue, _) = with_queue(&bed);
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    bed.pass(Settings::default().task_lease - Duration::from_micros(1));
    assert_eq!(outbox.deliver_pending().await.unwrap().total(), 0, "its claim still holds");
    let task = queue.pop();
    outbox.run_task(&task).await.unwrap();
}

async fn what_the_engine_refuses_is_given_back_and_tried_again<S: Store>(bed: Bed<S>) {
    let (outbox, queue, seen) = with_queue(&bed);
    queue.full.store(true, Ordering::SeqCst);
    place(&outbox, 1).await;
    let delivered = outbox.deliver_pending().await.unwrap();
    assert_eq!((delivered.left, delivered.total()), (1, 1));
    let row = bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.claimed_by), (Status::Pending, 0, None));
    queue.full.store(false, Ordering::SeqCst);
    assert_eq!(outbox.deliver_pending().await.unwrap().total(), 0, "tried again before the poll interval");
    bed.pass(settings().poll_interval);
    assert_eq!(outbox.deliver_pending().await.unwrap().handed_off, 1);
    outbox.run_task(&queue.pop()).await.unwrap();
    assert_eq!(seen.count(), 1);
}

async fn verdicts_of_a_tasks_worker_count_as_anywhere<S: Store>(bed: Bed<S>) {
    let queue = Queue::default();
    let verdict: Arc<Mutex<Vec<Failure<Bounded>>>> = Arc::default();
    let receiver = Receiver::on::<Placed>("test.task")
        .durable()
        .task()
        .max_attempts(2)
        .give_up_after(Duration::from_secs(86_400))
        .run({
            let verdict = verdict.clone();
            move |_: Placed| {
                let failure = verdict.lock().unwrap().pop().unwrap();
                async { Err::<(), _>(failure) }
            }
        });
    let outbox = bed.outbox().task_backend(queue.clone()).receiver(receiver).build().unwrap();
    place(&outbox, 1).await;
    let minute = Duration::from_secs(60);
    let until = outbox.now() + minute;
    for (failure, status, attempts, wait) in [
        (Failure::not_yet(until), Status::Pending, 0, minute),
        (Failure::defer(minute), Status::Failed, 0, minute * 2),
        (Failure::retry_after(minute), Status::Failed, 1, minute),
        (Failure::from("no"), Status::Dead, 2, minute),
    ] {
        verdict.lock().unwrap().push(failure);
        assert_eq!(outbox.deliver_pending().await.unwrap().handed_off, 1);
        assert_eq!(outbox.run_task(&queue.pop()).await.unwrap(), TaskEnd::Recorded(status));
        let row = bed.delivery().await;
        assert_eq!((row.status, row.attempts), (status, attempts));
        bed.pass(wait);
    }
}

async fn a_tasks_work_commits_with_its_acknowledgement<S: Store>(bed: Bed<S>) {
    let queue = Queue::default();
    let receiver =
        Receiver::on::<Placed>("test.task").durable().task().run(|event: Placed, tx: Tx<S>| async move {
            tx.fire(Noted { of: event.n }).await?;
            Ok::<(), Failure>(())
        });
    let outbox =
        bed.outbox().event::<Noted>().task_backend(queue.clone()).receiver(receiver).build().unwrap();
    place(&outbox, 7).await;
    outbox.deliver_pending().await.unwrap();
    assert_eq!(outbox.run_task(&queue.pop()).await.unwrap(), TaskEnd::Recorded(Status::Succeeded));
    assert_eq!(noted(&outbox).await, [7]);
}

async fn a_task_for_a_receiver_that_the_worker_does_not_know_is_given_back<S: Store>(bed: Bed<S>) {
    let (outbox, queue, seen) = with_queue(&bed);
    let older = bed.outbox().event::<Placed>().build().unwrap();
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    assert_eq!(older.run_task(&queue.pop()).await.unwrap(), TaskEnd::GivenUp);
    assert_eq!(bed.delivery().await.status, Status::Pending);
    bed.pass(settings().poll_interval);
    outbox.deliver_pending().await.unwrap();
    assert_eq!(outbox.run_task(&queue.pop()).await.unwrap(), TaskEnd::Recorded(Status::Succeeded));
    assert_eq!(seen.count(), 1);
}

async fn an_eager_task_is_handed_off_after_the_commit<S: Store>(bed: Bed<S>) {
    let queue = Queue::default();
    let receiver = Receiver::on::<Placed>("test.task")
        .durable()
        .eager()
        .task()
        .run(async |_: Placed| Ok::<(), Failure>(()));
    let outbox = bed.outbox().task_backend(queue.clone()).receiver(receiver).build().unwrap();
    place(&outbox, 1).await;
    outbox.idle().await;
    assert_eq!(outbox.run_task(&queue.pop()).await.unwrap(), TaskEnd::Recorded(Status::Succeeded));
}

async fn a_task_receiver_without_a_backend_is_refused<S: Store>(bed: Bed<S>) {
    let receiver =
        Receiver::on::<Placed>("test.task").durable().task().run(async |_: Placed| Ok::<(), Failure>(()));
    let refused = bed.outbox().receiver(receiver).build().unwrap_err().to_string();
    assert!(refused.contains("test.task") && refused.contains("task_backend"), "{refused}");
}

async fn a_taken_task_that_is_dropped_is_run_again<S: Store>(bed: Bed<S>) {
    let queue = Queue::default();
    let hangs = Arc::new(AtomicBool::new(true));
    let running = Seen::default();
    let receiver = Receiver::on::<Placed>("test.task").durable().task().run({
        let (hangs, running) = (hangs.clone(), running.clone());
        move |event: Placed, tx: Tx<S>| {
            let (hangs, running) = (hangs.clone(), running.clone());
            async move {
                tx.fire(Noted { of: event.n }).await?;
                running.see(event.n);
                if hangs.load(Ordering::SeqCst) {
                    std::future::pending::<()>().await;
                }
                Ok::<(), Failure>(())
            }
        }
    });
    let outbox =
        bed.outbox().event::<Noted>().task_backend(queue.clone()).receiver(receiver).build().unwrap();
    place(&outbox, 7).await;
    outbox.deliver_pending().await.unwrap();
    let task = queue.pop();
    let worker = tokio::spawn({
        let outbox = outbox.clone();
        async move { outbox.run_task(&task).await }
    });
    until("the handler to hang", || async { running.count() == 1 }).await;
    worker.abort();
    assert!(worker.await.unwrap_err().is_cancelled());
    hangs.store(false, Ordering::SeqCst);
    bed.pass(Settings::default().task_lease);
    outbox.deliver_pending().await.unwrap();
    assert_eq!(outbox.run_task(&queue.pop()).await.unwrap(), TaskEnd::Recorded(Status::Succeeded));
    assert_eq!(noted(&outbox).await, [7], "what the dropped one did was undone");
}

async fn a_pool_runs_tasks_on_threads_of_its_own_and_finishes_them_when_it_stops<S: Store>(bed: Bed<S>) {
    let pool = TaskPool::new(100);
    let threads = Seen::default();
    let receiver = Receiver::on::<Placed>("test.task").durable().task().run({
        let threads = threads.clone();
        move |_: Placed| {
            threads.see(std::thread::current().name().unwrap_or_default().to_owned());
            async { Ok::<(), Failure>(()) }
        }
    });
    let outbox = bed.outbox().task_backend(pool.clone()).receiver(receiver).build().unwrap();
    let serving = pool.serve(&outbox, 3).unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..20).map(|n| Placed { n })).await).await.unwrap();
    assert_eq!(outbox.deliver_pending().await.unwrap().handed_off, 20);
    serving.stop().await;
    let names: HashSet<String> = threads.all().into_iter().collect();
    assert_eq!((threads.count(), names), (20, HashSet::from(["owed-tasks".to_owned()])));
    assert!(bed.deliveries().await.iter().all(|row| row.status == Status::Succeeded));
}

async fn a_full_pool_refuses_and_nothing_is_lost<S: Store>(bed: Bed<S>) {
    let pool = TaskPool::new(2);
    let seen = Seen::default();
    let receiver = Receiver::on::<Placed>("test.task").durable().task().run({
        let seen = seen.clone();
        move |event: Placed| {
            seen.see(event.n);
            async { Ok::<(), Failure>(()) }
        }
    });
    let outbox = bed.outbox().task_backend(pool.clone()).receiver(receiver).build().unwrap();
    outbox.transaction(async |tx| tx.fire_all((0..5).map(|n| Placed { n })).await).await.unwrap();
    let delivered = outbox.deliver_pending().await.unwrap();
    assert_eq!((delivered.handed_off, delivered.left), (2, 3));
    let serving = pool.serve(&outbox, 1).unwrap();
    until("the rest to find room", || async {
        bed.pass(settings().poll_interval);
        outbox.deliver_pending().await.unwrap();
        seen.count() == 5
    })
    .await;
    serving.stop().await;
    assert_eq!(testing::drain(&outbox).await.total(), 0);
}

async fn a_pool_refuses_to_be_served_twice_or_by_nobody<S: Store>(bed: Bed<S>) {
    let pool = TaskPool::new(2);
    let outbox = bed.outbox().task_backend(pool.clone()).build().unwrap();
    assert!(pool.serve(&outbox, 0).unwrap_err().to_string().contains("0 workers"));
    let serving = pool.serve(&outbox, 1).unwrap();
    assert!(pool.serve(&outbox, 1).unwrap_err().to_string().contains("served already"));
    serving.stop().await;
}
