//! Recording events, in the order that `docs/architecture.md` lists.

use std::{future::IntoFuture, sync::Arc};

use futures::future::BoxFuture;
use owed_core::{
    Claim, Claimed, Codec, DeliveryId, EventId, EventRow, NewEvent, Recorded, Store, Timestamp, limits,
    micros,
};
use tracing::{Instrument, info_span};
use uuid::Uuid;

use super::{After, Tx, owe, tx::Halfway};
use crate::{
    codec,
    context::DeliveryContext,
    declare::{Declared, Mode, Ran},
    error::Error,
    event::{Event, retention},
    scope::{DEEPEST, Scope},
    trace,
};

/// What became of an event that was fired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fired {
    /// It is recorded, once the transaction commits.
    Recorded(EventId),
    /// It is recorded, and owed to nobody: the scope that it was fired in suppresses it.
    Suppressed(EventId),
    /// Nothing was written: the scope that it was fired in discards it.
    Discarded,
    /// An event with that dedupe key is recorded already. Nothing was written, no receiver runs, and the
    /// transaction is usable.
    Duplicate {
        /// The earlier event.
        of: EventId,
    },
}

impl Fired {
    /// The event's id, if this call recorded it.
    pub fn id(self) -> Option<EventId> {
        match self {
            Fired::Recorded(id) | Fired::Suppressed(id) => Some(id),
            Fired::Duplicate { .. } | Fired::Discarded => None,
        }
    }

    /// Whether the event had been recorded before.
    pub fn is_duplicate(self) -> bool {
        matches!(self, Fired::Duplicate { .. })
    }
}

/// An event about to be fired: await it. Made by [`Tx::fire`].
#[must_use = "nothing is fired until it is awaited"]
#[derive(Debug)]
pub struct Fire<'t, S: Store, E> {
    tx: &'t Tx<S>,
    event: E,
    // Not the method's name, which would spoil the compiler's message where the method can't be called.
    dedupe: Option<String>,
    occurred: Option<Timestamp>,
}

impl<'t, S: Store, E: Event> Fire<'t, S, E> {
    pub(super) fn new(tx: &'t Tx<S>, event: E) -> Self {
        Fire { tx, event, dedupe: None, occurred: None }
    }

    /// When it happened, in the domain's own time. Default: now.
    pub fn occurred_at(mut self, at: Timestamp) -> Self {
        self.occurred = Some(at);
        self
    }
}

impl<S: Store, E: Event> Fire<'_, S, E> {
    /// Records it only if no event that is still kept has this key, of at most 255 characters. See
    /// [`Fired::Duplicate`]. Does not compile for an event that is deleted once consumed, and its key with it.
    pub fn dedupe_key(mut self, key: impl Into<String>) -> Self
    where
        E::Retention: retention::Lasting,
    {
        self.dedupe = Some(key.into());
        self
    }
}

impl<'t, S: Store, E: Event> IntoFuture for Fire<'t, S, E> {
    type Output = Result<Fired, Error>;
    type IntoFuture = BoxFuture<'t, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let span = info_span!("owed.fire", event = E::NAME, count = 1);
        let firing = async move {
            let Some(about) = About::read::<S, E>(self.tx)? else { return Ok(Fired::Discarded) };
            let new = about.prepare(self.tx, &self.event, self.dedupe, self.occurred)?;
            let mut fired = record(self.tx, vec![new], &about.scope).await?;
            fired.pop().ok_or_else(|| owed_core::StoreError::failed("recording an event", "no answer").into())
        };
        Box::pin(firing.instrument(span))
    }
}

/// Events about to be fired: await it. Made by [`Tx::fire_all`].
#[must_use = "nothing is fired until it is awaited"]
#[derive(Debug)]
pub struct FireAll<'t, S: Store, E> {
    tx: &'t Tx<S>,
    events: Vec<E>,
}

impl<'t, S: Store, E: Event> FireAll<'t, S, E> {
    pub(super) fn new(tx: &'t Tx<S>, events: Vec<E>) -> Self {
        FireAll { tx, events }
    }
}

impl<'t, S: Store, E: Event> IntoFuture for FireAll<'t, S, E> {
    type Output = Result<Vec<Fired>, Error>;
    type IntoFuture = BoxFuture<'t, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let span = info_span!("owed.fire", event = E::NAME, count = self.events.len());
        let firing = async move {
            let Some(about) = About::read::<S, E>(self.tx)? else {
                return Ok(vec![Fired::Discarded; self.events.len()]);
            };
            let new: Result<Vec<_>, _> =
                self.events.iter().map(|event| about.prepare(self.tx, event, None, None)).collect();
            record(self.tx, new?, &about.scope).await
        };
        Box::pin(firing.instrument(span))
    }
}

/// What is the same for each event of one call: read once, when it is fired.
struct About {
    scope: Arc<Scope>,
    /// Of the scope, else one of this call's own.
    correlation_id: Option<Uuid>,
    data: Option<Vec<u8>>,
    trace_context: Option<String>,
    suppressed: Option<String>,
}

impl About {
    /// `None` where the event is to be discarded.
    fn read<S: Store, E: Event>(tx: &Tx<S>) -> Result<Option<Self>, Error> {
        if tx.outbox().registry().event(E::NAME).is_none() {
            return Err(Error::NotDeclared { name: E::NAME, type_name: std::any::type_name::<E>() });
        }
        let scope = Scope::shared().unwrap_or_default();
        let suppressed = match scope.suppresses(E::NAME) {
            Some((_, false)) => return Ok(None),
            Some((reason, true)) => Some(reason.to_owned()),
            None => None,
        };
        Ok(Some(About {
            correlation_id: scope.correlation_id,
            data: scope.encoded_data(),
            trace_context: scope.trace_context.as_deref().map(str::to_owned).or_else(trace::current),
            suppressed,
            scope,
        }))
    }

