//! Recording: any number of events with all they owe in one statement.

use std::collections::HashMap;

use owed_core::{DeliveryId, EventId, NewEvent, Recorded, StoreError, Timestamp, row::target_digest};
use owed_sql::{TableNames, Tables, classify};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, QueryResult, Statement, Value};
use uuid::Uuid;

use crate::{DIALECT, Inner, schema};

/// The most rows, and bytes, that one statement carries: a bound on what the server has to hold at once.
const ROWS: usize = 10_000;
const BYTES: usize = 32 * 1024 * 1024;

/// SeaORM's arrays hold no nulls, so something stands for them that no value can be: an empty text where a text is
/// never empty, or else one that has no mark before it; and this number.
const NULL: i64 = i64::MIN + 1;

/// Events and deliveries go as arrays, one for each column; `event` and `place` number them.
///
/// Ids are drawn first, so that the deliveries know theirs. An event whose dedupe key is taken (by a committed
/// event, by one of this transaction, or by one before it in the arrays) is left out, and its deliveries with it; a
/// key that another open transaction has written is waited for.
pub(crate) fn sql(tables: &Tables, names: &TableNames) -> String {
    format!(
        "WITH new AS MATERIALIZED (
             SELECT nextval('{event_ids}') AS id, e.*
             FROM unnest(
                 $1::text[], $2::integer[], $3::text[], $4::bytea[], $5::text[], $6::timestamptz[], $7::timestamptz[],
                 $8::text[], $9::text[], $10::bytea[], $11::uuid[], $12::bigint[], $13::text[], $14::bigint[],
                 $15::text[], $16::text[]
             ) WITH ORDINALITY AS e (
                 name, version, codec, payload, dedupe_key, occurred_at, recorded_at, actor_key, actor_label, scope,
                 correlation_id, causation_id, suppressed, retention_seconds, delete_when, trace_context, event
             )
         ), recorded AS (
             INSERT INTO {event} (
                 id, name, version, codec, payload, dedupe_key, occurred_at, recorded_at, actor_key, actor_label,
                 scope, correlation_id, causation_id, suppressed, retention_seconds, delete_when, trace_context
             )
             SELECT id, name, version, codec, payload, nullif(dedupe_key, ''), occurred_at, recorded_at, actor_key,
                 actor_label, substr(nullif(scope, ''), 2), correlation_id, nullif(causation_id, {NULL}), nullif(suppressed, ''),
                 nullif(retention_seconds, {NULL}), nullif(delete_when, ''), substr(nullif(trace_context, ''), 2)
             FROM new
             ORDER BY event
             ON CONFLICT (dedupe_key) WHERE dedupe_key IS NOT NULL DO NOTHING
             RETURNING id
         ), owed AS MATERIALIZED (
             SELECT nextval('{delivery_ids}') AS id, new.id AS event_id, new.recorded_at, d.*
             FROM unnest(
                 $17::bigint[], $18::text[], $19::text[], $20::bytea[], $21::integer[], $22::timestamptz[],
                 $23::timestamptz[], $24::text[]
             ) WITH ORDINALITY AS d (
                 event, receiver_key, target, target_digest, max_attempts, available_at, due_at, claimed_by, place
             )
             JOIN new USING (event)
             JOIN recorded ON recorded.id = new.id
             ORDER BY d.place
         ), written AS (
             INSERT INTO {delivery} (
                 id, event_id, receiver_key, target, target_digest, status, max_attempts, available_at, due_at,
                 claimed_by, claimed_at
             )
             SELECT id, event_id, receiver_key, target, target_digest,
                 CASE WHEN claimed_by = '' THEN 'pending' ELSE 'claimed' END, max_attempts, available_at, due_at,
                 nullif(claimed_by, ''), CASE WHEN claimed_by = '' THEN NULL ELSE recorded_at END
             FROM owed
         )
         SELECT new.event, recorded.id, NULL::bigint, NULL::bigint
         FROM new LEFT JOIN recorded ON recorded.id = new.id
         UNION ALL
         SELECT NULL, NULL, owed.place, owed.id FROM owed",
        event = tables.event,
        delivery = tables.delivery,
        event_ids = schema::sequence(names, "event"),
        delivery_ids = schema::sequence(names, "delivery"),
    )
}

