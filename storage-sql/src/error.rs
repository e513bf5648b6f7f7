//! What a driver's error means to a caller.

use owed_core::StoreError;
use sea_orm::{DbErr, RuntimeErr, sqlx};

/// How often a call that makes its own transaction tries again at once.
const TRIES: u32 = 5;

enum Kind {
    Retry,
    Unavailable,
    NoTables,
    Failed,
}

/// Turns SeaORM's error into a store's.
pub fn classify(doing: &'static str, error: DbErr) -> StoreError {
    let kind = match &error {
        DbErr::Conn(RuntimeErr::SqlxError(inner))
        | DbErr::Exec(RuntimeErr::SqlxError(inner))
        | DbErr::Query(RuntimeErr::SqlxError(inner)) => kind(inner),
        DbErr::Conn(_) | DbErr::ConnectionAcquire(_) => Kind::Unavailable,
        _ => Kind::Failed,
    };
    build(doing, kind, error)
}

/// Turns sqlx's error into a store's.
pub fn classify_sqlx(doing: &'static str, error: sqlx::Error) -> StoreError {
    let kind = kind(&error);
    build(doing, kind, error)
}

fn build(
    doing: &'static str,
    kind: Kind,
    source: impl std::error::Error + Send + Sync + 'static,
) -> StoreError {
    let source = Box::new(source);
    match kind {
        Kind::Retry => StoreError::Retry { doing, source },
        Kind::Unavailable => StoreError::Unavailable { doing, source },
        Kind::NoTables => StoreError::unsupported(format!(
            "a table of owed is missing: call `store.migrate().await`, or run the migrations of your service ({source})"
        )),
        Kind::Failed => StoreError::Failed { doing, source },
    }
}

fn kind(error: &sqlx::Error) -> Kind {
    use sqlx::Error as E;
    match error {
        E::Io(_) | E::Tls(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed | E::Protocol(_) => {
            Kind::Unavailable
        }
        E::Database(database) => {
            // MySQL's `code` is the SQLSTATE, which is too coarse; its number leads the message's own form.
            let number = database.try_downcast_ref_number();
            let code = database.code().unwrap_or_default();
            match (number, &*code) {
                // Deadlock and lock wait timeout of MySQL and MariaDB; "record has changed since last read" of MariaDB.
                (Some(1205 | 1213 | 1020), _) => Kind::Retry,
                // Read-only, shutting down, too many connections, killed.
                (Some(1040 | 1053 | 1290 | 1317 | 1792 | 1836 | 1927), _) => Kind::Unavailable,
                (Some(1146), _) => Kind::NoTables,
                (Some(_), _) => Kind::Failed,
                // PostgreSQL: serialisation failure, deadlock, lock not available.
                (None, "40001" | "40P01" | "55P03") => Kind::Retry,
                (None, "42P01" | "3F000") => Kind::NoTables,
                // Read-only, shutting down, starting up, terminated, too many connections, and every 08: connection.
                (None, "25006" | "57P01" | "57P02" | "57P03" | "57P05" | "53300" | "57014") => {
                    Kind::Unavailable
                }
                (None, code) if code.starts_with("08") => Kind::Unavailable,
                // SQLite: busy and locked in all their forms (the low byte is the primary code).
                (None, code) => match code.parse::<i32>().map(|code| code & 0xff) {
                    Ok(5 | 6) => Kind::Retry,
                    Ok(8 | 10 | 14) => Kind::Unavailable,
                    Ok(1) if database.message().starts_with("no such table") => Kind::NoTables,
                    _ => Kind::Failed,
                },
            }
        }
        _ => Kind::Failed,
    }
}

trait MysqlNumber {
    fn try_downcast_ref_number(&self) -> Option<u16>;
}

impl MysqlNumber for Box<dyn sqlx::error::DatabaseError> {
    #[cfg(feature = "mysql")]
    fn try_downcast_ref_number(&self) -> Option<u16> {
        self.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>().map(|error| error.number())
    }

    #[cfg(not(feature = "mysql"))]
    fn try_downcast_ref_number(&self) -> Option<u16> {
        None
    }
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
