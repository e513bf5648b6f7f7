//! Leases: renewed, handed back, taken over; and backoffs ended early.

use std::sync::Arc;

use owed_core::{Claim, ClaimKey, Claimed, DeliveryId, StoreError, Timestamp};
use owed_sql::{Tables, classify_sqlx, row as columns};
use sea_orm::sqlx::{self, AssertSqlSafe, PgPool, Row};

use crate::row;

/// Claims as arrays, one for each column.
pub(crate) struct Keys<'a> {
    pub(crate) ids: Vec<i64>,
    pub(crate) workers: Vec<&'a str>,
    pub(crate) since: Vec<Timestamp>,
}

impl<'a> Keys<'a> {
    pub(crate) fn of(keys: impl Iterator<Item = &'a ClaimKey> + Clone) -> Self {
        Keys {
            ids: keys.clone().map(|key| key.delivery.0).collect(),
            workers: keys.clone().map(|key| &*key.worker).collect(),
            since: keys.map(|key| key.at).collect(),
        }
    }
}

/// Answers what is still held. A row that its own handler's transaction has settled is locked until that commits:
/// it is passed over, and counted as held.
///
/// Plan: the rows by primary key, locked in its order.
pub(crate) async fn renew(
    pool: &PgPool,
    tables: &Tables,
    keys: &[ClaimKey],
    until: Timestamp,
) -> Result<Vec<DeliveryId>, StoreError> {
    if keys.is_empty() {
        return Ok(Vec::new());
    }
    let sql = format!(
        "WITH asked AS MATERIALIZED (
             SELECT *
             FROM unnest($1::bigint[], $2::text[], $3::timestamptz[])
                 WITH ORDINALITY AS k (id, claimed_by, claimed_at, place)
         ), free AS MATERIALIZED (
             SELECT d.id, d.status, d.claimed_by, d.claimed_at
             FROM {delivery} d
             WHERE d.id = ANY($1)
             ORDER BY d.id
             FOR UPDATE SKIP LOCKED
         ), held AS MATERIALIZED (
             SELECT asked.id, asked.place
             FROM asked JOIN free USING (id, claimed_by, claimed_at)
             WHERE free.status = 'claimed'
         ), renewed AS (
             UPDATE {delivery} d SET available_at = $4 FROM held WHERE d.id = held.id
         )
         SELECT held.place FROM held
         UNION ALL
         SELECT asked.place
         FROM asked
         WHERE NOT EXISTS (SELECT 1 FROM free WHERE free.id = asked.id)
             AND EXISTS (SELECT 1 FROM {delivery} d WHERE d.id = asked.id)",
        delivery = tables.delivery
    );
    let Keys { ids, workers, since } = Keys::of(keys.iter());
    let mut held: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .bind(ids)
        .bind(workers)
        .bind(since)
        .bind(until)
        .fetch_all(pool)
        .await
        .map_err(|error| classify_sqlx("renewing leases", error))?;
    held.sort_unstable();
    let place = |place: i64| usize::try_from(place - 1).ok().and_then(|place| keys.get(place));
    Ok(held.into_iter().filter_map(place).map(|key| key.delivery).collect())
}

/// Plan: for each claim its row by primary key, in the order of their ids (see [`crate::settle::succeeded_sql`]).
pub(crate) async fn release(
    pool: &PgPool,
    tables: &Tables,
    keys: &[ClaimKey],
    at: Timestamp,
) -> Result<u64, StoreError> {
    if keys.is_empty() {
        return Ok(0);
    }
    let sql = format!(
        "WITH held AS MATERIALIZED (
             SELECT mine.id
             FROM unnest($1::bigint[], $2::text[], $3::timestamptz[]) AS k (id, claimed_by, claimed_at)
             CROSS JOIN LATERAL (
                 SELECT d.id
                 FROM {delivery} d
                 WHERE d.id = k.id
                     AND d.status = 'claimed' AND d.claimed_by = k.claimed_by AND d.claimed_at = k.claimed_at
                 FOR UPDATE
             ) mine
         )
         UPDATE {delivery} d
         SET status = CASE WHEN d.last_error IS NULL THEN 'pending' ELSE 'failed' END,
             claimed_by = NULL,
             claimed_at = NULL,
             available_at = $4
         FROM held
         WHERE d.id = held.id",
        delivery = tables.delivery
    );
    let mut in_order: Vec<&ClaimKey> = keys.iter().collect();
    in_order.sort_unstable_by_key(|key| key.delivery);
    let Keys { ids, workers, since } = Keys::of(in_order.iter().copied());
    let query = sqlx::query(AssertSqlSafe(sql)).bind(ids).bind(workers).bind(since).bind(at);
    let written = query.execute(pool).await;
    Ok(written.map_err(|error| classify_sqlx("handing rows back", error))?.rows_affected())
}

/// Plan: one row by primary key, and its event by its own.
pub(crate) async fn take(
    pool: &PgPool,
    tables: &Tables,
    key: &ClaimKey,
    worker: &str,
    now: Timestamp,
    until: Timestamp,
) -> Result<Option<Claimed>, StoreError> {
    let taking = |error| classify_sqlx("taking a claim over", error);
    let sql = format!(
        "WITH taken AS (
             UPDATE {} d
             SET claimed_by = $4, claimed_at = $5, available_at = $6
             WHERE d.id = $1 AND d.status = 'claimed' AND d.claimed_by = $2 AND d.claimed_at = $3
             RETURNING {}
         )
         SELECT taken.*, {}
         FROM taken LEFT JOIN {} e ON e.id = taken.event_id",
        tables.delivery,
        columns::delivery_columns("d"),
        columns::event_columns("e"),
        tables.event,
    );
    let found = sqlx::query(AssertSqlSafe(sql))
        .bind(key.delivery.0)
        .bind(&*key.worker)
        .bind(key.at)
        .bind(worker)
        .bind(now)
        .bind(until)
        .fetch_optional(pool)
        .await
        .map_err(taking)?;
    let Some(found) = found else { return Ok(None) };
    let delivery = row::delivery(&found, 0).map_err(taking)?;
    let at = columns::DELIVERY.len();
    let event = match found.try_get::<Option<i64>, _>(at).map_err(taking)? {
        Some(_) => Some(Arc::new(row::event(&found, at).map_err(taking)?)),
        None => None,
    };
    Ok(Some(Claimed { claim: Claim::granted(delivery.id, worker.into(), now), delivery, event }))
}

/// Rows that another transaction holds are passed over.
///
/// Plan: the entries of `delivery_claim` that lie ahead, of these receivers; then primary keys.
pub(crate) async fn expedite(
    pool: &PgPool,
    tables: &Tables,
    receivers: &[&str],
    now: Timestamp,
) -> Result<u64, StoreError> {
    let sql = format!(
        "WITH waiting AS MATERIALIZED (
             SELECT d.id
             FROM {delivery} d
             WHERE d.receiver_key = ANY($1) AND d.available_at > $2
                 AND d.available_at > d.due_at AND d.status = 'failed'
             ORDER BY d.id
             FOR UPDATE SKIP LOCKED
         )
         UPDATE {delivery} d
         SET available_at = greatest(d.due_at, $2)
         FROM waiting
         WHERE d.id = waiting.id",
        delivery = tables.delivery
    );
    let query = sqlx::query(AssertSqlSafe(sql)).bind(receivers.to_vec()).bind(now);
    let written = query.execute(pool).await;
    Ok(written.map_err(|error| classify_sqlx("ending backoffs", error))?.rows_affected())
}
