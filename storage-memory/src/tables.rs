//! The committed rows, and the index that claims read.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use owed_core::{DeliveryRow, EventId, EventRow, Prunable, Status, Tally, Timestamp};

#[derive(Default)]
pub(crate) struct Tables {
    pub(crate) events: BTreeMap<i64, Arc<EventRow>>,
    pub(crate) deliveries: BTreeMap<i64, DeliveryRow>,
    dedupe: HashMap<String, i64>,
    /// By receiver, what is not settled, the oldest first.
    unsettled: BTreeMap<String, BTreeSet<(Timestamp, i64)>>,
    /// The newest success of each receiver among what was pruned.
    successes: BTreeMap<String, Timestamp>,
    last_event: i64,
    last_delivery: i64,
}

impl Tables {
    pub(crate) fn next_event(&mut self) -> i64 {
        self.last_event += 1;
        self.last_event
    }

    pub(crate) fn next_delivery(&mut self) -> i64 {
        self.last_delivery += 1;
        self.last_delivery
    }

    pub(crate) fn put_event(&mut self, row: Arc<EventRow>) {
        if let Some(key) = &row.dedupe_key {
            self.dedupe.insert(key.clone(), row.id.0);
        }
        self.events.insert(row.id.0, row);
    }

    pub(crate) fn put_delivery(&mut self, row: DeliveryRow) {
        self.remove_delivery(row.id.0);
        if let Some(at) = row.available_at {
            self.unsettled.entry(row.receiver_key.clone()).or_default().insert((at, row.id.0));
        }
        self.deliveries.insert(row.id.0, row);
    }

    fn remove_delivery(&mut self, id: i64) -> Option<DeliveryRow> {
        let before = self.deliveries.remove(&id)?;
        if let Some(at) = before.available_at
            && let Some(rows) = self.unsettled.get_mut(&before.receiver_key)
        {
            rows.remove(&(at, id));
            if rows.is_empty() {
                self.unsettled.remove(&before.receiver_key);
            }
        }
        Some(before)
    }

    /// Deletes a delivery, and keeps its success if it is its receiver's newest.
    pub(crate) fn prune_delivery(&mut self, id: i64) {
        let Some(row) = self.remove_delivery(id) else { return };
        if let Some(at) = row.succeeded_at {
            let newest = self.successes.entry(row.receiver_key).or_insert(at);
            *newest = at.max(*newest);
        }
    }

    pub(crate) fn remove_event(&mut self, id: i64) {
        let Some(row) = self.events.remove(&id) else { return };
        if let Some(key) = &row.dedupe_key {
            self.dedupe.remove(key);
        }
    }

    pub(crate) fn last_successes(&self) -> Vec<(String, Timestamp)> {
        let mut newest = self.successes.clone();
        for row in self.deliveries.values() {
            if let Some(at) = row.succeeded_at {
                let known = newest.entry(row.receiver_key.clone()).or_insert(at);
                *known = at.max(*known);
            }
        }
        newest.into_iter().collect()
    }

    pub(crate) fn of_event(&self, event: EventId) -> impl Iterator<Item = &DeliveryRow> {
        self.deliveries.values().filter(move |row| row.event_id == event)
    }

    /// Whether a prune may delete the event.
    pub(crate) fn is_prunable(&self, kind: &Prunable, event: &EventRow) -> bool {
        kind.is_due(event.retention, event.recorded_at)
            && self.of_event(event.id).all(|row| match kind {
                Prunable::Succeeded => matches!(row.status, Status::Succeeded | Status::Cancelled),
                Prunable::Settled | Prunable::Window { .. } => row.status.is_terminal(),
            })
    }

    pub(crate) fn event_of_key(&self, key: &str) -> Option<EventId> {
        self.dedupe.get(key).map(|id| EventId(*id))
    }

    /// The rows of one receiver that may be taken at `now`, the oldest first.
    pub(crate) fn available(&self, receiver: &str, now: Timestamp) -> impl Iterator<Item = i64> + '_ {
        self.unsettled
            .get(receiver)
            .into_iter()
            .flat_map(move |rows| rows.range(..=(now, i64::MAX)).map(|(_, id)| *id))
    }

    /// What is not settled of a receiver's, the soonest first.
    pub(crate) fn owed(&self, receiver: &str) -> impl Iterator<Item = &DeliveryRow> {
        let ids = self.unsettled.get(receiver).into_iter().flatten();
        ids.filter_map(|(_, id)| self.deliveries.get(id))
    }

    pub(crate) fn owed_receivers(&self) -> Vec<String> {
        self.unsettled.keys().cloned().collect()
    }

    pub(crate) fn tally(&self) -> Vec<Tally> {
        let mut counts: BTreeMap<(&str, Status), (u64, u64)> = BTreeMap::new();
        for row in self.deliveries.values() {
            let (rows, attempts) = counts.entry((&row.receiver_key, row.status)).or_default();
            *rows += 1;
            *attempts += row.attempts.unsigned_abs() as u64;
        }
        counts
            .into_iter()
            .map(|((key, status), (count, attempts))| Tally {
                receiver_key: key.to_owned(),
                status,
                count,
                attempts,
            })
            .collect()
    }
}
