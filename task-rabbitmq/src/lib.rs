//! Deliveries of `owed` as tasks on RabbitMQ.
//!
//! The relay hands each row of a receiver declared with `task()` to a queue; workers, in as many processes as you
//! like, take them from it. A message carries the delivery's id and its claim, and nothing of the event.
//!
//! ```no_run
//! # use owed::{Event, Failure, MemoryStore, Outbox, Receiver};
//! # use serde::{Deserialize, Serialize};
//! # #[derive(Serialize, Deserialize, Event)] struct Uploaded { picture: i64 }
//! # async fn thumbnail(_: Uploaded) -> Result<(), Failure> { Ok(()) }
//! # async fn example(store: MemoryStore) -> Result<(), Box<dyn std::error::Error>> {
//! use owed_rabbitmq::RabbitTasks;
//!
//! let tasks = RabbitTasks::connect("amqp://guest:guest@127.0.0.1:5672").await?;
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
//! The database is the record; the queue only says when to look. A message that is lost is handed off again once its
//! claim has ended (the setting `task_lease`). A copy, and one that comes late, finds its claim gone and is removed. A
//! message is acknowledged once the outcome is recorded. Both sides reconnect by themselves; while the server can't be
//! reached the relay gives rows back and tries on at the poll interval.
//!
//! A handler that runs longer than the server's `consumer_timeout` (30 minutes unless changed) has its message given
//! to another worker, which turns it away; the handler goes on.

mod worker;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties,
    options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions},
    types::FieldTable,
};
use owed::{BoxError, Outbox, Store, Task, TaskBackend};
use tokio::sync::Mutex;

pub use worker::RabbitWorker;

/// Something about RabbitMQ is not as it has to be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RabbitError {
    /// The server can't be reached, or refuses the connection. Try again later, or check its address and rights.
    #[error("RabbitMQ can't be reached")]
    Unreachable(#[source] BoxError),
    /// The server refuses the queue: it is there with other properties, or rights are missing.
    #[error("the queue {queue} can't be made or read")]
    Queue {
        /// Its name.
        queue: String,
        /// What the server said.
        #[source]
        source: BoxError,
    },
    /// A worker was asked for what it can't do.
    #[error("the worker can't start: {0}")]
    Worker(String),
}

/// A queue of tasks: where a relay hands deliveries to, and where workers take them from. Clones share it.
#[derive(Clone)]
pub struct RabbitTasks {
    shared: Arc<Shared>,
}

struct Shared {
    url: String,
    queue: String,
    /// Opened anew once it has failed.
    publisher: Mutex<Option<(Connection, Channel)>>,
}

impl fmt::Debug for RabbitTasks {
    /// Without the URL, which holds a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitTasks").field("queue", &self.shared.queue).finish_non_exhaustive()
    }
}

/// Puts a [`RabbitTasks`] together.
#[must_use = "nothing is connected until `open` is awaited"]
pub struct RabbitBuilder {
    url: String,
    queue: String,
}

impl fmt::Debug for RabbitBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitBuilder").field("queue", &self.queue).finish_non_exhaustive()
    }
}

/// How long the server has for one answer.
const ANSWERS: Duration = Duration::from_secs(10);

impl RabbitBuilder {
    /// The queue's name. Default `owed.tasks`. It is made where it is missing: durable.
    pub fn queue(mut self, name: impl Into<String>) -> Self {
        self.queue = name.into();
        self
    }

    /// Connects, and makes the queue where it is missing.
    ///
    /// # Errors
    /// If the server can't be reached, or refuses the queue.
    ///
    /// # Cancel safety
    /// Dropped, the queue is there or not, and the connection is closed.
    pub async fn open(self) -> Result<RabbitTasks, RabbitError> {
        let shared = Shared { url: self.url, queue: self.queue, publisher: Mutex::new(None) };
        // Told now, and not with the first task.
        shared.publisher().await?;
        Ok(RabbitTasks { shared: Arc::new(shared) })
    }
}

