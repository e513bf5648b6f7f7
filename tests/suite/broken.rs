//! Stores that break their contract, to see that the suite and the histories find out.

use std::{panic::AssertUnwindSafe, time::Duration};

use owed::{
    Backlog, Cancelled, Capabilities, DeliveryId, DeliveryQuery, DeliveryRow, EventId, EventQuery, EventRow,
    ManualClock, MemoryStore, MemoryTx, Pause, Pruned, Reopened, Store, StoreError, Tally, Timestamp,
    async_trait,
    conformance::{
        self, Harness,
        history::{self, Plan},
    },
    store::{
        ClaimKey, ClaimRequest, Claimed, Listener, NewDelivery, NewEvent, Prunable, PruneMark, Recorded,
        Settled, Settlement,
    },
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    ClaimsEarly,
    ReportsWhatItDidNotSettle,
    KeepsWhatWasUndone,
    RenewsForTooLong,
    IgnoresTheLimit,
    PrunesEarly,
    ReopensEarly,
}

#[derive(Clone)]
struct Broken(MemoryStore, Fault);

struct Opens(Fault);

#[async_trait]
impl Harness for Opens {
    type Store = Broken;

    async fn open(&self, clock: ManualClock) -> Broken {
        Broken(MemoryStore::with_clock(clock), self.0)
    }
}

type Answer<T> = Result<T, StoreError>;

#[async_trait]
impl Store for Broken {
    type Tx = MemoryTx;

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn now(&self) -> Timestamp {
        self.0.now()
    }

    async fn sync_clock(&self) -> Answer<()> {
        self.0.sync_clock().await
    }

    async fn begin(&self) -> Answer<MemoryTx> {
        self.0.begin().await
    }

    async fn savepoint(&self, tx: &MemoryTx) -> Answer<MemoryTx> {
        self.0.savepoint(tx).await
    }

    async fn commit(&self, tx: MemoryTx) -> Answer<()> {
        self.0.commit(tx).await
    }

    async fn rollback(&self, tx: MemoryTx) -> Answer<()> {
        if self.1 == Fault::KeepsWhatWasUndone {
            return self.0.commit(tx).await;
        }
        self.0.rollback(tx).await
    }

