//! What operators do to rows: cancel, requeue, reopen, prune. The same on each database, in a few statements by primary
//! key, always with the events locked first.
//!
//! None of these functions commits: that is the store's, or the caller's.

use std::collections::{BTreeMap, HashMap, HashSet};

use owed_core::{
    Cancelled, DeliveryId, EventId, EventRow, NewDelivery, Prunable, PruneMark, Pruned, Reopened,
    RetentionRule, Status, StoreError, Timestamp, row::target_digest,
};
use sea_orm::{ConnectionTrait, QueryResult};

use crate::{Dialect, Sql, TableNames, Tables, record, row};

/// The most ids that one statement names.
const IDS: usize = 1_000;

/// How one database locks rows that are named by id, and its tables.
#[derive(Clone, Debug)]
pub struct Operator {
    dialect: Dialect,
    tables: Tables,
    /// The table of dedupe keys, where it is one.
    dedupe: Option<String>,
    /// Holds the look for events past their window to its index.
    retention: String,
}

/// What a row has once it is owed as if it had never been tried.
const AFRESH: &str = "status = 'pending', attempts = 0, lapses = 0, claimed_by = NULL, claimed_at = NULL, \
                      last_error = NULL, completed_at = NULL";

impl Operator {
    /// For these tables. `dedupe` is the table of dedupe keys, where the event's own column is not what makes them
    /// unique.
    pub fn new(dialect: Dialect, names: &TableNames, dedupe: Option<String>) -> Self {
        let retention = match dialect {
            Dialect::Mysql => {
                format!("FORCE INDEX ({})", dialect.quote(&format!("{}event_retention", names.prefix())))
            }
            Dialect::Postgres | Dialect::Sqlite => String::new(),
        };
        Operator { dialect, tables: names.tables(dialect), dedupe, retention }
    }

