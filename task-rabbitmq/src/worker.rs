//! Runs tasks from the queue.

use std::{fmt, sync::Arc, time::Duration};

use futures::StreamExt;
use lapin::{
    Acker, Channel, Connection, Consumer,
    options::{BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, BasicRejectOptions},
    types::FieldTable,
};
use owed::{BoxError, Outbox, Store, Task};
use tokio::{sync::Semaphore, task::JoinSet};
use tracing::{debug, error, info, warn};

use crate::{RabbitError, RabbitTasks};

/// Takes tasks from the queue and runs them, until it is told to stop. Made by [`RabbitTasks::worker`].
#[must_use = "a worker does nothing until it is run"]
pub struct RabbitWorker<S: Store> {
    tasks: RabbitTasks,
    outbox: Outbox<S>,
    concurrency: u16,
}

impl<S: Store> fmt::Debug for RabbitWorker<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitWorker")
            .field("tasks", &self.tasks)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

/// The longest between two attempts to reach the server.
const BACKOFF: Duration = Duration::from_secs(15);

/// A connection that is taken from: dropped, the server gives what is not acknowledged to others.
struct Taking {
    messages: Consumer,
    _channel: Channel,
    connection: Connection,
}

impl<S: Store> RabbitWorker<S> {
    pub(crate) fn new(tasks: RabbitTasks, outbox: Outbox<S>) -> Self {
        RabbitWorker { tasks, outbox, concurrency: 16 }
    }

    /// How many tasks may run at once, at least 1. Default 16.
    pub fn concurrency(mut self, tasks: u16) -> Self {
        self.concurrency = tasks;
        self
    }

    /// Runs until `shutdown` completes: then takes nothing more, and returns when what runs has ended; the server gives
    /// what was not started to others. It outlives its server: what fails is logged and tried again.
    ///
    /// # Errors
    /// [`RabbitError::Worker`] if its concurrency is 0. Once it runs, it does not fail.
    ///
    /// # Cancel safety
    /// Dropped, running handlers are dropped and their transactions roll back; their rows are claimed again once their
    /// leases end. Prefer `shutdown`.
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) -> Result<(), RabbitError> {
        if self.concurrency == 0 {
            return Err(RabbitError::Worker("its concurrency is 0, and must be at least 1".into()));
        }
        tokio::pin!(shutdown);
        let room = Arc::new(Semaphore::new(usize::from(self.concurrency)));
        let mut running = JoinSet::new();
        let mut failing = false;
        let least = self.outbox.settings().poll_interval;
        let mut backoff = least;
        let mut last = None;
        'connected: loop {
            let opened = tokio::select! {
                opened = self.take() => opened,
                () = &mut shutdown => break,
            };
            let error: BoxError = match opened {
                Err(error) => error,
                Ok(mut taking) => {
                    if std::mem::take(&mut failing) {
                        info!(queue = self.tasks.shared.queue, "tasks are being taken from RabbitMQ again");
                    }
                    loop {
                        let turn = tokio::select! {
                            turn = room.clone().acquire_owned() => turn,
                            () = &mut shutdown => {
                                last = Some(taking);
                                break 'connected;
                            }
                        };
                        let next = tokio::select! {
                            next = taking.messages.next() => next,
                            () = &mut shutdown => {
                                last = Some(taking);
                                break 'connected;
                            }
                        };
                        match next {
                            Some(Ok(message)) => {
                                backoff = least;
                                let outbox = self.outbox.clone();
                                running.spawn(async move {
                                    handle(&outbox, &message.data, &message.acker).await;
                                    drop(turn);
                                });
                            }
                            Some(Err(error)) => break error.into(),
                            None => break "the queue's messages ended".into(),
                        }
                        while let Some(ended) = running.try_join_next() {
                            report(ended);
                        }
                    }
                }
            };
            if !std::mem::replace(&mut failing, true) {
                warn!(%error, queue = self.tasks.shared.queue, "tasks can't be taken from RabbitMQ; trying on, at intervals of up to {BACKOFF:?}");
            }
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = &mut shutdown => break,
            }
            backoff = (backoff * 2).min(BACKOFF.max(least));
        }
        // Running tasks still acknowledge on the last connection.
        while let Some(ended) = running.join_next().await {
            report(ended);
        }
        if let Some(Taking { connection, .. }) = last
            && let Err(error) = connection.close(200, "the worker stops".into()).await
        {
            debug!(%error, "the connection to RabbitMQ could not be closed in order");
        }
        Ok(())
    }

    async fn take(&self) -> Result<Taking, BoxError> {
        let (connection, channel) = self.tasks.shared.connect().await?;
        // Nothing is held ahead of what runs: what waits here can't be taken by another worker.
        channel.basic_qos(self.concurrency, BasicQosOptions::default()).await?;
        let queue = self.tasks.shared.queue.as_str().into();
        let messages = channel
            .basic_consume(queue, "".into(), BasicConsumeOptions::default(), FieldTable::default())
            .await?;
        Ok(Taking { messages, _channel: channel, connection })
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(ended) = ended {
        error!(error = %ended, "a task ended without an outcome; its row is claimed again once its lease ends");
    }
}

async fn handle<S: Store>(outbox: &Outbox<S>, payload: &[u8], message: &Acker) {
    let Ok(task) = serde_json::from_slice::<Task>(payload) else {
        // Not shown: whatever it is, it may be private.
        error!(bytes = payload.len(), "a message that is no task was removed from the queue");
        return told(message.reject(BasicRejectOptions { requeue: false }).await);
    };
    match outbox.run_task(&task).await {
        Ok(_) => told(message.ack(BasicAckOptions::default()).await),
        Err(error) => {
            warn!(%error, delivery = %task.delivery_id, "a task could not be taken; its message comes again");
            tokio::time::sleep(outbox.settings().poll_interval).await;
            told(message.nack(BasicNackOptions { requeue: true, multiple: false }).await);
        }
    }
}

/// Without effect on anything but the queue: a message that comes again finds its claim gone.
fn told(answer: Result<bool, lapin::Error>) {
    if let Err(error) = answer {
        debug!(%error, "a message could not be acknowledged; it comes again, and is turned away");
    }
}
