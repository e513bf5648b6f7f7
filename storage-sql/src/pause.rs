//! Pauses of lanes, for operators to see.

use owed_core::{Pause, StoreError, Timestamp};
use sea_orm::{ConnectionTrait, QueryResult};

use crate::{Dialect, Sql, Tables};

/// Writes a pause over the one that this worker has recorded for this lane before, and removes those that had ended
/// when it began. Run it in a transaction.
///
/// # Errors
/// If the database can't be reached.
pub async fn record(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    pause: &Pause,
) -> Result<(), StoreError> {
    let doing = "recording a pause";
    let table = &tables.lane_pause;
    let mut sql = Sql::new(dialect, format!("DELETE FROM {table} WHERE until <= "));
    sql.bind(dialect.time(Some(pause.since)));
    sql.execute(db, doing).await?;
    let mut sql = Sql::new(dialect, format!("INSERT INTO {table} (lane, worker, since, until) VALUES ("));
    sql.bind(pause.lane.as_str()).push(", ").bind(pause.worker.as_str()).push(", ");
    sql.bind(dialect.time(Some(pause.since))).push(", ").bind(dialect.time(Some(pause.until)));
    sql.push(match dialect {
        Dialect::Mysql => ") ON DUPLICATE KEY UPDATE since = VALUES(since), until = VALUES(until)",
        Dialect::Postgres | Dialect::Sqlite => {
            ") ON CONFLICT (lane, worker) DO UPDATE SET since = excluded.since, until = excluded.until"
        }
    });
    sql.execute(db, doing).await?;
    Ok(())
}

/// The pauses that end after `now`, by lane and worker.
///
/// # Errors
/// If the database can't be reached.
pub async fn current(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    now: Timestamp,
) -> Result<Vec<Pause>, StoreError> {
    let mut sql = Sql::new(
        dialect,
        format!("SELECT p.lane, p.worker, p.since, p.until FROM {} p WHERE p.until > ", tables.lane_pause),
    );
    sql.bind(dialect.time(Some(now))).push(" ORDER BY p.lane, p.worker");
    let read = |one: &QueryResult| {
        Ok(Pause {
            lane: one.try_get_by_index(0)?,
            worker: one.try_get_by_index(1)?,
            since: dialect.read_set_time(one, 2)?,
            until: dialect.read_set_time(one, 3)?,
        })
    };
    sql.rows(db, "reading pauses", read).await
}
