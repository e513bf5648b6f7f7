//! What is known about the code that fires: carried with the task, read when an event is fired.

use owed_core::EventId;
use uuid::Uuid;

/// Inline receivers may fire events with inline receivers; a circle of them would never end.
pub(crate) const DEEPEST: u8 = 32;

#[derive(Clone, Debug, Default)]
pub(crate) struct Scope {
    pub(crate) correlation_id: Option<Uuid>,
    pub(crate) causation_id: Option<EventId>,
    pub(crate) depth: u8,
}

tokio::task_local! {
    static SCOPE: Scope;
}

impl Scope {
    pub(crate) fn current() -> Scope {
        SCOPE.try_with(Scope::clone).unwrap_or_default()
    }

    /// Runs a receiver of `event`: what it fires descends from it. Both values come off the event's row, since
    /// the code that fired it may have ended long ago, in another process.
    pub(crate) async fn caused_by<F: Future>(event: EventId, correlation_id: Uuid, running: F) -> F::Output {
        let depth = Scope::current().depth.saturating_add(1);
        let scope = Scope { correlation_id: Some(correlation_id), causation_id: Some(event), depth };
        SCOPE.scope(scope, running).await
    }
}
