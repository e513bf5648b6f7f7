//! What is PostgreSQL's own. The contract that every store keeps is proven elsewhere.

#![allow(missing_docs, reason = "tests are named as sentences")]
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails, and says where")]

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{future::join_all, poll};
use owed_core::{
    ClaimRequest, Claimed, Codec, Listener, ManualClock, NewDelivery, NewEvent, Outcome, Prunable,
    ReceiverLease, Recorded, RetentionRule, Settled, Settlement, Store, StoreError, Timestamp,
};
use owed_postgres::{PostgresBuilder, PostgresStore};
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbBackend, Statement, TransactionTrait,
    sqlx::{PgPool, postgres::PgPoolOptions},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

fn url() -> String {
    let variable = "OWED_TEST_POSTGRES_URL";
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: run the tests with `cargo xtask test`"))
}

/// The server's URL, with a name for its sessions by which a test finds them again.
fn named(name: &str) -> String {
    let url = url();
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}application_name={name}")
}

fn random(start: &str) -> String {
    format!("{start}{:012x}_", rand::random::<u64>() >> 16)
}

fn now() -> Timestamp {
    "2026-03-01T12:00:00Z".parse().unwrap()
}

async fn fresh(builder: PostgresBuilder) -> PostgresStore {
    let store = builder.prefix(random("own")).clock(ManualClock::at(now())).connect().await.unwrap();
    store.migrate().await.unwrap();
    store
}

fn event(receivers: &[&str]) -> NewEvent {
    NewEvent {
        name: "own.Event".into(),
        version: 1,
        codec: Codec::Cbor,
        payload: vec![0, 159, 146, 150],
        dedupe_key: None,
        occurred_at: now(),
        recorded_at: now(),
        actor_key: String::new(),
        actor_label: String::new(),
        scope: None,
        correlation_id: uuid::Uuid::nil(),
        causation_id: None,
        suppressed: None,
        retention: RetentionRule::Ordinary,
        trace_context: None,
        deliveries: receivers
            .iter()
            .map(|key| NewDelivery {
                receiver_key: Arc::from(*key),
                target: String::new(),
                max_attempts: 5,
                available_at: now(),
                due_at: now(),
                claimed_by: None,
            })
            .collect(),
    }
}

async fn fire(store: &PostgresStore, events: &[NewEvent]) -> Vec<Recorded> {
    let tx = store.begin().await.unwrap();
    let recorded = store.record(&tx, events).await.unwrap();
    store.commit(tx).await.unwrap();
    recorded
}

fn request(keys: &[&str], limit: u32) -> ClaimRequest {
    let lease = |key: &&str| ReceiverLease { key: Arc::from(*key), lease: Duration::from_secs(60) };
    ClaimRequest::new("w".into(), keys.iter().map(lease).collect(), limit, now())
}

fn succeeded(claimed: Vec<Claimed>) -> Vec<Settlement> {
    claimed.into_iter().map(|one| Settlement::new(one.claim, Outcome::Succeeded)).collect()
}

async fn count(db: &DatabaseConnection, sql: impl Into<String>) -> i64 {
    let asked = Statement::from_string(DbBackend::Postgres, sql.into());
    db.query_one_raw(asked).await.unwrap().unwrap().try_get_by_index(0).unwrap()
}

/// Polls a call so many times, a moment apart, then drops it.
async fn dropped_after<F: Future>(polls: usize, call: F) {
    let mut call = pin!(call);
    for _ in 0..polls {
        if poll!(call.as_mut()).is_ready() {
            return;
        }
        // Sometimes at once, sometimes late enough for an answer.
        if rand::random() {
            tokio::time::sleep(Duration::from_micros(rand::random_range(0..300))).await;
        } else {
            tokio::task::yield_now().await;
        }
    }
}

