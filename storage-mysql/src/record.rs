//! Writing events and what they owe.
//!
//! No row is read back for its id. An INSERT of many rows draws their ids at once, in the order of the rows and
//! evenly apart, and answers the first (it is a "simple insert", whatever `innodb_autoinc_lock_mode` is, as long as
//! nobody puts a trigger on these tables); MariaDB answers all of them.

use std::collections::HashMap;

use owed_core::{DeliveryId, EventId, NewEvent, Recorded, StoreError, row::target_digest};
use owed_sql::{Sql, Tables, classify};
use sea_orm::{DatabaseTransaction, SqlErr, Value};

use crate::{
    DIALECT, Inner,
    connect::{Kind, SPACING},
};

/// Rows in one statement: at most 16 values each, below 65,535 placeholders.
const ROWS: usize = 2_000;
/// Bytes in one statement, below the servers' default `max_allowed_packet` (MariaDB: 16 MiB) even with one event
/// more of the largest payload.
const BYTES: usize = 4 * 1024 * 1024;

pub(crate) async fn record(
    tx: &DatabaseTransaction,
    inner: &Inner,
    events: &[NewEvent],
) -> Result<Vec<Recorded>, StoreError> {
    let mut found: Vec<Result<EventId, EventId>> = Vec::with_capacity(events.len());
    while let Some(next) = events.get(found.len()) {
        let rest = &events[found.len()..];
        let plain = rest.iter().take_while(|event| event.dedupe_key.is_none());
        let many = fitting(plain, |event| event.payload.len() + event.scope.as_ref().map_or(0, Vec::len));
        if many == 0 {
            found.push(insert_once(tx, &inner.tables, next).await?);
        } else {
            let sql = statement(&inner.tables, &rest[..many]);
            let ids = insert(tx, inner, sql, many, "recording events").await?;
            found.extend(ids.into_iter().map(|id| Ok(EventId(id))));
        }
    }
    let mut deliveries = deliveries(tx, inner, events, &found).await?.into_iter();
    let recorded = events.iter().zip(found).map(|(event, found)| match found {
        Ok(id) => {
            let deliveries = deliveries.by_ref().take(event.deliveries.len()).collect();
            Recorded::New { event: id, deliveries }
        }
        Err(of) => Recorded::Duplicate { of },
    });
    Ok(recorded.collect())
}

/// How many of these fit into one statement: at least one, if there is one.
fn fitting<T>(rows: impl Iterator<Item = T>, size: impl Fn(&T) -> usize) -> usize {
    let mut bytes = 0;
    let fits = |row: &T| {
        let fits = bytes < BYTES;
        bytes += size(row);
        fits
    };
    rows.take(ROWS).take_while(fits).count()
}

/// Writes `rows` rows and answers their ids, in order.
async fn insert(
    tx: &DatabaseTransaction,
    inner: &Inner,
    mut sql: Sql,
    rows: usize,
    doing: &'static str,
) -> Result<Vec<i64>, StoreError> {
    if inner.server.kind == Kind::Mariadb {
        sql.push(" RETURNING id");
        let mut ids = numbers(tx, sql, doing).await?;
        ids.sort_unstable();
        return match ids.len() == rows {
            true => Ok(ids),
            false => Err(StoreError::failed(doing, "the server did not answer for each row")),
        };
    }
    let spacing = match inner.spacing.known() {
        Some(known) => known,
        None if rows == 1 => 1,
        None => {
            let asked = numbers(tx, Sql::new(DIALECT, SPACING), doing).await?;
            asked.first().copied().unwrap_or(1)
        }
    };
    let written = sql.execute(tx, doing).await?;
    let first = i64::try_from(written.last_insert_id()).unwrap_or(i64::MAX);
    Ok((0..rows as i64).map(|n| first + n * spacing).collect())
}

async fn numbers(tx: &DatabaseTransaction, sql: Sql, doing: &'static str) -> Result<Vec<i64>, StoreError> {
    sql.rows(tx, doing, |row| row.try_get_by_index(0)).await
}

/// Writes one event with a dedupe key, or answers the earlier one. A duplicate undoes its own statement alone, so
/// the transaction stays usable.
async fn insert_once(
    tx: &DatabaseTransaction,
    tables: &Tables,
    event: &NewEvent,
) -> Result<Result<EventId, EventId>, StoreError> {
    let error = match statement(tables, std::slice::from_ref(event)).attempt(tx).await {
        Ok(written) => return Ok(Ok(EventId(i64::try_from(written.last_insert_id()).unwrap_or(i64::MAX)))),
        Err(error) => error,
    };
    if !matches!(error.sql_err(), Some(SqlErr::UniqueConstraintViolation(_))) {
        return Err(classify("recording an event", error));
    }
    // A locking read: it sees what is committed now, whatever this transaction's snapshot.
    let doing = "looking for the event with this dedupe key";
    let mut sql = Sql::new(DIALECT, format!("SELECT id FROM {} WHERE dedupe_key = ", tables.event));
    sql.bind(event.dedupe_key.clone()).push(" LOCK IN SHARE MODE");
    let ids = numbers(tx, sql, doing).await?;
    let id = ids.first().ok_or_else(|| StoreError::failed(doing, "it is not there"))?;
    Ok(Err(EventId(*id)))
}

fn statement(tables: &Tables, events: &[NewEvent]) -> Sql {
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
        ] as [Value; 16]);
    }
    sql
}

/// Writes what the events owe, those of duplicates left out, and answers the ids in order.
async fn deliveries(
    tx: &DatabaseTransaction,
    inner: &Inner,
    events: &[NewEvent],
    found: &[Result<EventId, EventId>],
) -> Result<Vec<DeliveryId>, StoreError> {
    let mut digests: HashMap<&str, Vec<u8>> = HashMap::new();
    let owed: Vec<_> = events
        .iter()
        .zip(found)
        .filter_map(|(event, found)| found.ok().map(|id| (event, id)))
        .flat_map(|(event, id)| event.deliveries.iter().map(move |delivery| (event, id, delivery)))
        .collect();
    let mut ids = Vec::with_capacity(owed.len());
    while ids.len() < owed.len() {
        let rest = &owed[ids.len()..];
        let chunk = &rest[..fitting(rest.iter(), |(_, _, delivery)| delivery.target.len())];
        let mut sql = Sql::new(
            DIALECT,
            format!(
                "INSERT INTO {} (event_id, receiver_key, target, target_digest, status, max_attempts, available_at,
                     due_at, claimed_by, claimed_at)
                 VALUES ",
                inner.tables.delivery
            ),
        );
        for (n, (event, id, delivery)) in chunk.iter().enumerate() {
            if n > 0 {
                sql.push(", ");
            }
            let born = delivery.claimed_by.is_some();
            let digest = digests.entry(&delivery.target).or_insert_with_key(|target| target_digest(target));
            sql.list([
                id.0.into(),
                (&*delivery.receiver_key).into(),
                delivery.target.as_str().into(),
                digest.clone().into(),
                if born { "claimed" } else { "pending" }.into(),
                delivery.max_attempts.into(),
                DIALECT.time(Some(delivery.available_at)),
                DIALECT.time(Some(delivery.due_at)),
                delivery.claimed_by.as_ref().map(|worker| worker.to_string()).into(),
                DIALECT.time(born.then_some(event.recorded_at)),
            ] as [Value; 10]);
        }
        let written = insert(tx, inner, sql, chunk.len(), "recording deliveries").await?;
        ids.extend(written.into_iter().map(DeliveryId));
    }
    Ok(ids)
}
