//! Claims, leases and batches for a database whose UPDATE can't answer rows or take arrays (MySQL, MariaDB), or
//! where another statement costs next to nothing (SQLite): each in a transaction of its own, in a few statements by
//! primary key.
//!
//! None of these functions commits: that is the store's, which opened the transaction.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use owed_core::{
    Claim, ClaimKey, ClaimRequest, Claimed, DeliveryId, EventId, EventRow, Outcome, Settled, Settlement,
    StoreError, Timestamp, limits,
};
use sea_orm::{ConnectionTrait, DbErr, QueryResult};

use crate::{Dialect, Sql, Tables, read::ASKED, row, settle};

/// The most ids that one statement names: below every database's limit on placeholders.
const IDS: usize = 1_000;
/// The most rows in a table of constants.
const OUTCOMES: usize = 256;

/// How one database locks, and which index a claim reads.
#[derive(Clone, Debug)]
pub struct Steps {
    /// Which kind of database.
    pub dialect: Dialect,
    /// Its tables.
    pub tables: Tables,
    /// Passes over rows that others hold: ` FOR UPDATE SKIP LOCKED`, or nothing where one transaction writes at a
    /// time.
    pub skip: &'static str,
    /// Waits for rows that others hold: ` FOR UPDATE`, or nothing.
    pub wait: &'static str,
    /// Holds the claim to its index, whatever the statistics say.
    pub index: String,
    /// Holds look-ups of ids to the primary key. Read whole, as a small table may be, a table shows rows that others
    /// have locked, and a statement would wait for those as well.
    pub primary: &'static str,
}