/// Sessions of that name that have a transaction open with nobody working in it. A rollback that is on its way is
/// given a moment.
async fn left_open(db: &DatabaseConnection, name: &str) -> i64 {
    let mut open = 0;
    for _ in 0..100 {
        let sql = format!(
            "SELECT count(*) FROM pg_stat_activity
             WHERE application_name = '{name}' AND state LIKE 'idle in transaction%'"
        );
        open = count(db, sql).await;
        if open == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    open
}

// --- plans --------------------------------------------------------------------------------------------------

/// Rows that a claim must not read, as many as asked of each kind: settled ones and scheduled ones of the very
/// receiver, and others' that are due.
async fn ballast(store: &PostgresStore, prefix: &str, rows: u32) {
    for (status, key, available) in [
        ("succeeded", "a", "NULL"),
        ("pending", "a", "timestamptz '2026-03-01 12:00Z' + n * interval '1 second'"),
        ("pending", "other", "timestamptz '2026-03-01 11:00Z'"),
    ] {
        let sql = format!(
            "INSERT INTO {prefix}delivery (event_id, receiver_key, target, target_digest, status, max_attempts,
                 available_at, due_at)
             SELECT n, '{key}', '{status}', '{status}', '{status}', 5, {available}, '2026-03-01 11:00Z'
             FROM generate_series(1, {rows}) n"
        );
        store.connection().execute_unprepared(&sql).await.unwrap();
    }
}

/// What a prune may look for.
fn prunable() -> [(Prunable, &'static str); 4] {
    let until = now();
    [
        (Prunable::Succeeded, "event_consumed"),
        (Prunable::Settled, "event_consumed"),
        (Prunable::Window { seconds: None, until }, "event_retention"),
        (Prunable::Window { seconds: Some(60), until }, "event_retention"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_look_at_what_they_ask_for_and_nothing_else() {
    let prefix = random("own");
    let store = PostgresStore::builder(url()).prefix(&prefix).connect().await.unwrap();
    store.migrate().await.unwrap();
    ballast(&store, &prefix, 30_000).await;
    let sql = format!(
        "INSERT INTO {prefix}event (name, version, codec, payload, occurred_at, recorded_at, actor_key, actor_label,
             correlation_id)
         SELECT 'e', 1, 'cbor', '', now, now, '', '', gen_random_uuid()
         FROM (SELECT timestamptz '2026-03-02 12:00Z' + n * interval '1 s' AS now FROM generate_series(1, 30000) n) x"
    );
    store.connection().execute_unprepared(&sql).await.unwrap();
    let dead =
        format!("UPDATE {prefix}delivery SET status = 'dead' WHERE id % 100 = 0 AND status = 'succeeded'");
    store.connection().execute_unprepared(&dead).await.unwrap();
    for analyzed in [false, true] {
        if analyzed {
            let sql = format!("ANALYZE {prefix}delivery; ANALYZE {prefix}event");
            store.connection().execute_unprepared(&sql).await.unwrap();
        }
        for (kind, index) in prunable() {
            let plan = store.explain_prunable(&kind).await.unwrap();
            assert!(plan.contains(&format!("{prefix}{index}")), "analyzed: {analyzed}:\n{plan}");
            assert!(plan.contains(&format!("{prefix}delivery_owed")), "analyzed: {analyzed}:\n{plan}");
            assert!(!plan.contains("Seq Scan"), "analyzed: {analyzed}:\n{plan}");
        }
        let plan = store.explain_dead_letters().await.unwrap();
        assert!(plan.contains(&format!("{prefix}delivery_dead")), "analyzed: {analyzed}:\n{plan}");
        assert!(!plan.contains("Seq Scan"), "analyzed: {analyzed}:\n{plan}");
    }
    store.drop_tables().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_reads_what_it_takes_and_nothing_else() {
    let prefix = random("own");
    let store = PostgresStore::builder(url()).prefix(&prefix).connect().await.unwrap();
    store.migrate().await.unwrap();
    ballast(&store, &prefix, 30_000).await;
    for analyzed in [false, true] {
        fire(&store, &vec![event(&["a", "b"]); 3_000]).await;
        if analyzed {
            let sql = format!("ANALYZE {prefix}delivery; ANALYZE {prefix}event");
            store.connection().execute_unprepared(&sql).await.unwrap();
        }
        for limit in [1, 100, 1_000, 2_000] {
            let plan = store.explain_claim(&request(&["a", "b"], limit)).await.unwrap();
            let index = format!("using {prefix}delivery_claim on");
            assert_eq!(plan.matches(&index).count(), 2, "one for each of two plans:\n{plan}");
            assert!(!plan.contains(&format!("Seq Scan on {prefix}")), "analyzed: {analyzed}:\n{plan}");
            assert!(!plan.contains("Rows Removed"), "analyzed: {analyzed}:\n{plan}");
            // The second receiver is not looked at when the first one has enough.
            let looked_at = plan.matches(&format!("(actual rows={limit} loops=1)")).count();
            assert!(looked_at > 0, "analyzed: {analyzed}:\n{plan}");
        }
    }
    store.drop_tables().await.unwrap();
}

// --- round trips --------------------------------------------------------------------------------------------

/// The same server by another way, which counts how often it is asked and answers.
async fn counted(url: &str) -> (String, Arc<AtomicUsize>) {
    let server = url
        .split(['@', '/'])
        .find(|part| part.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()));
    let server = server.expect("a URL with a host and a port").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let here = listener.local_addr().unwrap().to_string();
    let turns = Arc::new(AtomicUsize::new(0));
    let (through, counting) = (url.replacen(&server, &here, 1), turns.clone());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let upstream = TcpStream::connect(&server).await.unwrap();
            for one in [&client, &upstream] {
                one.set_nodelay(true).unwrap();
            }
            let ((mut asks, mut hears), (mut answers, mut told)) =
                (client.into_split(), upstream.into_split());
            // Whether the client has spoken since the server did.
            let asked = Arc::new(AtomicBool::new(false));
            let (counting, answered) = (counting.clone(), asked.clone());
            tokio::spawn(async move {
                let mut bytes = vec![0; 65_536];
                while let Ok(read @ 1..) = asks.read(&mut bytes).await {
                    if !asked.swap(true, Ordering::SeqCst) && bytes[..read] != PING {
                        counting.fetch_add(1, Ordering::SeqCst);
                    }
                    told.write_all(&bytes[..read]).await.unwrap();
                }
            });
            tokio::spawn(async move {
                let mut bytes = vec![0; 65_536];
                while let Ok(read @ 1..) = answers.read(&mut bytes).await {
                    answered.store(false, Ordering::SeqCst);
                    hears.write_all(&bytes[..read]).await.unwrap();
                }
            });
        }
    });
    (through, turns)
}

