//! What differs in values: times, uuids, placeholders.

use chrono::{DateTime, NaiveDateTime};
use owed_core::Timestamp;
use sea_orm::{DbBackend, DbErr, QueryResult, Value};
use uuid::Uuid;

/// A kind of database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// PostgreSQL: `timestamptz`, `uuid`.
    Postgres,
    /// MySQL and MariaDB: `datetime(6)` in UTC, `binary(16)`.
    Mysql,
    /// SQLite: microseconds since 1970 as an integer, a blob of 16 bytes.
    Sqlite,
}

impl Dialect {
    /// SeaORM's name for it.
    pub const fn backend(self) -> DbBackend {
        match self {
            Dialect::Postgres => DbBackend::Postgres,
            Dialect::Mysql => DbBackend::MySql,
            Dialect::Sqlite => DbBackend::Sqlite,
        }
    }

    /// Quotes an identifier that [`TableNames`](crate::TableNames) has checked.
    pub fn quote(self, name: &str) -> String {
        match self {
            Dialect::Mysql => format!("`{name}`"),
            Dialect::Postgres | Dialect::Sqlite => format!("\"{name}\""),
        }
    }

    /// The placeholder of the `n`-th value, counted from 1.
    pub fn placeholder(self, n: usize) -> String {
        match self {
            Dialect::Postgres => format!("${n}"),
            Dialect::Mysql | Dialect::Sqlite => "?".to_owned(),
        }
    }

    /// A time as this database keeps it. Never depends on a session's time zone.
    pub fn time(self, at: Option<Timestamp>) -> Value {
        match self {
            Dialect::Postgres => at.into(),
            Dialect::Mysql => at.map(|at| at.naive_utc()).into(),
            Dialect::Sqlite => at.map(|at| at.timestamp_micros()).into(),
        }
    }

    /// A uuid as this database keeps it.
    pub fn uuid(self, id: Uuid) -> Value {
        match self {
            Dialect::Postgres => id.into(),
            Dialect::Mysql | Dialect::Sqlite => id.as_bytes().to_vec().into(),
        }
    }

    /// Reads a time.
    ///
    /// # Errors
    /// If the column holds none.
    pub fn read_time(self, row: &QueryResult, column: usize) -> Result<Option<Timestamp>, DbErr> {
        match self {
            Dialect::Postgres => row.try_get_by_index(column),
            Dialect::Mysql => {
                let naive: Option<NaiveDateTime> = row.try_get_by_index(column)?;
                Ok(naive.map(|at| at.and_utc()))
            }
            Dialect::Sqlite => {
                let micros: Option<i64> = row.try_get_by_index(column)?;
                micros
                    .map(|at| {
                        DateTime::from_timestamp_micros(at)
                            .ok_or_else(|| DbErr::Type(format!("{at} is no time in microseconds")))
                    })
                    .transpose()
            }
        }
    }

    /// Reads a time that is never null.
    ///
    /// # Errors
    /// If the column holds none.
    pub fn read_set_time(self, row: &QueryResult, column: usize) -> Result<Timestamp, DbErr> {
        self.read_time(row, column)?
            .ok_or_else(|| DbErr::Type(format!("column {column} is null, and holds a time")))
    }

    /// Reads a uuid.
    ///
    /// # Errors
    /// If the column holds none.
    pub fn read_uuid(self, row: &QueryResult, column: usize) -> Result<Uuid, DbErr> {
        match self {
            Dialect::Postgres => row.try_get_by_index(column),
            Dialect::Mysql | Dialect::Sqlite => {
                let bytes: Vec<u8> = row.try_get_by_index(column)?;
                Uuid::from_slice(&bytes)
                    .map_err(|_| DbErr::Type(format!("{} bytes are no uuid", bytes.len())))
            }
        }
    }
}