    /// Waits for rows that others hold.
    fn wait(&self) -> &'static str {
        if self.dialect == Dialect::Sqlite { "" } else { " FOR UPDATE" }
    }

    /// Passes over rows that others hold.
    fn skip(&self) -> &'static str {
        if self.dialect == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" }
    }

    /// Holds look-ups of ids to the primary key: read whole, a small table shows rows that others have locked.
    fn primary(&self) -> &'static str {
        if self.dialect == Dialect::Mysql { "FORCE INDEX (PRIMARY)" } else { "" }
    }

    /// Locks events and reads them. See [`owed_core::Store::lock_events`].
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn lock_events(
        &self,
        tx: &impl ConnectionTrait,
        events: &[EventId],
    ) -> Result<Vec<EventRow>, StoreError> {
        let mut found = Vec::new();
        for chunk in in_order(events.iter().map(|id| id.0)).chunks(IDS) {
            let mut sql = Sql::new(
                self.dialect,
                format!(
                    "SELECT {} FROM {} e {} WHERE e.id IN ",
                    row::event_columns("e"),
                    self.tables.event,
                    self.primary()
                ),
            );
            sql.ids(chunk).push(" ORDER BY e.id").push(self.wait());
            found.extend(sql.rows(tx, "locking events", |one| row::event(self.dialect, one, 0)).await?);
        }
        Ok(found)
    }

    /// Locks those of these rows that are in one of `statuses`, in ascending order. Answers them, and how many of the
    /// others are claimed.
    ///
    /// They are looked for first and locked then, so that a claimed row is not waited for: its handler's transaction
    /// may hold it for long.
    async fn choose(
        &self,
        tx: &impl ConnectionTrait,
        deliveries: &[DeliveryId],
        statuses: &[Status],
    ) -> Result<(Vec<i64>, u64), StoreError> {
        let doing = "looking at deliveries";
        let (mut chosen, mut claimed) = (Vec::new(), 0);
        for chunk in in_order(deliveries.iter().map(|id| id.0)).chunks(IDS) {
            let select = |ids: &[i64], rest: &str| {
                let mut sql = Sql::new(
                    self.dialect,
                    format!(
                        "SELECT d.id, d.status FROM {} d {} WHERE d.id IN ",
                        self.tables.delivery,
                        self.primary()
                    ),
                );
                sql.ids(ids).push(" ORDER BY d.id").push(rest);
                sql
            };
            let read = |one: &QueryResult| Ok((one.try_get_by_index(0)?, one.try_get_by_index(1)?));
            let is = |status: &str| statuses.iter().any(|wanted| wanted.as_str() == status);
            let seen: Vec<(i64, String)> = select(chunk, "").rows(tx, doing, read).await?;
            claimed += seen.iter().filter(|(_, status)| status == "claimed").count() as u64;
            let wanted: Vec<i64> =
                seen.into_iter().filter(|(_, status)| is(status)).map(|(id, _)| id).collect();
            if wanted.is_empty() {
                continue;
            }
            let locked: Vec<(i64, String)> = select(&wanted, self.wait()).rows(tx, doing, read).await?;
            claimed += locked.iter().filter(|(_, status)| status == "claimed").count() as u64;
            chosen.extend(locked.into_iter().filter(|(_, status)| is(status)).map(|(id, _)| id));
        }
        Ok((chosen, claimed))
    }

    /// Withdraws rows. See [`owed_core::Store::cancel`].
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn cancel(
        &self,
        tx: &impl ConnectionTrait,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<Cancelled, StoreError> {
        let (ids, in_flight) = self.choose(tx, deliveries, &[Status::Pending, Status::Failed]).await?;
        for chunk in ids.chunks(IDS) {
            let mut sql = self.update("status = 'cancelled', available_at = NULL, completed_at = ");
            sql.bind(self.dialect.time(Some(now))).push(" WHERE id IN ").ids(chunk);
            sql.execute(tx, "cancelling deliveries").await?;
        }
        Ok(Cancelled::new(ids.len() as u64, in_flight))
    }

    /// Gives dead rows their budget back. See [`owed_core::Store::requeue`].
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn requeue(
        &self,
        tx: &impl ConnectionTrait,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<u64, StoreError> {
        let (ids, _) = self.choose(tx, deliveries, &[Status::Dead]).await?;
        self.afresh(tx, &ids, now, now, "requeueing deliveries").await?;
        Ok(ids.len() as u64)
    }

    fn update(&self, set: &str) -> Sql {
        let (delivery, primary) = (&self.tables.delivery, self.primary());
        Sql::new(self.dialect, format!("UPDATE {delivery} {primary} SET {set}"))
    }

    async fn afresh(
        &self,
        tx: &impl ConnectionTrait,
        ids: &[i64],
        available_at: Timestamp,
        due_at: Timestamp,
        doing: &'static str,
    ) -> Result<(), StoreError> {
        for chunk in ids.chunks(IDS) {
            let mut sql = self.update(AFRESH);
            sql.push(", available_at = ").bind(self.dialect.time(Some(available_at)));
            sql.push(", due_at = ").bind(self.dialect.time(Some(due_at)));
            sql.push(" WHERE id IN ").ids(chunk);
            sql.execute(tx, doing).await?;
        }
        Ok(())
    }

    /// Owes rows of one event again. See [`owed_core::Store::reopen`].
    ///
    /// Plan: a range of `delivery_owed` for each receiver; then primary keys.
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn reopen(
        &self,
        tx: &impl ConnectionTrait,
        event: EventId,
        rows: &[NewDelivery],
    ) -> Result<Reopened, StoreError> {
        let doing = "reopening deliveries";
        let receivers: HashSet<&str> = rows.iter().map(|row| &*row.receiver_key).collect();
        let mut there: HashMap<(String, Vec<u8>), (i64, Status)> = HashMap::new();
        for receiver in receivers {
            let mut sql = Sql::new(
                self.dialect,
                format!(
                    "SELECT d.id, d.target_digest, d.status FROM {} d WHERE d.event_id = ",
                    self.tables.delivery
                ),
            );
            sql.bind(event.0).push(" AND d.receiver_key = ").bind(receiver);
            let read = |one: &QueryResult| {
                let status: String = one.try_get_by_index(2)?;
                Ok((one.try_get_by_index::<Vec<u8>>(1)?, (one.try_get_by_index::<i64>(0)?, status)))
            };
            for (digest, (id, status)) in sql.rows(tx, doing, read).await? {
                // A status that nobody knows is not touched.
                let status = status.parse().unwrap_or(Status::Claimed);
                there.insert((receiver.to_owned(), digest), (id, status));
            }
        }
        let mut again: BTreeMap<(Timestamp, Timestamp), Vec<i64>> = BTreeMap::new();
        let mut missing = Vec::new();
        for row in rows {
            match there.get(&(row.receiver_key.to_string(), target_digest(&row.target))) {
                None => missing.push(row),
                // Terminal rows change under the event's lock alone, which the caller has.
                Some((id, status)) if status.is_terminal() => {
                    again.entry((row.available_at, row.due_at)).or_default().push(*id);
                }
                Some(_) => {}
            }
        }
        let mut done = Reopened::new(0, missing.len() as u64);
        for ((available_at, due_at), mut ids) in again {
            ids.sort_unstable();
            self.afresh(tx, &ids, available_at, due_at, doing).await?;
            done.reopened += ids.len() as u64;
        }
        for chunk in missing.chunks(IDS) {
            let owed = chunk.iter().map(|row| (event, row.due_at, *row));
            record::deliveries(self.dialect, &self.tables, owed).execute(tx, doing).await?;
        }
        Ok(done)
    }

    /// The windows of their own that events have. See [`owed_core::Store::retention_windows`].
    ///
    /// Plan: one descent of `event_retention` for each window.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn retention_windows(&self, db: &impl ConnectionTrait) -> Result<Vec<i64>, StoreError> {
        let event = &self.tables.event;
        let sql = match self.dialect {
            // A loose scan of the index.
            Dialect::Mysql => format!(
                "SELECT DISTINCT e.retention_seconds FROM {event} e {} WHERE e.retention_seconds > {} ORDER BY 1",
                self.retention,
                i64::MIN
            ),
            Dialect::Postgres | Dialect::Sqlite => format!(
                "WITH RECURSIVE k(seconds) AS (
                     SELECT (SELECT MIN(e.retention_seconds) FROM {event} e WHERE e.retention_seconds IS NOT NULL)
                     UNION ALL
                     SELECT (SELECT MIN(e.retention_seconds) FROM {event} e WHERE e.retention_seconds > k.seconds)
                     FROM k WHERE k.seconds IS NOT NULL
                 )
                 SELECT k.seconds FROM k WHERE k.seconds IS NOT NULL"
            ),
        };
        Sql::new(self.dialect, sql)
            .rows(db, "looking for retention windows", |one| one.try_get_by_index(0))
            .await
    }

    /// Adds the condition that an event is of this kind, its deliveries left aside.
    fn of_kind(&self, sql: &mut Sql, kind: &Prunable) {
        match kind {
            Prunable::Succeeded => sql.push("e.delete_when = 'succeeded'"),
            Prunable::Settled => sql.push("e.delete_when = 'settled'"),
            Prunable::Window { seconds, until } => {
                match seconds {
                    None => sql.push("e.retention_seconds IS NULL"),
                    Some(seconds) => sql.push("e.retention_seconds = ").bind(*seconds),
                };
                sql.push(" AND e.recorded_at <= ").bind(self.dialect.time(Some(*until)))
            }
        };
    }

    /// Adds the condition that no delivery of the event keeps it.
    fn unless_kept(&self, sql: &mut Sql, kind: &Prunable) {
        let kept = match kind {
            Prunable::Succeeded => "'succeeded', 'cancelled'",
            Prunable::Settled | Prunable::Window { .. } => "'succeeded', 'cancelled', 'dead', 'orphaned'",
        };
        // A value and no NOT EXISTS, which MySQL and PostgreSQL turn into a join of the two tables as a whole.
        sql.push(&format!(
            " AND (SELECT d.id FROM {} d WHERE d.event_id = e.id AND d.status NOT IN ({kept}) LIMIT 1) IS NULL",
            self.tables.delivery
        ));
    }

    /// Looks for events that may be deleted. See [`owed_core::Store::prunable`].
    ///
    /// Plan: for a window a range of `event_retention` from its start, else a range of `event_consumed`, in order and
    /// stopped by the limit; for each event its entries of `delivery_owed`.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn prunable(
        &self,
        db: &impl ConnectionTrait,
        kind: &Prunable,
        after: Option<PruneMark>,
        limit: u32,
    ) -> Result<Vec<PruneMark>, StoreError> {
        let sql = self.prunable_sql(kind, after, limit);
        sql.rows(db, "looking for events to delete", |one| {
            Ok(PruneMark {
                event: EventId(one.try_get_by_index(0)?),
                recorded_at: self.dialect.read_set_time(one, 1)?,
            })
        })
        .await
    }

    fn prunable_sql(&self, kind: &Prunable, after: Option<PruneMark>, limit: u32) -> Sql {
        let by_time = matches!(kind, Prunable::Window { .. });
        let hint = if by_time { self.retention.as_str() } else { "" };
        let event = &self.tables.event;
        let mut sql =
            Sql::new(self.dialect, format!("SELECT e.id, e.recorded_at FROM {event} e {hint} WHERE "));
        self.of_kind(&mut sql, kind);
        if let Some(after) = after {
            if by_time {
                let at = || self.dialect.time(Some(after.recorded_at));
                sql.push(" AND e.recorded_at >= ").bind(at());
                sql.push(" AND (e.recorded_at > ").bind(at());
                sql.push(" OR e.id > ").bind(after.event.0).push(")");
            } else {
                sql.push(" AND e.id > ").bind(after.event.0);
            }
        }
        self.unless_kept(&mut sql, kind);
        let order = match (by_time, self.dialect) {
            (false, _) => "e.id",
            // The first column is the same for all, but PostgreSQL does not know that of a null.
            (true, Dialect::Postgres) => "e.retention_seconds, e.recorded_at, e.id",
            (true, Dialect::Mysql | Dialect::Sqlite) => "e.recorded_at, e.id",
        };
        sql.push(&format!(" ORDER BY {order} LIMIT {limit}"));
        sql
    }

    /// How the database goes about looking for events to delete. For operators, and the tests that hold it to the plan.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain_prunable(
        &self,
        db: &impl ConnectionTrait,
        kind: &Prunable,
    ) -> Result<String, StoreError> {
        self.prunable_sql(kind, None, 1_000).explain(db).await
    }

    /// Deletes events that are due, and their deliveries. See [`owed_core::Store::prune`].
    ///
    /// Plan: primary keys, and for each event its entries of `delivery_owed`.
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn prune(
        &self,
        tx: &impl ConnectionTrait,
        kind: &Prunable,
        events: &[EventId],
        rows: u32,
    ) -> Result<Pruned, StoreError> {
        let mut pruned = Pruned::default();
        let mut left = rows.max(2) as usize;
        for chunk in in_order(events.iter().map(|id| id.0)).chunks(IDS) {
            if left <= 1 {
                pruned.more = true;
                break;
            }
            let step = self.prune_chunk(tx, kind, chunk, left).await?;
            left = left.saturating_sub((step.events + step.deliveries) as usize);
            pruned += step;
            if pruned.more {
                break;
            }
        }
        Ok(pruned)
    }

    async fn prune_chunk(
        &self,
        tx: &impl ConnectionTrait,
        kind: &Prunable,
        events: &[i64],
        rows: usize,
    ) -> Result<Pruned, StoreError> {
        let doing = "deleting events";
        let event = &self.tables.event;
        let id = |one: &QueryResult| one.try_get_by_index::<i64>(0);
        let mut lock = Sql::new(
            self.dialect,
            format!(
                "SELECT e.id, e.recorded_at, e.retention_seconds, e.delete_when FROM {event} e {} WHERE e.id IN ",
                self.primary()
            ),
        );
        lock.ids(events).push(" ORDER BY e.id").push(self.skip());
        let read = |one: &QueryResult| {
            let (seconds, when): (Option<i64>, Option<String>) =
                (one.try_get_by_index(2)?, one.try_get_by_index(3)?);
            let retention = RetentionRule::from_columns(seconds, when.as_deref());
            Ok((id(one)?, kind.is_due(retention, self.dialect.read_set_time(one, 1)?)))
        };
        // These columns never change; in the next statement they would only tempt the planner away from the ids.
        let locked = lock.rows(tx, doing, read).await?;
        let locked: Vec<i64> = locked.into_iter().filter(|(_, is_due)| *is_due).map(|(id, _)| id).collect();
        if locked.is_empty() {
            return Ok(Pruned::default());
        }
        // A statement of its own, that sees what was committed before the locks were given: a replay, say.
        let mut due = Sql::new(self.dialect, format!("SELECT e.id FROM {event} e WHERE e.id IN "));
        due.ids(&locked);
        self.unless_kept(&mut due, kind);
        due.push(" ORDER BY e.id");
        let due = due.rows(tx, doing, id).await?;
        if due.is_empty() {
            return Ok(Pruned::default());
        }
        let most = rows.saturating_sub(due.len()).max(1);
        let mut sql = Sql::new(
            self.dialect,
            format!(
                "SELECT d.event_id, d.id, d.receiver_key, d.succeeded_at FROM {} d WHERE d.event_id IN ",
                self.tables.delivery
            ),
        );
        sql.ids(&due).push(&format!(" ORDER BY d.event_id LIMIT {}", most + 1));
        let read = |one: &QueryResult| {
            let succeeded_at = self.dialect.read_time(one, 3)?;
            Ok((
                one.try_get_by_index::<i64>(0)?,
                one.try_get_by_index::<i64>(1)?,
                one.try_get_by_index::<String>(2)?,
                succeeded_at,
            ))
        };
        let mut found = sql.rows(tx, doing, read).await?;
        // The events before the first delivery that is left are complete.
        let first_left = found.get(most).map(|(event, ..)| *event);
        found.truncate(most);
        let whole: Vec<i64> =
            due.into_iter().take_while(|id| first_left.is_none_or(|first| *id < first)).collect();
        let mut newest: BTreeMap<&str, Timestamp> = BTreeMap::new();
        for (_, _, receiver, at) in &found {
            if let Some(at) = at {
                let known = newest.entry(receiver).or_insert(*at);
                *known = (*known).max(*at);
            }
        }
        self.keep_successes(tx, newest).await?;
        let ids = in_order(found.iter().map(|(_, id, ..)| *id));
        self.delete(tx, &self.tables.delivery, &ids).await?;
        if let Some(dedupe) = &self.dedupe {
            self.free_keys(tx, dedupe, &whole).await?;
        }
        self.delete(tx, event, &whole).await?;
        Ok(Pruned::new(whole.len() as u64, ids.len() as u64, first_left.is_some()))
    }

    async fn delete(&self, tx: &impl ConnectionTrait, table: &str, ids: &[i64]) -> Result<(), StoreError> {
        for chunk in ids.chunks(IDS) {
            let mut sql = match self.dialect {
                Dialect::Mysql => Sql::new(
                    self.dialect,
                    format!("DELETE t FROM {table} t FORCE INDEX (PRIMARY) WHERE t.id IN "),
                ),
                Dialect::Postgres | Dialect::Sqlite => {
                    Sql::new(self.dialect, format!("DELETE FROM {table} WHERE id IN "))
                }
            };
            sql.ids(chunk);
            sql.execute(tx, "deleting events").await?;
        }
        Ok(())
    }

    /// Keeps each receiver's newest success among rows that are about to go. In the order of their keys, so that two
    /// prunes wait for each other and never deadlock.
    async fn keep_successes(
        &self,
        tx: &impl ConnectionTrait,
        newest: BTreeMap<&str, Timestamp>,
    ) -> Result<(), StoreError> {
        let table = &self.tables.receiver_success;
        for chunk in newest.into_iter().collect::<Vec<_>>().chunks(IDS) {
            let mut sql =
                Sql::new(self.dialect, format!("INSERT INTO {table} (receiver_key, succeeded_at) VALUES "));
            for (n, (receiver, at)) in chunk.iter().enumerate() {
                sql.push(if n > 0 { ", (" } else { "(" }).bind(*receiver);
                sql.push(", ").bind(self.dialect.time(Some(*at))).push(")");
            }
            let later = if self.dialect == Dialect::Postgres { "GREATEST" } else { "MAX" };
            sql.push(&match self.dialect {
                Dialect::Mysql => {
                    " ON DUPLICATE KEY UPDATE succeeded_at = GREATEST(succeeded_at, VALUES(succeeded_at))"
                        .to_owned()
                }
                Dialect::Postgres | Dialect::Sqlite => format!(
                    " ON CONFLICT (receiver_key) DO UPDATE
                      SET succeeded_at = {later}({table}.succeeded_at, excluded.succeeded_at)"
                ),
            });
            sql.execute(tx, "keeping the newest successes").await?;
        }
        Ok(())
    }

    /// Frees the dedupe keys of events that are about to go. A key that somebody is looking at is left: the next event
    /// that has it takes it over. Waiting for it could be a deadlock with a service that fires several keys.
    async fn free_keys(
        &self,
        tx: &impl ConnectionTrait,
        dedupe: &str,
        events: &[i64],
    ) -> Result<(), StoreError> {
        let doing = "freeing dedupe keys";
        for chunk in events.chunks(IDS) {
            let event = &self.tables.event;
            let mut sql = Sql::new(
                self.dialect,
                format!("SELECT e.dedupe_key FROM {event} e WHERE e.dedupe_key IS NOT NULL AND e.id IN "),
            );
            sql.ids(chunk);
            let mut keys: Vec<String> = sql.rows(tx, doing, |one| one.try_get_by_index(0)).await?;
            if keys.is_empty() {
                continue;
            }
            keys.sort_unstable();
            let of_those = |mut sql: Sql, keys: Vec<String>| {
                sql.push("WHERE k.dedupe_key IN ").list(keys);
                sql.push(" AND k.event_id IN ").ids(chunk);
                sql
            };
            let select =
                Sql::new(self.dialect, format!("SELECT k.dedupe_key FROM {dedupe} k FORCE INDEX (PRIMARY) "));
            let mut select = of_those(select, keys);
            select.push(" ORDER BY k.dedupe_key").push(self.skip());
            let free: Vec<String> = select.rows(tx, doing, |one| one.try_get_by_index(0)).await?;
            if !free.is_empty() {
                let delete =
                    Sql::new(self.dialect, format!("DELETE k FROM {dedupe} k FORCE INDEX (PRIMARY) "));
                of_those(delete, free).execute(tx, doing).await?;
            }
        }
        Ok(())
    }
}

fn in_order(ids: impl IntoIterator<Item = i64>) -> Vec<i64> {
    let mut ids: Vec<i64> = ids.into_iter().collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
