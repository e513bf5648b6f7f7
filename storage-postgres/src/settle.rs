//! Settling: many outcomes in one statement, each where its own claim still holds.

use std::collections::HashSet;

use owed_core::{Outcome, Settled, Settlement, StoreError, Timestamp, limits};
use owed_sql::{Tables, classify_sqlx};
use sea_orm::sqlx::{self, AssertSqlSafe, PgPool};

use crate::Statements;

/// All of them succeeded, as most batches have.
///
/// Plan: the rows by primary key, locked in its order, so that two batches that overlap wait for each other and
/// never deadlock.
pub(crate) fn succeeded_sql(tables: &Tables) -> String {
    format!(
        "WITH held AS MATERIALIZED (
             SELECT d.id
             FROM unnest($1::bigint[], $2::text[], $3::timestamptz[]) AS c (id, claimed_by, claimed_at)
             JOIN {delivery} d ON d.id = c.id
             WHERE d.status = 'claimed' AND d.claimed_by = c.claimed_by AND d.claimed_at = c.claimed_at
             ORDER BY d.id
             FOR UPDATE OF d
         )
         UPDATE {delivery} d
         SET status = 'succeeded',
             attempts = d.attempts + 1,
             available_at = NULL,
             completed_at = $4,
             succeeded_at = $4,
             claimed_by = NULL,
             claimed_at = NULL,
             lapses = 0
         FROM held
         WHERE d.id = held.id
         RETURNING d.id",
        delivery = tables.delivery
    )
}

/// Any outcomes. Plan: as [`succeeded_sql`].
pub(crate) fn any_sql(tables: &Tables) -> String {
    format!(
        "WITH held AS MATERIALIZED (
             SELECT d.id, c.status, c.attempt, c.available_at, c.due_at, c.last_error, c.completed_at, c.succeeded_at
             FROM unnest(
                 $1::bigint[], $2::text[], $3::timestamptz[], $4::text[], $5::integer[], $6::timestamptz[],
                 $7::timestamptz[], $8::text[], $9::timestamptz[], $10::timestamptz[]
             ) AS c (
                 id, claimed_by, claimed_at, status, attempt, available_at, due_at, last_error, completed_at,
                 succeeded_at
             )
             JOIN {delivery} d ON d.id = c.id
             WHERE d.status = 'claimed' AND d.claimed_by = c.claimed_by AND d.claimed_at = c.claimed_at
             ORDER BY d.id
             FOR UPDATE OF d
         )
         UPDATE {delivery} d
         SET status = held.status,
             attempts = d.attempts + held.attempt,
             available_at = held.available_at,
             due_at = coalesce(held.due_at, d.due_at),
             last_error = coalesce(held.last_error, d.last_error),
             completed_at = held.completed_at,
             succeeded_at = coalesce(held.succeeded_at, d.succeeded_at),
             claimed_by = NULL,
             claimed_at = NULL,
             lapses = 0
         FROM held
         WHERE d.id = held.id
         RETURNING d.id",
        delivery = tables.delivery
    )
}

pub(crate) async fn settle_all(
    pool: &PgPool,
    statements: &Statements,
    settlements: &[Settlement],
    now: Timestamp,
) -> Result<Vec<Settled>, StoreError> {
    if settlements.is_empty() {
        return Ok(Vec::new());
    }
    // One row is written once by a statement: of two settlements of one claim, the first one counts.
    let mut seen = HashSet::with_capacity(settlements.len());
    let first: Vec<bool> = settlements.iter().map(|one| seen.insert(one.key().delivery)).collect();
    let once: Vec<&Settlement> =
        settlements.iter().zip(&first).filter(|(_, first)| **first).map(|(one, _)| one).collect();
    let ids: Vec<i64> = once.iter().map(|one| one.key().delivery.0).collect();
    let workers: Vec<&str> = once.iter().map(|one| &*one.key().worker).collect();
    let since: Vec<Timestamp> = once.iter().map(|one| one.key().at).collect();
    let written: Vec<i64> = if once.iter().all(|one| *one.outcome() == Outcome::Succeeded) {
        sqlx::query_scalar(AssertSqlSafe(statements.settle_succeeded.as_str()))
            .bind(ids)
            .bind(workers)
            .bind(since)
            .bind(now)
            .fetch_all(pool)
            .await
    } else {
        let columns: Vec<_> = once.iter().map(|one| one.columns(now)).collect();
        let errors: Vec<Option<String>> = columns
            .iter()
            .map(|columns| columns.last_error.map(|error| limits::storable(error, limits::ERROR)))
            .collect();
        sqlx::query_scalar(AssertSqlSafe(statements.settle_any.as_str()))
            .bind(ids)
            .bind(workers)
            .bind(since)
            .bind(columns.iter().map(|columns| columns.status.as_str()).collect::<Vec<_>>())
            .bind(columns.iter().map(|columns| columns.attempt).collect::<Vec<_>>())
            .bind(columns.iter().map(|columns| columns.available_at).collect::<Vec<_>>())
            .bind(columns.iter().map(|columns| columns.due_at).collect::<Vec<_>>())
            .bind(errors)
            .bind(columns.iter().map(|columns| columns.completed_at).collect::<Vec<_>>())
            .bind(columns.iter().map(|columns| columns.succeeded_at).collect::<Vec<_>>())
            .fetch_all(pool)
            .await
    }
    .map_err(|error| classify_sqlx("settling deliveries", error))?;
    let written: HashSet<i64> = written.into_iter().collect();
    let settled = settlements.iter().zip(first).map(|(one, first)| {
        if first && written.contains(&one.key().delivery.0) { Settled::Applied } else { Settled::Lost }
    });
    Ok(settled.collect())
}
