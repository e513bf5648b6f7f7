//! Writing events and what they owe.

use owed_core::{DeliveryId, EventId, NewEvent, Recorded, StoreError};
use owed_sql::{Sql, Tables, record as shared};
use sea_orm::DatabaseTransaction;

use crate::DIALECT;

/// Rows in one statement: 10 values each, below SQLite's 32,766.
const ROWS: usize = 1_000;

/// An event at a time, since nothing crosses a network; deliveries many at once.
pub(crate) async fn record(
    tx: &DatabaseTransaction,
    tables: &Tables,
    events: &[NewEvent],
) -> Result<Vec<Recorded>, StoreError> {
    let mut recorded = Vec::with_capacity(events.len());
    for event in events {
        recorded.push(match insert(tx, tables, event).await? {
            Some(id) => Recorded::New { event: id, deliveries: deliveries(tx, tables, id, event).await? },
            None => Recorded::Duplicate { of: earlier(tx, tables, event).await? },
        });
    }
    Ok(recorded)
}

async fn insert(
    tx: &DatabaseTransaction,
    tables: &Tables,
    event: &NewEvent,
) -> Result<Option<EventId>, StoreError> {
    let mut sql = shared::events(DIALECT, tables, std::slice::from_ref(event));
    sql.push(" ON CONFLICT (dedupe_key) WHERE dedupe_key IS NOT NULL DO NOTHING RETURNING id");
    let ids = ids(tx, sql, "recording an event").await?;
    Ok(ids.first().map(|id| EventId(*id)))
}

async fn earlier(tx: &DatabaseTransaction, tables: &Tables, event: &NewEvent) -> Result<EventId, StoreError> {
    let doing = "looking for the event with this dedupe key";
    let mut sql = Sql::new(DIALECT, format!("SELECT id FROM {} WHERE dedupe_key = ", tables.event));
    sql.bind(event.dedupe_key.clone());
    let ids = ids(tx, sql, doing).await?;
    ids.first().map(|id| EventId(*id)).ok_or_else(|| StoreError::failed(doing, "it is not there"))
}

async fn deliveries(
    tx: &DatabaseTransaction,
    tables: &Tables,
    id: EventId,
    event: &NewEvent,
) -> Result<Vec<DeliveryId>, StoreError> {
    let mut written = Vec::with_capacity(event.deliveries.len());
    for chunk in event.deliveries.chunks(ROWS) {
        let owed = chunk.iter().map(|delivery| (id, event.recorded_at, delivery));
        let mut sql = shared::deliveries(DIALECT, tables, owed);
        sql.push(" RETURNING id");
        let mut ids = ids(tx, sql, "recording deliveries").await?;
        // Rows are numbered in the order in which they stand in the statement; RETURNING promises no order.
        ids.sort_unstable();
        written.extend(ids.into_iter().map(DeliveryId));
    }
    Ok(written)
}

async fn ids(tx: &DatabaseTransaction, sql: Sql, doing: &'static str) -> Result<Vec<i64>, StoreError> {
    sql.rows(tx, doing, |row| row.try_get_by_index(0)).await
}
