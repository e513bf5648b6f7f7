//! SQL text with its values.

use std::time::Duration;

use owed_core::StoreError;
use sea_orm::{ConnectionTrait, DbErr, ExecResult, QueryResult, Statement, Value};

use crate::{Dialect, classify, whole::Whole};

/// How long the drop of a statement waits for it on MySQL and MariaDB.
///
/// sqlx 0.9.0 loses its place in the connection if a statement is dropped while it is being prepared: its answers
/// are then read as those of the next one. Preparing takes a round trip. A statement that is being executed may be
/// dropped, and may take long (it waits for a lock, say), so there is no waiting for that.
const PREPARING: Duration = Duration::from_millis(100);

/// SQL text that grows together with the values of its placeholders.
///
/// ```
/// # use owed_sql::{Dialect, Sql};
/// let mut sql = Sql::new(Dialect::Postgres, "SELECT 1 FROM t WHERE a = ");
/// sql.bind(7i64).push(" AND b IN ").list([1i64, 2]);
/// assert_eq!(sql.text(), "SELECT 1 FROM t WHERE a = $1 AND b IN ($2, $3)");
///
/// let mut sql = Sql::new(Dialect::Mysql, "DELETE FROM t WHERE id IN ");
/// sql.ids(&[1, 2, 3]);
/// assert_eq!(sql.text(), "DELETE FROM t WHERE id IN (?, ?, ?, ?)");
/// ```
#[derive(Clone, Debug)]
pub struct Sql {
    dialect: Dialect,
    text: String,
    values: Vec<Value>,
}

impl Sql {
    /// Starts with a text.
    pub fn new(dialect: Dialect, text: impl Into<String>) -> Self {
        Sql { dialect, text: text.into(), values: Vec::new() }
    }

    /// Adds text.
    pub fn push(&mut self, text: &str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    /// Adds a placeholder and its value.
    pub fn bind(&mut self, value: impl Into<Value>) -> &mut Self {
        self.values.push(value.into());
        self.text.push_str(&self.dialect.placeholder(self.values.len()));
        self
    }

    /// Adds placeholders in parentheses. An empty list is `(NULL)`, which nothing is in.
    pub fn list<V: Into<Value>>(&mut self, values: impl IntoIterator<Item = V>) -> &mut Self {
        self.push("(");
        let mut any = false;
        for value in values {
            if std::mem::replace(&mut any, true) {
                self.push(", ");
            }
            self.bind(value);
        }
        self.push(if any { ")" } else { "NULL)" })
    }

    /// Adds ids in parentheses, the last one over and over until there are 1, 2, 4, 8, .. of them: so a statement
    /// for any number of ids has few texts, and a connection has them prepared.
    pub fn ids(&mut self, ids: &[i64]) -> &mut Self {
        let padded = if ids.is_empty() { 0 } else { ids.len().next_power_of_two() };
        let last = ids.last().copied().into_iter().cycle();
        self.list(ids.iter().copied().chain(last).take(padded))
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Puts text before all of it.
    pub fn prepend(&mut self, text: &str) -> &mut Self {
        self.text.insert_str(0, text);
        self
    }

    /// Sends it, for its effect.
    ///
    /// # Errors
    /// What the database says, while `doing` this.
    pub async fn execute(
        self,
        db: &impl ConnectionTrait,
        doing: &'static str,
    ) -> Result<ExecResult, StoreError> {
        self.attempt(db).await.map_err(|error| classify(doing, error))
    }

    /// Sends it, for its effect, and passes SeaORM's own error on.
    ///
    /// # Errors
    /// What the database says.
    pub async fn attempt(self, db: &impl ConnectionTrait) -> Result<ExecResult, DbErr> {
        let dialect = self.dialect;
        let call = db.execute_raw(self.statement());
        if dialect == Dialect::Mysql { Whole::new(call, PREPARING).await } else { call.await }
    }

    /// Sends it, for its rows, each read by `read`.
    ///
    /// # Errors
    /// What the database says, while `doing` this; or what `read` does.
    pub async fn rows<T>(
        self,
        db: &impl ConnectionTrait,
        doing: &'static str,
        read: impl Fn(&QueryResult) -> Result<T, DbErr>,
    ) -> Result<Vec<T>, StoreError> {
        let dialect = self.dialect;
        let call = db.query_all_raw(self.statement());
        let rows = if dialect == Dialect::Mysql { Whole::new(call, PREPARING).await } else { call.await };
        let rows = rows.and_then(|rows| rows.iter().map(read).collect());
        rows.map_err(|error| classify(doing, error))
    }

    /// How the database goes about it, in its own words: a line for each step. Runs nothing.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain(mut self, db: &impl ConnectionTrait) -> Result<String, StoreError> {
        self.prepend(if self.dialect == Dialect::Sqlite { "EXPLAIN QUERY PLAN " } else { "EXPLAIN " });
        // Whichever of these the database has: the first is SQLite's, the second PostgreSQL's, the third one form of
        // MySQL's.
        let read = |row: &QueryResult| {
            let columns = ["detail", "QUERY PLAN", "EXPLAIN", "table", "type", "key", "Extra"];
            let shown = columns.map(|name| row.try_get::<String>("", name).ok());
            Ok(shown.into_iter().flatten().collect::<Vec<_>>().join("; "))
        };
        let lines = self.rows(db, "asking for a plan", read).await?;
        Ok(lines.into_iter().map(|line| line + "\n").collect())
    }

    fn statement(self) -> Statement {
        Statement::from_sql_and_values(self.dialect.backend(), self.text, self.values)
    }
}
