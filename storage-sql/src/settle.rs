//! The conditional writes that are the same on each database.

use owed_core::{ClaimKey, Settled, Settlement, StoreError, Timestamp, limits};
use sea_orm::ConnectionTrait;

use crate::{Dialect, Sql, Tables};

/// Adds `WHERE` the row is still claimed under exactly this key. By primary key.
pub fn where_claimed(sql: &mut Sql, dialect: Dialect, key: &ClaimKey) {
    sql.push(" WHERE id = ").bind(key.delivery.0);
    sql.push(" AND status = 'claimed' AND claimed_by = ").bind(&*key.worker);
    sql.push(" AND claimed_at = ").bind(dialect.time(Some(key.at)));
}

/// Writes one settlement, where its claim still holds.
///
/// # Errors
/// If the database can't be reached or refuses.
pub async fn settle(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    settlement: &Settlement,
    now: Timestamp,
) -> Result<Settled, StoreError> {
    let columns = settlement.columns(now);
    let mut sql = Sql::new(dialect, format!("UPDATE {} SET status = '{}'", tables.delivery, columns.status));
    sql.push(", attempts = attempts + ").bind(columns.attempt);
    sql.push(", available_at = ").bind(dialect.time(columns.available_at));
    sql.push(", completed_at = ").bind(dialect.time(columns.completed_at));
    sql.push(", claimed_by = NULL, claimed_at = NULL, lapses = 0");
    if let Some(at) = columns.due_at {
        sql.push(", due_at = ").bind(dialect.time(Some(at)));
    }
    if let Some(error) = columns.last_error {
        sql.push(", last_error = ").bind(limits::storable(error, limits::ERROR));
    }
    if let Some(at) = columns.succeeded_at {
        sql.push(", succeeded_at = ").bind(dialect.time(Some(at)));
    }
    where_claimed(&mut sql, dialect, settlement.key());
    applied(db, sql, "settling a delivery").await
}

/// Notes that a row which has lapsed before is being run.
///
/// # Errors
/// If the database can't be reached or refuses.
pub async fn suspect(
    db: &impl ConnectionTrait,
    dialect: Dialect,
    tables: &Tables,
    key: &ClaimKey,
) -> Result<Settled, StoreError> {
    let mut sql = Sql::new(dialect, format!("UPDATE {} SET lapses = lapses + 1", tables.delivery));
    where_claimed(&mut sql, dialect, key);
    applied(db, sql, "noting a lapsed delivery as running").await
}

async fn applied(db: &impl ConnectionTrait, sql: Sql, doing: &'static str) -> Result<Settled, StoreError> {
    let written = sql.execute(db, doing).await?;
    Ok(if written.rows_affected() == 0 { Settled::Lost } else { Settled::Applied })
}
