//! Leases: renewed, handed back, taken over; and backoffs ended early.

use std::sync::Arc;

use owed_core::{Claim, ClaimKey, Claimed, DeliveryId, StoreError, Timestamp};
use owed_sql::{Tables, classify_sqlx, row as columns};
use sea_orm::sqlx::{self, AssertSqlSafe, PgPool, Row};

use crate::row;

type Keys<'a> = (Vec<i64>, Vec<&'a str>, Vec<Timestamp>);

fn arrays(keys: &[ClaimKey]) -> Keys<'_> {
    (
        keys.iter().map(|key| key.delivery.0).collect(),
        keys.iter().map(|key| &*key.worker).collect(),
        keys.iter().map(|key| key.at).collect(),
    )
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
    let sql = format!(
        "WITH free AS MATERIALIZED (
             SELECT d.id, d.status = 'claimed' AND d.claimed_by = c.claimed_by AND d.claimed_at = c.claimed_at AS held
             FROM unnest($1::bigint[], $2::text[], $3::timestamptz[]) AS c (id, claimed_by, claimed_at)
             JOIN {delivery} d ON d.id = c.id
             ORDER BY d.id
             FOR UPDATE OF d SKIP LOCKED
         ), renewed AS (
             UPDATE {delivery} d SET available_at = $4 FROM free WHERE d.id = free.id AND free.held
         )
         SELECT c.id
         FROM unnest($1::bigint[]) AS c (id)
         LEFT JOIN free ON free.id = c.id
         WHERE coalesce(free.held, EXISTS (SELECT 1 FROM {delivery} d WHERE d.id = c.id))",
        delivery = tables.delivery
    );
    let (ids, workers, since) = arrays(keys);
    let held: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .bind(ids)
        .bind(workers)
        .bind(since)
        .bind(until)
        .fetch_all(pool)
        .await
        .map_err(|error| classify_sqlx("renewing leases", error))?;
    Ok(held.into_iter().map(DeliveryId).collect())
}

/// Plan: the rows by primary key, locked in its order.
pub(crate) async fn release(
    pool: &PgPool,
    tables: &Tables,
    keys: &[ClaimKey],
    at: Timestamp,
) -> Result<u64, StoreError> {
    let sql = format!(
        "WITH held AS MATERIALIZED (
             SELECT d.id
             FROM unnest($1::bigint[], $2::text[], $3::timestamptz[]) AS c (id, claimed_by, claimed_at)
             JOIN {delivery} d ON d.id = c.id
             WHERE d.status = 'claimed' AND d.claimed_by = c.claimed_by AND d.claimed_at = c.claimed_at
             ORDER BY d.id
             FOR UPDATE OF d
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
    let (ids, workers, since) = arrays(keys);
    let written =
        sqlx::query(AssertSqlSafe(sql)).bind(ids).bind(workers).bind(since).bind(at).execute(pool).await;
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

/// Plan: the entries of `delivery_claim` that lie ahead, of these receivers.
pub(crate) async fn expedite(
    pool: &PgPool,
    tables: &Tables,
    receivers: &[&str],
    now: Timestamp,
) -> Result<u64, StoreError> {
    let sql = format!(
        "UPDATE {}
         SET available_at = greatest(due_at, $2)
         WHERE status = 'failed' AND receiver_key = ANY($1::text[]) AND available_at > greatest(due_at, $2)",
        tables.delivery
    );
    let written = sqlx::query(AssertSqlSafe(sql)).bind(receivers.to_vec()).bind(now).execute(pool).await;
    Ok(written.map_err(|error| classify_sqlx("ending backoffs", error))?.rows_affected())
}
