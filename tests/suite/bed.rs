//! A store to test on, with a clock that the test moves.

use std::{
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use owed::{
    DeliveryQuery, DeliveryRow, Event, EventQuery, EventRow, Failure, ManualClock, Outbox, OutboxBuilder,
    Receiver, Settings, Store, Timestamp, testing,
};
use serde::{Deserialize, Serialize};

/// A fresh, empty store.
pub(crate) struct Bed<S: Store> {
    pub(crate) store: S,
    pub(crate) clock: ManualClock,
}

pub(crate) fn start() -> Timestamp {
    "2026-03-01T12:00:00Z".parse().unwrap()
}

/// Runs each test on each store. The tests are generic functions of a [`Bed`].
macro_rules! on_every_store {
    ($($test:ident),+ $(,)?) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { $crate::bed::memory(super::$test).await })+
        }
        #[cfg(feature = "sqlite")]
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { $crate::bed::sqlite(super::$test).await })+
        }
        #[cfg(feature = "postgres")]
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { $crate::bed::postgres(super::$test).await })+
        }
        #[cfg(feature = "mysql")]
        mod mysql {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { $crate::bed::mysql("OWED_TEST_MYSQL_URL", super::$test).await })+
        }
        #[cfg(feature = "mysql")]
        mod mariadb {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { $crate::bed::mysql("OWED_TEST_MARIADB_URL", super::$test).await })+
        }
    };
}
pub(crate) use on_every_store;

pub(crate) async fn memory<F: Future>(test: impl FnOnce(Bed<owed::MemoryStore>) -> F) {
    let clock = ManualClock::at(start());
    test(Bed { store: owed::MemoryStore::with_clock(clock.clone()), clock }).await;
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
fn server(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!(
            "{variable} is not set: run the tests with `cargo xtask test`, which finds or starts the servers"
        )
    })
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
fn prefix() -> String {
    format!("t{:012x}_", rand::random::<u64>() >> 16)
}

#[cfg(feature = "sqlite")]
pub(crate) async fn open_sqlite(clock: ManualClock) -> owed::SqliteStore {
    let file = std::env::temp_dir().join(format!("owed-test-{:016x}.sqlite", rand::random::<u64>()));
    let store = owed::SqliteStore::builder(format!("sqlite://{}", file.display())).clock(clock);
    let store = store.connect().await.expect("a file in the temporary folder");
    store.migrate().await.expect("an empty database");
    store
}

#[cfg(feature = "sqlite")]
pub(crate) async fn remove_sqlite(store: owed::SqliteStore) {
    let file = store.file().await.expect("the database knows its file");
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{file}{suffix}"));
    }
}

#[cfg(feature = "sqlite")]
pub(crate) async fn sqlite<F: Future>(test: impl FnOnce(Bed<owed::SqliteStore>) -> F) {
    let clock = ManualClock::at(start());
    let store = open_sqlite(clock.clone()).await;
    test(Bed { store: store.clone(), clock }).await;
    remove_sqlite(store).await;
}

#[cfg(feature = "postgres")]
pub(crate) async fn open_postgres(clock: ManualClock) -> owed::PostgresStore {
    let store = owed::PostgresStore::builder(server("OWED_TEST_POSTGRES_URL"))
        .prefix(prefix())
        .max_connections(8)
        .clock(clock)
        .connect()
        .await
        .expect("a reachable server");
    store.migrate().await.expect("rights to create tables");
    store
}

#[cfg(feature = "postgres")]
pub(crate) async fn postgres<F: Future>(test: impl FnOnce(Bed<owed::PostgresStore>) -> F) {
    let clock = ManualClock::at(start());
    let store = open_postgres(clock.clone()).await;
    test(Bed { store: store.clone(), clock }).await;
    store.drop_tables().await.expect("its own tables");
}

#[cfg(feature = "mysql")]
pub(crate) async fn open_mysql(variable: &str, clock: ManualClock) -> owed::MysqlStore {
    let store = owed::MysqlStore::builder(server(variable))
        .prefix(prefix())
        .max_connections(8)
        .clock(clock)
        .connect()
        .await
        .expect("a reachable server");
    store.migrate().await.expect("rights to create tables");
    store
}

#[cfg(feature = "mysql")]
pub(crate) async fn mysql<F: Future>(variable: &str, test: impl FnOnce(Bed<owed::MysqlStore>) -> F) {
    let clock = ManualClock::at(start());
    let store = open_mysql(variable, clock.clone()).await;
    test(Bed { store: store.clone(), clock }).await;
    store.drop_tables().await.expect("its own tables");
}

impl<S: Store> Bed<S> {
    /// An outbox whose relays poll often enough for a test that waits for one.
    pub(crate) fn outbox(&self) -> OutboxBuilder<S> {
        Outbox::builder(self.store.clone()).settings(settings())
    }

    pub(crate) fn pass(&self, by: Duration) {
        self.clock.advance(by);
    }

    pub(crate) async fn deliveries(&self) -> Vec<DeliveryRow> {
        self.store.deliveries(&DeliveryQuery::page(10_000)).await.expect("readable rows")
    }

    /// The only delivery there is.
    pub(crate) async fn delivery(&self) -> DeliveryRow {
        let mut rows = self.deliveries().await;
        assert_eq!(rows.len(), 1, "{rows:?}");
        rows.remove(0)
    }

    pub(crate) async fn events(&self) -> Vec<EventRow> {
        self.store.events(&EventQuery::page(10_000)).await.expect("readable rows")
    }
}

pub(crate) fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.poll_interval = Duration::from_millis(20);
    settings
}

/// What most tests fire.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(name = "test.Placed")]
pub(crate) struct Placed {
    pub(crate) n: i64,
}

/// What a handler fires where a test wants to see that its transaction committed, or did not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(name = "test.Noted")]
pub(crate) struct Noted {
    pub(crate) of: i64,
}

pub(crate) async fn noted<S: Store>(outbox: &Outbox<S>) -> Vec<i64> {
    testing::fired::<Noted, S>(outbox).await.into_iter().map(|note| note.of).collect()
}

pub(crate) async fn place<S: Store>(outbox: &Outbox<S>, n: i64) {
    outbox.transaction(async |tx| tx.fire(Placed { n }).await).await.expect("it fires");
}

/// What handlers saw, in the order in which they saw it.
#[derive(Clone, Debug)]
pub(crate) struct Seen<T>(Arc<Mutex<Vec<T>>>);

impl<T> Default for Seen<T> {
    fn default() -> Self {
        Seen(Arc::default())
    }
}

impl<T: Clone> Seen<T> {
    pub(crate) fn see(&self, what: T) {
        self.0.lock().unwrap().push(what);
    }

    pub(crate) fn all(&self) -> Vec<T> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// A durable receiver under the key `test.receiver` whose attempts fail with what `verdict` says.
pub(crate) fn failing<S: Store>(verdict: impl Fn() -> Failure + Send + Sync + 'static) -> owed::Declared<S> {
    Receiver::on::<Placed>("test.receiver").durable().run(move |_: Placed| {
        let failure = verdict();
        async move { Err::<(), Failure>(failure) }
    })
}

/// Waits until `seen` says yes, for what a relay does in its own time. Fails the test after a minute.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut seen: impl FnMut() -> F) {
    let patience = std::time::Instant::now() + Duration::from_secs(60);
    while !seen().await {
        assert!(std::time::Instant::now() < patience, "still waiting: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