impl Steps {
    /// Which of the receivers have a row that may be taken: one statement, which locks nothing and is all that an
    /// idle relay sends.
    ///
    /// Plan: for each receiver, one entry of the claim's index.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn due(
        &self,
        db: &impl ConnectionTrait,
        request: &ClaimRequest,
    ) -> Result<Vec<usize>, StoreError> {
        let doing = "looking for rows to claim";
        let mut due = Vec::new();
        for (chunk, receivers) in request.receivers.chunks(ASKED).enumerate() {
            let mut sql = Sql::new(self.dialect, "SELECT ");
            for (n, receiver) in receivers.iter().enumerate() {
                let comma = if n > 0 { ", " } else { "" };
                sql.push(&format!("{comma}EXISTS (SELECT 1 FROM {} d {} ", self.tables.delivery, self.index));
                sql.push("WHERE d.receiver_key = ").bind(&*receiver.key);
                sql.push(" AND d.available_at <= ").bind(self.dialect.time(Some(request.now))).push(")");
            }
            let read = |one: &QueryResult| {
                let each = (0..receivers.len()).map(|n| one.try_get_by_index::<i64>(n));
                each.collect::<Result<Vec<i64>, DbErr>>()
            };
            let found = sql.rows(db, doing, read).await?.pop().unwrap_or_default();
            due.extend(found.iter().enumerate().filter(|(_, is)| **is != 0).map(|(n, _)| chunk * ASKED + n));
        }
        Ok(due)
    }

    /// Takes rows of those receivers that are due. See [`owed_core::Store::claim`].
    ///
    /// Plan: a range of the claim's index for each receiver, in order and stopped by the limit; then primary keys.
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn claim(
        &self,
        tx: &impl ConnectionTrait,
        request: &ClaimRequest,
        due: &[usize],
    ) -> Result<Vec<Claimed>, StoreError> {
        let doing = "claiming rows";
        let mut picked: Vec<i64> = Vec::new();
        for receiver in due.iter().filter_map(|n| request.receivers.get(*n)) {
            let left = (request.limit as usize).saturating_sub(picked.len());
            if left == 0 {
                break;
            }
            let sql = self.pick(request, &receiver.key, left);
            let ids: Vec<i64> = sql.rows(tx, doing, |one| one.try_get_by_index(0)).await?;
            for chunk in ids.chunks(IDS) {
                // `lapses` first: MySQL reads the columns that were assigned before as they are then.
                let mut sql = Sql::new(
                    self.dialect,
                    format!(
                        "UPDATE {} {} SET lapses = CASE WHEN status = 'claimed' AND lapses < 1 THEN 1 ELSE lapses END, \
                         status = 'claimed', claimed_by = ",
                        self.tables.delivery, self.primary
                    ),
                );
                sql.bind(&*request.worker);
                sql.push(", claimed_at = ").bind(self.dialect.time(Some(request.now)));
                sql.push(", available_at = ").bind(self.dialect.time(Some(request.now + receiver.lease)));
                sql.push(" WHERE id IN ").ids(chunk);
                sql.execute(tx, doing).await?;
            }
            picked.extend(ids);
        }
        self.whole(tx, &picked, &request.worker, request.now).await
    }

    /// Chooses and locks rows of one receiver.
    fn pick(&self, request: &ClaimRequest, key: &str, limit: usize) -> Sql {
        let mut sql =
            Sql::new(self.dialect, format!("SELECT d.id FROM {} d {} ", self.tables.delivery, self.index));
        sql.push("WHERE d.receiver_key = ").bind(key);
        sql.push(" AND d.available_at <= ").bind(self.dialect.time(Some(request.now)));
        if let Some(before) = request.owed_before {
            sql.push(" AND d.due_at <= ").bind(self.dialect.time(Some(before)));
        }
        if let Some(only) = &request.only {
            // Numbers of ours, as text: there may be more than a statement has placeholders.
            let ids: Vec<String> = only.iter().map(|id| id.0.to_string()).collect();
            sql.push(&format!(
                " AND d.id IN ({})",
                if ids.is_empty() { "NULL".into() } else { ids.join(", ") }
            ));
        }
        sql.push(&format!(" ORDER BY d.available_at, d.id LIMIT {limit}{}", self.skip));
        sql
    }

    /// How the database goes about choosing rows, a line for each receiver. Claims nothing.
    ///
    /// # Errors
    /// If the database can't be reached.
    pub async fn explain(
        &self,
        tx: &impl ConnectionTrait,
        request: &ClaimRequest,
    ) -> Result<String, StoreError> {
        let mut plan = String::new();
        for receiver in &request.receivers {
            let sql = self.pick(request, &receiver.key, request.limit as usize);
            plan.push_str(&sql.explain(tx).await?);
        }
        Ok(plan)
    }

    /// Reads claimed rows with their events, in the order of `ids`.
    async fn whole(
        &self,
        tx: &impl ConnectionTrait,
        ids: &[i64],
        worker: &Arc<str>,
        at: Timestamp,
    ) -> Result<Vec<Claimed>, StoreError> {
        let doing = "reading claimed rows";
        let mut rows = HashMap::with_capacity(ids.len());
        for chunk in ids.chunks(IDS) {
            let mut sql = Sql::new(
                self.dialect,
                format!(
                    "SELECT {} FROM {} d WHERE d.id IN ",
                    row::delivery_columns("d"),
                    self.tables.delivery
                ),
            );
            sql.ids(chunk);
            let read = sql.rows(tx, doing, |one| row::delivery(self.dialect, one, 0)).await?;
            rows.extend(read.into_iter().map(|row| (row.id.0, row)));
        }
        let mut wanted: Vec<i64> = rows.values().map(|row| row.event_id.0).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut events: HashMap<EventId, Arc<EventRow>> = HashMap::with_capacity(wanted.len());
        for chunk in wanted.chunks(IDS) {
            let mut sql = Sql::new(
                self.dialect,
                format!("SELECT {} FROM {} e WHERE e.id IN ", row::event_columns("e"), self.tables.event),
            );
            sql.ids(chunk);
            let read = sql.rows(tx, doing, |one| row::event(self.dialect, one, 0)).await?;
            events.extend(read.into_iter().map(|event| (event.id, Arc::new(event))));
        }
        let claimed = ids.iter().filter_map(|id| {
            let delivery = rows.remove(id)?;
            Some(Claimed {
                claim: Claim::granted(delivery.id, worker.clone(), at),
                event: events.get(&delivery.event_id).cloned(),
                delivery,
            })
        });
        Ok(claimed.collect())
    }

    /// Moves a claim. See [`owed_core::Store::take`].
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn take(
        &self,
        tx: &impl ConnectionTrait,
        key: &ClaimKey,
        worker: &str,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<Option<Claimed>, StoreError> {
        let mut sql = Sql::new(
            self.dialect,
            format!("UPDATE {} {} SET claimed_by = ", self.tables.delivery, self.primary),
        );
        sql.bind(worker);
        sql.push(", available_at = ").bind(self.dialect.time(Some(until)));
        sql.push(", claimed_at = ").bind(self.dialect.time(Some(now)));
        settle::where_claimed(&mut sql, self.dialect, key);
        let written = sql.execute(tx, "taking a claim over").await?;
        if written.rows_affected() == 0 {
            return Ok(None);
        }
        Ok(self.whole(tx, &[key.delivery.0], &worker.into(), now).await?.pop())
    }

    /// Of these keys, which are held, which are not, and which could not be looked at because another transaction
    /// has their row. In the order of the keys.
    async fn held(
        &self,
        tx: &impl ConnectionTrait,
        keys: &[ClaimKey],
        lock: &str,
    ) -> Result<Vec<Option<bool>>, StoreError> {
        let doing = "looking at claims";
        let mut ids: Vec<i64> = keys.iter().map(|key| key.delivery.0).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut rows: HashMap<i64, Option<(String, Timestamp)>> = HashMap::with_capacity(ids.len());
        for chunk in ids.chunks(IDS) {
            let mut sql = Sql::new(
                self.dialect,
                format!(
                    "SELECT d.id, d.status, d.claimed_by, d.claimed_at FROM {} d {} WHERE d.id IN ",
                    self.tables.delivery, self.primary
                ),
            );
            sql.ids(chunk);
            sql.push(&format!(" ORDER BY d.id{lock}"));
            let read = |one: &QueryResult| {
                let status: String = one.try_get_by_index(1)?;
                let by: Option<String> = one.try_get_by_index(2)?;
                let at = self.dialect.read_time(one, 3)?;
                let claim = by.zip(at).filter(|_| status == "claimed");
                Ok((one.try_get_by_index::<i64>(0)?, claim))
            };
            rows.extend(sql.rows(tx, doing, read).await?);
        }
        let held = keys.iter().map(|key| {
            let claim = rows.get(&key.delivery.0)?;
            Some(claim.as_ref().is_some_and(|(by, at)| **by == *key.worker && *at == key.at))
        });
        Ok(held.collect())
    }

    /// Moves the end of leases. See [`owed_core::Store::renew`].
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn renew(
        &self,
        tx: &impl ConnectionTrait,
        keys: &[ClaimKey],
        until: Timestamp,
    ) -> Result<Vec<DeliveryId>, StoreError> {
        let held = self.held(tx, keys, self.skip).await?;
        let of = |wanted: Option<bool>| -> Vec<i64> {
            let keys = keys.iter().zip(&held).filter(|(_, held)| **held == wanted);
            keys.map(|(key, _)| key.delivery.0).collect()
        };
        for chunk in of(Some(true)).chunks(IDS) {
            let mut sql = Sql::new(
                self.dialect,
                format!("UPDATE {} {} SET available_at = ", self.tables.delivery, self.primary),
            );
            sql.bind(self.dialect.time(Some(until)));
            sql.push(" WHERE id IN ").ids(chunk);
            sql.execute(tx, "renewing leases").await?;
        }
        // What was passed over is being settled by its own handler, or taken over: it counts as held. What is not
        // there at all does not.
        let mut there: HashSet<i64> = HashSet::new();
        if !self.skip.is_empty() {
            for chunk in of(None).chunks(IDS) {
                let mut sql = Sql::new(
                    self.dialect,
                    format!("SELECT d.id FROM {} d WHERE d.id IN ", self.tables.delivery),
                );
                sql.ids(chunk);
                there.extend(sql.rows(tx, "looking at claims", |one| one.try_get_by_index::<i64>(0)).await?);
            }
        }
        let still = keys
            .iter()
            .zip(&held)
            .filter(|(key, held)| held.unwrap_or_else(|| there.contains(&key.delivery.0)));
        Ok(still.map(|(key, _)| key.delivery).collect())
    }

    /// Hands rows back. See [`owed_core::Store::release`].
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn release(
        &self,
        tx: &impl ConnectionTrait,
        keys: &[ClaimKey],
        at: Timestamp,
    ) -> Result<u64, StoreError> {
        let held = self.held(tx, keys, self.wait).await?;
        let mut ids: Vec<i64> = keys
            .iter()
            .zip(held)
            .filter(|(_, held)| *held == Some(true))
            .map(|(key, _)| key.delivery.0)
            .collect();
        ids.sort_unstable();
        ids.dedup();
        for chunk in ids.chunks(IDS) {
            let mut sql = Sql::new(
                self.dialect,
                format!(
                    "UPDATE {} {} SET status = CASE WHEN last_error IS NULL THEN 'pending' ELSE 'failed' END, \
                     claimed_by = NULL, claimed_at = NULL, available_at = ",
                    self.tables.delivery, self.primary
                ),
            );
            sql.bind(self.dialect.time(Some(at)));
            sql.push(" WHERE id IN ").ids(chunk);
            sql.execute(tx, "handing rows back").await?;
        }
        Ok(ids.len() as u64)
    }

    /// Writes many settlements. See [`owed_core::Store::settle_all`].
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn settle_all(
        &self,
        tx: &impl ConnectionTrait,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<Vec<Settled>, StoreError> {
        let keys: Vec<ClaimKey> = settlements.iter().map(|one| one.key().clone()).collect();
        let held = self.held(tx, &keys, self.wait).await?;
        // A row is settled once, by the first settlement whose claim holds.
        let mut done: HashSet<i64> = HashSet::with_capacity(settlements.len());
        let mut succeeded = Vec::new();
        let mut others = Vec::new();
        let mut settled = Vec::with_capacity(settlements.len());
        for (settlement, held) in settlements.iter().zip(held) {
            let id = settlement.key().delivery.0;
            if held != Some(true) || !done.insert(id) {
                settled.push(Settled::Lost);
                continue;
            }
            settled.push(Settled::Applied);
            match settlement.outcome() {
                Outcome::Succeeded => succeeded.push(id),
                _ => others.push(settlement),
            }
        }
        succeeded.sort_unstable();
        for chunk in succeeded.chunks(IDS) {
            let mut sql = Sql::new(
                self.dialect,
                format!(
                    "UPDATE {} {} SET status = 'succeeded', attempts = attempts + 1, available_at = NULL, \
                     claimed_by = NULL, claimed_at = NULL, lapses = 0, completed_at = ",
                    self.tables.delivery, self.primary
                ),
            );
            sql.bind(self.dialect.time(Some(now)));
            sql.push(", succeeded_at = ").bind(self.dialect.time(Some(now)));
            sql.push(" WHERE id IN ").ids(chunk);
            sql.execute(tx, "settling deliveries").await?;
        }
        if self.dialect == Dialect::Mysql {
            for chunk in others.chunks(OUTCOMES) {
                let sql = self.outcomes(chunk, now);
                sql.execute(tx, "settling deliveries").await?;
            }
        } else {
            for settlement in others {
                settle::settle(tx, self.dialect, &self.tables, settlement, now).await?;
            }
        }
        Ok(settled)
    }

    /// Writes outcomes of any kind to rows that are locked and held, for MySQL and MariaDB: a table of constants,
    /// joined by primary key.
    fn outcomes(&self, settlements: &[&Settlement], now: Timestamp) -> Sql {
        let mut sql = Sql::new(self.dialect, "UPDATE (");
        let last = settlements.last().into_iter().cycle();
        // The last row over and over, as with ids: a few texts for any number of rows.
        for (n, settlement) in
            settlements.iter().chain(last).take(settlements.len().next_power_of_two()).enumerate()
        {
            let columns = settlement.columns(now);
            let time = |at| self.dialect.time(at);
            sql.push(if n == 0 { "SELECT CAST(" } else { " UNION ALL SELECT CAST(" });
            sql.bind(settlement.key().delivery.0).push(" AS SIGNED) AS id");
            sql.push(", CAST(").bind(columns.status.as_str()).push(" AS CHAR(20)) AS status");
            sql.push(", CAST(").bind(columns.attempt).push(" AS SIGNED) AS attempt");
            sql.push(", CAST(").bind(time(columns.available_at)).push(" AS DATETIME(6)) AS available_at");
            sql.push(", CAST(").bind(time(columns.due_at)).push(" AS DATETIME(6)) AS due_at");
            let error = columns.last_error.map(|error| limits::storable(error, limits::ERROR));
            sql.push(", CAST(").bind(error).push(" AS CHAR(2000)) AS last_error");
            sql.push(", CAST(").bind(time(columns.completed_at)).push(" AS DATETIME(6)) AS completed_at");
            sql.push(", CAST(").bind(time(columns.succeeded_at)).push(" AS DATETIME(6)) AS succeeded_at");
        }
        sql.push(&format!(
            ") o STRAIGHT_JOIN {} d ON d.id = o.id
             SET d.status = o.status,
                 d.attempts = d.attempts + o.attempt,
                 d.available_at = o.available_at,
                 d.due_at = COALESCE(o.due_at, d.due_at),
                 d.last_error = COALESCE(o.last_error, d.last_error),
                 d.completed_at = o.completed_at,
                 d.succeeded_at = COALESCE(o.succeeded_at, d.succeeded_at),
                 d.claimed_by = NULL,
                 d.claimed_at = NULL,
                 d.lapses = 0",
            self.tables.delivery
        ));
        sql
    }

    /// Ends backoffs. See [`owed_core::Store::expedite`]. Rows that others hold are passed over.
    ///
    /// Plan: the entries of the claim's index that lie ahead, of these receivers; then primary keys.
    ///
    /// # Errors
    /// If the database can't be reached or refuses.
    pub async fn expedite(
        &self,
        tx: &impl ConnectionTrait,
        receivers: &[&str],
        now: Timestamp,
    ) -> Result<u64, StoreError> {
        let doing = "ending backoffs";
        let time = || self.dialect.time(Some(now));
        let mut ids: Vec<i64> = Vec::new();
        for chunk in receivers.chunks(ASKED) {
            let mut sql = Sql::new(
                self.dialect,
                format!("SELECT d.id FROM {} d {} ", self.tables.delivery, self.index),
            );
            sql.push("WHERE d.receiver_key IN ").list(chunk.iter().copied());
            sql.push(" AND d.available_at > ").bind(time());
            sql.push(" AND d.available_at > d.due_at AND d.status = 'failed' ORDER BY d.id").push(self.skip);
            ids.extend(sql.rows(tx, doing, |one| one.try_get_by_index::<i64>(0)).await?);
        }
        let mut moved = 0;
        for chunk in ids.chunks(IDS) {
            let mut sql = Sql::new(
                self.dialect,
                format!(
                    "UPDATE {} {} SET available_at = CASE WHEN due_at > ",
                    self.tables.delivery, self.primary
                ),
            );
            sql.bind(time()).push(" THEN due_at ELSE ").bind(time()).push(" END WHERE id IN ").ids(chunk);
            let written = sql.execute(tx, doing).await?;
            moved += written.rows_affected();
        }
        Ok(moved)
    }
}
