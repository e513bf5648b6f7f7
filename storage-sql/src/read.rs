//! Pages, counts, and who is owed something.

use owed_core::{
    Backlog, DeliveryQuery, DeliveryRow, EventQuery, EventRow, Status, StoreError, Tally, Timestamp,
};
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
        of_event(&mut sql, dialect, query);
        sql.push(&format!(" ORDER BY e.id LIMIT {}", query.limit));
        found.extend(sql.rows(db, "reading events", |one| row::event(dialect, one, 0)).await?);
    }
    found.truncate(query.limit as usize);
    Ok(found)
}

/// Adds what a query asks of an event, apart from its id.
fn of_event(sql: &mut Sql, dialect: Dialect, query: &EventQuery) {
    if let Some(name) = &query.name {
        sql.push(" AND e.name = ").bind(name.as_str());
    }
    if let Some(id) = query.correlation_id {
        sql.push(" AND e.correlation_id = ").bind(dialect.uuid(id));
    }
    if let Some(from) = query.recorded_from {
        sql.push(" AND e.recorded_at >= ").bind(dialect.time(Some(from)));
    }
    if let Some(until) = query.recorded_until {
        sql.push(" AND e.recorded_at < ").bind(dialect.time(Some(until)));
    }
}

/// A page of deliveries. By primary key, from the last one of the page before.
///
/// Plan for dead letters: a range of `delivery_dead`, which holds nothing else.
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
        for events in chunks(query.of.ids.as_ref().map(|ids| ids.iter().map(|id| id.0).collect())) {
            let sql = deliveries_sql(dialect, tables, query, ids.as_deref(), events.as_deref());
            found.extend(sql.rows(db, "reading deliveries", |one| row::delivery(dialect, one, 0)).await?);
        }
    }
    found.sort_unstable_by_key(|row: &DeliveryRow| row.id);
    found.truncate(query.limit as usize);
    Ok(found)
}

fn deliveries_sql(
    dialect: Dialect,
    tables: &Tables,
    query: &DeliveryQuery,
    ids: Option<&[i64]>,
    events: Option<&[i64]>,
) -> Sql {
    let mut sql = Sql::new(
        dialect,
        format!("SELECT {} FROM {} d WHERE d.id > ", row::delivery_columns("d"), tables.delivery),
    );
    sql.bind(query.after.map_or(i64::MIN, |id| id.0));
    if let Some(ids) = ids {
        sql.push(" AND d.id IN ").ids(ids);
    }
    if let Some(events) = events {
        sql.push(" AND d.event_id IN ").ids(events);
    }
    if let Some(keys) = &query.receivers {
        sql.push(" AND d.receiver_key IN ").list(keys.iter().map(String::as_str));
    }
    if !query.receivers_except.is_empty() {
        sql.push(" AND d.receiver_key NOT IN ").list(query.receivers_except.iter().map(String::as_str));
    }
    // As texts of the statement, so that the planner can tell which index holds them.
    match query.statuses.as_slice() {
        [] => {}
        [Status::Dead] => {
            sql.push(" AND ").push(dead(dialect));
        }
        statuses => {
            let texts: Vec<String> = statuses.iter().map(|status| format!("'{status}'")).collect();
            sql.push(&format!(" AND d.status IN ({})", texts.join(", ")));
        }
    }
    if let Some(target) = &query.target {
        sql.push(" AND d.target = ").bind(target.as_str());
    }
    if let Some(text) = &query.error {
        match dialect {
            Dialect::Postgres => sql.push(" AND strpos(d.last_error, ").bind(text.as_str()).push(") > 0"),
            Dialect::Mysql | Dialect::Sqlite => {
                sql.push(" AND INSTR(d.last_error, ").bind(text.as_str()).push(") > 0")
            }
        };
    }
    if query.needs_event() {
        sql.push(&format!(" AND EXISTS (SELECT 1 FROM {} e WHERE e.id = d.event_id", tables.event));
        of_event(&mut sql, dialect, &query.of);
        sql.push(")");
    }
    sql.push(&format!(" ORDER BY d.id LIMIT {}", query.limit));
    sql
}

/// The condition that a row is a dead letter, as the index of those is declared.
fn dead(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Mysql { "d.dead = 1" } else { "d.status = 'dead'" }
}

/// How many dead letters each receiver has.
///
/// Plan: `delivery_dead` from its start, stopped by the bound.
///
/// # Errors
/// If the database can't be reached.
pub async fn dead_letters(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    bound: u32,
) -> Result<Vec<(String, u64)>, StoreError> {
    let sql = format!(
        "SELECT x.receiver_key, COUNT(*)
         FROM (SELECT d.receiver_key FROM {} d WHERE {} ORDER BY d.id LIMIT {bound}) x
         GROUP BY x.receiver_key",
        tables.delivery,
        dead(dialect)
    );
    let read = |one: &QueryResult| {
        Ok((one.try_get_by_index::<String>(0)?, one.try_get_by_index::<i64>(1)?.unsigned_abs()))
    };
    let mut counts = Sql::new(dialect, sql).rows(db, "counting dead letters", read).await?;
    counts.sort_unstable();
    Ok(counts)
}

