//! SeaORM calls on our transactions, as they are.

use owed_core::Store;
use sea_orm::{ConnectionTrait, DbBackend, DbErr, ExecResult, QueryResult, Statement};

use crate::fire::Tx;

/// Runs the service's own statements in the transaction: `order.insert(&tx)`, `Order::find().all(&tx)`.
#[crate::async_trait]
impl<S: Store<Tx: ConnectionTrait>> ConnectionTrait for Tx<S> {
    fn get_database_backend(&self) -> DbBackend {
        self.raw().get_database_backend()
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        self.raw().execute_raw(statement).await
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        self.raw().execute_unprepared(sql).await
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        self.raw().query_one_raw(statement).await
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        self.raw().query_all_raw(statement).await
    }

    fn support_returning(&self) -> bool {
        self.raw().support_returning()
    }

    fn is_mock_connection(&self) -> bool {
        self.raw().is_mock_connection()
    }
}
