//! What is MySQL's and MariaDB's own; each test runs on both. The contract that every store keeps is proven elsewhere.

#![allow(missing_docs, reason = "tests are named as sentences")]
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails, and says where")]

use std::{
    collections::HashMap,
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
    ClaimRequest, Claimed, Codec, DeliveryQuery, EventQuery, ManualClock, NewDelivery, NewEvent, Outcome,
    Prunable, ReceiverLease, Recorded, RetentionRule, Settled, Settlement, Status, Store, StoreError,
    Timestamp,
};
use owed_mysql::{MysqlBuilder, MysqlStore};
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbBackend, Statement,
    sqlx::{
        self, MySqlPool,
        mysql::{MySqlConnectOptions, MySqlPoolOptions},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

/// Runs each test on each server.
macro_rules! on_both {
    ($($test:ident),+ $(,)?) => {
        mod mysql {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(super::url("OWED_TEST_MYSQL_URL")).await })+
        }
        mod mariadb {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(super::url("OWED_TEST_MARIADB_URL")).await })+
        }
    };
}

on_both! {
    a_claim_reads_what_it_takes_and_nothing_else,
    calls_take_no_more_round_trips_than_they_must,
    receivers_that_are_owed_are_found_however_many_there_are,
    migrations_run_once_however_many_ask_for_them_at_once,
    printed_migrations_make_the_same_tables,
    keys_differ_by_every_byte_and_may_be_255_wide_characters_long,
    a_duplicate_is_in_nobody_else_s_way,
    ids_of_a_batch_are_known_while_others_write,
    ids_of_a_batch_are_known_whatever_the_spacing,
    times_do_not_depend_on_the_session_s_zone,
    a_dropped_call_leaves_no_transaction_open,
    a_savepoint_dropped_in_flight_leaves_its_transaction_whole,
    a_dropped_statement_leaves_its_connection_usable,
    transactions_are_read_committed_whatever_the_server_was_told,
    a_batch_is_cut_into_statements_of_a_bounded_size,
    of_two_claims_on_one_row_the_one_that_holds_is_settled,
    outcomes_of_every_kind_are_written_in_one_statement,
    connections_that_the_server_cut_are_replaced,
}

fn url(variable: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: run the tests with `cargo xtask test`"))
}

fn random(start: &str) -> String {
    format!("{start}{:012x}_", rand::random::<u64>() >> 16)
}

fn now() -> Timestamp {
    "2026-03-01T12:00:00.123456Z".parse().unwrap()
}

