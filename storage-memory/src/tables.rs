//! The committed rows, and the index that claims read.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use owed_core::{DeliveryRow, EventId, EventRow, Status, Tally, Timestamp};

#[derive(Default)]
pub(crate) struct Tables {
    pub(crate) events: BTreeMap<i64, Arc<EventRow>>,
    pub(crate) deliveries: BTreeMap<i64, DeliveryRow>,
    dedupe: HashMap<String, i64>,
    /// By receiver, what is not settled, the oldest first.
    unsettled: BTreeMap<String, BTreeSet<(Timestamp, i64)>>,
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
        if let Some(before) = self.deliveries.get(&row.id.0)
            && let Some(at) = before.available_at
            && let Some(rows) = self.unsettled.get_mut(&before.receiver_key)
        {
            rows.remove(&(at, row.id.0));
            if rows.is_empty() {
                self.unsettled.remove(&before.receiver_key);
            }
        }
        if let Some(at) = row.available_at {
            self.unsettled.entry(row.receiver_key.clone()).or_default().insert((at, row.id.0));
        }
        self.deliveries.insert(row.id.0, row);
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
