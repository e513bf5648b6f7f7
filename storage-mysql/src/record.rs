//! Writing events and what they owe.
//!
//! No row is read back for its id. An INSERT of many rows draws their ids at once, in the order of the rows and
//! evenly apart, and answers the first (it is a "simple insert", whatever `innodb_autoinc_lock_mode` is, as long as
//! nobody puts a trigger on these tables); MariaDB answers all of them.

use std::collections::{HashMap, HashSet};

use owed_core::{DeliveryId, EventId, NewEvent, Recorded, StoreError};
use owed_sql::{Sql, record as shared};
use sea_orm::{DatabaseTransaction, QueryResult, Value};

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
    let mut ids: Vec<i64> = Vec::with_capacity(events.len());
    while ids.len() < events.len() {
        let rest = &events[ids.len()..];
        let size = |event: &&NewEvent| event.payload.len() + event.scope.as_ref().map_or(0, Vec::len);
        let chunk = &rest[..fitting(rest.iter(), size)];
        let sql = shared::events(DIALECT, &inner.tables, chunk);
        ids.extend(insert(tx, inner, sql, chunk.len(), "recording events").await?);
    }
    let earlier = once(tx, inner, events, &ids).await?;
    let found = ids.iter().map(|id| match earlier.get(id) {
        None => Ok(EventId(*id)),
        Some(of) => Err(EventId(*of)),
    });
    let found: Vec<Result<EventId, EventId>> = found.collect();
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

/// Notes the dedupe keys of events that were just written. Takes those back whose key is there already, and answers
/// for each of them the earlier one.
///
/// A key that another open transaction has noted is waited for. Plan: by primary key.
async fn once(
    tx: &DatabaseTransaction,
    inner: &Inner,
    events: &[NewEvent],
    ids: &[i64],
) -> Result<HashMap<i64, i64>, StoreError> {
    let keyed: Vec<(&str, i64)> =
        events.iter().zip(ids).filter_map(|(event, id)| Some((event.dedupe_key.as_deref()?, *id))).collect();
    let mut earlier = HashMap::new();
    for chunk in keyed.chunks(ROWS) {
        // What is ignored is a duplicate: the values have been checked.
        let mut sql =
            Sql::new(DIALECT, format!("INSERT IGNORE INTO {} (dedupe_key, event_id) VALUES ", inner.dedupe));
        for (n, (key, id)) in chunk.iter().enumerate() {
            sql.push(if n > 0 { ", " } else { "" }).list([Value::from(*key), Value::from(*id)]);
        }
        let written = sql.execute(tx, "noting dedupe keys").await?;
        if written.rows_affected() < chunk.len() as u64 {
            earlier.extend(duplicates(tx, inner, chunk).await?);
        }
    }
    let taken_back: Vec<i64> = earlier.keys().copied().collect();
    for chunk in taken_back.chunks(ROWS) {
        let mut sql = Sql::new(
            DIALECT,
            format!("DELETE e FROM {} e FORCE INDEX (PRIMARY) WHERE e.id IN ", inner.tables.event),
        );
        sql.ids(chunk);
        sql.execute(tx, "taking a duplicate back").await?;
    }
    Ok(earlier)
}

/// Which of these were not noted, and the earlier events that have their keys.
async fn duplicates(
    tx: &DatabaseTransaction,
    inner: &Inner,
    keyed: &[(&str, i64)],
) -> Result<HashMap<i64, i64>, StoreError> {
    let doing = "looking for events with these dedupe keys";
    // Locking reads see what is committed now, whatever this transaction's snapshot.
    const NOW: &str = " LOCK IN SHARE MODE";
    let mut sql = Sql::new(
        DIALECT,
        format!(
            "SELECT k.dedupe_key, k.event_id FROM {} k FORCE INDEX (PRIMARY) WHERE k.dedupe_key IN ",
            inner.dedupe
        ),
    );
    sql.list(keyed.iter().map(|(key, _)| *key)).push(NOW);
    let read = |row: &QueryResult| Ok((row.try_get_by_index(0)?, row.try_get_by_index(1)?));
    let found: Vec<(String, i64)> = sql.rows(tx, doing, read).await?;
    // The events are looked at without a lock first, which operators would have to wait for; only one that this
    // transaction can't see is looked for as it is now.
    let mut there: HashSet<i64> = HashSet::new();
    for lock in ["", NOW] {
        let unseen: Vec<i64> = found.iter().map(|(_, id)| *id).filter(|id| !there.contains(id)).collect();
        if !unseen.is_empty() {
            let event = &inner.tables.event;
            let mut sql =
                Sql::new(DIALECT, format!("SELECT e.id FROM {event} e FORCE INDEX (PRIMARY) WHERE e.id IN "));
            sql.ids(&unseen).push(lock);
            there.extend(numbers(tx, sql, doing).await?);
        }
    }
    let mut noted: HashMap<String, (i64, bool)> =
        found.into_iter().map(|(key, id)| (key, (id, there.contains(&id)))).collect();
    let mut earlier = HashMap::new();
    for (key, id) in keyed {
        match noted.get_mut(*key) {
            Some((of, _)) if of == id => {}
            Some((of, true)) => {
                earlier.insert(*id, *of);
            }
            // Somebody deleted that event and left its key.
            Some((of, there @ false)) => {
                let mut sql = Sql::new(DIALECT, format!("UPDATE {} SET event_id = ", inner.dedupe));
                sql.bind(*id).push(" WHERE dedupe_key = ").bind(*key);
                sql.execute(tx, "noting a dedupe key").await?;
                (*of, *there) = (*id, true);
            }
            None => return Err(StoreError::failed(doing, "a key that was there is not")),
        }
    }
    Ok(earlier)
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

/// Writes what the events owe, those of duplicates left out, and answers the ids in order.
async fn deliveries(
    tx: &DatabaseTransaction,
    inner: &Inner,
    events: &[NewEvent],
    found: &[Result<EventId, EventId>],
) -> Result<Vec<DeliveryId>, StoreError> {
    let owed: Vec<_> = events
        .iter()
        .zip(found)
        .filter_map(|(event, found)| found.ok().map(|id| (event, id)))
        .flat_map(|(event, id)| {
            event.deliveries.iter().map(move |delivery| (id, event.recorded_at, delivery))
        })
        .collect();
    let mut ids = Vec::with_capacity(owed.len());
    while ids.len() < owed.len() {
        let rest = &owed[ids.len()..];
        let chunk = &rest[..fitting(rest.iter(), |(_, _, delivery)| delivery.target.len())];
        let sql = shared::deliveries(DIALECT, &inner.tables, chunk.iter().copied());
        let written = insert(tx, inner, sql, chunk.len(), "recording deliveries").await?;
        ids.extend(written.into_iter().map(DeliveryId));
    }
    Ok(ids)
}