async fn fresh(builder: MysqlBuilder) -> MysqlStore {
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

async fn fire(store: &MysqlStore, events: &[NewEvent]) -> Vec<Recorded> {
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

async fn row(db: &impl ConnectionTrait, sql: impl Into<String>) -> sea_orm::QueryResult {
    let asked = Statement::from_string(DbBackend::MySql, sql.into());
    db.query_one_raw(asked).await.unwrap().unwrap()
}

async fn run(db: &DatabaseConnection, sql: impl AsRef<str>) {
    db.execute_unprepared(sql.as_ref()).await.unwrap();
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

// --- plans --------------------------------------------------------------------------------------------------

/// How many rows a session has read so far, by whatever way.
async fn read_so_far(db: &impl ConnectionTrait) -> i64 {
    let asked = Statement::from_string(DbBackend::MySql, "SHOW SESSION STATUS LIKE 'Handler_read%'");
    let rows = db.query_all_raw(asked).await.unwrap();
    rows.iter().map(|row| row.try_get_by_index::<String>(1).unwrap().parse::<i64>().unwrap()).sum()
}

async fn a_claim_reads_what_it_takes_and_nothing_else(url: String) {
    let prefix = random("own");
    let store = MysqlStore::builder(url.as_str()).prefix(&prefix).max_connections(1).connect().await.unwrap();
    store.migrate().await.unwrap();
    let digits = (0..10).map(|n| format!("SELECT {n} AS d")).collect::<Vec<_>>().join(" UNION ALL ");
    for (status, key, available) in [
        ("succeeded", "a", "NULL"),
        ("pending", "a", "TIMESTAMP '2026-03-02 12:00:00' + INTERVAL n SECOND"),
        ("pending", "other", "TIMESTAMP '2026-03-01 11:00:00'"),
    ] {
        let sql = format!(
            "INSERT INTO {prefix}delivery (event_id, receiver_key, target, target_digest, status, max_attempts,
                 available_at, due_at)
             SELECT n, '{key}', '{status}', '{status}', '{status}', 5, {available}, '2026-03-01 11:00:00'
             FROM (SELECT 1000000 + w.d + 10 * x.d + 100 * y.d + 1000 * z.d AS n
                   FROM ({digits}) w, ({digits}) x, ({digits}) y, ({digits}) z) numbers"
        );
        run(store.connection(), sql).await;
    }
    fire(&store, &vec![event(&["a", "b"]); 1_000]).await;
    let index = format!("{prefix}delivery_claim");
    let plan = store.explain_claim(&request(&["a", "b"], 100)).await.unwrap();
    assert_eq!(plan.matches(&index).count(), 2, "one for each receiver:\n{plan}");
    assert!(!plan.to_lowercase().contains("sort"), "{plan}");
    let dead = store.explain_dead_letters().await.unwrap();
    assert!(dead.contains(&format!("{prefix}delivery_dead")), "{dead}");
    let until = now();
    for (kind, index) in [
        (Prunable::Settled, "event_consumed"),
        (Prunable::Window { seconds: None, until }, "event_retention"),
        (Prunable::Window { seconds: Some(60), until }, "event_retention"),
    ] {
        let plan = store.explain_prunable(&kind).await.unwrap();
        assert!(plan.contains(&format!("{prefix}{index}")), "{plan}");
        assert!(plan.contains(&format!("{prefix}delivery_owed")), "{plan}");
        assert!(!plan.to_lowercase().contains("sort"), "{plan}");
    }
    // One session does it all, so it has counted everything that was read: the probe, the rows by index and by
    // key twice, and their events. Not one of the 30,000 others.
    for (limit, most) in [(1, 30), (100, 1_000), (500, 5_000)] {
        let before = read_so_far(store.connection()).await;
        assert_eq!(store.claim(&request(&["a", "b"], limit)).await.unwrap().len(), limit as usize);
        let read = read_so_far(store.connection()).await - before;
        assert!(read <= most, "{read} rows read for {limit}");
    }
    // As many as there are receivers, and a few.
    let before = read_so_far(store.connection()).await;
    assert_eq!(store.owed_receivers().await.unwrap(), ["a", "b", "other"]);
    let read = read_so_far(store.connection()).await - before;
    assert!(read <= 50, "{read} rows read for three receivers");
    store.drop_tables().await.unwrap();
}

async fn receivers_that_are_owed_are_found_however_many_there_are(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(2)).await;
    let keys: Vec<String> = (0..1_205).map(|n| format!("r{n:04}")).collect();
    fire(&store, &[event(&keys.iter().map(String::as_str).collect::<Vec<_>>())]).await;
    let settled = store.claim(&request(&[&keys[3]], 9)).await.unwrap();
    store.settle_all(&succeeded(settled), now()).await.unwrap();
    let owed = store.owed_receivers().await.unwrap();
    let expected: Vec<&String> = keys.iter().filter(|key| **key != keys[3]).collect();
    assert!(owed.iter().eq(expected), "{} of 1204", owed.len());
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

/// What a pool sends over a connection that comes back to it (COM_PING): nobody waits for it, and it is not counted.
const PING: [u8; 5] = [1, 0, 0, 0, 0x0e];

/// How many round trips a call takes.
async fn trips<T>(turns: &AtomicUsize, call: impl Future<Output = T>) -> (usize, T) {
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = turns.load(Ordering::SeqCst);
    let answer = call.await;
    (turns.load(Ordering::SeqCst) - before, answer)
}

async fn calls_take_no_more_round_trips_than_they_must(url: String) {
    let (through, turns) = counted(&url).await;
    let store = fresh(MysqlStore::builder(through).max_connections(1)).await;
    for prepared in [false, true] {
        let mut count = Vec::new();
        let (begin, tx) = trips(&turns, store.begin()).await;
        let tx = tx.unwrap();
        let (record, _) = trips(&turns, store.record(&tx, &vec![event(&["a", "b"]); 30])).await;
        let (commit, committed) = trips(&turns, store.commit(tx)).await;
        committed.unwrap();
        count.extend([("begin", begin, 1), ("record", record, 2), ("commit", commit, 1)]);
        let (claim, claimed) = trips(&turns, store.claim(&request(&["a", "b"], 60))).await;
        let claimed = claimed.unwrap();
        assert_eq!(claimed.len(), 60);
        let (settle, settled) = trips(&turns, store.settle_all(&succeeded(claimed), now())).await;
        assert!(settled.unwrap().iter().all(|one| *one == Settled::Applied));
        let (idle, _) = trips(&turns, store.claim(&request(&["a", "b"], 60))).await;
        // The probe, BEGIN, two statements for each receiver, the rows, their events, COMMIT. (The second receiver's
        // rows are what was still wanted.)
        count.extend([("claim", claim, 9), ("settle_all", settle, 4), ("an idle claim", idle, 1)]);
        if prepared {
            assert!(count.iter().all(|(_, trips, most)| trips == most), "{count:?}");
        }
    }
    store.drop_tables().await.unwrap();
}

// --- tables -------------------------------------------------------------------------------------------------

async fn migrations_run_once_however_many_ask_for_them_at_once(url: String) {
    let prefix = random("Select");
    let stores = (0..5).map(|_| async {
        // One connection: the lock has one of its own.
        let store = MysqlStore::builder(url.as_str()).prefix(&prefix).max_connections(1).connect().await?;
        store.migrate().await?;
        Ok::<_, StoreError>(store)
    });
    let stores: Vec<MysqlStore> = join_all(stores).await.into_iter().collect::<Result<_, _>>().unwrap();
    stores[0].migrate().await.unwrap();
    fire(&stores[1], &[event(&["a"])]).await;
    assert_eq!(stores[2].claim(&request(&["a"], 9)).await.unwrap().len(), 1);
    stores[0].drop_tables().await.unwrap();
    let missing = stores[0].claim(&request(&["a"], 9)).await.unwrap_err().to_string();
    assert!(missing.contains("store.migrate()"), "{missing}");
}

async fn printed_migrations_make_the_same_tables(url: String) {
    let store = MysqlStore::builder(url.as_str()).prefix(random("own")).connect().await.unwrap();
    run(store.connection(), store.migration_sql()).await;
    fire(&store, &[event(&["a"])]).await;
    // They are the service's to run as well, and to undo.
    let manager = sea_orm_migration::SchemaManager::new(store.connection());
    for migration in store.migrations() {
        migration.down(&manager).await.unwrap();
        migration.up(&manager).await.unwrap();
    }
    assert!(store.claim(&request(&["a"], 9)).await.unwrap().is_empty());
    store.drop_tables().await.unwrap();
}

async fn keys_differ_by_every_byte_and_may_be_255_wide_characters_long(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(2)).await;
    let wide = "𝔘".repeat(255);
    let keys = ["a", "A", "á", "a ", " a", "a\u{301}", "ß", "ss", "🚀", "🚁", &wide];
    for key in keys {
        let keyed = NewEvent { dedupe_key: Some(key.into()), ..event(&[key]) };
        let recorded = fire(&store, &[keyed.clone(), keyed]).await;
        let [Recorded::New { event, .. }, Recorded::Duplicate { of }] = recorded[..] else {
            panic!("{key:?}: {recorded:?}")
        };
        assert_eq!(event, of);
    }
    for key in keys {
        let claimed = store.claim(&request(&[key], 99)).await.unwrap();
        assert_eq!(claimed.len(), 1, "{key:?}");
        assert_eq!(claimed[0].delivery.receiver_key, key);
    }
    let mut sorted = keys.to_vec();
    sorted.sort_unstable();
    assert_eq!(store.owed_receivers().await.unwrap(), sorted);
    store.drop_tables().await.unwrap();
}

async fn a_duplicate_is_in_nobody_else_s_way(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(4)).await;
    let keyed = |key: &str| NewEvent { dedupe_key: Some(key.into()), ..event(&["a"]) };
    for key in ["b", "m", "x"] {
        fire(&store, &[keyed(key)]).await;
    }
    // One key is undone, and one that was waited for turns out to be a duplicate.
    let undone = store.begin().await.unwrap();
    store.record(&undone, &[keyed("a"), keyed("c")]).await.unwrap();
    store.rollback(undone).await.unwrap();
    let first = store.begin().await.unwrap();
    store.record(&first, &[keyed("n")]).await.unwrap();
    let holding = store.begin().await.unwrap();
    let raced = tokio::spawn({
        let store = store.clone();
        async move {
            let keys = ["b", "m", "x", "a", "c", "n"].map(keyed);
            let recorded = store.record(&holding, &keys).await.unwrap();
            (holding, recorded)
        }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    store.commit(first).await.unwrap();
    let (holding, recorded) = raced.await.unwrap();
    let is_new = |one: &Recorded| matches!(one, Recorded::New { .. });
    assert_eq!(recorded.iter().map(is_new).collect::<Vec<_>>(), [false, false, false, true, true, false]);
    // While that transaction is open, everything else can be written.
    for new in
        [event(&["a"]), keyed("0"), keyed("aa"), keyed("bb"), keyed("l"), keyed("nn"), keyed("w"), keyed("z")]
    {
        let fired = timeout(Duration::from_secs(3), fire(&store, &[new.clone(), event(&["a"])])).await;
        assert!(is_new(&fired.unwrap_or_else(|_| panic!("{:?} had to wait", new.dedupe_key))[0]));
    }
    store.rollback(holding).await.unwrap();
    // A key whose event is gone is free.
    let sql = table(&store).replace("_delivery", "_event");
    run(store.connection(), format!("DELETE FROM {sql} WHERE dedupe_key = 'b'")).await;
    let again = fire(&store, &[keyed("b"), keyed("b")]).await;
    let [Recorded::New { event, .. }, Recorded::Duplicate { of }] = again[..] else { panic!("{again:?}") };
    assert_eq!(event, of);
    store.drop_tables().await.unwrap();
}

// --- ids ----------------------------------------------------------------------------------------------------

/// Fires batches over several connections at once, and compares the ids that were answered with those of the rows.
async fn ids_are_right(store: &MysqlStore) {
    let marked = |batch: usize, n: usize| {
        let keys = [format!("{batch}-{n}-x"), format!("{batch}-{n}-y")];
        event(&[&keys[0], &keys[1]])
    };
    let batches = (0..24).map(|batch| {
        let store = store.clone();
        tokio::spawn(async move {
            let events: Vec<NewEvent> = (0..40).map(|n| marked(batch, n)).collect();
            let recorded = fire(&store, &events).await;
            events.into_iter().zip(recorded).collect::<Vec<_>>()
        })
    });
    let written: Vec<_> = join_all(batches).await.into_iter().flat_map(|batch| batch.unwrap()).collect();
    let rows = store.deliveries(&DeliveryQuery::page(100_000)).await.unwrap();
    let rows: HashMap<_, _> = rows.into_iter().map(|row| (row.id, row)).collect();
    assert_eq!(rows.len(), 24 * 40 * 2);
    for (new, recorded) in written {
        let Recorded::New { event, deliveries } = recorded else { panic!("{recorded:?}") };
        for (owed, id) in new.deliveries.iter().zip(deliveries) {
            let row = &rows[&id];
            assert_eq!((row.event_id, row.receiver_key.as_str()), (event, &*owed.receiver_key));
        }
    }
}

async fn ids_of_a_batch_are_known_while_others_write(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(8)).await;
    ids_are_right(&store).await;
    store.drop_tables().await.unwrap();
}

async fn ids_of_a_batch_are_known_whatever_the_spacing(url: String) {
    let options: MySqlConnectOptions = url.replace("mariadb://", "mysql://").parse().unwrap();
    // The service's own sessions, each with a spacing of its own.
    let pool = MySqlPoolOptions::new().max_connections(6).after_connect(|connection, _| {
        Box::pin(async move {
            let set = format!("SET SESSION auto_increment_increment = {}", rand::random_range(1..5));
            sqlx::query(sqlx::AssertSqlSafe(set)).execute(connection).await.map(|_| ())
        })
    });
    let pool: MySqlPool = pool.connect_with(options).await.unwrap();
    let store = fresh(MysqlStore::on(pool.into())).await;
    ids_are_right(&store).await;
    store.drop_tables().await.unwrap();
}

// --- times --------------------------------------------------------------------------------------------------

async fn times_do_not_depend_on_the_session_s_zone(url: String) {
    let options: MySqlConnectOptions = url.replace("mariadb://", "mysql://").parse().unwrap();
    let kolkata = options.timezone(Some(String::from("+05:30")));
    let pool: MySqlPool = MySqlPoolOptions::new().max_connections(2).connect_with(kolkata).await.unwrap();
    let prefix = random("own");
    let there = MysqlStore::on(pool.into()).prefix(&prefix).connect().await.unwrap();
    there.migrate().await.unwrap();
    let here = MysqlStore::builder(url).prefix(&prefix).connect().await.unwrap();
    assert!((here.now() - there.now()).abs() < chrono::TimeDelta::seconds(2));
    assert!((here.now() - chrono::Utc::now()).abs() < chrono::TimeDelta::seconds(2));
    fire(&there, &[event(&["a"])]).await;
    for store in [&here, &there] {
        let row = &store.events(&EventQuery::page(9)).await.unwrap()[0];
        assert_eq!((row.occurred_at, row.recorded_at), (now(), now()));
        let early = ClaimRequest { now: now() - Duration::from_micros(1), ..request(&["a"], 9) };
        assert!(store.claim(&early).await.unwrap().is_empty());
    }
    let claimed = there.claim(&request(&["a"], 9)).await.unwrap();
    assert_eq!(claimed[0].delivery.available_at, Some(now() + Duration::from_secs(60)));
    assert_eq!(here.settle_all(&succeeded(claimed), now()).await.unwrap(), [Settled::Applied]);
    here.drop_tables().await.unwrap();
}

// --- transactions -------------------------------------------------------------------------------------------

async fn a_dropped_call_leaves_no_transaction_open(url: String) {
    let store = fresh(MysqlStore::builder(url.as_str()).max_connections(3)).await;
    for round in 0..120 {
        let polls = round % 10 + 1;
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
        let kept = timeout(Duration::from_secs(10), fire(&store, &[event(&["kept"])])).await;
        assert!(matches!(kept.expect("a connection to work on")[0], Recorded::New { .. }));
    }
    let tallied = store.tally().await.unwrap();
    assert_eq!(tallied.len(), 1, "{tallied:?}");
    assert_eq!((tallied[0].receiver_key.as_str(), tallied[0].count), ("kept", 120));
    // A transaction that were still open would hold the tables against this.
    timeout(Duration::from_secs(10), store.drop_tables()).await.expect("nobody works on them").unwrap();
}

async fn a_savepoint_dropped_in_flight_leaves_its_transaction_whole(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(2)).await;
    for round in 0..40 {
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
    assert_eq!(tallied, [("after".to_owned(), 40), ("before".to_owned(), 40)]);
    store.drop_tables().await.unwrap();
}

/// sqlx loses its place in a connection whose statement is dropped while it is being prepared. Each statement here
/// has a text of its own, so each is.
async fn a_dropped_statement_leaves_its_connection_usable(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(2)).await;
    for round in 0..60 {
        let receivers: Vec<String> = (0..=round).map(|n| format!("r{n}")).collect();
        let receivers: Vec<&str> = receivers.iter().map(String::as_str).collect();
        let tx = store.begin().await.unwrap();
        let events = [event(&receivers)];
        dropped_after(round % 5 + 1, store.record(&tx, &events)).await;
        // Whatever was written of it, the transaction answers.
        let again = timeout(Duration::from_secs(5), store.record(&tx, &[event(&["kept"])])).await;
        let again = again.expect("an answer").unwrap();
        assert!(matches!(again[0], Recorded::New { .. }));
        store.rollback(tx).await.unwrap();
    }
    assert!(store.tally().await.unwrap().is_empty());
    store.drop_tables().await.unwrap();
}

