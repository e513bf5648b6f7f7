//! What operators do to rows.

use std::{collections::HashMap, sync::Arc};

use owed_core::{
    Cancelled, DeliveryId, DeliveryRow, EventId, EventRow, NewDelivery, Prunable, PruneMark, Pruned,
    Reopened, Status, StoreError, Timestamp,
};

use crate::{
    Shared, State,
    tx::{Lock, MemoryTx, TxId},
};

pub(crate) async fn lock_events(tx: &MemoryTx, events: &[EventId]) -> Result<Vec<EventRow>, StoreError> {
    let mut found = Vec::new();
    for id in in_order(events) {
        let lock = Lock::Event(id.0);
        let newly = tx.lock(lock.clone()).await?;
        match tx.event(id.0) {
            Some(row) => found.push(EventRow::clone(&row)),
            None if newly => tx.unlock(&lock),
            None => {}
        }
    }
    Ok(found)
}

fn in_order<I: Copy + Ord>(ids: &[I]) -> Vec<I> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Rewrites those of these rows that are in one of `statuses`, and answers how many.
async fn rewrite(
    tx: &MemoryTx,
    deliveries: &[DeliveryId],
    statuses: &[Status],
    write: impl Fn(DeliveryRow) -> DeliveryRow,
) -> Result<u64, StoreError> {
    let mut written = 0;
    let is = |row: &DeliveryRow| statuses.contains(&row.status);
    for id in in_order(deliveries) {
        // Only what matches is waited for, and looked at again once it is ours.
        if !tx.delivery(id.0).is_some_and(|row| is(&row)) {
            continue;
        }
        let lock = Lock::Delivery(id.0);
        let newly = tx.lock(lock.clone()).await?;
        match tx.delivery(id.0).filter(is) {
            Some(row) => {
                tx.stage_delivery(write(row));
                written += 1;
            }
            None if newly => tx.unlock(&lock),
            None => {}
        }
    }
    Ok(written)
}

pub(crate) async fn cancel(
    tx: &MemoryTx,
    deliveries: &[DeliveryId],
    now: Timestamp,
) -> Result<Cancelled, StoreError> {
    let withdraw =
        |row| DeliveryRow { status: Status::Cancelled, available_at: None, completed_at: Some(now), ..row };
    let cancelled = rewrite(tx, deliveries, &[Status::Pending, Status::Failed], withdraw).await?;
    let claimed = |id: &DeliveryId| tx.delivery(id.0).is_some_and(|row| row.status == Status::Claimed);
    let in_flight = in_order(deliveries).iter().filter(|id| claimed(id)).count() as u64;
    Ok(Cancelled::new(cancelled, in_flight))
}

/// The row, owed from `at` as if it had never been tried. What it succeeded at before is kept.
fn fresh(row: DeliveryRow, available_at: Timestamp, due_at: Timestamp) -> DeliveryRow {
    DeliveryRow {
        status: Status::Pending,
        attempts: 0,
        available_at: Some(available_at),
        due_at,
        claimed_by: None,
        claimed_at: None,
        lapses: 0,
        last_error: None,
        completed_at: None,
        ..row
    }
}

pub(crate) async fn requeue(
    tx: &MemoryTx,
    deliveries: &[DeliveryId],
    now: Timestamp,
) -> Result<u64, StoreError> {
    rewrite(tx, deliveries, &[Status::Dead], |row| fresh(row, now, now)).await
}

pub(crate) async fn reopen(
    tx: &MemoryTx,
    event: EventId,
    rows: &[NewDelivery],
) -> Result<Reopened, StoreError> {
    let Some(event) = tx.event(event.0) else { return Ok(Reopened::default()) };
    let there: HashMap<(String, String), DeliveryRow> = tx
        .deliveries()
        .into_values()
        .filter(|row| row.event_id == event.id)
        .map(|row| ((row.receiver_key.clone(), row.target.clone()), row))
        .collect();
    let mut done = Reopened::default();
    for new in rows {
        let Some(row) = there.get(&(new.receiver_key.to_string(), new.target.clone())) else {
            tx.insert_delivery(&event, new);
            done.added += 1;
            continue;
        };
        if row.status.is_terminal() {
            // Nobody else writes a terminal row without the event's lock.
            tx.lock(Lock::Delivery(row.id.0)).await?;
            tx.stage_delivery(fresh(row.clone(), new.available_at, new.due_at));
            done.reopened += 1;
        }
    }
    Ok(done)
}

pub(crate) fn retention_windows(shared: &Shared) -> Vec<i64> {
    let state = shared.state();
    let windows = state.tables.events.values().filter_map(|row| row.retention.columns().0);
    windows.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

pub(crate) fn prunable(
    shared: &Shared,
    kind: &Prunable,
    after: Option<PruneMark>,
    limit: u32,
) -> Vec<PruneMark> {
    let state = shared.state();
    let by_time = matches!(kind, Prunable::Window { .. });
    let mut due: Vec<PruneMark> = state
        .tables
        .events
        .values()
        .filter(|row| state.tables.is_prunable(kind, row))
        .map(|row: &Arc<EventRow>| PruneMark { recorded_at: row.recorded_at, event: row.id })
        .filter(|mark| {
            after.is_none_or(|after| if by_time { *mark > after } else { mark.event > after.event })
        })
        .collect();
    if by_time {
        due.sort_unstable();
    }
    due.truncate(limit as usize);
    due
}

pub(crate) fn prune(shared: &Shared, kind: &Prunable, events: &[EventId], rows: u32) -> Pruned {
    let mut state = shared.state();
    let State { tables, locks, .. } = &mut *state;
    let mut pruned = Pruned::default();
    let mut left = rows.max(1) as usize;
    for id in in_order(events) {
        let Some(event) = tables.events.get(&id.0).cloned() else { continue };
        if locks.is_held(&Lock::Event(id.0), TxId::NONE) || !tables.is_prunable(kind, &event) {
            continue;
        }
        if left == 0 {
            pruned.more = true;
            break;
        }
        let mut ids: Vec<i64> = tables.of_event(id).map(|row| row.id.0).collect();
        pruned.more = ids.len() > left;
        ids.truncate(left);
        left -= ids.len();
        pruned.deliveries += ids.len() as u64;
        ids.into_iter().for_each(|id| tables.prune_delivery(id));
        if pruned.more {
            break;
        }
        tables.remove_event(id.0);
        pruned.events += 1;
        left = left.saturating_sub(1);
    }
    pruned
}
