//! What is SQLite's own. The contract that every store keeps is proven elsewhere.

#![allow(missing_docs, reason = "tests are named as sentences")]
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails, and says where")]

use std::{future::Future, path::PathBuf, pin::pin, process::Command, sync::Arc, time::Duration};

use futures::{future::join_all, poll};
use owed_core::{
    ClaimRequest, Claimed, Codec, DeliveryQuery, ManualClock, NewDelivery, NewEvent, Outcome, Prunable,
    ReceiverLease, Recorded, RetentionRule, Settled, Settlement, Store, Timestamp,
};
use owed_sqlite::SqliteStore;
use sea_orm::{ConnectionTrait, DbBackend, Statement};
use tokio::time::timeout;

/// A file that goes when the test does.
struct File(PathBuf);

impl File {
    fn new() -> Self {
        File(std::env::temp_dir().join(format!("owed-own-{:016x}.sqlite", rand::random::<u64>())))
    }

    fn url(&self) -> String {
        format!("sqlite://{}", self.0.display())
    }

    async fn open(&self) -> SqliteStore {
        let store = SqliteStore::builder(self.url()).clock(ManualClock::at(now()));
        let store = store.connect().await.unwrap();
        store.migrate().await.unwrap();
        store
    }
}

impl Drop for File {
    fn drop(&mut self) {
        for suffix in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{suffix}", self.0.display()));
        }
    }
}

