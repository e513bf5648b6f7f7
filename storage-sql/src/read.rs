//! Pages, counts, and who is owed something.

use owed_core::{DeliveryQuery, DeliveryRow, EventQuery, EventRow, Status, StoreError, Tally};
use sea_orm::{ConnectionTrait, DbErr, QueryResult};

use crate::{Dialect, Sql, Tables, row};

/// The most ids that one statement names, whatever a caller selects.
const IDS: usize = 1_000;

/// A page of events. By primary key, from the last one of the page before.
///
/// # Errors
/// If the database can't be reached, or a row is damaged.
pub async fn events(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    query: &EventQuery,
) -> Result<Vec<EventRow>, StoreError> {
    let mut found = Vec::new();
    for ids in chunks(query.ids.as_ref().map(|ids| ids.iter().map(|id| id.0).collect())) {
        let mut sql = Sql::new(
            dialect,
            format!("SELECT {} FROM {} e WHERE e.id > ", row::event_columns("e"), tables.event),
        );
        sql.bind(query.after.map_or(i64::MIN, |id| id.0));
        if let Some(ids) = ids {
            sql.push(" AND e.id IN ").ids(&ids);
        }
        if let Some(name) = &query.name {
            sql.push(" AND e.name = ").bind(name.as_str());
        }
        if let Some(id) = query.correlation_id {
            sql.push(" AND e.correlation_id = ").bind(dialect.uuid(id));
        }
        sql.push(&format!(" ORDER BY e.id LIMIT {}", query.limit));
        found.extend(sql.rows(db, "reading events", |one| row::event(dialect, one, 0)).await?);
    }
    found.truncate(query.limit as usize);
    Ok(found)
}

/// A page of deliveries. By primary key, from the last one of the page before.
///
/// # Errors
/// If the database can't be reached, or a row is damaged.
pub async fn deliveries(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    query: &DeliveryQuery,
) -> Result<Vec<DeliveryRow>, StoreError> {
    let mut found = Vec::new();
    for ids in chunks(query.ids.as_ref().map(|ids| ids.iter().map(|id| id.0).collect())) {
        let mut sql = Sql::new(
            dialect,
            format!("SELECT {} FROM {} d WHERE d.id > ", row::delivery_columns("d"), tables.delivery),
        );
        sql.bind(query.after.map_or(i64::MIN, |id| id.0));
        if let Some(ids) = ids {
            sql.push(" AND d.id IN ").ids(&ids);
        }
        if let Some(event) = query.event_id {
            sql.push(" AND d.event_id = ").bind(event.0);
        }
        if let Some(key) = &query.receiver_key {
            sql.push(" AND d.receiver_key = ").bind(key.as_str());
        }
        if let Some(status) = query.status {
            sql.push(" AND d.status = ").bind(status.as_str());
        }
        sql.push(&format!(" ORDER BY d.id LIMIT {}", query.limit));
        found.extend(sql.rows(db, "reading deliveries", |one| row::delivery(dialect, one, 0)).await?);
    }
    found.truncate(query.limit as usize);
    Ok(found)
}

/// The rows of a receiver that are not settled, those that may be taken soonest first.
///
/// Plan: a range of the claim's index, stopped by the limit.
///
/// # Errors
/// If the database can't be reached, or a row is damaged.
pub async fn owed(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    receiver: &str,
    limit: u32,
) -> Result<Vec<DeliveryRow>, StoreError> {
    let mut sql = Sql::new(
        dialect,
        format!("SELECT {} FROM {} d WHERE d.receiver_key = ", row::delivery_columns("d"), tables.delivery),
    );
    sql.bind(receiver);
    // A range starts after the nulls of what is settled.
    sql.push(if dialect == Dialect::Mysql {
        " AND d.available_at >= '1000-01-01'"
    } else {
        " AND d.available_at IS NOT NULL"
    });
    sql.push(&format!(" ORDER BY d.available_at, d.id LIMIT {limit}"));
    sql.rows(db, "reading what is owed", |one| row::delivery(dialect, one, 0)).await
}

