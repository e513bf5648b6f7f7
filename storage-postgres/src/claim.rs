//! Claiming: rows and their events, whole, in one statement.

use std::{collections::HashMap, sync::Arc, time::Duration};

use owed_core::{Claim, ClaimRequest, Claimed, EventId, EventRow, StoreError};
use owed_sql::{Tables, classify_sqlx, row as columns};
use sea_orm::sqlx::{self, AssertSqlSafe, Connection, PgConnection, PgPool, Row, postgres::PgRow};

use crate::{Statements, row};

/// The claim.
///
/// Plan: for each receiver, in order, an index scan of `delivery_claim` from its oldest entry, locked as it is
/// read and stopped by the limit (the outer LIMIT has no ORDER BY, so a later receiver is not even looked at once
/// there are enough); then the primary keys of deliveries and events. Neither what is settled, nor what is
/// scheduled ahead, nor what other receivers are owed is read.
///
/// The planner is held to it, whatever its statistics say:
/// - `LIMIT (SELECT ..)` is a limit that it does not know, so it goes for the path that answers soonest. Told the
///   number, it reads and sorts *all* that is due as soon as it believes that this is about as much.
/// - `= ANY (ARRAY(..))` and the subquery with `OFFSET 0` are looked up by key. Joined, either table is read whole
///   and hashed from some size of batch on.
///
/// Its commit does not wait for the disk, and that alone: a server that crashes within the moment forgets the claim,
/// and the row is owed as before. Whoever held it can't settle it any more.
pub(crate) fn sql(tables: &Tables, filtered: bool) -> String {
    let (delivery, event) = (&tables.delivery, &tables.event);
    let filter = if filtered {
        "AND ($6::timestamptz IS NULL OR d.due_at <= $6) AND ($7::bigint[] IS NULL OR d.id = ANY($7))"
    } else {
        ""
    };
    format!(
        "WITH picked AS MATERIALIZED (
             SELECT due.id, due.available_at AS since, k.place
             FROM unnest($1::text[]) WITH ORDINALITY AS k (receiver_key, place)
             CROSS JOIN LATERAL (
                 SELECT d.id, d.available_at
                 FROM {delivery} d
                 WHERE d.receiver_key = k.receiver_key AND d.available_at <= $3 {filter}
                 ORDER BY d.available_at, d.id
                 LIMIT (SELECT $4::bigint)
                 FOR UPDATE SKIP LOCKED
             ) due
             LIMIT (SELECT $4::bigint WHERE set_config('synchronous_commit', 'off', true) = 'off')
         ), taken AS (
             UPDATE {delivery} d
             SET status = 'claimed',
                 claimed_by = $5,
                 claimed_at = $3,
                 available_at =
                     $3 + ($2::bigint[])[array_position($1::text[], d.receiver_key)] * interval '1 microsecond',
                 lapses = CASE WHEN d.status = 'claimed' THEN greatest(d.lapses, 1) ELSE d.lapses END
             WHERE d.id = ANY (ARRAY(SELECT picked.id FROM picked))
             RETURNING {}
         )
         SELECT taken.*, picked.place, picked.since, {}
         FROM taken
         JOIN picked ON picked.id = taken.id
         LEFT JOIN LATERAL (SELECT e.* FROM {event} e WHERE e.id = taken.event_id OFFSET 0) e ON true",
        columns::delivery_columns("d"),
        columns::event_columns("e"),
    )
}

pub(crate) async fn claim(
    pool: &PgPool,
    statements: &Statements,
    request: &ClaimRequest,
) -> Result<Vec<Claimed>, StoreError> {
    if request.limit == 0 || request.receivers.is_empty() {
        return Ok(Vec::new());
    }
    let claiming = |error| classify_sqlx("claiming rows", error);
    let (keys, leases) = receivers(request);
    let filtered = request.owed_before.is_some() || request.only.is_some();
    let text = if filtered { &statements.claim_filtered } else { &statements.claim };
    let mut query = sqlx::query(AssertSqlSafe(text.as_str()))
        .bind(keys)
        .bind(leases)
        .bind(request.now)
        .bind(i64::from(request.limit))
        .bind(&*request.worker);
    if filtered {
        let only = request.only.as_ref().map(|only| only.iter().map(|id| id.0).collect::<Vec<i64>>());
        query = query.bind(request.owed_before).bind(only);
    }
    let rows = query.fetch_all(pool).await.map_err(claiming)?;
    read(&rows, request).map_err(claiming)
}