fn now() -> Timestamp {
    "2026-03-01T12:00:00.123456Z".parse().unwrap()
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

async fn fire(store: &SqliteStore, events: &[NewEvent]) -> Vec<Recorded> {
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

/// Polls a call so many times, a moment apart, then drops it.
async fn dropped_after<F: Future>(polls: usize, call: F) {
    let mut call = pin!(call);
    for _ in 0..polls {
        if poll!(call.as_mut()).is_ready() {
            return;
        }
        if rand::random() {
            tokio::time::sleep(Duration::from_micros(rand::random_range(0..100))).await;
        } else {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_reads_its_index_alone_and_in_order() {
    let file = File::new();
    let store = file.open().await;
    let plan = store.explain_claim(&request(&["a", "b"], 100)).await.unwrap();
    let search = "SEARCH d USING COVERING INDEX owed_delivery_claim (receiver_key=? AND available_at<?)";
    assert_eq!(plan, format!("{search}\n{search}\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_look_at_what_they_ask_for_and_nothing_else() {
    let file = File::new();
    let store = file.open().await;
    for (kind, search) in [
        (Prunable::Settled, "INDEX owed_event_consumed (delete_when=?"),
        (
            Prunable::Window { seconds: None, until: now() },
            "INDEX owed_event_retention (retention_seconds=? AND recorded_at<?)",
        ),
        (
            Prunable::Window { seconds: Some(60), until: now() },
            "INDEX owed_event_retention (retention_seconds=? AND recorded_at<?)",
        ),
    ] {
        let plan = store.explain_prunable(&kind).await.unwrap();
        assert!(plan.contains(search), "{plan}");
        assert!(plan.contains("SEARCH d USING INDEX owed_delivery_owed (event_id=?)"), "{plan}");
        assert!(!plan.contains("B-TREE"), "sorted apart:\n{plan}");
    }
    let plan = store.explain_dead_letters().await.unwrap();
    assert!(plan.contains("INDEX owed_delivery_dead"), "{plan}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrations_run_once_however_many_ask_for_them_at_once() {
    let file = File::new();
    let stores = join_all((0..8).map(|_| file.open())).await;
    stores[0].migrate().await.unwrap();
    fire(&stores[1], &[event(&["a"])]).await;
    assert_eq!(stores[2].claim(&request(&["a"], 9)).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn printed_migrations_make_the_same_tables_under_any_prefix() {
    let file = File::new();
    let first = SqliteStore::builder(file.url()).prefix("Select_").connect().await.unwrap();
    let missing = first.claim(&request(&["a"], 9)).await.unwrap_err().to_string();
    assert!(missing.contains("store.migrate()"), "{missing}");
    first.connection().execute_unprepared(&first.migration_sql()).await.unwrap();
    fire(&first, &[event(&["a"])]).await;
    // Another set of tables in one file knows nothing of it.
    assert!(file.open().await.claim(&request(&["a"], 9)).await.unwrap().is_empty());
    let manager = sea_orm_migration::SchemaManager::new(first.connection());
    for migration in first.migrations() {
        migration.down(&manager).await.unwrap();
        migration.up(&manager).await.unwrap();
    }
    assert!(first.claim(&request(&["a"], 9)).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_is_on_the_disk_and_keys_of_the_service_hold() {
    let file = File::new();
    let store = file.open().await;
    let own = async |name: &str| -> String {
        let asked = Statement::from_string(
            DbBackend::Sqlite,
            format!("SELECT CAST({name} AS TEXT) FROM pragma_{name}"),
        );
        store.connection().query_one_raw(asked).await.unwrap().unwrap().try_get_by_index(0).unwrap()
    };
    assert_eq!(own("journal_mode").await, "wal");
    assert_eq!(own("synchronous").await, "2", "FULL");
    assert_eq!(own("foreign_keys").await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_call_leaves_no_transaction_open() {
    let file = File::new();
    let store = file.open().await;
    for round in 0..200 {
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
        let kept = timeout(Duration::from_secs(10), fire(&store, &[event(&["kept"])])).await;
        assert!(matches!(kept.expect("the connection that writes")[0], Recorded::New { .. }));
    }
    // Seen from another connection: committed.
    let tallied = file.open().await.tally().await.unwrap();
    assert_eq!(tallied.len(), 1, "{tallied:?}");
    assert_eq!((tallied[0].receiver_key.as_str(), tallied[0].count), ("kept", 200));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_savepoint_dropped_in_flight_leaves_its_transaction_whole() {
    let file = File::new();
    let store = file.open().await;
    for round in 0..60 {
        for committed in [true, false] {
            let tx = store.begin().await.unwrap();
            store.record(&tx, &[event(&["before"])]).await.unwrap();
            dropped_after(round % 4 + 1, store.savepoint(&tx)).await;
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
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_in_memory_is_one_connection_that_stays() {
    let store =
        SqliteStore::builder("sqlite::memory:").clock(ManualClock::at(now())).connect().await.unwrap();
    store.migrate().await.unwrap();
    fire(&store, &[event(&["a"])]).await;
    assert_eq!(store.detached(2).await.unwrap().deliveries(&DeliveryQuery::page(9)).await.unwrap().len(), 1);
    assert_eq!(store.file().await.unwrap(), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_of_the_service_s_own_serves_as_well() {
    let file = File::new();
    drop(file.open().await);
    let db = sea_orm::Database::connect(file.url()).await.unwrap();
    let store = SqliteStore::on(db).clock(ManualClock::at(now())).connect().await.unwrap();
    let writing = (0..8).map(|_| async {
        for _ in 0..10 {
            fire(&store, &[event(&["a"])]).await;
        }
    });
    join_all(writing).await;
    assert_eq!(store.claim(&request(&["a"], 99)).await.unwrap().len(), 80);
}

// --- processes ----------------------------------------------------------------------------------------------

const CHILD: &str = "OWED_OWN_SQLITE_CHILD";

/// What each of several processes does to one new file: opens and migrates it, fires, and delivers what it can get
/// hold of. It panics if it is ever told that the database is locked.
async fn work(file: &File) -> usize {
    let store = file.open().await;
    let mut done = 0;
    for _ in 0..60 {
        fire(&store, &[event(&["a"])]).await;
        let claimed = store.claim(&request(&["a"], 3)).await.unwrap();
        let settled = store.settle_all(&succeeded(claimed), now()).await.unwrap();
        assert!(settled.iter().all(|one| *one == Settled::Applied));
        done += settled.len();
    }
    done
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_open_and_write_one_new_file_at_once_wait_for_each_other() {
    if let Ok(path) = std::env::var(CHILD) {
        let file = std::mem::ManuallyDrop::new(File(path.into()));
        work(&file).await;
        return;
    }
    let file = File::new();
    let this = "processes_that_open_and_write_one_new_file_at_once_wait_for_each_other";
    let mut children: Vec<_> = (0..4)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args([this, "--exact", "--quiet"])
                .env(CHILD, &file.0)
                .spawn()
                .unwrap()
        })
        .collect();
    work(&file).await;
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    let store = file.open().await;
    let left = store.claim(&request(&["a"], 9_999)).await.unwrap().len() as u64;
    let tallied = store.tally().await.unwrap();
    let done: u64 = tallied.iter().filter(|one| one.status.is_terminal()).map(|one| one.count).sum();
    assert_eq!(done + left, 5 * 60, "each delivered once, or still owed");
}
