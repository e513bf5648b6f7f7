//! Deliveries of `owed` as tasks on NATS JetStream.
//!
//! The relay hands each row of a receiver declared with `task()` to a stream; workers, in as many processes as you
//! like, take them from it. A message carries the delivery's id and its claim, and nothing of the event.
//!
//! ```no_run
//! # use owed::{Event, Failure, MemoryStore, Outbox, Receiver};
//! # use serde::{Deserialize, Serialize};
//! # #[derive(Serialize, Deserialize, Event)] struct Uploaded { picture: i64 }
//! # async fn thumbnail(_: Uploaded) -> Result<(), Failure> { Ok(()) }
//! # async fn example(store: MemoryStore) -> Result<(), Box<dyn std::error::Error>> {
//! use owed_nats::NatsTasks;
//!
//! let tasks = NatsTasks::connect("nats://127.0.0.1:4222").await?;
//! let outbox = Outbox::builder(store)
//!     .task_backend(tasks.clone())
//!     .receiver(Receiver::on::<Uploaded>("media.thumbnail").durable().task().run(thumbnail))
//!     .build()?;
//!
//! // in the process with the relay
//! outbox.relay().spawn()?;
//! // in each worker process
//! # let shutdown = async {};
//! tasks.worker(&outbox).concurrency(16).run_until(shutdown).await?;
//! # Ok(()) }
//! ```
//!
//! # What is promised
//!
//! The database is the record; the stream only says when to look. A message that is lost is handed off again once its
//! claim has ended (the setting `task_lease`). A copy, and one that comes late, finds its claim gone and is removed. A
//! message is acknowledged once the outcome is recorded. Both sides reconnect by themselves; while the server can't be
//! reached the relay gives rows back and tries on at the poll interval.

mod worker;

use std::{fmt, sync::Arc, time::Duration};

use async_nats::{
    Client,
    jetstream::{
        self, Context,
        consumer::{self, AckPolicy, PullConsumer},
        message::PublishMessage,
        stream::{self, RetentionPolicy},
    },
};
use async_trait::async_trait;
use owed::{BoxError, Outbox, Store, Task, TaskBackend};

pub use worker::NatsWorker;

/// Something about NATS is not as it has to be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NatsError {
    /// The server can't be reached. Try again later, or check its address.
    #[error("NATS can't be reached")]
    Unreachable(#[source] BoxError),
    /// The server refuses the stream: JetStream is off, rights are missing, another stream has its subject.
    #[error("the stream {stream} can't be made or read")]
    Stream {
        /// Its name.
        stream: String,
        /// What the server said.
        #[source]
        source: BoxError,
    },
    /// The server refuses the consumer.
    #[error("the consumer {consumer} of the stream {stream} can't be made or read")]
    Consumer {
        /// Its name.
        consumer: String,
        /// Its stream.
        stream: String,
        /// What the server said.
        #[source]
        source: BoxError,
    },
    /// A worker was asked for what it can't do.
    #[error("the worker can't start: {0}")]
    Worker(String),
}

/// A stream of tasks: where a relay hands deliveries to, and where workers take them from. Clones share it.
#[derive(Clone)]
pub struct NatsTasks {
    context: Context,
    names: Arc<Names>,
}

struct Names {
    stream: String,
    subject: String,
    consumer: String,
    max_age: Duration,
    ack_wait: Duration,
}

impl fmt::Debug for NatsTasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsTasks")
            .field("stream", &self.names.stream)
            .field("subject", &self.names.subject)
            .field("consumer", &self.names.consumer)
            .finish_non_exhaustive()
    }
}

/// Puts a [`NatsTasks`] together.
#[must_use = "nothing is connected until `open` is awaited"]
pub struct NatsBuilder {
    client: Client,
    names: Names,
}

impl fmt::Debug for NatsBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsBuilder").field("stream", &self.names.stream).finish_non_exhaustive()
    }
}

impl NatsBuilder {
    /// The stream's name. Default `OWED_TASKS`. It is made where it is missing: a work queue, in files.
    pub fn stream(mut self, name: impl Into<String>) -> Self {
        self.names.stream = name.into();
        self
    }

