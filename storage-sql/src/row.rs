//! Rows as they are read back. The column lists and the readers below go together.

use owed_core::{DeliveryId, DeliveryRow, EventId, EventRow, RetentionRule, Status};
use sea_orm::{DbErr, QueryResult};

use crate::Dialect;

/// The columns of an event, in the order in which [`event`] reads them.
pub const EVENT: [&str; 16] = [
    "id",
    "name",
    "version",
    "codec",
    "payload",
    "dedupe_key",
    "occurred_at",
    "recorded_at",
    "actor_key",
    "actor_label",
    "scope",
    "correlation_id",
    "causation_id",
    "suppressed",
    "retention_seconds",
    "delete_when",
];

/// The last column of an event; see [`event`].
pub const EVENT_LAST: &str = "trace_context";

/// The columns of a delivery, in the order in which [`delivery`] reads them.
pub const DELIVERY: [&str; 15] = [
    "id",
    "event_id",
    "receiver_key",
    "target",
    "status",
    "attempts",
    "max_attempts",
    "available_at",
    "due_at",
    "claimed_by",
    "claimed_at",
    "lapses",
    "last_error",
    "completed_at",
    "succeeded_at",
];

/// `e.id, e.name, ..` of every column of an event.
pub fn event_columns(alias: &str) -> String {
    columns(alias, EVENT.iter().chain([&EVENT_LAST]))
}

/// `d.id, d.event_id, ..` of every column of a delivery.
pub fn delivery_columns(alias: &str) -> String {
    columns(alias, DELIVERY.iter())
}

fn columns<'a>(alias: &str, names: impl Iterator<Item = &'a &'a str>) -> String {
    names.map(|name| format!("{alias}.{name}")).collect::<Vec<_>>().join(", ")
}

/// Reads an event whose first column is number `at`.
///
/// # Errors
/// If a column is damaged.
pub fn event(dialect: Dialect, row: &QueryResult, at: usize) -> Result<EventRow, DbErr> {
    let delete_when: Option<String> = row.try_get_by_index(at + 15)?;
    Ok(EventRow {
        id: EventId(row.try_get_by_index(at)?),
        name: row.try_get_by_index(at + 1)?,
        version: row.try_get_by_index(at + 2)?,
        codec: row.try_get_by_index(at + 3)?,
        payload: row.try_get_by_index(at + 4)?,
        dedupe_key: row.try_get_by_index(at + 5)?,
        occurred_at: dialect.read_set_time(row, at + 6)?,
        recorded_at: dialect.read_set_time(row, at + 7)?,
        actor_key: row.try_get_by_index(at + 8)?,
        actor_label: row.try_get_by_index(at + 9)?,
        scope: row.try_get_by_index(at + 10)?,
        correlation_id: dialect.read_uuid(row, at + 11)?,
        causation_id: row.try_get_by_index::<Option<i64>>(at + 12)?.map(EventId),
        suppressed: row.try_get_by_index(at + 13)?,
        retention: RetentionRule::from_columns(row.try_get_by_index(at + 14)?, delete_when.as_deref()),
        trace_context: row.try_get_by_index(at + 16)?,
    })
}

/// Reads a delivery whose first column is number `at`.
///
/// # Errors
/// If a column is damaged.
pub fn delivery(dialect: Dialect, row: &QueryResult, at: usize) -> Result<DeliveryRow, DbErr> {
    let status: String = row.try_get_by_index(at + 4)?;
    Ok(DeliveryRow {
        id: DeliveryId(row.try_get_by_index(at)?),
        event_id: EventId(row.try_get_by_index(at + 1)?),
        receiver_key: row.try_get_by_index(at + 2)?,
        target: row.try_get_by_index(at + 3)?,
        status: status.parse::<Status>().map_err(|error| DbErr::Type(error.to_string()))?,
        attempts: row.try_get_by_index(at + 5)?,
        max_attempts: row.try_get_by_index(at + 6)?,
        available_at: dialect.read_time(row, at + 7)?,
        due_at: dialect.read_set_time(row, at + 8)?,
        claimed_by: row.try_get_by_index(at + 9)?,
        claimed_at: dialect.read_time(row, at + 10)?,
        lapses: row.try_get_by_index(at + 11)?,
        last_error: row.try_get_by_index(at + 12)?,
        completed_at: dialect.read_time(row, at + 13)?,
        succeeded_at: dialect.read_time(row, at + 14)?,
    })
}
