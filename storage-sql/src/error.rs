//! What a driver's error means to a caller.

use std::error::Error;

use owed_core::StoreError;
use sea_orm::{DbErr, RuntimeErr, sqlx};

/// How often a call that makes its own transaction tries again at once.
const TRIES: u32 = 5;

enum Kind {
    /// The same again, at once.
    Retry,
    /// The same again, later, on another connection.
    Unavailable,
    /// As [`Kind::Unavailable`], and this connection never will do.
    ReadOnly,
    NoTables,
    /// The server's message quotes a value, so it is not passed on.
    Quoting(String),
    Failed,
}

/// Turns SeaORM's error into a store's.
pub fn classify(doing: &'static str, error: DbErr) -> StoreError {
    let kind = match (beneath(&error), &error) {
        (Some(inner), _) => kind(inner),
        (None, DbErr::Conn(_) | DbErr::ConnectionAcquire(_)) => Kind::Unavailable,
        _ => Kind::Failed,
    };
    build(doing, kind, error)
}

/// Turns sqlx's error into a store's.
pub fn classify_sqlx(doing: &'static str, error: sqlx::Error) -> StoreError {
    build(doing, kind(&error), error)
}

/// Whether a server said that it takes no writes: a replica, or what was the primary before a fail-over.
pub(crate) fn is_read_only(error: &(dyn Error + 'static)) -> bool {
    let inner = error.downcast_ref::<sqlx::Error>();
    let inner = inner.or_else(|| error.downcast_ref::<DbErr>().and_then(beneath));
    inner.is_some_and(|inner| matches!(kind(inner), Kind::ReadOnly))
}

fn beneath(error: &DbErr) -> Option<&sqlx::Error> {
    match error {
        DbErr::Conn(RuntimeErr::SqlxError(inner))
        | DbErr::Exec(RuntimeErr::SqlxError(inner))
        | DbErr::Query(RuntimeErr::SqlxError(inner)) => Some(inner),
        _ => None,
    }
}

fn build(doing: &'static str, kind: Kind, source: impl Error + Send + Sync + 'static) -> StoreError {
    match kind {
        Kind::Retry => StoreError::Retry { doing, source: Box::new(source) },
        Kind::Unavailable | Kind::ReadOnly => StoreError::Unavailable { doing, source: Box::new(source) },
        Kind::NoTables => StoreError::unsupported(format!(
            "a table of owed is missing: call `store.migrate().await`, or run the migrations of your service ({source})"
        )),
        Kind::Quoting(said) => StoreError::failed(doing, said),
        Kind::Failed => StoreError::failed(doing, source),
    }
}

fn kind(error: &sqlx::Error) -> Kind {
    use sqlx::Error as E;
    match error {
        E::Io(_)
        | E::Tls(_)
        | E::PoolTimedOut
        | E::PoolClosed
        | E::WorkerCrashed
        | E::BeginFailed
        | E::Protocol(_) => Kind::Unavailable,
        E::Database(database) => {
            let code = database.code().unwrap_or_default();
            match number(&**database) {
                Some(number) => mysql(number, &code),
                // PostgreSQL's codes have five places, SQLite's are numbers of up to four.
                None if code.len() == 5 => postgres(&code),
                None => sqlite(&code, database.message()),
            }
        }
        _ => Kind::Failed,
    }
}

/// By SQLSTATE: <https://www.postgresql.org/docs/current/errcodes-appendix.html>.
fn postgres(code: &str) -> Kind {
    match code {
        // Serialisation failure, deadlock, lock not available.
        "40001" | "40P01" | "55P03" => Kind::Retry,
        "25006" => Kind::ReadOnly,
        // Terminated, crashed, starting up, idle for too long, cancelled by an administrator or a time-out.
        "57P01" | "57P02" | "57P03" | "57P05" | "57014" => Kind::Unavailable,
        // No table, no schema.
        "42P01" | "3F000" => Kind::NoTables,
        // 08: the connection; 53: out of connections, of memory, of disk.
        _ if code.starts_with("08") || code.starts_with("53") => Kind::Unavailable,
        _ => Kind::Failed,
    }
}

/// By number, which says more than the SQLSTATE: <https://dev.mysql.com/doc/mysql-errors/9.0/en/>.
fn mysql(number: u16, code: &str) -> Kind {
    match number {
        // Lock wait time-out, deadlock; MariaDB: the record has changed since it was read.
        1205 | 1213 | 1020 => Kind::Retry,
        // `read_only`, a read-only transaction, a read-only engine, offline mode.
        1290 | 1792 | 1836 | 3032 => Kind::ReadOnly,
        // Too many connections (of all, of one user), out of memory, shutting down, interrupted, killed.
        1040 | 1203 | 1041 | 1053 | 1317 | 1927 => Kind::Unavailable,
        1146 => Kind::NoTables,
        // A duplicate, a value of the wrong form, one that is not of the character set.
        1062 | 1292 | 1366 => Kind::Quoting(format!("error {number} ({code}) of the server")),
        _ => Kind::Failed,
    }
}

/// By result code: <https://www.sqlite.org/rescode.html>. The low byte is the primary one.
fn sqlite(code: &str, message: &str) -> Kind {
    match code.parse::<i32>().map(|code| code & 0xff) {
        // Busy and locked.
        Ok(5 | 6) => Kind::Retry,
        // Read-only; an error of the disk; full; can't be opened.
        Ok(8 | 10 | 13 | 14) => Kind::Unavailable,
        Ok(1) if message.starts_with("no such table") => Kind::NoTables,
        _ => Kind::Failed,
    }
}

#[cfg(feature = "mysql")]
fn number(error: &dyn sqlx::error::DatabaseError) -> Option<u16> {
    error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>().map(|error| error.number())
}

#[cfg(not(feature = "mysql"))]
fn number(_: &dyn sqlx::error::DatabaseError) -> Option<u16> {
    None
}

/// Makes a call again, at once, while the database asks for it; a few times.
///
/// # Errors
/// What the call said the last time.
pub async fn retrying<T, F>(mut call: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut tries = 1;
    loop {
        match call().await {
            Err(StoreError::Retry { .. }) if tries < TRIES => tries += 1,
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_is_made_again_while_the_database_asks_for_it_and_five_times_at_most() {
        let mut made = 0;
        let answer: Result<(), _> = retrying(|| {
            made += 1;
            async { Err(StoreError::Retry { doing: "testing", source: "deadlock".into() }) }
        })
        .await;
        assert!(matches!(answer, Err(StoreError::Retry { .. })));
        assert_eq!(made, 5);

        let mut made = 0;
        let answer: Result<(), _> = retrying(|| {
            made += 1;
            async { Err(StoreError::failed("testing", "no")) }
        })
        .await;
        assert!(matches!(answer, Err(StoreError::Failed { .. })));
        assert_eq!(made, 1);
    }

    #[test]
    fn codes_say_what_a_caller_can_do() {
        assert!(matches!(postgres("40P01"), Kind::Retry));
        assert!(matches!(postgres("25006"), Kind::ReadOnly));
        assert!(matches!(postgres("08006"), Kind::Unavailable));
        assert!(matches!(postgres("53100"), Kind::Unavailable));
        assert!(matches!(postgres("23505"), Kind::Failed));
        assert!(matches!(mysql(1213, "40001"), Kind::Retry));
        assert!(matches!(mysql(1836, "HY000"), Kind::ReadOnly));
        assert!(
            matches!(mysql(1062, "23000"), Kind::Quoting(said) if said == "error 1062 (23000) of the server")
        );
        // SQLITE_BUSY_SNAPSHOT, and a missing table.
        assert!(matches!(sqlite("517", "database is locked"), Kind::Retry));
        assert!(matches!(sqlite("1", "no such table: owed_event"), Kind::NoTables));
    }
}