    async fn record(&self, tx: &MemoryTx, events: &[NewEvent]) -> Answer<Vec<Recorded>> {
        self.0.record(tx, events).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Answer<Vec<Claimed>> {
        let mut request = request.clone();
        match self.1 {
            Fault::ClaimsEarly => request.now += Duration::from_micros(1),
            Fault::IgnoresTheLimit => request.limit = request.limit.saturating_mul(2),
            _ => {}
        }
        self.0.claim(&request).await
    }

    async fn take(
        &self,
        key: &ClaimKey,
        worker: &str,
        now: Timestamp,
        until: Timestamp,
    ) -> Answer<Option<Claimed>> {
        self.0.take(key, worker, now, until).await
    }

    async fn renew(&self, keys: &[ClaimKey], until: Timestamp) -> Answer<Vec<DeliveryId>> {
        let late = if self.1 == Fault::RenewsForTooLong { 1 } else { 0 };
        self.0.renew(keys, until + Duration::from_micros(late)).await
    }

    async fn release(&self, keys: &[ClaimKey], at: Timestamp) -> Answer<u64> {
        self.0.release(keys, at).await
    }

    async fn suspect(&self, key: &ClaimKey) -> Answer<Settled> {
        self.0.suspect(key).await
    }

    async fn settle(&self, tx: &MemoryTx, settlement: &Settlement, now: Timestamp) -> Answer<Settled> {
        self.0.settle(tx, settlement, now).await
    }

    async fn settle_all(&self, settlements: &[Settlement], now: Timestamp) -> Answer<Vec<Settled>> {
        let settled = self.0.settle_all(settlements, now).await?;
        if self.1 == Fault::ReportsWhatItDidNotSettle {
            return Ok(vec![Settled::Applied; settled.len()]);
        }
        Ok(settled)
    }

    async fn expedite(&self, receivers: &[&str], now: Timestamp) -> Answer<u64> {
        self.0.expedite(receivers, now).await
    }

    async fn pause(&self, pause: &Pause) -> Answer<()> {
        self.0.pause(pause).await
    }

    async fn lock_events(&self, tx: &MemoryTx, events: &[EventId]) -> Answer<Vec<EventRow>> {
        self.0.lock_events(tx, events).await
    }

    async fn cancel(&self, tx: &MemoryTx, rows: &[DeliveryId], now: Timestamp) -> Answer<Cancelled> {
        self.0.cancel(tx, rows, now).await
    }

    async fn requeue(&self, tx: &MemoryTx, rows: &[DeliveryId], now: Timestamp) -> Answer<u64> {
        self.0.requeue(tx, rows, now).await
    }

    async fn reopen(&self, tx: &MemoryTx, event: EventId, rows: &[NewDelivery]) -> Answer<Reopened> {
        let early = Duration::from_secs(if self.1 == Fault::ReopensEarly { 1 } else { 0 });
        let rows: Vec<_> = rows
            .iter()
            .map(|row| NewDelivery { available_at: row.available_at - early, ..row.clone() })
            .collect();
        self.0.reopen(tx, event, &rows).await
    }

    async fn retention_windows(&self) -> Answer<Vec<i64>> {
        self.0.retention_windows().await
    }

    async fn prunable(
        &self,
        kind: &Prunable,
        after: Option<PruneMark>,
        limit: u32,
    ) -> Answer<Vec<PruneMark>> {
        self.0.prunable(kind, after, limit).await
    }

    async fn prune(&self, kind: &Prunable, events: &[EventId], rows: u32) -> Answer<Pruned> {
        let mut kind = *kind;
        if let Prunable::Window { until, .. } = &mut kind
            && self.1 == Fault::PrunesEarly
        {
            *until += Duration::from_secs(3_600);
        }
        self.0.prune(&kind, events, rows).await
    }

    async fn backlog(&self, receiver: &str, now: Timestamp, bound: u32) -> Answer<Backlog> {
        self.0.backlog(receiver, now, bound).await
    }

    async fn dead_letters(&self, bound: u32) -> Answer<Vec<(String, u64)>> {
        self.0.dead_letters(bound).await
    }

    async fn events_in(&self, tx: &MemoryTx, query: &EventQuery) -> Answer<Vec<EventRow>> {
        self.0.events_in(tx, query).await
    }

    async fn deliveries_in(&self, tx: &MemoryTx, query: &DeliveryQuery) -> Answer<Vec<DeliveryRow>> {
        self.0.deliveries_in(tx, query).await
    }

    async fn last_successes(&self) -> Answer<Vec<(String, Timestamp)>> {
        self.0.last_successes().await
    }

    async fn pauses(&self, now: Timestamp) -> Answer<Vec<Pause>> {
        self.0.pauses(now).await
    }

    async fn owed(&self, receiver: &str, limit: u32) -> Answer<Vec<DeliveryRow>> {
        self.0.owed(receiver, limit).await
    }

    async fn owed_receivers(&self) -> Answer<Vec<String>> {
        self.0.owed_receivers().await
    }

    async fn tally(&self) -> Answer<Vec<Tally>> {
        self.0.tally().await
    }

    async fn events(&self, query: &EventQuery) -> Answer<Vec<EventRow>> {
        self.0.events(query).await
    }

    async fn deliveries(&self, query: &DeliveryQuery) -> Answer<Vec<DeliveryRow>> {
        self.0.deliveries(query).await
    }

    async fn wake(&self) -> Answer<()> {
        self.0.wake().await
    }

    async fn listen(&self) -> Answer<Box<dyn Listener>> {
        self.0.listen().await
    }

    async fn detached(&self, _: u32) -> Answer<Self> {
        Ok(self.clone())
    }
}

const FAULTS: [Fault; 7] = [
    Fault::ClaimsEarly,
    Fault::ReportsWhatItDidNotSettle,
    Fault::KeepsWhatWasUndone,
    Fault::RenewsForTooLong,
    Fault::IgnoresTheLimit,
    Fault::PrunesEarly,
    Fault::ReopensEarly,
];

mod memory {
    use super::*;
    use crate::kept;

    #[test]
    fn the_suite_finds_every_fault_and_names_a_check() {
        for fault in FAULTS {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let tested = AssertUnwindSafe(|| runtime.block_on(conformance::test_all(&Opens(fault))));
            let failed = std::panic::catch_unwind(tested).expect_err("a broken store passed");
            let said = failed.downcast_ref::<String>().expect("a list of checks");
            assert!(conformance::checks().iter().any(|check| said.contains(check)), "{fault:?}: {said}");
        }
    }

    #[test]
    fn random_histories_find_every_fault_and_print_a_short_one() {
        for fault in FAULTS {
            let plan = Plan { cases: 200, steps: 60, seed: 1 };
            let run = AssertUnwindSafe(|| history::run(&Opens(fault), &plan));
            let failed = std::panic::catch_unwind(run).expect_err("a broken store passed");
            let said = failed.downcast_ref::<String>().expect("a history");
            assert!(said.contains("history::replay(harness, &vec!["), "{fault:?}: {said}");
        }
    }

    #[test]
    fn kept_histories_find_the_fault_that_they_are_kept_for() {
        for fault in FAULTS {
            let ops = match fault {
                Fault::ClaimsEarly => kept::claimed_early(),
                Fault::ReportsWhatItDidNotSettle => kept::settled_twice(),
                Fault::KeepsWhatWasUndone => kept::undone(),
                Fault::RenewsForTooLong => kept::renewed(),
                Fault::IgnoresTheLimit => kept::limited(),
                Fault::PrunesEarly => kept::pruned(),
                Fault::ReopensEarly => kept::reopened(),
            };
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let replay = AssertUnwindSafe(|| runtime.block_on(history::replay(&Opens(fault), &ops)));
            std::panic::catch_unwind(replay).expect_err("a broken store passed");
        }
    }
}
