//! SQL text with its values.

use sea_orm::{Statement, Value};

use crate::Dialect;

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

    /// The statement to send.
    pub fn statement(self) -> Statement {
        Statement::from_sql_and_values(self.dialect.backend(), self.text, self.values)
    }
}