    /// The subject that tasks are published under. Default `owed.tasks`.
    pub fn subject(mut self, subject: impl Into<String>) -> Self {
        self.names.subject = subject.into();
        self
    }

    /// The durable consumer that all workers share. Default `owed`.
    pub fn consumer(mut self, name: impl Into<String>) -> Self {
        self.names.consumer = name.into();
        self
    }

    /// How long a message may wait before the stream drops it, where the stream is made. Default 1 h. What waits longer
    /// than the setting `task_lease` is worth nothing any more.
    pub fn max_age(mut self, age: Duration) -> Self {
        self.names.max_age = age;
        self
    }

    /// How long a worker may be silent before its message is given to another, where the consumer is made. Workers
    /// say three times as often that they are still at it. Default 30 s.
    pub fn ack_wait(mut self, wait: Duration) -> Self {
        self.names.ack_wait = wait;
        self
    }

    /// Makes the stream where it is missing.
    ///
    /// # Errors
    /// If the server refuses it.
    ///
    /// # Cancel safety
    /// Dropped, the stream is there or not; nothing else is changed.
    pub async fn open(self) -> Result<NatsTasks, NatsError> {
        let context = jetstream::new(self.client);
        let Names { stream, subject, max_age, .. } = &self.names;
        let config = stream::Config {
            name: stream.clone(),
            subjects: vec![subject.clone()],
            retention: RetentionPolicy::WorkQueue,
            max_age: *max_age,
            ..stream::Config::default()
        };
        let refused = |source: BoxError| NatsError::Stream { stream: stream.clone(), source };
        let made = context.get_or_create_stream(config).await.map_err(|error| refused(error.into()))?;
        if !made.cached_info().config.subjects.contains(subject) {
            return Err(refused(format!("it is there, and does not take the subject {subject}").into()));
        }
        Ok(NatsTasks { context, names: Arc::new(self.names) })
    }
}

impl NatsTasks {
    /// Connects to a server, with the default names.
    ///
    /// # Errors
    /// If the server can't be reached, or refuses the stream.
    ///
    /// # Cancel safety
    /// Dropped, the connection is closed.
    pub async fn connect(url: &str) -> Result<Self, NatsError> {
        let client = async_nats::connect(url).await.map_err(|error| NatsError::Unreachable(error.into()))?;
        NatsTasks::on(client).open().await
    }

    /// Starts from a client of your own: for credentials, TLS, several servers, other names.
    pub fn on(client: Client) -> NatsBuilder {
        let names = Names {
            stream: "OWED_TASKS".into(),
            subject: "owed.tasks".into(),
            consumer: "owed".into(),
            max_age: Duration::from_secs(3_600),
            ack_wait: Duration::from_secs(30),
        };
        NatsBuilder { client, names }
    }

    /// A worker: the loop that runs tasks with the receivers of this outbox.
    pub fn worker<S: Store>(&self, outbox: &Outbox<S>) -> NatsWorker<S> {
        NatsWorker::new(self.clone(), outbox.clone())
    }

    async fn pull_consumer(&self) -> Result<PullConsumer, NatsError> {
        let Names { stream, consumer, ack_wait, .. } = &*self.names;
        let refused = |source: BoxError| NatsError::Consumer {
            consumer: consumer.clone(),
            stream: stream.clone(),
            source,
        };
        let on = self.context.get_stream(stream).await.map_err(|error| refused(error.into()))?;
        let config = consumer::pull::Config {
            durable_name: Some(consumer.clone()),
            ack_policy: AckPolicy::Explicit,
            ack_wait: *ack_wait,
            ..consumer::pull::Config::default()
        };
        on.get_or_create_consumer(consumer, config).await.map_err(|error| refused(error.into()))
    }
}

#[async_trait]
impl TaskBackend for NatsTasks {
    /// Publishes the task, and waits until the stream has it. The stream drops a second publication of the same claim.
    async fn enqueue(&self, task: Task) -> Result<(), BoxError> {
        let id = format!("{}-{}-{}", task.delivery_id, task.claimed_by, task.claimed_at.timestamp_micros());
        let message = PublishMessage::build().message_id(id).payload(serde_json::to_vec(&task)?.into());
        let subject = self.names.subject.clone();
        self.context.send_publish(subject, message).await?.await?;
        Ok(())
    }
}
