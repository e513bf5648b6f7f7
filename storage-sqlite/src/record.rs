//! Writing events and what they owe.

use owed_core::{DeliveryId, EventId, NewEvent, Recorded, StoreError, row::target_digest};
use owed_sql::{Sql, Tables};
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
    let (seconds, delete_when) = event.retention.columns();
    let mut sql = Sql::new(
        DIALECT,
        format!(
            "INSERT INTO {} (name, version, codec, payload, dedupe_key, occurred_at, recorded_at, actor_key,
                 actor_label, scope, correlation_id, causation_id, suppressed, retention_seconds, delete_when,
                 trace_context)
             VALUES ",
            tables.event
        ),
    );
    sql.list([
        (&*event.name).into(),
        event.version.into(),
        event.codec.as_str().into(),
        event.payload.clone().into(),
        event.dedupe_key.clone().into(),
        DIALECT.time(Some(event.occurred_at)),
        DIALECT.time(Some(event.recorded_at)),
        event.actor_key.as_str().into(),
        event.actor_label.as_str().into(),
        event.scope.clone().into(),
        DIALECT.uuid(event.correlation_id),
        event.causation_id.map(|id| id.0).into(),
        event.suppressed.clone().into(),
        seconds.into(),
        delete_when.map(str::to_owned).into(),
        event.trace_context.clone().into(),
    ] as [sea_orm::Value; 16]);
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
        let mut sql = Sql::new(
            DIALECT,
            format!(
                "INSERT INTO {} (event_id, receiver_key, target, target_digest, status, max_attempts, available_at,
                     due_at, claimed_by, claimed_at)
                 VALUES ",
                tables.delivery
            ),
        );
        for (n, delivery) in chunk.iter().enumerate() {
            if n > 0 {
                sql.push(", ");
            }
            let born = delivery.claimed_by.is_some();
            sql.list([
                id.0.into(),
                (&*delivery.receiver_key).into(),
                delivery.target.as_str().into(),
                target_digest(&delivery.target).into(),
                if born { "claimed" } else { "pending" }.into(),
                delivery.max_attempts.into(),
                DIALECT.time(Some(delivery.available_at)),
                DIALECT.time(Some(delivery.due_at)),
                delivery.claimed_by.as_ref().map(|worker| worker.to_string()).into(),
                DIALECT.time(born.then_some(event.recorded_at)),
            ] as [sea_orm::Value; 10]);
        }
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