/// The ids to ask for, a statement's worth at a time and in order; one ask for all where none are named.
fn chunks(ids: Option<Vec<i64>>) -> Vec<Option<Vec<i64>>> {
    match ids {
        None => vec![None],
        Some(mut ids) => {
            ids.sort_unstable();
            ids.dedup();
            ids.chunks(IDS).map(|chunk| Some(chunk.to_vec())).collect()
        }
    }
}

/// Counts deliveries by receiver and status. Reads the whole table.
///
/// # Errors
/// If the database can't be reached.
pub async fn tally(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
) -> Result<Vec<Tally>, StoreError> {
    let signed = if dialect == Dialect::Mysql { "SIGNED" } else { "BIGINT" };
    let sql = format!(
        "SELECT d.receiver_key, d.status, COUNT(*), CAST(SUM(d.attempts) AS {signed})
         FROM {} d
         GROUP BY d.receiver_key, d.status",
        tables.delivery
    );
    let read = |one: &QueryResult| {
        let status: String = one.try_get_by_index(1)?;
        Ok(Tally {
            receiver_key: one.try_get_by_index(0)?,
            status: status.parse::<Status>().map_err(|error| DbErr::Type(error.to_string()))?,
            count: one.try_get_by_index::<i64>(2)?.unsigned_abs(),
            attempts: one.try_get_by_index::<i64>(3)?.unsigned_abs(),
        })
    };
    let mut tallies = Sql::new(dialect, sql).rows(db, "counting deliveries", read).await?;
    tallies.sort_unstable();
    Ok(tallies)
}

/// Every receiver with rows that are not settled, in order.
///
/// Plan: one descent of the claim's index for each receiver, whatever is in the table.
///
/// # Errors
/// If the database can't be reached.
pub async fn owed_receivers(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
) -> Result<Vec<String>, StoreError> {
    let doing = "looking for receivers that are owed something";
    let delivery = &tables.delivery;
    if dialect != Dialect::Mysql {
        let sql = format!(
            "WITH RECURSIVE k(receiver_key) AS (
                 SELECT (SELECT MIN(d.receiver_key) FROM {delivery} d WHERE d.available_at IS NOT NULL)
                 UNION ALL
                 SELECT (
                     SELECT MIN(d.receiver_key) FROM {delivery} d
                     WHERE d.available_at IS NOT NULL AND d.receiver_key > k.receiver_key
                 )
                 FROM k WHERE k.receiver_key IS NOT NULL
             )
             SELECT k.receiver_key FROM k WHERE k.receiver_key IS NOT NULL"
        );
        return Sql::new(dialect, sql).rows(db, doing, |one| one.try_get_by_index(0)).await;
    }
    // Here the index holds the settled rows as well, as nulls. A correlated subquery would read them all; so it is
    // hopped over for its keys (a loose index scan), and then each is asked for one row that is not null.
    let keys = format!("SELECT DISTINCT d.receiver_key FROM {delivery} d ORDER BY d.receiver_key");
    let keys: Vec<String> = Sql::new(dialect, keys).rows(db, doing, |one| one.try_get_by_index(0)).await?;
    let mut owed = Vec::with_capacity(keys.len());
    for chunk in keys.chunks(ASKED) {
        let mut sql = Sql::new(dialect, "SELECT ");
        for (n, key) in chunk.iter().enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            sql.push(&format!("{comma}EXISTS (SELECT 1 FROM {delivery} d WHERE d.receiver_key = "));
            sql.bind(key.as_str()).push(" AND d.available_at >= '1000-01-01')");
        }
        let read = |one: &QueryResult| {
            (0..chunk.len()).map(|n| one.try_get_by_index::<i64>(n)).collect::<Result<Vec<_>, DbErr>>()
        };
        let found = sql.rows(db, doing, read).await?.pop().unwrap_or_default();
        owed.extend(chunk.iter().zip(found).filter(|(_, is)| *is != 0).map(|(key, _)| key.clone()));
    }
    Ok(owed)
}

/// The most receivers that one statement asks about.
pub(crate) const ASKED: usize = 200;
