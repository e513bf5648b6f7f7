//! The task site: rows that a relay claims and somebody else runs, under exactly that claim.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use owed_core::{ClaimKey, Claimed, DeliveryId, Status, Store, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tracing::{info, warn};

use super::{
    attempt::{Conclusion, Work, attempt},
    lease::Held,
    settler,
};
use crate::{declare::BoxError, error::Error, outbox::Outbox};

/// A delivery that was handed off, as the message of a task engine carries it: its id, and the claim that it was
/// handed off under. Plain values, and nothing of the payload.
///
/// The worker gives it to [`Outbox::run_task`] exactly as it came. It is serde data: any engine can carry it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Task {
    /// The delivery.
    pub delivery_id: DeliveryId,
    /// The worker that claimed it.
    pub claimed_by: String,
    /// When it did, to the microsecond.
    pub claimed_at: Timestamp,
}

/// Where the deliveries of receivers declared with [`task`](crate::Receiver::task) are handed to: a queue, or a pool
/// of threads such as [`TaskPool`](crate::TaskPool).
///
/// A backend may lose a task, deliver it twice, or late: the row is the record. What is lost is handed off again
/// once its claim has ended (the setting `task_lease`), and a copy finds its claim gone.
///
/// ```
/// use owed::{BoxError, Task, TaskBackend, async_trait};
///
/// struct Queue(tokio::sync::mpsc::Sender<Task>);
///
/// #[async_trait]
/// impl TaskBackend for Queue {
///     async fn enqueue(&self, task: Task) -> Result<(), BoxError> {
///         Ok(self.0.try_send(task)?)
///     }
/// }
/// ```
#[async_trait]
pub trait TaskBackend: Send + Sync + 'static {
    /// Arranges for the task to be run by [`Outbox::run_task`] somewhere.
    ///
    /// # Errors
    /// If it could not be handed over. The row is then given back, and tried again after the poll interval. The text
    /// of the error is logged, so it must not hold secrets.
    async fn enqueue(&self, task: Task) -> Result<(), BoxError>;
}

/// What became of a task that was given to [`Outbox::run_task`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TaskEnd {
    /// Its delivery was run, and its outcome is recorded: the row is in this status now.
    Recorded(Status),
    /// Nothing ran: its claim is gone. It is a copy, or came late, or its row is settled.
    TurnedAway,
    /// It ran, and somebody else took the row before its outcome was recorded; or nobody here knows its receiver,
    /// its event or the version of its payload, and it was given back.
    GivenUp,
}

/// The backend of an outbox, and whether it works.
pub(crate) struct Handoff {
    backend: Box<dyn TaskBackend>,
    failing: AtomicBool,
}

impl fmt::Debug for Handoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handoff")
    }
}

impl Handoff {
    pub(crate) fn new(backend: impl TaskBackend) -> Self {
        Handoff { backend: Box::new(backend), failing: AtomicBool::new(false) }
    }
}

/// Runs a claimed row here, or hands it to the backend if that is how its receiver is declared.
pub(super) async fn dispatch<S: Store>(outbox: &Outbox<S>, work: Work) -> Conclusion {
    let declared = outbox.registry().receiver(&work.claimed.delivery.receiver_key);
    let task = declared.and_then(|receiver| receiver.durable()).is_some_and(|spec| spec.task);
    match outbox.handoff().filter(|_| task) {
        Some(handoff) => hand_off(outbox, handoff, work.claimed.claim.key().clone(), work.held).await,
        None => attempt(outbox, work).await,
    }
}

/// Hands a claimed row to the backend. What can't be handed over is given back for after the poll interval.
async fn hand_off<S: Store>(outbox: &Outbox<S>, handoff: &Handoff, key: ClaimKey, held: Held) -> Conclusion {
    let task = Task { delivery_id: key.delivery, claimed_by: key.worker.to_string(), claimed_at: key.at };
    let handed = handoff.backend.enqueue(task).await;
    // From here on the row belongs to the task: its lease is not renewed.
    drop(held);
    match handed {
        Ok(()) => {
            if handoff.failing.swap(false, Ordering::Relaxed) {
                info!("deliveries are being handed to the task backend again");
            }
            Conclusion::HandedOff
        }
        Err(error) => {
            if !handoff.failing.swap(true, Ordering::Relaxed) {
                warn!(%error, "deliveries can't be handed to the task backend; trying on at the poll interval");
            }
            let at = outbox.now() + outbox.settings().poll_interval;
            if let Err(error) = outbox.store().release(&[key], at).await {
                warn!(%error, "a delivery that could not be handed off could not be given back either; it is claimed again once its lease ends");
            }
            Conclusion::Left
        }
    }
}

impl<S: Store> Outbox<S> {
    /// Runs a delivery that was handed to a task engine: takes its row under exactly the claim that the task carries,
    /// runs its receiver, and records the outcome, all as a relay does. For the worker of a
    /// [`TaskBackend`]; acknowledge the message once this has answered `Ok`, whatever it answered.
    ///
    /// ```
    /// # use owed::{MemoryStore, Outbox, Task, TaskEnd, DeliveryId};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
    /// # let message = Task { delivery_id: DeliveryId(1), claimed_by: "gone".into(), claimed_at: outbox.now() };
    /// assert_eq!(outbox.run_task(&message).await?, TaskEnd::TurnedAway); // its claim is gone
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Store`] if the row could not be taken: nothing has run, and the message should come again.
    ///
    /// # Cancel safety
    /// Dropped, the handler is dropped at its next await and its transaction rolls back; the row is claimed again
    /// once its lease ends.
    pub async fn run_task(&self, task: &Task) -> Result<TaskEnd, Error> {
        let key = ClaimKey {
            delivery: task.delivery_id,
            worker: task.claimed_by.as_str().into(),
            at: task.claimed_at,
        };
        // Minted for this one take: two copies of a message that come at once are two workers.
        let worker = format!("{}-{:08x}", self.worker(), rand::random::<u32>());
        let now = self.now();
        let lease = self.settings().lease;
        let Some(claimed) = self.store().take(&key, &worker, now, now + lease).await? else {
            info!(delivery = %task.delivery_id, "a task was turned away: its claim is gone (a copy, a late one, or settled already)");
            return Ok(TaskEnd::TurnedAway);
        };
        let lease = super::eager::run_lease(self, &claimed.delivery.receiver_key);
        let held = self.leases().keep(claimed.claim.key().clone(), lease);
        Ok(self.run_taken(claimed, held).await)
    }

    async fn run_taken(&self, claimed: Claimed, held: Held) -> TaskEnd {
        match attempt(self, Work { claimed, held }).await {
            Conclusion::Acknowledged => TaskEnd::Recorded(Status::Succeeded),
            Conclusion::Lost | Conclusion::Left | Conclusion::HandedOff => TaskEnd::GivenUp,
            Conclusion::Unsettled(unsettled) => {
                let status = unsettled.status;
                let mut hooks = JoinSet::new();
                let written = settler::write(self, [*unsettled], &mut hooks).await;
                while hooks.join_next().await.is_some() {}
                if written.lost > 0 { TaskEnd::GivenUp } else { TaskEnd::Recorded(status) }
            }
        }
    }
}

/// A backend is often shared with what drains it.
#[async_trait]
impl<T: TaskBackend + ?Sized> TaskBackend for Arc<T> {
    async fn enqueue(&self, task: Task) -> Result<(), BoxError> {
        (**self).enqueue(task).await
    }
}