/// How the database goes about a page of dead letters. For operators, and the tests that hold it to the plan.
///
/// # Errors
/// If the database can't be reached.
pub async fn explain_dead(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
) -> Result<String, StoreError> {
    let query = DeliveryQuery { statuses: vec![Status::Dead], ..DeliveryQuery::page(100) };
    deliveries_sql(dialect, tables, &query, None, None).explain(db).await
}

/// Counts what a receiver is owed.
///
/// Plan: a range of the claim's index, stopped by the bound.
///
/// # Errors
/// If the database can't be reached.
pub async fn backlog(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    receiver: &str,
    now: Timestamp,
    bound: u32,
) -> Result<Backlog, StoreError> {
    let at = || dialect.time(Some(now));
    let signed = if dialect == Dialect::Mysql { "SIGNED" } else { "BIGINT" };
    let mut sql = Sql::new(dialect, "SELECT COUNT(*)");
    for (status, time) in
        [("", "x.due_at"), (" AND x.status = 'claimed'", ""), (" AND x.status = 'claimed'", "x.available_at")]
    {
        sql.push(&format!(", CAST(COALESCE(SUM(CASE WHEN 1 = 1{status}"));
        if !time.is_empty() {
            sql.push(&format!(" AND {time} <= ")).bind(at());
        }
        sql.push(&format!(" THEN 1 ELSE 0 END), 0) AS {signed})"));
    }
    sql.push(", MIN(CASE WHEN x.due_at <= ").bind(at()).push(" THEN x.due_at END)");
    sql.push(&format!(
        " FROM (SELECT d.status, d.due_at, d.available_at FROM {} d WHERE d.receiver_key = ",
        tables.delivery
    ));
    sql.bind(receiver).push(unsettled(dialect));
    sql.push(&format!(" ORDER BY d.available_at, d.id LIMIT {}) x", u64::from(bound) + 1));
    let read = |one: &QueryResult| {
        let count = |at| one.try_get_by_index::<i64>(at).map(i64::unsigned_abs);
        let mut backlog = Backlog::default();
        let all = count(0)?;
        backlog.owed = count(1)?;
        backlog.scheduled = all - backlog.owed;
        (backlog.claimed, backlog.lapsed) = (count(2)?, count(3)?);
        backlog.oldest_owed = dialect.read_time(one, 4)?;
        // One row more was looked at, to know whether there is one.
        backlog.bounded = all > u64::from(bound);
        Ok(backlog)
    };
    let counted = sql.rows(db, "counting what is owed", read).await?.pop();
    Ok(counted.unwrap_or_default())
}

/// When each receiver last succeeded. Reads the whole table.
///
/// # Errors
/// If the database can't be reached.
pub async fn last_successes(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
) -> Result<Vec<(String, Timestamp)>, StoreError> {
    let sql = format!(
        "SELECT x.receiver_key, MAX(x.succeeded_at)
         FROM (
             SELECT d.receiver_key, MAX(d.succeeded_at) AS succeeded_at
             FROM {} d
             WHERE d.succeeded_at IS NOT NULL
             GROUP BY d.receiver_key
             UNION ALL
             SELECT s.receiver_key, s.succeeded_at FROM {} s
         ) x
         GROUP BY x.receiver_key",
        tables.delivery, tables.receiver_success
    );
    let read = |one: &QueryResult| Ok((one.try_get_by_index(0)?, dialect.read_set_time(one, 1)?));
    let mut found: Vec<(String, Timestamp)> =
        Sql::new(dialect, sql).rows(db, "looking for the newest successes", read).await?;
    found.sort_unstable();
    Ok(found)
}

/// Adds the condition that a row is not settled, as a range of the claim's index.
fn unsettled(dialect: Dialect) -> &'static str {
    // A range starts after the nulls of what is settled.
    match dialect {
        Dialect::Mysql => " AND d.available_at >= '1000-01-01'",
        Dialect::Postgres | Dialect::Sqlite => " AND d.available_at IS NOT NULL",
    }
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
    sql.bind(receiver).push(unsettled(dialect));
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
    // Here the index holds the settled rows as well, as nulls. A correlated subquery would read them all, and so may a
    // DISTINCT (whether it hops over the index hangs on statistics); so it is asked for the next key after each, and
    // then each is asked for one row that is not null.
    let mut keys: Vec<String> = Vec::new();
    loop {
        let mut sql = Sql::new(dialect, format!("SELECT MIN(d.receiver_key) FROM {delivery} d"));
        if let Some(last) = keys.last() {
            sql.push(" WHERE d.receiver_key > ").bind(last.as_str());
        }
        let next: Option<String> = sql.rows(db, doing, |one| one.try_get_by_index(0)).await?.pop().flatten();
        match next {
            Some(key) => keys.push(key),
            None => break,
        }
    }
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
