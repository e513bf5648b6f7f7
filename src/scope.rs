//! What is known about the code that fires: carried with the task, read when an event is fired.

use std::{collections::BTreeMap, fmt, sync::Arc};

use owed_core::{EventId, limits};
use serde::Serialize;
use uuid::Uuid;

use crate::{
    codec::{self, Value},
    error::Error,
    event::Event,
};

/// Inline receivers may fire events with inline receivers; a circle of them would never end.
pub(crate) const DEEPEST: u8 = 32;

/// On whose behalf, in which request, and with which notes code fires events. Every event that is fired in a scope
/// carries it.
///
/// ```
/// use owed::Scope;
/// # use owed::{Event, MemoryStore, Outbox, EventQuery, Store};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize, Event)] struct OrderPlaced { order: i64 }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let outbox = Outbox::builder(MemoryStore::new()).event::<OrderPlaced>().build()?;
/// let scope = Scope::new().actor("user:7", "Ada").data("source", "import")?;
/// scope
///     .run(async {
///         // any depth of calls
///         outbox.transaction(async |tx| tx.fire(OrderPlaced { order: 42 }).await).await
///     })
///     .await?;
/// # let event = outbox.store().events(&EventQuery::page(1)).await?.remove(0);
/// # assert_eq!((event.actor_key.as_str(), event.actor_label.as_str()), ("user:7", "Ada"));
/// # Ok(()) }
/// ```
///
/// Scopes layer: an inner one adds to what the outer one says, and replaces what it says itself. The actor is one
/// thing: naming it replaces key and label. Events of one scope share its correlation id: the one it was given, else
/// that of the scope around it, else a new one.
///
/// A scope ends with its future, however that ends, and belongs to its task. A task or thread that is spawned starts
/// without one: give it what is current where it is spawned.
///
/// ```
/// # use owed::Scope;
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # let sending = async {}; let work = || ();
/// let spawned = tokio::spawn(Scope::current().run(sending));
/// let thread = std::thread::spawn(Scope::current().wrap(work));
/// # spawned.await.unwrap(); thread.join().unwrap();
/// # }
/// ```
#[derive(Clone, Default)]
#[must_use = "a scope does nothing until something runs in it"]
pub struct Scope {
    pub(crate) actor: Option<(String, String)>,
    pub(crate) correlation_id: Option<Uuid>,
    pub(crate) causation_id: Option<EventId>,
    pub(crate) trace_context: Option<Arc<str>>,
    data: Arc<BTreeMap<String, Value>>,
    /// The innermost last.
    suppressions: Vec<Suppression>,
    pub(crate) depth: u8,
}

impl fmt::Debug for Scope {
    /// Shows what is there, and no value: they may be private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope")
            .field("actor", &self.actor.is_some())
            .field("correlation_id", &self.correlation_id)
            .field("causation_id", &self.causation_id)
            .field("data", &self.data.keys())
            .field("suppressions", &self.suppressions)
            .finish_non_exhaustive()
    }
}

tokio::task_local! {
    static SCOPE: Arc<Scope>;
}

impl Scope {
    /// A scope that says nothing yet.
    pub fn new() -> Self {
        Scope::default()
    }

    /// What the running task is in; an empty scope if it is in none. A copy: to give to a task or a thread that is
    /// about to be spawned.
    pub fn current() -> Scope {
        Scope::shared().map(|scope| (*scope).clone()).unwrap_or_default()
    }

    pub(crate) fn shared() -> Option<Arc<Scope>> {
        SCOPE.try_with(Arc::clone).ok()
    }

    /// Who does it: a stable key (`user:7`), and a text for people. Each is cut at 255 characters, since an actor
    /// that is too long to name in full must not stop the business.
    pub fn actor(mut self, key: impl AsRef<str>, label: impl AsRef<str>) -> Self {
        let cut = |text: &str| limits::storable(text, limits::TEXT);
        self.actor = Some((cut(key.as_ref()), cut(label.as_ref())));
        self
    }

    /// The id that everything which one request leads to shares. Default: that of the scope around, else a new one.
    pub fn correlation_id(mut self, id: Uuid) -> Self {
        self.correlation_id = Some(id);
        self
    }

