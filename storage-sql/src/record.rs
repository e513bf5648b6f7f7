//! The INSERTs of events and deliveries, for a database without arrays: many rows, a placeholder for each value.

use std::collections::HashMap;

use owed_core::{EventId, NewDelivery, NewEvent, Timestamp, row::target_digest};
use sea_orm::Value;

use crate::{Dialect, Sql, Tables};

/// Writes these events; what follows it (RETURNING, ON CONFLICT) is the store's to add. 16 values a row.
pub fn events(dialect: Dialect, tables: &Tables, events: &[NewEvent]) -> Sql {
    let mut sql = Sql::new(
        dialect,
        format!(
            "INSERT INTO {} (name, version, codec, payload, dedupe_key, occurred_at, recorded_at, actor_key,
                 actor_label, scope, correlation_id, causation_id, suppressed, retention_seconds, delete_when,
                 trace_context)
             VALUES ",
            tables.event
        ),
    );
    for (n, event) in events.iter().enumerate() {
        if n > 0 {
            sql.push(", ");
        }
        let (seconds, delete_when) = event.retention.columns();
        sql.list([
            (&*event.name).into(),
            event.version.into(),
            event.codec.as_str().into(),
            event.payload.clone().into(),
            event.dedupe_key.clone().into(),
            dialect.time(Some(event.occurred_at)),
            dialect.time(Some(event.recorded_at)),
            event.actor_key.as_str().into(),
            event.actor_label.as_str().into(),
            event.scope.clone().into(),
            dialect.uuid(event.correlation_id),
            event.causation_id.map(|id| id.0).into(),
            event.suppressed.clone().into(),
            seconds.into(),
            delete_when.map(str::to_owned).into(),
            event.trace_context.clone().into(),
        ] as [Value; 16]);
    }
    sql
}

/// Writes these deliveries, each with its event and the moment at which one that is born claimed is claimed. 10 values
/// a row.
pub fn deliveries<'e>(
    dialect: Dialect,
    tables: &Tables,
    owed: impl IntoIterator<Item = (EventId, Timestamp, &'e NewDelivery)>,
) -> Sql {
    let mut sql = Sql::new(
        dialect,
        format!(
            "INSERT INTO {} (event_id, receiver_key, target, target_digest, status, max_attempts, available_at,
                 due_at, claimed_by, claimed_at)
             VALUES ",
            tables.delivery
        ),
    );
    // Events of one fan-out go to the same targets again and again.
    let mut digests: HashMap<&str, Vec<u8>> = HashMap::new();
    for (n, (event, at, delivery)) in owed.into_iter().enumerate() {
        if n > 0 {
            sql.push(", ");
        }
        let born = delivery.claimed_by.as_deref();
        let digest = digests.entry(&delivery.target).or_insert_with_key(|target| target_digest(target));
        sql.list([
            event.0.into(),
            (&*delivery.receiver_key).into(),
            delivery.target.as_str().into(),
            digest.clone().into(),
            if born.is_some() { "claimed" } else { "pending" }.into(),
            delivery.max_attempts.into(),
            dialect.time(Some(delivery.available_at)),
            dialect.time(Some(delivery.due_at)),
            born.map(str::to_owned).into(),
            dialect.time(born.map(|_| at)),
        ] as [Value; 10]);
    }
    sql
}
