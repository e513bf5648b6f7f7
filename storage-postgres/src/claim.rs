//! Claiming: rows and their events, whole, in one statement.

use std::{collections::HashMap, sync::Arc};

use owed_core::{Claim, ClaimRequest, Claimed, EventId, EventRow, StoreError};
use owed_sql::{Tables, classify_sqlx, row as columns};
use sea_orm::sqlx::{self, AssertSqlSafe, PgPool, Row, postgres::PgRow};

use crate::{Statements, row};

/// The claim.
///
/// Plan: for each receiver, in order, an index scan of `delivery_claim` from its oldest entry, locked as it is
/// read and stopped by the limit (the outer LIMIT has no ORDER BY, so a later receiver is not even looked at once
/// there are enough); then the primary keys of deliveries and events. Neither what is settled, nor what is
/// scheduled ahead, nor what other receivers are owed is read.
pub(crate) fn sql(tables: &Tables, filtered: bool) -> String {
    let (delivery, event) = (&tables.delivery, &tables.event);
    let filter = if filtered {
        "AND ($6::timestamptz IS NULL OR d.due_at <= $6) AND ($7::bigint[] IS NULL OR d.id = ANY($7))"
    } else {
        ""
    };
    format!(
        "WITH picked AS MATERIALIZED (
             SELECT due.id, due.available_at, k.place, k.lease
             FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS k (receiver_key, lease, place)
             CROSS JOIN LATERAL (
                 SELECT d.id, d.available_at
                 FROM {delivery} d
                 WHERE d.receiver_key = k.receiver_key AND d.available_at <= $3 {filter}
                 ORDER BY d.available_at, d.id
                 LIMIT $4
                 FOR UPDATE SKIP LOCKED
             ) due
             LIMIT $4
         ), taken AS (
             UPDATE {delivery} d
             SET status = 'claimed',
                 claimed_by = $5,
                 claimed_at = $3,
                 available_at = $3 + picked.lease * interval '1 microsecond',
                 lapses = CASE WHEN d.status = 'claimed' THEN greatest(d.lapses, 1) ELSE d.lapses END
             FROM picked
             WHERE d.id = picked.id
             RETURNING {}, picked.place, picked.available_at AS since
         )
         SELECT taken.*, {}
         FROM taken LEFT JOIN {event} e ON e.id = taken.event_id",
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
    let keys: Vec<&str> = request.receivers.iter().map(|receiver| &*receiver.key).collect();
    let leases: Vec<i64> = request
        .receivers
        .iter()
        .map(|receiver| i64::try_from(receiver.lease.as_micros()).unwrap_or(i64::MAX))
        .collect();
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