    /// A note of any shape, kept on the event and given to its receivers
    /// ([`DeliveryContext::scope`](crate::DeliveryContext)). The same key again replaces its value.
    ///
    /// # Errors
    /// [`Error::ScopeData`] if it can't be serialised (or is nested too deep to be read back), and
    /// [`Error::Refused`] if all notes together are over 64 KiB as CBOR.
    pub fn data(mut self, key: impl Into<String>, value: impl Serialize) -> Result<Self, Error> {
        let key = key.into();
        let wrong = |source| Error::ScopeData { key: key.clone(), source };
        let value = Value::serialized(&value).map_err(|error| wrong(error.into()))?;
        if matches!(value, Value::Array(_) | Value::Map(_) | Value::Tag(..)) {
            codec::reads_back(&value).map_err(wrong)?;
        }
        Arc::make_mut(&mut self.data).insert(key, value);
        let size = self.encoded_data().map_or(0, |data| data.len());
        limits::bytes("the scope's data", size, limits::SCOPE)?;
        Ok(self)
    }

    /// The W3C trace context (`traceparent`) of what it does, kept on its events for
    /// [`DeliveryContext::trace_context`](crate::DeliveryContext). With the Cargo feature `otel` it is taken from the
    /// current span where no scope says one.
    ///
    /// # Errors
    /// [`Error::TraceContext`] if it isn't one.
    pub fn trace_context(mut self, traceparent: &str) -> Result<Self, Error> {
        if !is_traceparent(traceparent) {
            return Err(Error::TraceContext { size: traceparent.len() });
        }
        self.trace_context = Some(traceparent.into());
        Ok(self)
    }

    /// Fires chosen events without delivering them. See [`Suppression`].
    pub fn suppressing(mut self, suppression: Suppression) -> Self {
        self.suppressions.push(suppression);
        self
    }

    /// Runs a future in this scope, laid over the one that is current where it is awaited.
    ///
    /// # Cancel safety
    /// As safe as `running` itself.
    pub async fn run<F: Future>(self, running: F) -> F::Output {
        SCOPE.scope(Arc::new(self.over_current()), running).await
    }

    /// Makes a function that runs in this scope on any thread, laid over the one that is current where it is called:
    /// for `std::thread::spawn`, `spawn_blocking` and pools.
    pub fn wrap<T>(self, work: impl FnOnce() -> T) -> impl FnOnce() -> T {
        move || SCOPE.sync_scope(Arc::new(self.over_current()), work)
    }

    fn over_current(self) -> Scope {
        let mut scope = match Scope::shared() {
            None => self,
            Some(around) => self.over(&around),
        };
        scope.correlation_id.get_or_insert_with(Uuid::now_v7);
        scope
    }

    fn over(self, around: &Scope) -> Scope {
        let data = if self.data.is_empty() || Arc::ptr_eq(&self.data, &around.data) {
            around.data.clone()
        } else if around.data.is_empty() {
            self.data
        } else {
            let mut data = (*around.data).clone();
            data.extend((*self.data).clone());
            Arc::new(data)
        };
        let mut suppressions = around.suppressions.clone();
        suppressions.extend(self.suppressions);
        Scope {
            actor: self.actor.or_else(|| around.actor.clone()),
            correlation_id: self.correlation_id.or(around.correlation_id),
            causation_id: self.causation_id.or(around.causation_id),
            trace_context: self.trace_context.or_else(|| around.trace_context.clone()),
            data,
            suppressions,
            depth: self.depth.max(around.depth),
        }
    }

    /// The notes as CBOR; `None` where there are none.
    pub(crate) fn encoded_data(&self) -> Option<Vec<u8>> {
        if self.data.is_empty() {
            return None;
        }
        let mut bytes = Vec::new();
        // Values that were made by serialising can be written, and a Vec takes any number of bytes.
        ciborium::into_writer(&*self.data, &mut bytes).ok().map(|()| bytes)
    }

    /// Whether an event of this name is suppressed: with which reason, and whether it is recorded at all.
    pub(crate) fn suppresses(&self, name: &str) -> Option<(&str, bool)> {
        let mut matching = self.suppressions.iter().rev().filter(|suppression| suppression.matches(name));
        let innermost = matching.next()?;
        let discards = innermost.discards || matching.any(|suppression| suppression.discards);
        Some((&innermost.reason, !discards))
    }