/// The claim's plans: the one that the server makes once and keeps, which is what a relay's connection comes to use,
/// and the one for these very values. Over a connection of its own, in a transaction that is rolled back.
pub(crate) async fn explain(
    pool: &PgPool,
    statements: &Statements,
    request: &ClaimRequest,
) -> Result<String, StoreError> {
    let explaining = |error| classify_sqlx("asking for the plan of a claim", error);
    let mut connection = PgConnection::connect_with(&pool.connect_options()).await.map_err(explaining)?;
    let begin = format!(
        "BEGIN; PREPARE owed_claim (text[], bigint[], timestamptz, bigint, text) AS {}",
        statements.claim
    );
    sqlx::raw_sql(AssertSqlSafe(begin)).execute(&mut connection).await.map_err(explaining)?;
    let (keys, leases) = receivers(request);
    let mut plan = String::new();
    for mode in ["force_generic_plan", "force_custom_plan"] {
        let set = format!("SAVEPOINT before; SET LOCAL plan_cache_mode = {mode}");
        sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut connection).await.map_err(explaining)?;
        let execute: String = sqlx::query_scalar(
            "SELECT format(
                 'EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF)
                  EXECUTE owed_claim (%L, %L, %L, %L, %L)',
                 $1::text[], $2::bigint[], $3::timestamptz, $4::bigint, $5::text
             )",
        )
        .bind(&keys)
        .bind(&leases)
        .bind(request.now)
        .bind(i64::from(request.limit))
        .bind(&*request.worker)
        .fetch_one(&mut connection)
        .await
        .map_err(explaining)?;
        let lines: Vec<String> = sqlx::query_scalar(AssertSqlSafe(execute))
            .fetch_all(&mut connection)
            .await
            .map_err(explaining)?;
        plan.push_str(&format!("{mode}:\n{}\n", lines.join("\n")));
        let undo = "ROLLBACK TO SAVEPOINT before";
        sqlx::raw_sql(undo).execute(&mut connection).await.map_err(explaining)?;
    }
    // Closed, it is rolled back.
    connection.close().await.map_err(explaining)?;
    Ok(plan)
}

fn receivers(request: &ClaimRequest) -> (Vec<&str>, Vec<i64>) {
    let micros = |lease: Duration| i64::try_from(lease.as_micros()).unwrap_or(i64::MAX);
    request.receivers.iter().map(|receiver| (&*receiver.key, micros(receiver.lease))).unzip()
}

const DELIVERY: usize = columns::DELIVERY.len();

/// In the order of the receivers, the oldest first; the events that several deliveries share are shared here too.
fn read(rows: &[PgRow], request: &ClaimRequest) -> Result<Vec<Claimed>, sqlx::Error> {
    let mut events: HashMap<EventId, Arc<EventRow>> = HashMap::new();
    let mut claimed = Vec::with_capacity(rows.len());
    for one in rows {
        let delivery = row::delivery(one, 0)?;
        let place: i64 = one.try_get(DELIVERY)?;
        let since: owed_core::Timestamp = one.try_get(DELIVERY + 1)?;
        let found: Option<i64> = one.try_get(DELIVERY + 2)?;
        let event = match found {
            None => None,
            Some(_) => Some(match events.get(&delivery.event_id) {
                Some(event) => event.clone(),
                None => {
                    let event = Arc::new(row::event(one, DELIVERY + 2)?);
                    events.insert(event.id, event.clone());
                    event
                }
            }),
        };
        let claim = Claim::granted(delivery.id, request.worker.clone(), request.now);
        claimed.push(((place, since, delivery.id), Claimed { claim, delivery, event }));
    }
    claimed.sort_unstable_by_key(|(order, _)| *order);
    Ok(claimed.into_iter().map(|(_, claimed)| claimed).collect())
}