/// What a pool sends over a connection that comes back to it (a lone Sync): nobody waits for it, and it is not counted.
const PING: [u8; 5] = [b'S', 0, 0, 0, 4];

/// How many round trips a call takes.
async fn trips<T>(turns: &AtomicUsize, call: impl Future<Output = T>) -> (usize, T) {
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = turns.load(Ordering::SeqCst);
    let answer = call.await;
    (turns.load(Ordering::SeqCst) - before, answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_hot_call_is_one_round_trip() {
    let (url, turns) = counted(&url()).await;
    let store = fresh(PostgresStore::builder(url).max_connections(1)).await;
    let keyed = || NewEvent { dedupe_key: Some(random("k")), ..event(&["a", "b", "c"]) };
    // The first time, each statement is prepared.
    for prepared in [false, true] {
        let mut count = Vec::new();
        let (begin, tx) = trips(&turns, store.begin()).await;
        let tx = tx.unwrap();
        let events: Vec<NewEvent> = (0..50).map(|_| keyed()).collect();
        let (record, recorded) = trips(&turns, store.record(&tx, &events)).await;
        assert!(recorded.unwrap().iter().all(|one| matches!(one, Recorded::New { .. })));
        let (commit, committed) = trips(&turns, store.commit(tx)).await;
        committed.unwrap();
        count.extend([("begin", begin), ("record", record), ("commit", commit)]);
        let (claim, claimed) = trips(&turns, store.claim(&request(&["a", "b"], 60))).await;
        let claimed = claimed.unwrap();
        let keys: Vec<_> = claimed.iter().map(|one| one.claim.key().clone()).collect();
        let (renew, renewed) = trips(&turns, store.renew(&keys, now() + Duration::from_secs(90))).await;
        assert_eq!(renewed.unwrap().len(), 60);
        let (settle, settled) = trips(&turns, store.settle_all(&succeeded(claimed), now())).await;
        assert!(settled.unwrap().iter().all(|one| *one == Settled::Applied));
        let (idle, _) = trips(&turns, store.claim(&request(&["nobody"], 60))).await;
        count.extend([("claim", claim), ("renew", renew), ("settle_all", settle), ("an idle claim", idle)]);
        if prepared {
            assert!(count.iter().all(|(_, trips)| *trips == 1), "{count:?}");
        }
    }
    store.drop_tables().await.unwrap();
}

// --- tables -------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrations_run_once_however_many_ask_for_them_at_once() {
    for schema in [None, Some(random("schema"))] {
        let prefix = random("own");
        let stores = (0..6).map(|_| async {
            let mut builder = PostgresStore::builder(url()).prefix(&prefix).max_connections(2);
            if let Some(schema) = &schema {
                builder = builder.schema(schema);
            }
            let store = builder.connect().await?;
            store.migrate().await?;
            Ok::<_, StoreError>(store)
        });
        let stores: Vec<PostgresStore> =
            join_all(stores).await.into_iter().collect::<Result<_, _>>().unwrap();
        stores[0].migrate().await.unwrap();
        fire(&stores[1], &[event(&["a"])]).await;
        assert_eq!(stores[2].claim(&request(&["a"], 9)).await.unwrap().len(), 1);
        stores[0].drop_tables().await.unwrap();
        if let Some(schema) = schema {
            let sql = format!("DROP SCHEMA \"{schema}\"");
            stores[0].connection().execute_unprepared(&sql).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_are_words_of_sql_are_quoted() {
    let schema = random("Order");
    let store = PostgresStore::builder(url()).prefix("Select_").schema(&schema).connect().await.unwrap();
    let missing = store.claim(&request(&["a"], 9)).await.unwrap_err().to_string();
    assert!(missing.contains("store.migrate()"), "{missing}");
    store.migrate().await.unwrap();
    // Printed, it says where.
    assert!(store.migration_sql().contains(&format!("CREATE TABLE \"{schema}\".\"Select_event\"")));
    fire(&store, &[event(&["a"])]).await;
    let claimed = store.claim(&request(&["a"], 9)).await.unwrap();
    let settled = store.settle_all(&succeeded(claimed), now()).await.unwrap();
    assert_eq!(settled, [Settled::Applied]);
    let sql = format!("DROP SCHEMA \"{schema}\" CASCADE");
    store.connection().execute_unprepared(&sql).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn printed_migrations_make_the_same_tables_and_go_down_again() {
    let store = PostgresStore::builder(url()).prefix(random("own")).connect().await.unwrap();
    store.connection().execute_unprepared(&store.migration_sql()).await.unwrap();
    fire(&store, &[event(&["a"])]).await;
    let tx = store.connection().begin().await.unwrap();
    let manager = sea_orm_migration::SchemaManager::new(&tx);
    for migration in store.migrations() {
        migration.down(&manager).await.unwrap();
        migration.up(&manager).await.unwrap();
    }
    tx.commit().await.unwrap();
    assert!(store.claim(&request(&["a"], 9)).await.unwrap().is_empty());
    store.drop_tables().await.unwrap();
}

// --- transactions -------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_call_leaves_no_transaction_open() {
    let name = random("own_drop");
    let store = fresh(PostgresStore::builder(named(&name)).max_connections(3)).await;
    let watching = PostgresStore::connect(url()).await.unwrap();
    for round in 0..200 {
        let polls = round % 8 + 1;
        dropped_after(polls, store.begin()).await;
        dropped_after(polls, async {
            let tx = store.begin().await.unwrap();
            store.record(&tx, &[event(&["leaked"])]).await.unwrap();
            let inner = store.savepoint(&tx).await.unwrap();
            store.record(&inner, &[event(&["leaked"])]).await.unwrap();
            store.rollback(inner).await.unwrap();
            store.rollback(tx).await.unwrap();
        })
        .await;
        // In a transaction that somebody left open this would never be seen.
        let kept = fire(&store, &[event(&["kept"])]).await;
        assert!(matches!(kept[0], Recorded::New { .. }));
    }
    assert_eq!(left_open(watching.connection(), &name).await, 0);
    let tallied = store.tally().await.unwrap();
    assert_eq!(tallied.len(), 1, "{tallied:?}");
    assert_eq!((tallied[0].receiver_key.as_str(), tallied[0].count), ("kept", 200));
    store.drop_tables().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_savepoint_dropped_in_flight_leaves_its_transaction_whole() {
    let store = fresh(PostgresStore::builder(url()).max_connections(2)).await;
    for round in 0..60 {
        for committed in [true, false] {
            let tx = store.begin().await.unwrap();
            store.record(&tx, &[event(&["before"])]).await.unwrap();
            dropped_after(round % 6 + 1, store.savepoint(&tx)).await;
            store.record(&tx, &[event(&["after"])]).await.unwrap();
            if committed {
                store.commit(tx).await.unwrap();
            } else {
                store.rollback(tx).await.unwrap();
            }
        }
    }
    let tallied: Vec<_> =
        store.tally().await.unwrap().into_iter().map(|one| (one.receiver_key, one.count)).collect();
    assert_eq!(tallied, [("after".to_owned(), 60), ("before".to_owned(), 60)]);
    store.drop_tables().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_who_gave_up_on_a_busy_pool_leave_no_queue_behind() {
    let store = fresh(PostgresStore::builder(url()).max_connections(1)).await;
    let held = store.begin().await.unwrap();
    for _ in 0..500 {
        let given_up = timeout(Duration::from_micros(200), store.begin()).await;
        assert!(given_up.is_err());
    }
    store.rollback(held).await.unwrap();
    // One of them at most was on its way.
    timeout(Duration::from_secs(1), store.begin()).await.expect("a turn at once").unwrap();
    store.drop_tables().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_are_read_committed_whatever_the_server_was_told() {
    let level = "SELECT current_setting('transaction_isolation')";
    let serializable = "options[default_transaction_isolation]=serializable";
    let told = format!("{}&{serializable}", named("own_isolation"));
    let foreign: PgPool = PgPoolOptions::new().max_connections(2).connect(&told).await.unwrap();
    for builder in [PostgresStore::builder(told.as_str()), PostgresStore::on(foreign.into())] {
        let store = fresh(builder).await;
        for store in [store.clone(), store.detached(2).await.unwrap()] {
            let tx = store.begin().await.unwrap();
            let row = tx.query_one_raw(Statement::from_string(DbBackend::Postgres, level)).await.unwrap();
            assert_eq!(row.unwrap().try_get_by_index::<String>(0).unwrap(), "read committed");
            store.rollback(tx).await.unwrap();
        }
        store.drop_tables().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_that_cannot_see_the_earlier_event_is_told_so() {
    let store = fresh(PostgresStore::builder(url()).max_connections(3)).await;
    let keyed = NewEvent { dedupe_key: Some("k".into()), ..event(&[]) };
    let repeatable = sea_orm::IsolationLevel::RepeatableRead;
    let tx = store.connection().begin_with_config(Some(repeatable), None).await.unwrap();
    assert!(store.events(&Default::default()).await.unwrap().is_empty());
    tx.execute_unprepared("SELECT 1").await.unwrap();
    fire(&store, std::slice::from_ref(&keyed)).await;
    let error = store.record(&tx, &[keyed]).await.unwrap_err();
    drop(tx);
    let clear = matches!(error, StoreError::Retry { .. }) || error.to_string().contains("READ COMMITTED");
    assert!(clear, "{error:?}");
    store.drop_tables().await.unwrap();
}

// --- connections --------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_alone_does_not_wait_for_the_disk() {
    let prefix = random("own_disk");
    let builder = PostgresStore::builder(url()).prefix(&prefix).max_connections(1);
    let store = builder.clock(ManualClock::at(now())).connect().await.unwrap();
    store.migrate().await.unwrap();
    let spy = format!(
        "CREATE TABLE {prefix}spy (status text, waits text);
         CREATE FUNCTION {prefix}spy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             INSERT INTO {prefix}spy VALUES (NEW.status, current_setting('synchronous_commit'));
             RETURN NULL;
         END $$;
         CREATE TRIGGER spy AFTER UPDATE ON {prefix}delivery FOR EACH ROW EXECUTE FUNCTION {prefix}spy();"
    );
    store.connection().execute_unprepared(&spy).await.unwrap();
    fire(&store, &[event(&["a"])]).await;
    let claimed = store.claim(&request(&["a"], 1)).await.unwrap();
    assert_eq!(store.settle_all(&succeeded(claimed), now()).await.unwrap(), [Settled::Applied]);
    let seen = |status: &str, waits: &str| {
        format!("SELECT count(*) FROM {prefix}spy WHERE status = '{status}' AND waits = '{waits}'")
    };
    assert_eq!(count(store.connection(), seen("claimed", "off")).await, 1);
    assert_eq!(count(store.connection(), seen("succeeded", "on")).await, 1);
    store.drop_tables().await.unwrap();
    let gone = format!("DROP FUNCTION {prefix}spy(); DROP TABLE {prefix}spy");
    store.connection().execute_unprepared(&gone).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_turned_read_only_is_not_used_again() {
    let store = fresh(PostgresStore::builder(url()).max_connections(1)).await;
    fire(&store, &[event(&["a"])]).await;
    let set = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY";
    store.connection().execute_unprepared(set).await.unwrap();
    let refused = store.claim(&request(&["a"], 1)).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unavailable { .. }), "{refused:?}");
    assert_eq!(store.claim(&request(&["a"], 1)).await.unwrap().len(), 1);
    store.drop_tables().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_the_server_cut_are_replaced() {
    let name = random("own_cut");
    let store = fresh(PostgresStore::builder(named(&name)).max_connections(3)).await;
    let watching = PostgresStore::connect(url()).await.unwrap();
    for _ in 0..3 {
        join_all((0..3).map(|_| async { store.begin().await.unwrap() })).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let cut = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{name}'"
        );
        assert!(count(watching.connection(), cut).await > 0);
        // One that was used a moment ago is taken for alive, so each of them may fail once.
        let mut refused = 0;
        while let Err(error) = store.claim(&request(&["a"], 1)).await {
            assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
            refused += 1;
            assert!(refused <= 3, "{error:?}");
        }
    }
    store.drop_tables().await.unwrap();
}

// --- rows ---------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_arrays_could_lose_come_back_as_they_were() {
    let store = fresh(PostgresStore::builder(url()).max_connections(2)).await;
    let events: Vec<NewEvent> =
        [(Some(Vec::new()), Some(String::new())), (None, None), (Some(vec![0]), Some("=".into()))]
            .into_iter()
            .map(|(scope, trace_context)| NewEvent { scope, trace_context, ..event(&[]) })
            .collect();
    fire(&store, &events).await;
    let read = store.events(&owed_core::EventQuery::page(9)).await.unwrap();
    let read: Vec<_> = read.into_iter().map(|row| (row.scope, row.trace_context)).collect();
    let written: Vec<_> = events.into_iter().map(|one| (one.scope, one.trace_context)).collect();
    assert_eq!(read, written);
    store.drop_tables().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_is_cut_into_statements_of_a_bounded_size() {
    let store = fresh(PostgresStore::builder(url()).max_connections(2)).await;
    let many = vec![event(&["a", "b"]); 7_000];
    let recorded = fire(&store, &many).await;
    let ids: std::collections::HashSet<_> = recorded
        .iter()
        .flat_map(|one| match one {
            Recorded::New { deliveries, .. } => deliveries.clone(),
            Recorded::Duplicate { .. } => Vec::new(),
        })
        .collect();
    assert_eq!(ids.len(), 14_000);
    let large = NewEvent { payload: vec![7; 10 * 1024 * 1024], ..event(&["c"]) };
    fire(&store, &vec![large; 5]).await;
    let claimed = store.claim(&request(&["c"], 9)).await.unwrap();
    assert!(
        claimed.iter().all(|one| one.event.as_ref().is_some_and(|event| event.payload.len() == 10 << 20))
    );
    assert_eq!(claimed.len(), 5);
    store.drop_tables().await.unwrap();
}

/// A relay that lost a row and took it again may settle both of its claims in one batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_claims_on_one_row_the_one_that_holds_is_settled() {
    let store = fresh(PostgresStore::builder(url()).max_connections(2)).await;
    fire(&store, &[event(&["a"])]).await;
    let mut lost = store.claim(&request(&["a"], 1)).await.unwrap();
    let later = ClaimRequest { now: now() + Duration::from_secs(61), ..request(&["a"], 1) };
    let mut holds = store.claim(&later).await.unwrap();
    let both = vec![lost.remove(0), holds.remove(0)];
    let keys: Vec<_> = both.iter().map(|one| one.claim.key().clone()).collect();
    assert_eq!(store.renew(&keys, later.now + Duration::from_secs(60)).await.unwrap().len(), 1);
    let settled = store.settle_all(&succeeded(both), later.now).await.unwrap();
    assert_eq!(settled, [Settled::Lost, Settled::Applied]);
    store.drop_tables().await.unwrap();
}

// --- wake-ups -----------------------------------------------------------------------------------------------

async fn woken(listener: &mut Box<dyn Listener>) -> bool {
    timeout(Duration::from_secs(5), listener.wait()).await.is_ok_and(|ended| ended.is_ok())
}

/// Until nothing more comes: one wake-up can reach its own process by both ways.
async fn quiet(listener: &mut Box<dyn Listener>) {
    while timeout(Duration::from_millis(200), listener.wait()).await.is_ok() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wake_up_reaches_other_processes_of_the_same_tables_alone() {
    let prefix = random("own");
    let connect =
        |prefix: String| async { PostgresStore::builder(url()).prefix(prefix).connect().await.unwrap() };
    let (here, there) = (connect(prefix.clone()).await, connect(prefix).await);
    let elsewhere = connect(random("own")).await;
    let mut listening = there.listen().await.unwrap();
    let mut stranger = elsewhere.listen().await.unwrap();
    here.wake().await.unwrap();
    assert!(woken(&mut listening).await);
    quiet(&mut listening).await;
    // Several count as one, near enough: they are not handed out one by one.
    for _ in 0..50 {
        here.wake().await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(woken(&mut listening).await);
    let mut more = 0;
    while timeout(Duration::from_millis(200), listening.wait()).await.is_ok() {
        more += 1;
    }
    assert!(more <= 1, "{more}");
    assert!(timeout(Duration::from_millis(200), stranger.wait()).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_whose_connection_is_cut_says_so_once() {
    let name = random("own_listen");
    let store = PostgresStore::builder(named(&name)).prefix(random("own")).connect().await.unwrap();
    let watching = PostgresStore::connect(url()).await.unwrap();
    let mut listening = store.listen().await.unwrap();
    let cut = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
         WHERE application_name = '{name}' AND query LIKE 'LISTEN%'"
    );
    assert_eq!(count(watching.connection(), cut).await, 1);
    let said = timeout(Duration::from_secs(5), listening.wait()).await.expect("the loss is noticed");
    assert!(matches!(said, Err(StoreError::Unavailable { .. })), "{said:?}");
    // Asked again it waits, rather than failing over and over.
    assert!(timeout(Duration::from_millis(300), listening.wait()).await.is_err());
    let mut again = store.listen().await.unwrap();
    store.wake().await.unwrap();
    assert!(woken(&mut again).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_detached_store_has_connections_of_its_own() {
    let store = fresh(PostgresStore::builder(url()).max_connections(1)).await;
    let own = store.detached(2).await.unwrap();
    let pid = "SELECT pg_backend_pid()::bigint";
    assert_ne!(count(store.connection(), pid).await, count(own.connection(), pid).await);
    let held = store.begin().await.unwrap();
    assert!(own.renew(&[], now()).await.unwrap().is_empty());
    assert!(own.claim(&request(&["a"], 1)).await.unwrap().is_empty());
    assert_eq!(own.now(), store.now());
    store.rollback(held).await.unwrap();
    store.drop_tables().await.unwrap();
}