async fn transactions_are_read_committed_whatever_the_server_was_told(url: String) {
    let options: MySqlConnectOptions = url.replace("mariadb://", "mysql://").parse().unwrap();
    let pool: MySqlPool = MySqlPoolOptions::new().max_connections(2).connect_with(options).await.unwrap();
    for builder in [MysqlStore::builder(url.as_str()), MysqlStore::on(pool.into())] {
        let store = fresh(builder.max_connections(3)).await;
        for reading in [store.clone(), store.detached(2).await.unwrap()] {
            let tx = reading.begin().await.unwrap();
            let seen = format!("SELECT COUNT(*) FROM {}", table(&store));
            let before: i64 = row(&tx, &seen).await.try_get_by_index(0).unwrap();
            fire(&store, &[event(&["a"])]).await;
            let after: i64 = row(&tx, &seen).await.try_get_by_index(0).unwrap();
            assert_eq!(after, before + 1);
            reading.rollback(tx).await.unwrap();
        }
        store.drop_tables().await.unwrap();
    }
}

/// The name of a store's table of deliveries, out of its own migrations.
fn table(store: &MysqlStore) -> String {
    let sql = store.migration_sql();
    let names = sql.split('`').skip(1).step_by(2);
    names.into_iter().find(|name| name.ends_with("_delivery")).unwrap().to_owned()
}

