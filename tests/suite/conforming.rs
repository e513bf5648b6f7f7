//! The contract, on every store that comes with the project.

use owed::{
    ManualClock, MemoryStore, async_trait,
    conformance::{self, Harness, history},
};

struct Memory;

#[async_trait]
impl Harness for Memory {
    type Store = MemoryStore;

    async fn open(&self, clock: ManualClock) -> MemoryStore {
        MemoryStore::with_clock(clock)
    }
}

#[cfg(feature = "sqlite")]
struct Sqlite;

#[cfg(feature = "sqlite")]
#[async_trait]
impl Harness for Sqlite {
    type Store = owed::SqliteStore;

    async fn open(&self, clock: ManualClock) -> owed::SqliteStore {
        crate::bed::open_sqlite(clock).await
    }

    async fn close(&self, store: owed::SqliteStore) {
        crate::bed::remove_sqlite(store).await;
    }

    fn one_writer(&self) -> bool {
        true
    }
}

#[cfg(feature = "postgres")]
struct Postgres;

#[cfg(feature = "postgres")]
#[async_trait]
impl Harness for Postgres {
    type Store = owed::PostgresStore;

    async fn open(&self, clock: ManualClock) -> owed::PostgresStore {
        crate::bed::open_postgres(clock).await
    }

    async fn close(&self, store: owed::PostgresStore) {
        store.drop_tables().await.expect("its own tables");
    }
}

#[cfg(feature = "mysql")]
struct Mysql(&'static str);

#[cfg(feature = "mysql")]
#[async_trait]
impl Harness for Mysql {
    type Store = owed::MysqlStore;

    async fn open(&self, clock: ManualClock) -> owed::MysqlStore {
        crate::bed::open_mysql(self.0, clock).await
    }

    async fn close(&self, store: owed::MysqlStore) {
        store.drop_tables().await.expect("its own tables");
    }
}

macro_rules! conforms {
    ($($(#[$cfg:meta])? $store:ident: $harness:expr;)+) => {$(
        $(#[$cfg])?
        mod $store {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn the_store_keeps_its_contract() {
                conformance::test_all(&$harness).await;
            }

            #[test]
            fn random_histories_leave_the_same_rows_as_in_memory() {
                history::run(&$harness, &history::Plan::from_env());
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn histories_that_found_a_fault_once_leave_the_same_rows_as_in_memory() {
                for ops in crate::kept::all() {
                    history::replay(&$harness, &ops).await;
                }
            }
        }
    )+};
}

conforms! {
    memory: Memory;
    #[cfg(feature = "sqlite")]
    sqlite: Sqlite;
    #[cfg(feature = "postgres")]
    postgres: Postgres;
    #[cfg(feature = "mysql")]
    mysql: Mysql("OWED_TEST_MYSQL_URL");
    #[cfg(feature = "mysql")]
    mariadb: Mysql("OWED_TEST_MARIADB_URL");
}
