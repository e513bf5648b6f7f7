//! Runs tasks from the stream.

use std::{fmt, sync::Arc, time::Duration};

use async_nats::jetstream::{AckKind, Message, consumer::pull};
use futures::{FutureExt, StreamExt};
use owed::{BoxError, Outbox, Store, Task};
use tokio::{sync::Semaphore, task::JoinSet};
use tracing::{debug, error, info, warn};

use crate::{NatsError, NatsTasks};

/// Takes tasks from the stream and runs them, until it is told to stop. Made by [`NatsTasks::worker`].
#[must_use = "a worker does nothing until it is run"]
pub struct NatsWorker<S: Store> {
    tasks: NatsTasks,
    outbox: Outbox<S>,
    concurrency: usize,
}

impl<S: Store> fmt::Debug for NatsWorker<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsWorker")
            .field("tasks", &self.tasks)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

/// The longest between two attempts to reach the server.
const BACKOFF: Duration = Duration::from_secs(15);

impl<S: Store> NatsWorker<S> {
    pub(crate) fn new(tasks: NatsTasks, outbox: Outbox<S>) -> Self {
        NatsWorker { tasks, outbox, concurrency: 16 }
    }

    /// How many tasks may run at once, at least 1. Default 16.
    pub fn concurrency(mut self, tasks: usize) -> Self {
        self.concurrency = tasks;
        self
    }

    /// Runs until `shutdown` completes: then takes nothing more, gives back what it has not started, and returns when
    /// what runs has ended. It outlives its server: what fails is logged and tried again.
    ///
    /// # Errors
    /// [`NatsError::Worker`] if its concurrency is 0. Once it runs, it does not fail.
    ///
    /// # Cancel safety
    /// Dropped, running handlers are dropped and their transactions roll back; their rows are claimed again once their
    /// leases end. Prefer `shutdown`.
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) -> Result<(), NatsError> {
        if self.concurrency == 0 {
            return Err(NatsError::Worker("its concurrency is 0, and must be at least 1".into()));
        }
        tokio::pin!(shutdown);
        let room = Arc::new(Semaphore::new(self.concurrency));
        let mut running = JoinSet::new();
        let mut failing = false;
        let least = self.outbox.settings().poll_interval;
        let mut backoff = least;
        'connected: loop {
            let opened = tokio::select! {
                opened = self.messages() => opened,
                () = &mut shutdown => break,
            };
            let error: BoxError = match opened {
                Err(error) => error,
                Ok(mut messages) => loop {
                    if std::mem::take(&mut failing) {
                        info!(stream = self.tasks.names.stream, "tasks are being taken from NATS again");
                    }
                    let turn = tokio::select! {
                        turn = room.clone().acquire_owned() => turn,
                        () = &mut shutdown => {
                            give_back(messages).await;
                            break 'connected;
                        }
                    };
                    let next = tokio::select! {
                        next = messages.next() => next,
                        () = &mut shutdown => {
                            give_back(messages).await;
                            break 'connected;
                        }
                    };
                    match next {
                        Some(Ok(message)) => {
                            backoff = least;
                            let (outbox, wait) = (self.outbox.clone(), self.tasks.names.ack_wait);
                            running.spawn(async move {
                                handle(&outbox, &message, wait).await;
                                drop(turn);
                            });
                        }
                        Some(Err(error)) => break error.into(),
                        None => break "the stream of messages ended".into(),
                    }
                    while let Some(ended) = running.try_join_next() {
                        report(ended);
                    }
                },
            };
            if !std::mem::replace(&mut failing, true) {
                warn!(%error, stream = self.tasks.names.stream, "tasks can't be taken from NATS; trying on, at intervals of up to {BACKOFF:?}");
            }
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = &mut shutdown => break,
            }
            backoff = (backoff * 2).min(BACKOFF.max(least));
        }
        while let Some(ended) = running.join_next().await {
            report(ended);
        }
        Ok(())
    }

    async fn messages(&self) -> Result<pull::Stream, BoxError> {
        let consumer = self.tasks.pull_consumer().await?;
        // Little is held ahead: what waits here can't be taken by another worker.
        let messages = consumer.stream().max_messages_per_batch(self.concurrency);
        Ok(messages.heartbeat(Duration::from_secs(5)).expires(Duration::from_secs(30)).messages().await?)
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(ended) = ended {
        error!(error = %ended, "a task ended without an outcome; its row is claimed again once its lease ends");
    }
}

/// Hands messages that were not started to other workers.
async fn give_back(mut messages: pull::Stream) {
    while let Some(Some(Ok(message))) = messages.next().now_or_never() {
        acknowledge(&message, AckKind::Nak(None)).await;
    }
}

async fn handle<S: Store>(outbox: &Outbox<S>, message: &Message, ack_wait: Duration) {
    let Ok(task) = serde_json::from_slice::<Task>(&message.payload) else {
        // Not shown: whatever it is, it may be private.
        error!(bytes = message.payload.len(), "a message that is no task was removed from the stream");
        return acknowledge(message, AckKind::Term).await;
    };
    let still_at_it = async {
        loop {
            tokio::time::sleep(ack_wait / 3).await;
            acknowledge(message, AckKind::Progress).await;
        }
    };
    let ended = tokio::select! {
        ended = outbox.run_task(&task) => ended,
        () = still_at_it => return,
    };
    match ended {
        Ok(_) => acknowledge(message, AckKind::Ack).await,
        Err(error) => {
            warn!(%error, delivery = %task.delivery_id, "a task could not be taken; its message comes again");
            acknowledge(message, AckKind::Nak(Some(outbox.settings().poll_interval))).await;
        }
    }
}

/// Without effect on anything but the stream: a message that comes again finds its claim gone.
async fn acknowledge(message: &Message, kind: AckKind) {
    if let Err(error) = message.ack_with(kind).await {
        debug!(%error, "a message could not be acknowledged; it comes again, and is turned away");
    }
}