// --- rows ---------------------------------------------------------------------------------------------------

async fn a_batch_is_cut_into_statements_of_a_bounded_size(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(2)).await;
    let recorded = fire(&store, &vec![event(&["a", "b"]); 4_500]).await;
    let ids: std::collections::HashSet<_> = recorded
        .iter()
        .flat_map(|one| match one {
            Recorded::New { deliveries, .. } => deliveries.clone(),
            Recorded::Duplicate { .. } => Vec::new(),
        })
        .collect();
    assert_eq!(ids.len(), 9_000);
    // The largest payloads, scopes and targets, several to a statement, on a server with its default packet.
    let large =
        NewEvent { payload: vec![7; 10 * 1024 * 1024], scope: Some(vec![7; 65_536]), ..event(&["c"]) };
    fire(&store, &vec![large; 3]).await;
    let mut wide = event(&[]);
    wide.deliveries = (0..2_500)
        .map(|n| NewDelivery {
            target: format!("{n:04}{}", "𝔘".repeat(1_996)),
            ..event(&["d"]).deliveries.remove(0)
        })
        .collect();
    fire(&store, &[wide]).await;
    let scoped = NewEvent { payload: vec![7; 100], scope: Some(vec![7; 65_536]), ..event(&["e"]) };
    fire(&store, &vec![scoped; 300]).await;
    for (key, owed) in [("c", 3), ("d", 2_500), ("e", 300)] {
        assert_eq!(store.claim(&request(&[key], 9_999)).await.unwrap().len(), owed, "{key}");
    }
    store.drop_tables().await.unwrap();
}

