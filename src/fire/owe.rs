//! What an event owes: one delivery for each durable receiver, or for each of its targets.

use std::{cell::OnceCell, collections::HashSet, sync::Arc};

use chrono::TimeDelta;
use owed_core::{EventId, EventRow, NewDelivery, NewEvent, Store, Timestamp, limits, micros};

use crate::{context::DeliveryContext, declare::DueTime, error::Error, outbox::Outbox};

/// The deliveries of an event that is about to be written.
pub(super) fn deliveries<S: Store>(outbox: &Outbox<S>, event: &NewEvent) -> Result<Vec<NewDelivery>, Error> {
    // Most receivers need no more than the event's times; only targets and due functions look inside.
    let seen = OnceCell::new();
    let owing = Owing {
        outbox,
        name: &event.name,
        occurred_at: event.occurred_at,
        now: event.recorded_at,
        eagerly: true,
        seen: &|| seen.get_or_init(|| Arc::new(event.clone().into_row(EventId(0)))).clone(),
    };
    owing.to(|_| true)
}

/// What an event that was written before owes, if it is to be delivered again now.
pub(crate) fn again<S: Store>(
    outbox: &Outbox<S>,
    event: &Arc<EventRow>,
    now: Timestamp,
    only: impl Fn(&str) -> bool,
) -> Result<Vec<NewDelivery>, Error> {
    let seen = || event.clone();
    let owing =
        Owing { outbox, name: &event.name, occurred_at: event.occurred_at, now, eagerly: false, seen: &seen };
    owing.to(only)
}

/// An event that owes something from `now` on.
struct Owing<'e, S: Store> {
    outbox: &'e Outbox<S>,
    name: &'e str,
    occurred_at: Timestamp,
    now: Timestamp,
    /// Whether the rows of eager receivers are born claimed by this process.
    eagerly: bool,
    seen: &'e dyn Fn() -> Arc<EventRow>,
}

impl<S: Store> Owing<'_, S> {
    /// One delivery for each durable receiver among `only`, or for each of its targets.
    fn to(&self, only: impl Fn(&str) -> bool) -> Result<Vec<NewDelivery>, Error> {
        let mut owed = Vec::new();
        for receiver in self.outbox.registry().listening(self.name).filter(|receiver| only(&receiver.key)) {
            let Some(spec) = receiver.durable() else { continue };
            let wrong = |why: String| Error::Owing { receiver: receiver.key.to_string(), why };
            let due_at = match &spec.due {
                Some(due) => self.due_at(due).map_err(wrong)?,
                None => self.now,
            };
            let settings = self.outbox.settings();
            let max_attempts = spec.max_attempts.unwrap_or(settings.max_attempts);
            let born_claimed = self.eagerly && spec.eager;
            let delivery = |target: String| NewDelivery {
                receiver_key: receiver.key.clone(),
                target,
                max_attempts: i32::try_from(max_attempts).unwrap_or(i32::MAX),
                available_at: if born_claimed { self.now + spec.claim_lease(settings) } else { due_at },
                due_at,
                claimed_by: born_claimed.then(|| self.outbox.worker().clone()),
            };
            let Some(targets) = &spec.targets else {
                owed.push(delivery(String::new()));
                continue;
            };
            let event = (self.seen)();
            let context = DeliveryContext::of_event(receiver.key.clone(), &event);
            let answered = targets(&event, &context).map_err(|error| wrong(error.to_string()))?;
            let mut taken = HashSet::with_capacity(answered.len());
            for (place, target) in answered.iter().enumerate() {
                limits::text("the target", target, limits::TARGET).map_err(|refused| {
                    wrong(format!("target {} of {}: {refused}", place + 1, answered.len()))
                })?;
                if taken.insert(target.as_str()) {
                    owed.push(delivery(target.clone()));
                }
            }
        }
        Ok(owed)
    }

    /// When a delivery is due: never before now.
    fn due_at(&self, due: &DueTime) -> Result<Timestamp, String> {
        let at = match due {
            DueTime::After(delay) => TimeDelta::from_std(*delay)
                .ok()
                .and_then(|delay| self.occurred_at.checked_add_signed(delay))
                .ok_or_else(|| format!("{delay:?} after the event is past the end of time"))?,
            DueTime::At(at) => at(&(self.seen)()).map_err(|error| error.to_string())?,
        };
        let latest = self.now + crate::settings::Settings::LONGEST * 10;
        if at > latest {
            return Err(format!("it would be due at {at}, and the latest time that it may be is {latest}"));
        }
        Ok(micros(at).max(self.now))
    }
}
