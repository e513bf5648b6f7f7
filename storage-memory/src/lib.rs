//! The in-memory store of `owed`: for unit tests, and the model that other stores are checked against.
//!
//! It has real transactions: uncommitted writes are seen by their own transaction alone, a rollback or a
//! dropped transaction undoes them, savepoints nest, two transactions that write one dedupe key wait for each
//! other, and two that wait for each other are told so. What it does not have is a disk.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `operate` | what operators do to rows |
//! | `tables` | the committed rows, and the index that claims read |
//! | `tx` | transactions: layers of staged writes, and locks |
//! | this one | [`Store`] over the two |

mod operate;
mod tables;
mod tx;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use owed_core::{
    Backlog, Cancelled, Capabilities, Claim, ClaimKey, ClaimRequest, Claimed, Clock, DeliveryId,
    DeliveryQuery, DeliveryRow, EventId, EventQuery, EventRow, Listener, NewDelivery, NewEvent, Pause,
    Prunable, PruneMark, Pruned, Recorded, Reopened, SampledClock, Settled, Settlement, Signal, Status,
    Store, StoreError, Tally, Timestamp, limits,
};
use tokio::sync::Notify;

use tables::Tables;
pub use tx::MemoryTx;
use tx::{Lock, TxId};

/// Events and deliveries in this process's memory. Clones share them.
///
/// ```
/// # use owed_memory::MemoryStore;
/// # use owed_core::{ManualClock, Store};
/// let clock = ManualClock::at("2026-01-01T00:00:00Z".parse().unwrap());
/// let store = MemoryStore::with_clock(clock.clone());
/// clock.advance(std::time::Duration::from_secs(1));
/// assert_eq!(store.now().to_rfc3339(), "2026-01-01T00:00:01+00:00");
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    /// Raised whenever a transaction ends: whoever waits for a lock looks again.
    released: Notify,
    signal: Signal,
    clock: Box<dyn Clock>,
}

#[derive(Default)]
pub(crate) struct State {
    tables: Tables,
    locks: tx::Locks,
    /// By lane and worker.
    pauses: BTreeMap<(String, String), Pause>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        MemoryStore::new()
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// An empty store on this machine's clock.
    pub fn new() -> Self {
        MemoryStore::with_clock(SampledClock::default())
    }

    /// An empty store on a clock of the caller's, such as one that a test moves.
    pub fn with_clock(clock: impl Clock) -> Self {
        MemoryStore {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                released: Notify::new(),
                signal: Signal::new(),
                clock: Box::new(clock),
            }),
        }
    }

    /// Runs `write` once none of `rows` is locked by a transaction, as an UPDATE would wait.
    async fn when_free<T>(&self, rows: &[ClaimKey], write: impl FnOnce(&mut Tables) -> T + Send) -> T {
        let mut write = Some(write);
        loop {
            let released = self.shared.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            {
                let mut state = self.shared.state();
                let busy =
                    rows.iter().any(|k| state.locks.is_held(&Lock::Delivery(k.delivery.0), TxId::NONE));
                if !busy && let Some(write) = write.take() {
                    return write(&mut state.tables);
                }
            }
            released.await;
        }
    }
}

/// Applies a settlement to a row that is still claimed under its key.
fn apply(row: &mut DeliveryRow, settlement: &Settlement, now: Timestamp) -> Settled {
    if !holds(row, settlement.key()) {
        return Settled::Lost;
    }
    let columns = settlement.columns(now);
    row.status = columns.status;
    row.attempts += columns.attempt;
    row.available_at = columns.available_at;
    row.due_at = columns.due_at.unwrap_or(row.due_at);
    if let Some(error) = columns.last_error {
        row.last_error = Some(limits::storable(error, limits::ERROR));
    }
    row.completed_at = columns.completed_at;
    row.succeeded_at = columns.succeeded_at.or(row.succeeded_at);
    row.claimed_by = None;
    row.claimed_at = None;
    row.lapses = 0;
    Settled::Applied
}

fn holds(row: &DeliveryRow, key: &ClaimKey) -> bool {
    row.status == Status::Claimed
        && row.claimed_by.as_deref() == Some(&*key.worker)
        && row.claimed_at == Some(key.at)
}

