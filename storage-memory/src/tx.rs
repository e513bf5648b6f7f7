//! Transactions: layers of staged writes, and locks.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use owed_core::{DeliveryId, DeliveryRow, EventId, EventRow, NewDelivery, NewEvent, Recorded, StoreError};

use crate::Shared;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TxId(u64);

impl TxId {
    /// Somebody who is no transaction: every held lock is another's.
    pub(crate) const NONE: TxId = TxId(0);
}

/// What a transaction can hold against others until it ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lock {
    Dedupe(String),
    Event(i64),
    Delivery(i64),
}

#[derive(Default)]
pub(crate) struct Locks {
    owners: HashMap<Lock, TxId>,
    /// Who waits for whom: a cycle is a deadlock.
    waits: HashMap<TxId, TxId>,
    last: u64,
}

impl Locks {
    /// Whether somebody other than `me` holds it.
    pub(crate) fn is_held(&self, lock: &Lock, me: TxId) -> bool {
        self.owners.get(lock).is_some_and(|owner| *owner != me)
    }

    fn would_deadlock(&self, me: TxId, mut owner: TxId) -> bool {
        while let Some(next) = self.waits.get(&owner) {
            if *next == me {
                return true;
            }
            owner = *next;
        }
        false
    }
}

/// Writes since the transaction began, or since one of its savepoints.
#[derive(Default)]
struct Layer {
    events: BTreeMap<i64, Arc<EventRow>>,
    deliveries: BTreeMap<i64, DeliveryRow>,
    locks: Vec<Lock>,
}

struct Inner {
    id: TxId,
    shared: Arc<Shared>,
    layers: Mutex<Vec<Layer>>,
}

/// An open transaction of a [`MemoryStore`](crate::MemoryStore), or a savepoint in one. Dropped, it is undone.
pub struct MemoryTx {
    inner: Arc<Inner>,
    /// Its place among the layers: 0 for the transaction itself.
    level: usize,
    ended: bool,
}

impl std::fmt::Debug for MemoryTx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryTx").field("level", &self.level).finish_non_exhaustive()
    }
}

/// Takes the "waits for" edge away again, however the wait ends.
struct Waiting<'a>(&'a Inner);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.shared.state().locks.waits.remove(&self.0.id);
    }
}

impl MemoryTx {
    pub(crate) fn begin(shared: Arc<Shared>) -> Self {
        let id = {
            let locks = &mut shared.state().locks;
            locks.last += 1;
            TxId(locks.last)
        };
        let inner = Inner { id, shared, layers: Mutex::new(vec![Layer::default()]) };
        MemoryTx { inner: Arc::new(inner), level: 0, ended: false }
    }

    fn layers(&self) -> MutexGuard<'_, Vec<Layer>> {
        self.inner.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn savepoint(&self) -> MemoryTx {
        let mut layers = self.layers();
        layers.push(Layer::default());
        MemoryTx { inner: self.inner.clone(), level: layers.len() - 1, ended: false }
    }

    /// Waits until the lock is this transaction's. Answers whether it was not before.
    pub(crate) async fn lock(&self, lock: Lock) -> Result<bool, StoreError> {
        let inner = &*self.inner;
        let waiting = Waiting(inner);
        loop {
            let released = inner.shared.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            {
                let mut state = inner.shared.state();
                let locks = &mut state.locks;
                match locks.owners.get(&lock).copied() {
                    Some(owner) if owner == inner.id => return Ok(false),
                    None => {
                        locks.owners.insert(lock.clone(), inner.id);
                        drop(state);
                        if let Some(top) = self.layers().last_mut() {
                            top.locks.push(lock);
                        }
                        break;
                    }
                    Some(owner) => {
                        if locks.would_deadlock(inner.id, owner) {
                            return Err(StoreError::Retry {
                                doing: "waiting for another transaction",
                                source: "deadlock".into(),
                            });
                        }
                        locks.waits.insert(inner.id, owner);
                    }
                }
            }
            released.await;
        }
        drop(waiting);
        Ok(true)
    }

    /// Lets go of a lock that nothing was written under.
    pub(crate) fn unlock(&self, lock: &Lock) {
        for layer in self.layers().iter_mut() {
            layer.locks.retain(|held| held != lock);
        }
        self.inner.shared.state().locks.owners.remove(lock);
        self.inner.shared.released.notify_waiters();
    }

