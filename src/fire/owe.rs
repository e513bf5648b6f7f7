//! What an event owes: one delivery for each durable receiver, or for each of its targets.

use std::{cell::OnceCell, collections::HashSet, sync::Arc};

use chrono::TimeDelta;
use owed_core::{EventId, EventRow, NewDelivery, NewEvent, Store, Timestamp, limits, micros};

use crate::{
    context::DeliveryContext,
    declare::{Declared, DueTime, DurableSpec},
    error::Error,
    outbox::Outbox,
};

/// The deliveries of an event that is about to be written.
pub(super) fn deliveries<S: Store>(outbox: &Outbox<S>, event: &NewEvent) -> Result<Vec<NewDelivery>, Error> {
    // Most receivers need no more than the event's times; only targets and due functions look inside.
    let seen = OnceCell::new();
    let seen = || seen.get_or_init(|| Arc::new(event.clone().into_row(EventId(0))));
    let mut owed = Vec::new();
    for receiver in outbox.registry().listening(&event.name) {
        let Some(spec) = receiver.durable() else { continue };
        let wrong = |why: String| Error::Owing { receiver: receiver.key.to_string(), why };
        let due_at = match &spec.due {
            Some(due) => due_at(due, event, seen).map_err(wrong)?,
            None => event.recorded_at,
        };
        match &spec.targets {
            None => owed.push(delivery(outbox, receiver, spec, event.recorded_at, due_at, String::new())),
            Some(targets) => {
                let context = DeliveryContext::of_event(receiver.key.clone(), seen());
                let answered = targets(seen(), &context).map_err(|error| wrong(error.to_string()))?;
                let mut taken = HashSet::with_capacity(answered.len());
                for (place, target) in answered.iter().enumerate() {
                    limits::text("the target", target, limits::TARGET).map_err(|refused| {
                        wrong(format!("target {} of {}: {refused}", place + 1, answered.len()))
                    })?;
                    if taken.insert(target.as_str()) {
                        owed.push(delivery(
                            outbox,
                            receiver,
                            spec,
                            event.recorded_at,
                            due_at,
                            target.clone(),
                        ));
                    }
                }
            }
        }
    }
    Ok(owed)
}

/// When a delivery is due: never before the row is written.
fn due_at<'e>(
    due: &DueTime,
    event: &NewEvent,
    seen: impl Fn() -> &'e Arc<EventRow>,
) -> Result<Timestamp, String> {
    let at = match due {
        DueTime::After(delay) => TimeDelta::from_std(*delay)
            .ok()
            .and_then(|delay| event.occurred_at.checked_add_signed(delay))
            .ok_or_else(|| format!("{delay:?} after the event is past the end of time"))?,
        DueTime::At(at) => at(seen()).map_err(|error| error.to_string())?,
    };
    let latest = event.recorded_at + crate::settings::Settings::LONGEST * 10;
    if at > latest {
        return Err(format!("it would be due at {at}, and the latest time that it may be is {latest}"));
    }
    Ok(micros(at).max(event.recorded_at))
}

fn delivery<S: Store>(
    outbox: &Outbox<S>,
    receiver: &Declared<S>,
    spec: &DurableSpec,
    now: Timestamp,
    due_at: Timestamp,
    target: String,
) -> NewDelivery {
    let settings = outbox.settings();
    let max_attempts = spec.max_attempts.unwrap_or(settings.max_attempts);
    NewDelivery {
        receiver_key: receiver.key.clone(),
        target,
        max_attempts: i32::try_from(max_attempts).unwrap_or(i32::MAX),
        available_at: if spec.eager { now + spec.claim_lease(settings) } else { due_at },
        due_at,
        claimed_by: spec.eager.then(|| outbox.worker().clone()),
    }
}