impl Shared {
    async fn connect(&self) -> Result<(Connection, Channel), RabbitError> {
        let unreachable = |error: BoxError| RabbitError::Unreachable(error);
        let connecting = async {
            let properties = ConnectionProperties::default().with_connection_name("owed".into());
            let connection = Connection::connect(&self.url, properties).await?;
            let channel = connection.create_channel().await?;
            Ok::<_, lapin::Error>((connection, channel))
        };
        let (connection, channel) = tokio::time::timeout(ANSWERS, connecting)
            .await
            .map_err(|_| unreachable(format!("no answer within {ANSWERS:?}").into()))?
            .map_err(|error| unreachable(error.into()))?;
        let declaring = channel.queue_declare(
            self.queue.as_str().into(),
            QueueDeclareOptions::durable(),
            FieldTable::default(),
        );
        let refused = |source: BoxError| RabbitError::Queue { queue: self.queue.clone(), source };
        tokio::time::timeout(ANSWERS, declaring)
            .await
            .map_err(|_| refused(format!("no answer within {ANSWERS:?}").into()))?
            .map_err(|error| refused(error.into()))?;
        Ok((connection, channel))
    }

    /// The channel to publish on. Connects where there is none that works.
    async fn publisher(&self) -> Result<Channel, RabbitError> {
        let mut publisher = self.publisher.lock().await;
        if let Some((connection, channel)) = &*publisher
            && connection.status().connected()
            && channel.status().connected()
        {
            return Ok(channel.clone());
        }
        *publisher = None;
        let (connection, channel) = self.connect().await?;
        let confirming = channel.confirm_select(ConfirmSelectOptions::default()).await;
        confirming.map_err(|error| RabbitError::Unreachable(error.into()))?;
        *publisher = Some((connection, channel.clone()));
        Ok(channel)
    }
}

impl RabbitTasks {
    /// Connects to a server, with the default queue.
    ///
    /// # Errors
    /// If the server can't be reached, or refuses the queue.
    ///
    /// # Cancel safety
    /// Dropped, the connection is closed.
    pub async fn connect(url: impl Into<String>) -> Result<Self, RabbitError> {
        RabbitTasks::builder(url).open().await
    }

    /// Starts with a server's URL: `amqp://USER:PASSWORD@HOST:PORT/VHOST`, or `amqps://` with the feature `tls`.
    pub fn builder(url: impl Into<String>) -> RabbitBuilder {
        RabbitBuilder { url: url.into(), queue: "owed.tasks".into() }
    }

    /// A worker: the loop that runs tasks with the receivers of this outbox.
    pub fn worker<S: Store>(&self, outbox: &Outbox<S>) -> RabbitWorker<S> {
        RabbitWorker::new(self.clone(), outbox.clone())
    }
}

#[async_trait]
impl TaskBackend for RabbitTasks {
    /// Publishes the task, and waits until the server has it.
    async fn enqueue(&self, task: Task) -> Result<(), BoxError> {
        let payload = serde_json::to_vec(&task)?;
        let channel = self.shared.publisher().await?;
        let publishing = async {
            // Mandatory: a queue that was deleted is an error, and no way to lose messages.
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            // 2: kept on the disk.
            let properties =
                BasicProperties::default().with_delivery_mode(2).with_content_type("application/json".into());
            let queue = self.shared.queue.as_str().into();
            channel.basic_publish("".into(), queue, options, &payload, properties).await?.await
        };
        let answered = tokio::time::timeout(ANSWERS, publishing).await;
        let refused = match answered {
            Ok(Ok(Confirmation::Ack(None))) => return Ok(()),
            Ok(Ok(Confirmation::Ack(Some(_)))) => {
                format!("there is no queue {} any more", self.shared.queue).into()
            }
            Ok(Ok(_)) => "the server did not take the message".into(),
            Ok(Err(error)) => BoxError::from(error),
            Err(_) => format!("no answer within {ANSWERS:?}").into(),
        };
        // The next one connects anew, which also makes the queue again.
        *self.shared.publisher.lock().await = None;
        Err(refused)
    }
}