#[async_trait]
impl Store for MemoryStore {
    type Tx = MemoryTx;

    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::new("memory");
        can.wakes_other_processes = false;
        can
    }

    fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    async fn sync_clock(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn begin(&self) -> Result<MemoryTx, StoreError> {
        Ok(MemoryTx::begin(self.shared.clone()))
    }

    async fn savepoint(&self, tx: &MemoryTx) -> Result<MemoryTx, StoreError> {
        Ok(tx.savepoint())
    }

    async fn commit(&self, tx: MemoryTx) -> Result<(), StoreError> {
        tx.keep();
        Ok(())
    }

    async fn rollback(&self, tx: MemoryTx) -> Result<(), StoreError> {
        drop(tx);
        Ok(())
    }

    async fn record(&self, tx: &MemoryTx, events: &[NewEvent]) -> Result<Vec<Recorded>, StoreError> {
        let mut answers = Vec::with_capacity(events.len());
        for event in events {
            if let Some(key) = &event.dedupe_key {
                tx.lock(Lock::Dedupe(key.clone())).await?;
                if let Some(of) = tx.event_of_key(key) {
                    answers.push(Recorded::Duplicate { of });
                    continue;
                }
            }
            answers.push(tx.insert(event));
        }
        Ok(answers)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Claimed>, StoreError> {
        let mut state = self.shared.state();
        let State { tables, locks, .. } = &mut *state;
        let mut claimed = Vec::new();
        for receiver in &request.receivers {
            let left = request.limit as usize - claimed.len();
            if left == 0 {
                break;
            }
            let ids: Vec<i64> = tables
                .available(&receiver.key, request.now)
                .filter(|id| !locks.is_held(&Lock::Delivery(*id), TxId::NONE))
                .filter(|id| request.only.as_ref().is_none_or(|only| only.contains(&DeliveryId(*id))))
                .filter(|id| request.owed_before.is_none_or(|before| tables.deliveries[id].due_at <= before))
                .take(left)
                .collect();
            for id in ids {
                let mut row = tables.deliveries[&id].clone();
                if row.status == Status::Claimed {
                    row.lapses = row.lapses.max(1);
                }
                row.status = Status::Claimed;
                row.claimed_by = Some(request.worker.to_string());
                row.claimed_at = Some(request.now);
                row.available_at = Some(request.now + receiver.lease);
                tables.put_delivery(row.clone());
                claimed.push(tables.whole(row, request.worker.clone(), request.now));
            }
        }
        Ok(claimed)
    }

    async fn take(
        &self,
        key: &ClaimKey,
        worker: &str,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<Option<Claimed>, StoreError> {
        let taken = self
            .when_free(std::slice::from_ref(key), |tables| {
                let mut row = tables.deliveries.get(&key.delivery.0)?.clone();
                holds(&row, key).then(|| {
                    row.claimed_by = Some(worker.to_owned());
                    row.claimed_at = Some(now);
                    row.available_at = Some(until);
                    tables.put_delivery(row.clone());
                    tables.whole(row, worker.into(), now)
                })
            })
            .await;
        Ok(taken)
    }

    async fn renew(&self, keys: &[ClaimKey], until: Timestamp) -> Result<Vec<DeliveryId>, StoreError> {
        // A row that its own handler's transaction has settled already is locked until that commits; it needs
        // no renewal then, so it is passed over and counted as held.
        let mut state = self.shared.state();
        let State { tables, locks, .. } = &mut *state;
        let mut held = Vec::new();
        for key in keys {
            if locks.is_held(&Lock::Delivery(key.delivery.0), TxId::NONE) {
                held.push(key.delivery);
            } else if let Some(row) = tables.deliveries.get(&key.delivery.0).filter(|row| holds(row, key)) {
                tables.put_delivery(DeliveryRow { available_at: Some(until), ..row.clone() });
                held.push(key.delivery);
            }
        }
        Ok(held)
    }

    async fn release(&self, keys: &[ClaimKey], at: Timestamp) -> Result<u64, StoreError> {
        let released = self
            .when_free(keys, |tables| {
                let mut released = 0;
                for key in keys {
                    let Some(row) = tables.deliveries.get(&key.delivery.0).filter(|row| holds(row, key))
                    else {
                        continue;
                    };
                    let status = if row.last_error.is_some() { Status::Failed } else { Status::Pending };
                    tables.put_delivery(DeliveryRow {
                        status,
                        claimed_by: None,
                        claimed_at: None,
                        available_at: Some(at),
                        ..row.clone()
                    });
                    released += 1;
                }
                released
            })
            .await;
        Ok(released)
    }

    async fn suspect(&self, key: &ClaimKey) -> Result<Settled, StoreError> {
        let noted = self
            .when_free(std::slice::from_ref(key), |tables| {
                match tables.deliveries.get(&key.delivery.0).filter(|row| holds(row, key)) {
                    Some(row) => {
                        tables.put_delivery(DeliveryRow { lapses: row.lapses + 1, ..row.clone() });
                        Settled::Applied
                    }
                    None => Settled::Lost,
                }
            })
            .await;
        Ok(noted)
    }

    async fn settle(
        &self,
        tx: &MemoryTx,
        settlement: &Settlement,
        now: Timestamp,
    ) -> Result<Settled, StoreError> {
        let id = settlement.key().delivery.0;
        let newly = tx.lock(Lock::Delivery(id)).await?;
        if let Some(mut row) = tx.delivery(id)
            && apply(&mut row, settlement, now) == Settled::Applied
        {
            tx.stage_delivery(row);
            return Ok(Settled::Applied);
        }
        if newly {
            // Nothing was written, so nobody has to wait for it.
            tx.unlock(&Lock::Delivery(id));
        }
        Ok(Settled::Lost)
    }

    async fn settle_all(
        &self,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<Vec<Settled>, StoreError> {
        let keys: Vec<ClaimKey> = settlements.iter().map(|s| s.key().clone()).collect();
        let settled = self
            .when_free(&keys, |tables| {
                let mut all = Vec::with_capacity(settlements.len());
                for settlement in settlements {
                    let Some(mut row) = tables.deliveries.get(&settlement.key().delivery.0).cloned() else {
                        all.push(Settled::Lost);
                        continue;
                    };
                    let settled = apply(&mut row, settlement, now);
                    if settled == Settled::Applied {
                        tables.put_delivery(row);
                    }
                    all.push(settled);
                }
                all
            })
            .await;
        Ok(settled)
    }

    async fn expedite(&self, receivers: &[&str], now: Timestamp) -> Result<u64, StoreError> {
        let mut state = self.shared.state();
        let State { tables, locks, .. } = &mut *state;
        let moved: Vec<DeliveryRow> = tables
            .deliveries
            .values()
            .filter(|row| {
                row.status == Status::Failed
                    && receivers.contains(&row.receiver_key.as_str())
                    && row.available_at.is_some_and(|at| at > now.max(row.due_at))
                    && !locks.is_held(&Lock::Delivery(row.id.0), TxId::NONE)
            })
            .map(|row| DeliveryRow { available_at: Some(now.max(row.due_at)), ..row.clone() })
            .collect();
        let count = moved.len() as u64;
        moved.into_iter().for_each(|row| tables.put_delivery(row));
        Ok(count)
    }

    async fn pause(&self, pause: &Pause) -> Result<(), StoreError> {
        let pauses = &mut self.shared.state().pauses;
        pauses.retain(|_, other| other.until > pause.since);
        pauses.insert((pause.lane.clone(), pause.worker.clone()), pause.clone());
        Ok(())
    }

    async fn pauses(&self, now: Timestamp) -> Result<Vec<Pause>, StoreError> {
        Ok(self.shared.state().pauses.values().filter(|pause| pause.until > now).cloned().collect())
    }

    async fn owed(&self, receiver: &str, limit: u32) -> Result<Vec<DeliveryRow>, StoreError> {
        Ok(self.shared.state().tables.owed(receiver).take(limit as usize).cloned().collect())
    }

    async fn owed_receivers(&self) -> Result<Vec<String>, StoreError> {
        Ok(self.shared.state().tables.owed_receivers())
    }

    async fn backlog(&self, receiver: &str, now: Timestamp, bound: u32) -> Result<Backlog, StoreError> {
        let mut backlog = Backlog::default();
        let state = self.shared.state();
        let mut rows = state.tables.owed(receiver);
        rows.by_ref().take(bound as usize).for_each(|row| backlog.count(row, now));
        backlog.bounded = rows.next().is_some();
        Ok(backlog)
    }

    async fn dead_letters(&self, bound: u32) -> Result<Vec<(String, u64)>, StoreError> {
        let state = self.shared.state();
        let dead = state.tables.deliveries.values().filter(|row| row.status == Status::Dead);
        let mut counts: BTreeMap<String, u64> = BTreeMap::new();
        for row in dead.take(bound as usize) {
            *counts.entry(row.receiver_key.clone()).or_default() += 1;
        }
        Ok(counts.into_iter().collect())
    }

    async fn tally(&self) -> Result<Vec<Tally>, StoreError> {
        Ok(self.shared.state().tables.tally())
    }

    async fn events(&self, query: &EventQuery) -> Result<Vec<EventRow>, StoreError> {
        Ok(page_of_events(&self.shared.state().tables.events, query))
    }

    async fn events_in(&self, tx: &MemoryTx, query: &EventQuery) -> Result<Vec<EventRow>, StoreError> {
        Ok(page_of_events(&tx.events(), query))
    }

    async fn deliveries(&self, query: &DeliveryQuery) -> Result<Vec<DeliveryRow>, StoreError> {
        let Tables { deliveries, events, .. } = &self.shared.state().tables;
        Ok(page_of_deliveries(deliveries, events, query))
    }

    async fn deliveries_in(
        &self,
        tx: &MemoryTx,
        query: &DeliveryQuery,
    ) -> Result<Vec<DeliveryRow>, StoreError> {
        Ok(page_of_deliveries(&tx.deliveries(), &tx.events(), query))
    }

    async fn last_successes(&self) -> Result<Vec<(String, Timestamp)>, StoreError> {
        Ok(self.shared.state().tables.last_successes())
    }

    async fn lock_events(&self, tx: &MemoryTx, events: &[EventId]) -> Result<Vec<EventRow>, StoreError> {
        operate::lock_events(tx, events).await
    }

    async fn cancel(
        &self,
        tx: &MemoryTx,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<Cancelled, StoreError> {
        operate::cancel(tx, deliveries, now).await
    }

    async fn requeue(
        &self,
        tx: &MemoryTx,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<u64, StoreError> {
        operate::requeue(tx, deliveries, now).await
    }

    async fn reopen(
        &self,
        tx: &MemoryTx,
        event: EventId,
        rows: &[NewDelivery],
    ) -> Result<Reopened, StoreError> {
        operate::reopen(tx, event, rows).await
    }

    async fn retention_windows(&self) -> Result<Vec<i64>, StoreError> {
        Ok(operate::retention_windows(&self.shared))
    }

    async fn prunable(
        &self,
        kind: &Prunable,
        after: Option<PruneMark>,
        limit: u32,
    ) -> Result<Vec<PruneMark>, StoreError> {
        Ok(operate::prunable(&self.shared, kind, after, limit))
    }

    async fn prune(&self, kind: &Prunable, events: &[EventId], rows: u32) -> Result<Pruned, StoreError> {
        Ok(operate::prune(&self.shared, kind, events, rows))
    }

    async fn wake(&self) -> Result<(), StoreError> {
        self.shared.signal.raise();
        Ok(())
    }

    async fn listen(&self) -> Result<Box<dyn Listener>, StoreError> {
        Ok(Box::new(self.shared.signal.clone()))
    }

    async fn detached(&self, _: u32) -> Result<Self, StoreError> {
        Ok(self.clone())
    }
}

fn page_of_events(events: &BTreeMap<i64, Arc<EventRow>>, query: &EventQuery) -> Vec<EventRow> {
    let from = query.after.map_or(i64::MIN, |EventId(id)| id.saturating_add(1));
    let found = events.range(from..).map(|(_, row)| row).filter(|row| query.matches(row));
    found.take(query.limit as usize).map(|row| EventRow::clone(row)).collect()
}

fn page_of_deliveries(
    deliveries: &BTreeMap<i64, DeliveryRow>,
    events: &BTreeMap<i64, Arc<EventRow>>,
    query: &DeliveryQuery,
) -> Vec<DeliveryRow> {
    let from = query.after.map_or(i64::MIN, |DeliveryId(id)| id.saturating_add(1));
    let of_event = |row: &DeliveryRow| {
        !query.needs_event() || events.get(&row.event_id.0).is_some_and(|event| query.of.matches(event))
    };
    let rows = deliveries.range(from..).map(|(_, row)| row);
    let found = rows.filter(|row| query.matches(row) && of_event(row));
    found.take(query.limit as usize).cloned().collect()
}

impl Tables {
    fn whole(&self, row: DeliveryRow, worker: Arc<str>, at: Timestamp) -> Claimed {
        Claimed {
            claim: Claim::granted(row.id, worker, at),
            event: self.events.get(&row.event_id.0).cloned(),
            delivery: row,
        }
    }
}