pub(crate) async fn record(
    tx: &DatabaseTransaction,
    inner: &Inner,
    events: &[NewEvent],
) -> Result<Vec<Recorded>, StoreError> {
    let mut recorded = Vec::with_capacity(events.len());
    let mut from = 0;
    while from < events.len() {
        let (mut to, mut rows, mut bytes) = (from, 0, 0);
        while to < events.len() && (to == from || (rows < ROWS && bytes < BYTES)) {
            rows += events[to].deliveries.len() + 1;
            bytes += size(&events[to]);
            to += 1;
        }
        recorded.extend(chunk(tx, inner, &events[from..to]).await?);
        from = to;
    }
    Ok(recorded)
}

/// About how many bytes an event takes, with what it owes.
fn size(event: &NewEvent) -> usize {
    let targets: usize = event.deliveries.iter().map(|owed| owed.target.len()).sum();
    event.payload.len() + event.scope.as_ref().map_or(0, Vec::len) + targets
}

async fn chunk(
    tx: &DatabaseTransaction,
    inner: &Inner,
    events: &[NewEvent],
) -> Result<Vec<Recorded>, StoreError> {
    let recording = |error| classify("recording events", error);
    let statement =
        Statement::from_sql_and_values(DIALECT.backend(), inner.sql.record.as_str(), arrays(events));
    let rows = tx.query_all_raw(statement).await.map_err(recording)?;
    let deliveries: usize = events.iter().map(|event| event.deliveries.len()).sum();
    let mut event_ids: Vec<Option<EventId>> = vec![None; events.len()];
    let mut delivery_ids: Vec<Option<DeliveryId>> = vec![None; deliveries];
    for row in &rows {
        read(row, &mut event_ids, &mut delivery_ids).map_err(recording)?;
    }
    let earlier = if event_ids.iter().any(Option::is_none) {
        earlier(tx, inner, events, &event_ids).await?
    } else {
        HashMap::new()
    };
    let mut place = 0;
    let mut recorded = Vec::with_capacity(events.len());
    for (event, id) in events.iter().zip(event_ids) {
        let owed = &delivery_ids[place..place + event.deliveries.len()];
        place += event.deliveries.len();
        let answer = match (id, &event.dedupe_key) {
            (Some(id), _) => {
                let written: Option<Vec<DeliveryId>> = owed.iter().copied().collect();
                written.map(|deliveries| Recorded::New { event: id, deliveries })
            }
            (None, Some(key)) => earlier.get(key.as_str()).map(|of| Recorded::Duplicate { of: *of }),
            (None, None) => None,
        };
        recorded.push(answer.ok_or_else(|| {
            StoreError::failed("recording events", "the server did not answer for each of them")
        })?);
    }
    Ok(recorded)
}

fn read(
    row: &QueryResult,
    events: &mut [Option<EventId>],
    deliveries: &mut [Option<DeliveryId>],
) -> Result<(), DbErr> {
    let at = |number: i64| usize::try_from(number - 1).unwrap_or(usize::MAX);
    let event: Option<i64> = row.try_get_by_index(0)?;
    if let Some(event) = event {
        if let Some(slot) = events.get_mut(at(event)) {
            *slot = row.try_get_by_index::<Option<i64>>(1)?.map(EventId);
        }
        return Ok(());
    }
    let place: i64 = row.try_get_by_index(2)?;
    if let Some(slot) = deliveries.get_mut(at(place)) {
        *slot = Some(DeliveryId(row.try_get_by_index(3)?));
    }
    Ok(())
}