    /// Checks and encodes one event, and works out what it owes. Writes nothing.
    fn prepare<S: Store, E: Event>(
        &self,
        tx: &Tx<S>,
        event: &E,
        dedupe_key: Option<String>,
        occurred_at: Option<Timestamp>,
    ) -> Result<NewEvent, Error> {
        let outbox = tx.outbox();
        let codec: Codec = outbox.settings().codec;
        let payload =
            codec::encode(codec, event).map_err(|source| Error::Encode { name: E::NAME, source })?;
        let now = outbox.now();
        let (actor_key, actor_label) = self.scope.actor.clone().unwrap_or_default();
        let mut new = NewEvent {
            name: E::NAME.into(),
            version: E::VERSION,
            codec,
            payload,
            dedupe_key,
            occurred_at: micros(occurred_at.unwrap_or(now)),
            recorded_at: now,
            actor_key,
            actor_label,
            scope: self.data.clone(),
            correlation_id: self.correlation_id.unwrap_or_else(Uuid::now_v7),
            causation_id: self.scope.causation_id,
            suppressed: self.suppressed.clone(),
            retention: <E::Retention as retention::Retention>::RULE,
            trace_context: self.trace_context.clone(),
            deliveries: Vec::new(),
        };
        limits::event(&new)?;
        if new.suppressed.is_none() {
            // Keys were checked by `build`, targets are where they are answered.
            new.deliveries = owe::deliveries(outbox, &new)?;
        }
        Ok(new)
    }
}

/// Writes the events, then runs their inline receivers and notes what waits for the commit.
async fn record<S: Store>(tx: &Tx<S>, new: Vec<NewEvent>, scope: &Arc<Scope>) -> Result<Vec<Fired>, Error> {
    if new.is_empty() {
        return Ok(Vec::new());
    }
    let halfway = Halfway::new(tx, "firing an event");
    let recorded = tx.outbox().store().record(tx.raw(), &new).await?;
    let mut fired = Vec::with_capacity(new.len());
    for (new, recorded) in new.into_iter().zip(recorded) {
        match recorded {
            Recorded::Duplicate { of } => fired.push(Fired::Duplicate { of }),
            // Nothing follows from one that is suppressed.
            Recorded::New { event, .. } if new.suppressed.is_some() => fired.push(Fired::Suppressed(event)),
            Recorded::New { event, deliveries } => {
                fired.push(Fired::Recorded(event));
                follow(tx, event, &deliveries, new, scope).await?;
            }
        }
    }
    halfway.ended();
    Ok(fired)
}

/// What follows from an event that was written.
async fn follow<S: Store>(
    tx: &Tx<S>,
    id: EventId,
    deliveries: &[DeliveryId],
    mut new: NewEvent,
    scope: &Arc<Scope>,
) -> Result<(), Error> {
    let outbox = tx.outbox();
    let name = new.name.clone();
    let listening = || outbox.registry().listening(&name);
    let owed = std::mem::take(&mut new.deliveries);
    let mut after =
        After { owes: owed.iter().any(|delivery| delivery.claimed_by.is_none()), ..After::default() };
    let needs_event = owed.iter().any(|delivery| delivery.claimed_by.is_some())
        || listening().any(|receiver| !matches!(receiver.mode, Mode::Durable(_)));
    if !needs_event {
        tx.then(after);
        return Ok(());
    }
    let recorded_at = new.recorded_at;
    let event = Arc::new(new.into_row(id));
    for (delivery, id) in owed.iter().zip(deliveries) {
        let Some(worker) = &delivery.claimed_by else { continue };
        after.eager.push(Claimed {
            claim: Claim::granted(*id, worker.clone(), recorded_at),
            delivery: delivery.row(*id, event.id, recorded_at),
            event: Some(event.clone()),
        });
    }
    for receiver in listening() {
        match receiver.mode {
            Mode::Inline => run_inline(tx, receiver, &event, scope).await?,
            Mode::OnCommit => after.on_commit.push((receiver.clone(), event.clone(), scope.clone())),
            Mode::Durable(_) => {}
        }
    }
    tx.then(after);
    Ok(())
}

async fn run_inline<S: Store>(
    tx: &Tx<S>,
    receiver: &Declared<S>,
    event: &Arc<EventRow>,
    scope: &Arc<Scope>,
) -> Result<(), Error> {
    let refuse = |source| {
        tx.poison(format!("the inline receiver {} refused in it", receiver.key));
        Err(Error::Inline { receiver: receiver.key.to_string(), source })
    };
    if scope.depth >= DEEPEST {
        return refuse(
            format!("inline receivers have fired events {DEEPEST} deep: they are going in a circle").into(),
        );
    }
    let context = DeliveryContext::of_event(receiver.key.clone(), event);
    let lent = receiver.takes_tx.then(|| tx.lend());
    let running = receiver.run(event, context, lent);
    match scope.clone().caused_by(event.id, event.correlation_id, running).await {
        Ran::Succeeded => Ok(()),
        Ran::Failed { error, .. } => refuse(error),
        Ran::Undecodable(error) => refuse(error.into()),
    }
}