    pub(crate) fn event_of_key(&self, key: &str) -> Option<EventId> {
        let staged = self.layers().iter().rev().find_map(|layer| {
            layer.events.values().find(|row| row.dedupe_key.as_deref() == Some(key)).map(|row| row.id)
        });
        staged.or_else(|| self.inner.shared.state().tables.event_of_key(key))
    }

    pub(crate) fn delivery(&self, id: i64) -> Option<DeliveryRow> {
        let staged = self.layers().iter().rev().find_map(|layer| layer.deliveries.get(&id).cloned());
        staged.or_else(|| self.inner.shared.state().tables.deliveries.get(&id).cloned())
    }

    pub(crate) fn event(&self, id: i64) -> Option<Arc<EventRow>> {
        let staged = self.layers().iter().rev().find_map(|layer| layer.events.get(&id).cloned());
        staged.or_else(|| self.inner.shared.state().tables.events.get(&id).cloned())
    }

    /// Every event as this transaction sees it.
    pub(crate) fn events(&self) -> BTreeMap<i64, Arc<EventRow>> {
        let mut all = self.inner.shared.state().tables.events.clone();
        for layer in self.layers().iter() {
            all.extend(layer.events.iter().map(|(id, row)| (*id, row.clone())));
        }
        all
    }

    /// Every delivery as this transaction sees it.
    pub(crate) fn deliveries(&self) -> BTreeMap<i64, DeliveryRow> {
        let mut all = self.inner.shared.state().tables.deliveries.clone();
        for layer in self.layers().iter() {
            all.extend(layer.deliveries.iter().map(|(id, row)| (*id, row.clone())));
        }
        all
    }

    /// Writes a delivery of an event that is there.
    pub(crate) fn insert_delivery(&self, event: &EventRow, new: &NewDelivery) {
        let id = DeliveryId(self.inner.shared.state().tables.next_delivery());
        self.stage_delivery(new.row(id, event.id, event.recorded_at));
    }

    pub(crate) fn stage_delivery(&self, row: DeliveryRow) {
        if let Some(top) = self.layers().last_mut() {
            top.deliveries.insert(row.id.0, row);
        }
    }

    pub(crate) fn insert(&self, new: &NewEvent) -> Recorded {
        let (event, deliveries) = {
            let tables = &mut self.inner.shared.state().tables;
            let event = EventId(tables.next_event());
            (event, new.deliveries.iter().map(|_| DeliveryId(tables.next_delivery())).collect::<Vec<_>>())
        };
        let row = new.clone().into_row(event);
        if let Some(top) = self.layers().last_mut() {
            top.events.insert(event.0, Arc::new(row));
            for (delivery, id) in new.deliveries.iter().zip(&deliveries) {
                top.deliveries.insert(id.0, delivery.row(*id, event, new.recorded_at));
            }
        }
        Recorded::New { event, deliveries }
    }

    /// Makes the staged writes real, or hands a savepoint's to the layer around it.
    pub(crate) fn keep(mut self) {
        self.ended = true;
        let above: Vec<Layer> = self.layers().split_off(self.level);
        if self.level > 0 {
            let mut layers = self.layers();
            if let Some(around) = layers.last_mut() {
                for layer in above {
                    around.events.extend(layer.events);
                    around.deliveries.extend(layer.deliveries);
                    around.locks.extend(layer.locks);
                }
            }
            return;
        }
        let mut state = self.inner.shared.state();
        for layer in above {
            layer.events.into_values().for_each(|row| state.tables.put_event(row));
            layer.deliveries.into_values().for_each(|row| state.tables.put_delivery(row));
            for lock in layer.locks {
                state.locks.owners.remove(&lock);
            }
        }
        drop(state);
        self.inner.shared.released.notify_waiters();
    }
}

impl Drop for MemoryTx {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let undone: Vec<Layer> = {
            let mut layers = self.layers();
            if layers.len() <= self.level { Vec::new() } else { layers.split_off(self.level) }
        };
        {
            let mut state = self.inner.shared.state();
            for lock in undone.into_iter().flat_map(|layer| layer.locks) {
                state.locks.owners.remove(&lock);
            }
        }
        self.inner.shared.released.notify_waiters();
    }
}