/// The events that have the dedupe keys of those that were left out.
async fn earlier(
    tx: &DatabaseTransaction,
    inner: &Inner,
    events: &[NewEvent],
    ids: &[Option<EventId>],
) -> Result<HashMap<String, EventId>, StoreError> {
    let doing = "looking for events with these dedupe keys";
    let keys: Vec<&str> = events
        .iter()
        .zip(ids)
        .filter(|(_, id)| id.is_none())
        .filter_map(|(event, _)| event.dedupe_key.as_deref())
        .collect();
    let sql = format!("SELECT dedupe_key, id FROM {} WHERE dedupe_key = ANY($1::text[])", inner.tables.event);
    let values = [Value::from(keys.iter().map(|key| (*key).to_owned()).collect::<Vec<String>>())];
    let rows = tx
        .query_all_raw(Statement::from_sql_and_values(DIALECT.backend(), sql, values))
        .await
        .map_err(|error| classify(doing, error))?;
    let mut found = HashMap::with_capacity(rows.len());
    for row in rows {
        let read = || Ok::<(String, i64), DbErr>((row.try_get_by_index(0)?, row.try_get_by_index(1)?));
        let (key, id) = read().map_err(|error| classify(doing, error))?;
        found.insert(key, EventId(id));
    }
    if keys.iter().any(|key| !found.contains_key(*key)) {
        return Err(StoreError::unsupported(
            "an event with this dedupe key was committed after this transaction's snapshot, which can't see it: \
             fire from a READ COMMITTED transaction, or make this one again",
        ));
    }
    Ok(found)
}

/// Empty for none, else one byte and then the scope, which may itself be empty.
fn marked_scope(event: &NewEvent) -> Vec<u8> {
    event.scope.as_ref().map_or_else(Vec::new, |scope| [b"=".as_slice(), scope.as_slice()].concat())
}

fn marked_trace(event: &NewEvent) -> String {
    event.trace_context.as_ref().map_or_else(String::new, |trace| format!("={trace}"))
}

fn arrays(events: &[NewEvent]) -> Vec<Value> {
    let text = |column: fn(&NewEvent) -> &str| -> Value {
        events.iter().map(|event| column(event).to_owned()).collect::<Vec<String>>().into()
    };
    let number = |column: fn(&NewEvent) -> Option<i64>| -> Value {
        events.iter().map(|event| column(event).unwrap_or(NULL)).collect::<Vec<i64>>().into()
    };
    let time = |column: fn(&NewEvent) -> Timestamp| -> Value {
        events.iter().map(column).collect::<Vec<Timestamp>>().into()
    };
    let owed =
        || events.iter().enumerate().flat_map(|(n, event)| event.deliveries.iter().map(move |one| (n, one)));
    vec![
        text(|event| &event.name),
        events.iter().map(|event| event.version).collect::<Vec<i32>>().into(),
        text(|event| event.codec.as_str()),
        events.iter().map(|event| event.payload.clone()).collect::<Vec<Vec<u8>>>().into(),
        text(|event| event.dedupe_key.as_deref().unwrap_or_default()),
        time(|event| event.occurred_at),
        time(|event| event.recorded_at),
        text(|event| &event.actor_key),
        text(|event| &event.actor_label),
        events.iter().map(marked_scope).collect::<Vec<Vec<u8>>>().into(),
        events.iter().map(|event| event.correlation_id).collect::<Vec<Uuid>>().into(),
        number(|event| event.causation_id.map(|id| id.0)),
        text(|event| event.suppressed.as_deref().unwrap_or_default()),
        number(|event| event.retention.columns().0),
        text(|event| event.retention.columns().1.unwrap_or_default()),
        events.iter().map(marked_trace).collect::<Vec<String>>().into(),
        owed().map(|(n, _)| n as i64 + 1).collect::<Vec<i64>>().into(),
        owed().map(|(_, one)| one.receiver_key.to_string()).collect::<Vec<String>>().into(),
        owed().map(|(_, one)| one.target.clone()).collect::<Vec<String>>().into(),
        owed().map(|(_, one)| target_digest(&one.target)).collect::<Vec<Vec<u8>>>().into(),
        owed().map(|(_, one)| one.max_attempts).collect::<Vec<i32>>().into(),
        owed().map(|(_, one)| one.available_at).collect::<Vec<Timestamp>>().into(),
        owed().map(|(_, one)| one.due_at).collect::<Vec<Timestamp>>().into(),
        owed()
            .map(|(_, one)| one.claimed_by.as_deref().unwrap_or_default().to_owned())
            .collect::<Vec<String>>()
            .into(),
    ]
}
