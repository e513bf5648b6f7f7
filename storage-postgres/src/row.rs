//! Rows of the statements that go through the driver itself, read by position.

use owed_core::{DeliveryId, DeliveryRow, EventId, EventRow, RetentionRule, Status};
use sea_orm::sqlx::{Error, Row, postgres::PgRow};

/// Reads a delivery whose first column is number `at`, in the order of [`owed_sql::row::DELIVERY`].
pub(crate) fn delivery(row: &PgRow, at: usize) -> Result<DeliveryRow, Error> {
    let status: &str = row.try_get(at + 4)?;
    Ok(DeliveryRow {
        id: DeliveryId(row.try_get(at)?),
        event_id: EventId(row.try_get(at + 1)?),
        receiver_key: row.try_get(at + 2)?,
        target: row.try_get(at + 3)?,
        status: status.parse::<Status>().map_err(|error| Error::Decode(error.into()))?,
        attempts: row.try_get(at + 5)?,
        max_attempts: row.try_get(at + 6)?,
        available_at: row.try_get(at + 7)?,
        due_at: row.try_get(at + 8)?,
        claimed_by: row.try_get(at + 9)?,
        claimed_at: row.try_get(at + 10)?,
        lapses: row.try_get(at + 11)?,
        last_error: row.try_get(at + 12)?,
        completed_at: row.try_get(at + 13)?,
        succeeded_at: row.try_get(at + 14)?,
    })
}

/// Reads an event whose first column is number `at`, in the order of [`owed_sql::row::event_columns`].
pub(crate) fn event(row: &PgRow, at: usize) -> Result<EventRow, Error> {
    let delete_when: Option<&str> = row.try_get(at + 15)?;
    Ok(EventRow {
        id: EventId(row.try_get(at)?),
        name: row.try_get(at + 1)?,
        version: row.try_get(at + 2)?,
        codec: row.try_get(at + 3)?,
        payload: row.try_get(at + 4)?,
        dedupe_key: row.try_get(at + 5)?,
        occurred_at: row.try_get(at + 6)?,
        recorded_at: row.try_get(at + 7)?,
        actor_key: row.try_get(at + 8)?,
        actor_label: row.try_get(at + 9)?,
        scope: row.try_get(at + 10)?,
        correlation_id: row.try_get(at + 11)?,
        causation_id: row.try_get::<Option<i64>, _>(at + 12)?.map(EventId),
        suppressed: row.try_get(at + 13)?,
        retention: RetentionRule::from_columns(row.try_get(at + 14)?, delete_when),
        trace_context: row.try_get(at + 16)?,
    })
}