    /// Runs a receiver of `event` where it was fired: what it fires descends from it, on behalf of whoever fired it.
    pub(crate) async fn caused_by<F: Future>(
        self: Arc<Scope>,
        event: EventId,
        correlation_id: Uuid,
        running: F,
    ) -> F::Output {
        let scope = Scope {
            correlation_id: Some(correlation_id),
            causation_id: Some(event),
            depth: self.depth.saturating_add(1),
            ..(*self).clone()
        };
        SCOPE.scope(Arc::new(scope), running).await
    }

    /// Runs a delivery: what it fires descends from its event. Both values come off the row, since the code that
    /// fired it may have ended long ago, in another process; and nothing of the code that delivers it is added.
    pub(crate) async fn of_delivery<F: Future>(
        event: EventId,
        correlation_id: Uuid,
        running: F,
    ) -> F::Output {
        Arc::<Scope>::default().caused_by(event, correlation_id, running).await
    }
}

/// Which events are fired without being delivered, and why.
///
/// The reason is required, and lands on each event's row: it is recorded with no deliveries, and none of its
/// receivers run. [`discard`](Suppression::discard) writes nothing at all, for imports of many rows.
///
/// ```
/// # use owed::{Event, Fired, MemoryStore, Outbox, Scope, Suppression};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize, Event)] struct OrderPlaced { order: i64 }
/// # #[derive(Serialize, Deserialize, Event)] struct OrderPaid { order: i64 }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let outbox = Outbox::builder(MemoryStore::new()).event::<OrderPlaced>().event::<OrderPaid>().build()?;
/// let old_orders = Suppression::of::<OrderPlaced>("import of old orders")?.and::<OrderPaid>();
/// let fired = Scope::new()
///     .suppressing(old_orders)
///     .run(outbox.transaction(async |tx| tx.fire(OrderPlaced { order: 42 }).await))
///     .await?;
/// assert!(matches!(fired, Fired::Suppressed(_)));
/// # Ok(()) }
/// ```
///
/// Nested ones accumulate: the innermost that matches gives the reason, and any that discards wins.
#[derive(Clone, Debug)]
#[must_use = "a suppression does nothing until it is part of a scope that runs"]
pub struct Suppression {
    reason: Arc<str>,
    /// `None`: all.
    names: Option<Vec<&'static str>>,
    discards: bool,
}

impl Suppression {
    fn new(reason: &str, names: Option<Vec<&'static str>>) -> Result<Self, Error> {
        limits::text("the suppression reason", reason, limits::TEXT)?;
        Ok(Suppression { reason: reason.into(), names, discards: false })
    }

    /// Suppresses events of type `E`, for a reason of at most 255 characters.
    ///
    /// # Errors
    /// [`Error::Refused`] if the reason is empty, over its limit, or holds a NUL.
    pub fn of<E: Event>(reason: impl AsRef<str>) -> Result<Self, Error> {
        Suppression::new(reason.as_ref(), Some(vec![E::NAME]))
    }

    /// Suppresses every event, for a reason of at most 255 characters.
    ///
    /// # Errors
    /// [`Error::Refused`] if the reason is empty, over its limit, or holds a NUL.
    pub fn everything(reason: impl AsRef<str>) -> Result<Self, Error> {
        Suppression::new(reason.as_ref(), None)
    }

    /// Suppresses events of type `E` as well.
    pub fn and<E: Event>(mut self) -> Self {
        if let Some(names) = &mut self.names {
            names.push(E::NAME);
        }
        self
    }

    /// Writes nothing for these events: [`Fired::Discarded`](crate::Fired::Discarded). It trades the audit trail for
    /// the write.
    pub fn discard(mut self) -> Self {
        self.discards = true;
        self
    }

    fn matches(&self, name: &str) -> bool {
        self.names.as_ref().is_none_or(|names| names.contains(&name))
    }
}

/// `00-<32 hex digits, not all zero>-<16, not all zero>-<2>`, in lower case, of any version but ff.
fn is_traceparent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let hex = |part: &str, len: usize| {
        part.len() == len && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let something = |part: &str| part.bytes().any(|byte| byte != b'0');
    matches!(parts.as_slice(), [version, trace, parent, flags]
        if hex(version, 2) && *version != "ff"
            && hex(trace, 32) && something(trace)
            && hex(parent, 16) && something(parent)
            && hex(flags, 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_context_is_checked_by_the_rules_of_w3c() {
        assert!(is_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
        for wrong in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert!(!is_traceparent(wrong), "{wrong}");
        }
    }
}
