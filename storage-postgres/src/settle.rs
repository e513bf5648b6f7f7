//! Settling: many outcomes in one statement, each where its own claim still holds.

use std::collections::HashSet;

use owed_core::{Outcome, Settled, Settlement, StoreError, Timestamp, limits};
use owed_sql::{Tables, classify_sqlx};
use sea_orm::sqlx::{self, AssertSqlSafe, PgPool};

use crate::{Statements, lease::Keys};

/// All of them succeeded, as most batches have.
///
/// Plan: for each claim its row by primary key, whatever the statistics say of the other columns (as a join, it was
/// seen to read the whole table for each row while the statistics knew of no claimed ones: 9 s for 1,000 rows among
/// 50,000). The claims come in the order of their ids, and so do the locks: two batches that overlap wait for each
/// other and never deadlock.
pub(crate) fn succeeded_sql(tables: &Tables) -> String {
    format!(
        "WITH held AS MATERIALIZED (
             SELECT mine.id, k.place
             FROM unnest($1::bigint[], $2::text[], $3::timestamptz[])
                 WITH ORDINALITY AS k (id, claimed_by, claimed_at, place)
             CROSS JOIN LATERAL (
                 SELECT d.id
                 FROM {delivery} d
                 WHERE d.id = k.id
                     AND d.status = 'claimed' AND d.claimed_by = k.claimed_by AND d.claimed_at = k.claimed_at
                 FOR UPDATE
             ) mine
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
         RETURNING held.place",
        delivery = tables.delivery
    )
}

/// Any outcomes. Plan: as [`succeeded_sql`].
pub(crate) fn any_sql(tables: &Tables) -> String {
    format!(
        "WITH held AS MATERIALIZED (
             SELECT mine.id, k.place, k.status, k.attempt, k.available_at, k.due_at, k.last_error, k.completed_at,
                 k.succeeded_at
             FROM unnest(
                 $1::bigint[], $2::text[], $3::timestamptz[], $4::text[], $5::integer[], $6::timestamptz[],
                 $7::timestamptz[], $8::text[], $9::timestamptz[], $10::timestamptz[]
             ) WITH ORDINALITY AS k (
                 id, claimed_by, claimed_at, status, attempt, available_at, due_at, last_error, completed_at,
                 succeeded_at, place
             )
             CROSS JOIN LATERAL (
                 SELECT d.id
                 FROM {delivery} d
                 WHERE d.id = k.id
                     AND d.status = 'claimed' AND d.claimed_by = k.claimed_by AND d.claimed_at = k.claimed_at
                 FOR UPDATE
             ) mine
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
         RETURNING held.place",
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
    // A row is held under one claim at most, so each claim named once is each row written once: of two settlements
    // of one claim the first one counts.
    let mut seen = HashSet::with_capacity(settlements.len());
    let mut once: Vec<(usize, &Settlement)> =
        settlements.iter().enumerate().filter(|(_, one)| seen.insert(one.key())).collect();
    once.sort_unstable_by_key(|(_, one)| one.key().delivery);
    let keys = Keys::of(once.iter().map(|(_, one)| one.key()));
    let written: Vec<i64> = if once.iter().all(|(_, one)| *one.outcome() == Outcome::Succeeded) {
        sqlx::query_scalar(AssertSqlSafe(statements.settle_succeeded.as_str()))
            .bind(keys.ids)
            .bind(keys.workers)
            .bind(keys.since)
            .bind(now)
            .fetch_all(pool)
            .await
    } else {
        let columns: Vec<_> = once.iter().map(|(_, one)| one.columns(now)).collect();
        let errors: Vec<Option<String>> = columns
            .iter()
            .map(|columns| columns.last_error.map(|error| limits::storable(error, limits::ERROR)))
            .collect();
        sqlx::query_scalar(AssertSqlSafe(statements.settle_any.as_str()))
            .bind(keys.ids)
            .bind(keys.workers)
            .bind(keys.since)
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
    let mut settled = vec![Settled::Lost; settlements.len()];
    for place in written {
        let at = usize::try_from(place - 1).ok().and_then(|place| once.get(place));
        if let Some(slot) = at.and_then(|(at, _)| settled.get_mut(*at)) {
            *slot = Settled::Applied;
        }
    }
    Ok(settled)
}
