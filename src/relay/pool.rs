//! A task backend in this process: a runtime and threads of its own, apart from the relay's.

use std::{fmt, num::NonZeroUsize, sync::Arc};

use async_trait::async_trait;
use owed_core::Store;
use tokio::{
    sync::{
        Mutex, Semaphore,
        mpsc::{Receiver, Sender, channel, error::TrySendError},
        oneshot,
    },
    task::JoinSet,
};
use tracing::{error, warn};

use super::task::{Task, TaskBackend};
use crate::{declare::BoxError, error::Error, outbox::Outbox};

/// A task backend in this process: deliveries run on threads and a runtime of their own, over database connections of
/// their own. For handlers that block, or that must not take the service's threads.
///
/// Bounded: what does not fit is given back by the relay and handed off again later.
///
/// ```
/// # use owed::{Event, Failure, MemoryStore, Outbox, Receiver, TaskPool, testing};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize, Event)] struct Uploaded { picture: i64 }
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = TaskPool::new(1_000); // at most so many wait
/// let outbox = Outbox::builder(MemoryStore::new())
///     .task_backend(pool.clone())
///     .receiver(Receiver::on::<Uploaded>("media.thumbnail").durable().task().run(
///         async |event: Uploaded| {
///             std::thread::sleep(std::time::Duration::from_millis(1)); // blocks nobody else
///             println!("picture {} is small now", event.picture);
///             Ok::<(), Failure>(())
///         },
///     ))
///     .build()?;
/// let serving = pool.serve(&outbox, 4)?; // four at once
///
/// outbox.transaction(async |tx| tx.fire(Uploaded { picture: 7 }).await).await?;
/// outbox.deliver_pending().await?; // or a relay: hands it off
/// serving.stop().await; // finishes what waits
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct TaskPool {
    tasks: Sender<Task>,
    waiting: Arc<Mutex<Option<Receiver<Task>>>>,
}

impl fmt::Debug for TaskPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskPool").field("room", &self.tasks.capacity()).finish_non_exhaustive()
    }
}

impl TaskPool {
    /// A pool in which at most `waiting` tasks wait, at least one.
    pub fn new(waiting: usize) -> Self {
        let (tasks, receiver) = channel(waiting.max(1));
        TaskPool { tasks, waiting: Arc::new(Mutex::new(Some(receiver))) }
    }

    /// Starts to run its tasks, `workers` at once, on as many threads.
    ///
    /// # Errors
    /// [`Error::Relay`] if it is served already, if `workers` is zero, or if no thread can be started.
    pub fn serve<S: Store>(&self, outbox: &Outbox<S>, workers: usize) -> Result<TaskPoolHandle, Error> {
        let wrong = |why: String| Error::Relay { why };
        let workers = NonZeroUsize::new(workers)
            .ok_or_else(|| wrong("its task pool has 0 workers, and must have at least 1".into()))?
            .get();
        let taken = self.waiting.try_lock().ok().and_then(|mut waiting| waiting.take());
        let Some(tasks) = taken else { return Err(wrong("its task pool is served already".into())) };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(workers)
            .thread_name("owed-tasks")
            .enable_all()
            .build()
            .map_err(|error| wrong(format!("no runtime could be started for its task pool: {error}")))?;
        let (stop, stopped) = oneshot::channel();
        let (ended, done) = oneshot::channel();
        let outbox = outbox.clone();
        std::thread::Builder::new()
            .name("owed-task-pool".into())
            .spawn(move || {
                runtime.block_on(run(outbox, tasks, workers, stopped));
                // Nobody may wait for it any more.
                let _ = ended.send(());
            })
            .map_err(|error| wrong(format!("no thread could be started for its task pool: {error}")))?;
        Ok(TaskPoolHandle { stop: Some(stop), done: Some(done) })
    }
}

#[async_trait]
impl TaskBackend for TaskPool {
    /// Never waits: a pool that is full, or no longer served, refuses.
    async fn enqueue(&self, task: Task) -> Result<(), BoxError> {
        self.tasks.try_send(task).map_err(|error| match error {
            TrySendError::Full(_) => {
                format!("the task pool is full: {} tasks wait", self.tasks.max_capacity()).into()
            }
            TrySendError::Closed(_) => "the task pool has been stopped".into(),
        })
    }
}

async fn run<S: Store>(
    outbox: Outbox<S>,
    mut tasks: Receiver<Task>,
    workers: usize,
    stopped: oneshot::Receiver<()>,
) {
    // A connection for each that works in a transaction, and some for outcomes.
    let connections = u32::try_from(workers.saturating_add(2)).unwrap_or(u32::MAX);
    let outbox = match outbox.store().detached(connections).await {
        Ok(store) => outbox.over(store),
        Err(error) => {
            warn!(%error, "a task pool could not open connections of its own, and shares those of its outbox");
            outbox
        }
    };
    let room = Arc::new(Semaphore::new(workers));
    let mut running = JoinSet::new();
    tokio::pin!(stopped);
    let mut stopping = false;
    loop {
        let Ok(turn) = room.clone().acquire_owned().await else { break };
        let task = tokio::select! {
            task = tasks.recv() => task,
            // Dropped without a word, the handle means the same.
            _ = &mut stopped, if !stopping => {
                stopping = true;
                tasks.close();
                continue;
            }
        };
        let Some(task) = task else { break };
        let outbox = outbox.clone();
        running.spawn(async move {
            if let Err(error) = outbox.run_task(&task).await {
                warn!(%error, delivery = %task.delivery_id, "a task could not be taken; it is handed off again once its claim ends");
            }
            drop(turn);
        });
        while let Some(ended) = running.try_join_next() {
            report(ended);
        }
    }
    while let Some(ended) = running.join_next().await {
        report(ended);
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(ended) = ended {
        error!(error = %ended, "a task ended without an outcome; its row is claimed again once its lease ends");
    }
}

/// A [`TaskPool`] that is being served. Dropped, it stops cleanly without being waited for.
#[derive(Debug)]
pub struct TaskPoolHandle {
    stop: Option<oneshot::Sender<()>>,
    done: Option<oneshot::Receiver<()>>,
}

impl TaskPoolHandle {
    /// Takes no more tasks, runs those that wait, and returns when the last one has ended.
    ///
    /// # Cancel safety
    /// Dropped, the pool stops all the same.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        if let Some(done) = self.done.take() {
            // It can only fail where the pool's thread is gone, which is what is waited for.
            let _ = done.await;
        }
    }
}
