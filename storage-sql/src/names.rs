//! Table names: prefix and schema, checked and quoted.

use owed_core::StoreError;

use crate::Dialect;

/// The longest prefix or schema, in characters: with the longest table name it stays below every database's limit.
pub const LONGEST: usize = 40;

/// What a service decides about table names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableNames {
    prefix: String,
    schema: Option<String>,
}

/// The prefix that a service gets without asking for another.
pub const PREFIX: &str = "owed_";

impl Default for TableNames {
    fn default() -> Self {
        TableNames { prefix: PREFIX.into(), schema: None }
    }
}

fn check(what: &str, name: &str) -> Result<(), StoreError> {
    let size = name.chars().count();
    if size > LONGEST {
        return Err(StoreError::unsupported(format!(
            "the {what} is {size} characters long, and the limit is {LONGEST}"
        )));
    }
    let starts = name.chars().next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_');
    if !starts || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return Err(StoreError::unsupported(format!(
            "the {what} {name:?} must start with a letter or an underscore, and hold letters, digits and underscores alone"
        )));
    }
    Ok(())
}

impl TableNames {
    /// Names with a prefix and, where the database has them, in a schema.
    ///
    /// # Errors
    /// If one is too long, or holds more than letters, digits and underscores.
    pub fn new(prefix: impl Into<String>, schema: Option<String>) -> Result<Self, StoreError> {
        let prefix = prefix.into();
        check("table prefix", &prefix)?;
        if let Some(schema) = &schema {
            check("schema", schema)?;
        }
        Ok(TableNames { prefix, schema })
    }

    /// The prefix.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The schema.
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// The quoted name of one table, for statements.
    pub fn table(&self, dialect: Dialect, name: &str) -> String {
        let table = dialect.quote(&format!("{}{name}", self.prefix));
        match &self.schema {
            Some(schema) => format!("{}.{table}", dialect.quote(schema)),
            None => table,
        }
    }

    /// The quoted names, for statements.
    pub fn tables(&self, dialect: Dialect) -> Tables {
        let table = |name: &str| self.table(dialect, name);
        Tables {
            event: table("event"),
            delivery: table("delivery"),
            receiver_success: table("receiver_success"),
            lane_pause: table("lane_pause"),
        }
    }
}

/// The quoted table names of one store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    /// Events.
    pub event: String,
    /// Deliveries.
    pub delivery: String,
    /// The newest success of each receiver among what was pruned.
    pub receiver_success: String,
    /// Lanes that a relay left alone for a while.
    pub lane_pause: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_what_could_not_be_is_refused() {
        let names = TableNames::new("my_", Some("app".into())).unwrap();
        assert_eq!(names.tables(Dialect::Postgres).event, r#""app"."my_event""#);
        assert_eq!(TableNames::default().tables(Dialect::Mysql).delivery, "`owed_delivery`");
        for bad in ["", "1a", "a-b", "a\"; drop table x; --", "ä", "a b"] {
            assert!(TableNames::new(bad, None).is_err(), "{bad:?}");
        }
        let long = TableNames::new("x".repeat(41), None).unwrap_err().to_string();
        assert_eq!(long, "the table prefix is 41 characters long, and the limit is 40");
    }
}