/// A relay that lost a row and took it again may settle both of its claims in one batch.
async fn of_two_claims_on_one_row_the_one_that_holds_is_settled(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(2)).await;
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

async fn outcomes_of_every_kind_are_written_in_one_statement(url: String) {
    let store = fresh(MysqlStore::builder(url).max_connections(2)).await;
    let later = now() + Duration::from_secs(7);
    let outcomes = || {
        vec![
            Outcome::Failed { error: "no\0t yet 🚀".into(), available_at: later },
            Outcome::Dead { error: "x".repeat(3_000), counted: true },
            Outcome::Succeeded,
            Outcome::NotYet { until: later },
            Outcome::Deferred { error: "wait".into(), available_at: later },
            Outcome::Orphaned { error: "nobody".into() },
            Outcome::Dead { error: "at once".into(), counted: false },
        ]
    };
    // One by one, in a transaction, they come to the same.
    fire(&store, &vec![event(&["all"]); outcomes().len()]).await;
    fire(&store, &vec![event(&["each"]); outcomes().len()]).await;
    let settlements = |claimed: Vec<Claimed>| -> Vec<Settlement> {
        claimed
            .into_iter()
            .zip(outcomes())
            .map(|(one, outcome)| Settlement::new(one.claim, outcome))
            .collect()
    };
    let all = settlements(store.claim(&request(&["all"], 99)).await.unwrap());
    assert!(store.settle_all(&all, now()).await.unwrap().iter().all(|one| *one == Settled::Applied));
    for one in settlements(store.claim(&request(&["each"], 99)).await.unwrap()) {
        let tx = store.begin().await.unwrap();
        assert_eq!(store.settle(&tx, &one, now()).await.unwrap(), Settled::Applied);
        store.commit(tx).await.unwrap();
    }
    let rows = store.deliveries(&DeliveryQuery::page(99)).await.unwrap();
    let (all, each) = rows.split_at(outcomes().len());
    for (one, other) in all.iter().zip(each) {
        let mut same = other.clone();
        (same.id, same.event_id) = (one.id, one.event_id);
        same.receiver_key.clone_from(&one.receiver_key);
        assert_eq!(*one, same);
    }
    assert_eq!(all[0].status, Status::Failed);
    assert_eq!(all[0].last_error.as_deref(), Some("no\u{fffd}t yet 🚀"));
    assert_eq!(all[1].last_error.as_ref().map(String::len), Some(2_000));
    assert_eq!((all[3].due_at, all[3].available_at), (later, Some(later)));
    store.drop_tables().await.unwrap();
}

// --- connections --------------------------------------------------------------------------------------------

async fn connections_that_the_server_cut_are_replaced(url: String) {
    let store = fresh(MysqlStore::builder(url.as_str()).max_connections(1)).await;
    let watching = MysqlStore::builder(url).max_connections(1).connect().await.unwrap();
    for _ in 0..3 {
        let id: u64 = row(store.connection(), "SELECT CONNECTION_ID()").await.try_get_by_index(0).unwrap();
        run(watching.connection(), format!("KILL {id}")).await;
        // One that was used a moment ago is taken for alive, so it may fail once.
        if let Err(error) = store.claim(&request(&["a"], 1)).await {
            assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
            store.claim(&request(&["a"], 1)).await.unwrap();
        }
    }
    store.drop_tables().await.unwrap();
}
