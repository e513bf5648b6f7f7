//! Random histories: the same operations on a store and on the in-memory one, their rows compared after each.
//!
//! ```no_run
//! # use owed::{MemoryStore, ManualClock, async_trait, conformance::{Harness, history::{self, Plan}}};
//! # struct Mine;
//! # #[async_trait] impl Harness for Mine {
//! #     type Store = MemoryStore;
//! #     async fn open(&self, clock: ManualClock) -> MemoryStore { MemoryStore::with_clock(clock) }
//! # }
//! // Panics with the shortest history that still differs, as code for `history::replay`.
//! history::run(&Mine, &Plan::from_env());
//! ```

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use owed_core::{
    Claim, ClaimKey, ClaimRequest, DeliveryId, DeliveryQuery, DeliveryRow, EventId, EventQuery, ManualClock,
    NewDelivery, NewEvent, Outcome, Prunable, ReceiverLease, Recorded, RetentionRule, Settled, Settlement,
    Store, Timestamp,
};
use owed_memory::MemoryStore;
use proptest::{
    prelude::*,
    test_runner::{Config, RngAlgorithm, RngSeed, TestError, TestRng, TestRunner},
};

use super::{Harness, MICRO, event, owed_to, start};

/// How many histories to run, and how long they are.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How many histories.
    pub cases: u32,
    /// The most operations of one.
    pub steps: usize,
    /// What they are drawn from.
    pub seed: u64,
}

impl Plan {
    /// From `OWED_HISTORY_CASES` (default 40), `OWED_HISTORY_STEPS` (60) and `OWED_HISTORY_SEED` (1; `random` for
    /// another one each time).
    ///
    /// # Panics
    /// If one of them is no number.
    pub fn from_env() -> Self {
        fn number<N: std::str::FromStr>(name: &str, otherwise: N) -> N {
            match std::env::var(name) {
                Err(_) => otherwise,
                Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, which is no number")),
            }
        }
        let random = std::env::var("OWED_HISTORY_SEED").is_ok_and(|seed| seed == "random");
        Plan {
            cases: number("OWED_HISTORY_CASES", 40),
            steps: number("OWED_HISTORY_STEPS", 60),
            seed: if random { rand::random() } else { number("OWED_HISTORY_SEED", 1) },
        }
    }
}

/// One operation. Numbers choose among what is there when it runs; where nothing is, it does nothing.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "each is the call of its name")]
pub enum Op {
    Begin {
        slot: u8,
    },
    Commit {
        slot: u8,
    },
    Rollback {
        slot: u8,
    },
    Savepoint {
        slot: u8,
    },
    ReleaseSavepoint {
        slot: u8,
    },
    UndoSavepoint {
        slot: u8,
    },
    /// In the slot's transaction if it is open, else in one of its own.
    Fire {
        slot: u8,
        receivers: u8,
        key: Option<u8>,
        delay: u8,
        born_claimed: bool,
    },
    Claim {
        worker: u8,
        receivers: u8,
        limit: u8,
    },
    SettleInTransaction {
        slot: u8,
        claim: u8,
        outcome: u8,
    },
    SettleAll {
        claims: Vec<(u8, u8)>,
    },
    Take {
        claim: u8,
        worker: u8,
    },
    Renew {
        claims: Vec<u8>,
    },
    HandBack {
        claim: u8,
    },
    Suspect {
        claim: u8,
    },
    Expedite {
        receivers: u8,
    },
    /// Cancels (0), requeues (1) or reopens (2) rows of one event, in a transaction of its own.
    Operate {
        event: u8,
        what: u8,
        receivers: u8,
        delay: u8,
    },
    Prune {
        kind: u8,
        seconds: u8,
    },
    Advance {
        milliseconds: u32,
    },
    GoBack {
        milliseconds: u16,
    },
}

const SLOTS: u8 = 3;
const RECEIVERS: [&str; 3] = ["a", "b", "c"];
const LEASE: Duration = Duration::from_secs(30);

fn op() -> impl Strategy<Value = Op> {
    let slot = || 0..SLOTS;
    let any = any::<u8>;
    prop_oneof![
        2 => slot().prop_map(|slot| Op::Begin { slot }),
        3 => slot().prop_map(|slot| Op::Commit { slot }),
        1 => slot().prop_map(|slot| Op::Rollback { slot }),
        1 => slot().prop_map(|slot| Op::Savepoint { slot }),
        1 => slot().prop_map(|slot| Op::ReleaseSavepoint { slot }),
        1 => slot().prop_map(|slot| Op::UndoSavepoint { slot }),
        6 => (slot(), 0..8u8, prop::option::weighted(0.3, 0..4u8), 0..4u8, prop::bool::weighted(0.1)).prop_map(
            |(slot, receivers, key, delay, born_claimed)| Op::Fire { slot, receivers, key, delay, born_claimed }
        ),
        8 => (0..3u8, 1..8u8, 0..6u8).prop_map(|(worker, receivers, limit)| Op::Claim { worker, receivers, limit }),
        3 => (slot(), any(), any()).prop_map(|(slot, claim, outcome)| Op::SettleInTransaction { slot, claim, outcome }),
        5 => prop::collection::vec((any(), any()), 1..6).prop_map(|claims| Op::SettleAll { claims }),
        1 => (any(), 0..3u8).prop_map(|(claim, worker)| Op::Take { claim, worker }),
        2 => prop::collection::vec(any(), 1..5).prop_map(|claims| Op::Renew { claims }),
        2 => any().prop_map(|claim| Op::HandBack { claim }),
        1 => any().prop_map(|claim| Op::Suspect { claim }),
        1 => (0..8u8).prop_map(|receivers| Op::Expedite { receivers }),
        4 => (any(), 0..3u8, 0..8u8, 0..4u8).prop_map(
            |(event, what, receivers, delay)| Op::Operate { event, what, receivers, delay }
        ),
        2 => (0..4u8, 0..60u8).prop_map(|(kind, seconds)| Op::Prune { kind, seconds }),
        5 => (0..60_000u32).prop_map(|milliseconds| Op::Advance { milliseconds }),
        1 => (0..u16::MAX).prop_map(|milliseconds| Op::GoBack { milliseconds }),
    ]
}

/// Runs random histories, on one store that it opens.
///
/// # Panics
/// With the shortest history it can find for which the store and the in-memory one differ.
pub fn run<H: Harness>(harness: &H, plan: &Plan) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let clock = ManualClock::at(start());
    let store = runtime.block_on(harness.open(clock.clone()));
    let config = Config {
        cases: plan.cases,
        rng_seed: RngSeed::Fixed(plan.seed),
        failure_persistence: None,
        max_shrink_iters: 300,
        max_shrink_time: 60_000,
        ..Config::default()
    };
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&plan.seed.to_le_bytes());
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let histories = prop::collection::vec(op(), 1..=plan.steps);
    let ended = runner.run(&histories, |ops| {
        let replaying = one(store.clone(), clock.clone(), harness.one_writer(), &ops);
        runtime.block_on(replaying).map_err(TestCaseError::fail)
    });
    runtime.block_on(harness.close(store));
    match ended {
        Ok(()) => {}
        Err(TestError::Fail(why, ops)) => {
            panic!(
                "a history of seed {} differs: {why}\nhistory::replay(harness, &vec!{ops:?}).await",
                plan.seed
            )
        }
        Err(aborted) => panic!("{aborted}"),
    }
}

/// Runs one history that is known to have differed once.
///
/// # Panics
/// If it differs.
pub async fn replay<H: Harness>(harness: &H, ops: &[Op]) {
    let clock = ManualClock::at(start());
    let store = harness.open(clock.clone()).await;
    let ended = one(store.clone(), clock, harness.one_writer(), ops).await;
    harness.close(store).await;
    if let Err(why) = ended {
        panic!("{why}");
    }
}

/// Both sides of an open transaction, with its savepoints.
struct Slot<S: Store> {
    levels: Vec<(S::Tx, owed_memory::MemoryTx)>,
    keys: HashSet<String>,
    locked: HashSet<DeliveryId>,
}

struct Both<S: Store> {
    store: S,
    model: MemoryStore,
    clock: ManualClock,
    one_writer: bool,
    /// Sets this history's receivers and keys apart from those of others in the same tables.
    prefix: String,
    slots: Vec<Option<Slot<S>>>,
    /// The store's ids and the model's, of everything that was ever written.
    events: BTreeMap<EventId, EventId>,
    deliveries: BTreeMap<DeliveryId, DeliveryId>,
    claims: Vec<(ClaimKey, ClaimKey)>,
}

static HISTORIES: AtomicU64 = AtomicU64::new(0);

async fn one<S: Store>(store: S, clock: ManualClock, one_writer: bool, ops: &[Op]) -> Result<(), String> {
    clock.set(start());
    let number = HISTORIES.fetch_add(1, Ordering::SeqCst);
    let mut both = Both {
        store,
        model: MemoryStore::with_clock(clock.clone()),
        clock,
        one_writer,
        prefix: format!("{:x}-{number}", std::process::id()),
        slots: (0..SLOTS).map(|_| None).collect(),
        events: BTreeMap::new(),
        deliveries: BTreeMap::new(),
        claims: Vec::new(),
    };
    for (step, op) in ops.iter().enumerate() {
        // No two operations at one instant, so that the order of rows is never left to chance.
        both.clock.advance(MICRO);
        let ended = tokio::time::timeout(Duration::from_secs(10), both.apply(op)).await;
        let ended = ended.map_err(|_| "it never came back".to_owned()).and_then(|ended| ended);
        let compared = match ended {
            Ok(()) => both.compare().await,
            Err(why) => Err(why),
        };
        compared.map_err(|why| format!("step {step}, {op:?}: {why}"))?;
    }
    Ok(())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, store: T, model: T) -> Result<(), String> {
    if store == model {
        Ok(())
    } else {
        Err(format!("{what}: the store says {store:?}, the model {model:?}"))
    }
}

fn said<T>(what: &str, answer: Result<T, owed_core::StoreError>) -> Result<T, String> {
    answer.map_err(|error| {
        let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        format!("{what} failed: {error}: {source}")
    })
}

fn settlement(key: &ClaimKey, outcome: Outcome) -> Settlement {
    Settlement::new(Claim::granted(key.delivery, key.worker.clone(), key.at), outcome)
}

impl<S: Store> Both<S> {
    fn receivers(&self, mask: u8) -> Vec<String> {
        let chosen = RECEIVERS.iter().enumerate().filter(|(n, _)| mask & (1 << n) != 0);
        chosen.map(|(_, name)| format!("{}-{name}", self.prefix)).collect()
    }

    /// Whether a write outside of the slots would wait for one of them.
    fn must_not_write(&self) -> bool {
        self.one_writer && self.slots.iter().any(Option::is_some)
    }

    fn is_locked(&self, id: DeliveryId) -> bool {
        self.slots.iter().flatten().any(|slot| slot.locked.contains(&id))
    }

    fn claim_at(&self, number: u8) -> Option<&(ClaimKey, ClaimKey)> {
        // The newest ones most often: they are the likeliest to be held.
        let back = usize::from(number) % self.claims.len().clamp(1, 12);
        self.claims.iter().rev().nth(back)
    }

    fn outcome(&self, number: u8, place: usize) -> Outcome {
        let at = self.clock_now()
            + Duration::from_secs(u64::from(number / 8))
            + Duration::from_micros(place as u64 + 1);
        let error = format!("error {number}");
        match number % 8 {
            0..=2 => Outcome::Succeeded,
            3 => Outcome::Failed { error, available_at: at },
            4 => Outcome::Deferred { error, available_at: at },
            5 => Outcome::Dead { error, counted: number >= 128 },
            6 => Outcome::Orphaned { error },
            _ => Outcome::NotYet { until: at },
        }
    }

    fn clock_now(&self) -> Timestamp {
        self.model.now()
    }

    async fn apply(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Begin { slot } => {
                let place = usize::from(*slot);
                if self.slots[place].is_some() || self.must_not_write() {
                    return Ok(());
                }
                let levels = vec![(
                    said("begin", self.store.begin().await)?,
                    said("begin", self.model.begin().await)?,
                )];
                self.slots[place] = Some(Slot { levels, keys: HashSet::new(), locked: HashSet::new() });
            }
            Op::Commit { slot } | Op::Rollback { slot } => {
                let Some(mut slot) = self.slots[usize::from(*slot)].take() else { return Ok(()) };
                // Inner savepoints end with it, the innermost first.
                while slot.levels.len() > 1 {
                    let Some((store, model)) = slot.levels.pop() else { break };
                    said("releasing", self.store.commit(store).await)?;
                    said("releasing", self.model.commit(model).await)?;
                }
                let Some((store, model)) = slot.levels.pop() else { return Ok(()) };
                if matches!(op, Op::Commit { .. }) {
                    said("commit", self.store.commit(store).await)?;
                    said("commit", self.model.commit(model).await)?;
                } else {
                    said("rollback", self.store.rollback(store).await)?;
                    said("rollback", self.model.rollback(model).await)?;
                }
            }
            Op::Savepoint { slot } => {
                let Some(slot) = self.slots[usize::from(*slot)].as_mut() else { return Ok(()) };
                let Some((store, model)) = slot.levels.last() else { return Ok(()) };
                let store = said("savepoint", self.store.savepoint(store).await)?;
                let model = said("savepoint", self.model.savepoint(model).await)?;
                slot.levels.push((store, model));
            }
            Op::ReleaseSavepoint { slot } | Op::UndoSavepoint { slot } => {
                let Some(slot) = self.slots[usize::from(*slot)].as_mut().filter(|slot| slot.levels.len() > 1)
                else {
                    return Ok(());
                };
                let Some((store, model)) = slot.levels.pop() else { return Ok(()) };
                if matches!(op, Op::ReleaseSavepoint { .. }) {
                    said("release", self.store.commit(store).await)?;
                    said("release", self.model.commit(model).await)?;
                } else {
                    said("undo", self.store.rollback(store).await)?;
                    said("undo", self.model.rollback(model).await)?;
                }
            }
            Op::Fire { slot, receivers, key, delay, born_claimed } => {
                self.fire(usize::from(*slot), *receivers, *key, *delay, *born_claimed).await?;
            }
            Op::Claim { worker, receivers, limit } => self.claim(*worker, *receivers, *limit).await?,
            Op::SettleInTransaction { slot, claim, outcome } => {
                let Some((of_store, of_model)) = self.claim_at(*claim).cloned() else { return Ok(()) };
                let (outcome, now, place) = (self.outcome(*outcome, 0), self.clock_now(), usize::from(*slot));
                let elsewhere = self.slots.iter().enumerate().any(|(n, slot)| {
                    n != place && slot.as_ref().is_some_and(|slot| slot.locked.contains(&of_model.delivery))
                });
                // Databases differ in whether a savepoint that is undone lets go of its row locks.
                let Some(slot) =
                    self.slots[place].as_mut().filter(|slot| slot.levels.len() == 1 && !elsewhere)
                else {
                    return Ok(());
                };
                let Some((store, model)) = slot.levels.last() else { return Ok(()) };
                let settled = self.store.settle(store, &settlement(&of_store, outcome.clone()), now).await;
                let expected = self.model.settle(model, &settlement(&of_model, outcome), now).await;
                if said(
                    "settle",
                    expected
                        .as_ref()
                        .map(|one| *one)
                        .map_err(|_| owed_core::StoreError::unsupported("model")),
                )? == Settled::Applied
                {
                    slot.locked.insert(of_model.delivery);
                }
                same("settle", said("settle", settled)?, said("settle", expected)?)?;
            }
            Op::SettleAll { claims } => {
                if self.must_not_write() {
                    return Ok(());
                }
                let chosen: Vec<_> = claims
                    .iter()
                    .enumerate()
                    .filter_map(|(place, (claim, outcome))| {
                        let (store, model) = self.claim_at(*claim)?.clone();
                        let outcome = self.outcome(*outcome, place);
                        (!self.is_locked(model.delivery)).then_some((store, model, outcome))
                    })
                    .collect();
                let of = |pick: fn(&(ClaimKey, ClaimKey, Outcome)) -> &ClaimKey| {
                    chosen.iter().map(|one| settlement(pick(one), one.2.clone())).collect::<Vec<_>>()
                };
                let now = self.clock_now();
                let settled = said("settle_all", self.store.settle_all(&of(|one| &one.0), now).await)?;
                same(
                    "settle_all",
                    settled,
                    said("settle_all", self.model.settle_all(&of(|one| &one.1), now).await)?,
                )?;
            }
            Op::Take { claim, worker } => {
                let Some((store, model)) = self.claim_at(*claim).cloned() else { return Ok(()) };
                if self.must_not_write() || self.is_locked(model.delivery) {
                    return Ok(());
                }
                let (worker, now, until) =
                    (format!("task{worker}"), self.clock_now(), self.clock_now() + LEASE);
                let taken = said("take", self.store.take(&store, &worker, now, until).await)?;
                let expected = said("take", self.model.take(&model, &worker, now, until).await)?;
                same("take", taken.is_some(), expected.is_some())?;
                if let Some((taken, expected)) = taken.zip(expected) {
                    self.claims.push((taken.claim.key().clone(), expected.claim.key().clone()));
                }
            }
            Op::Renew { claims } => {
                if self.must_not_write() {
                    return Ok(());
                }
                let chosen: Vec<_> =
                    claims.iter().filter_map(|claim| self.claim_at(*claim).cloned()).collect();
                let (store, model): (Vec<_>, Vec<_>) = chosen.into_iter().unzip();
                let until = self.clock_now() + LEASE;
                let renewed = said("renew", self.store.renew(&store, until).await)?;
                let expected = said("renew", self.model.renew(&model, until).await)?;
                let renewed: HashSet<_> = renewed.iter().map(|id| self.deliveries.get(id).copied()).collect();
                same("renew", renewed, expected.into_iter().map(Some).collect())?;
            }
            Op::HandBack { claim } => {
                let Some((store, model)) = self.claim_at(*claim).cloned() else { return Ok(()) };
                if self.must_not_write() || self.is_locked(model.delivery) {
                    return Ok(());
                }
                let now = self.clock_now();
                let released = said("release", self.store.release(&[store], now).await)?;
                same("release", released, said("release", self.model.release(&[model], now).await)?)?;
            }
            Op::Suspect { claim } => {
                let Some((store, model)) = self.claim_at(*claim).cloned() else { return Ok(()) };
                if self.must_not_write() || self.is_locked(model.delivery) {
                    return Ok(());
                }
                let noted = said("suspect", self.store.suspect(&store).await)?;
                same("suspect", noted, said("suspect", self.model.suspect(&model).await)?)?;
            }
            Op::Expedite { receivers } => {
                if self.must_not_write() || self.slots.iter().flatten().any(|slot| !slot.locked.is_empty()) {
                    return Ok(());
                }
                let receivers = self.receivers(*receivers);
                let keys: Vec<&str> = receivers.iter().map(String::as_str).collect();
                let now = self.clock_now();
                let moved = said("expedite", self.store.expedite(&keys, now).await)?;
                same("expedite", moved, said("expedite", self.model.expedite(&keys, now).await)?)?;
            }
            Op::Operate { event, what, receivers, delay } => {
                self.operate(*event, *what, *receivers, *delay).await?;
            }
            Op::Prune { kind, seconds } => self.prune(*kind, *seconds).await?,
            Op::Advance { milliseconds } => {
                self.clock.advance(Duration::from_millis(u64::from(*milliseconds)))
            }
            Op::GoBack { milliseconds } => {
                self.clock.set(self.clock_now() - Duration::from_millis(u64::from(*milliseconds)));
            }
        }
        Ok(())
    }

    async fn fire(
        &mut self,
        place: usize,
        receivers: u8,
        key: Option<u8>,
        delay: u8,
        born_claimed: bool,
    ) -> Result<(), String> {
        let now = self.clock_now();
        let key = key.map(|key| format!("{}-key{key}", self.prefix));
        let held_elsewhere = key.as_ref().is_some_and(|key| {
            self.slots
                .iter()
                .enumerate()
                .any(|(n, slot)| n != place && slot.as_ref().is_some_and(|slot| slot.keys.contains(key)))
        });
        if held_elsewhere || (self.slots[place].is_none() && self.must_not_write()) {
            return Ok(());
        }
        let due_at = now + Duration::from_secs(u64::from(delay) * 20);
        let deliveries = self.receivers(receivers).into_iter().map(|receiver| NewDelivery {
            available_at: if born_claimed { now + LEASE } else { due_at },
            due_at,
            claimed_by: born_claimed.then(|| "firing".into()),
            ..owed_to(&receiver, now)
        });
        let retention = match (receivers + delay) % 4 {
            0 => RetentionRule::Ordinary,
            1 => RetentionRule::Seconds(30),
            2 => RetentionRule::Succeeded,
            _ => RetentionRule::Settled,
        };
        let new =
            [NewEvent { dedupe_key: key.clone(), deliveries: deliveries.collect(), retention, ..event(now) }];
        let (recorded, expected) = match self.slots[place].as_mut() {
            Some(slot) => {
                slot.keys.extend(key);
                let Some((store, model)) = slot.levels.last() else { return Ok(()) };
                (
                    said("record", self.store.record(store, &new).await)?,
                    said("record", self.model.record(model, &new).await)?,
                )
            }
            None => {
                let (store, model) =
                    (said("begin", self.store.begin().await)?, said("begin", self.model.begin().await)?);
                let recorded = said("record", self.store.record(&store, &new).await)?;
                let expected = said("record", self.model.record(&model, &new).await)?;
                said("commit", self.store.commit(store).await)?;
                said("commit", self.model.commit(model).await)?;
                (recorded, expected)
            }
        };
        match (&recorded[0], &expected[0]) {
            (
                Recorded::New { event, deliveries },
                Recorded::New { event: event_of_model, deliveries: of_model },
            ) => {
                same("how many deliveries", deliveries.len(), of_model.len())?;
                self.events.insert(*event, *event_of_model);
                self.deliveries.extend(deliveries.iter().copied().zip(of_model.iter().copied()));
                // Nobody has the claim of a row that was born with it before the row is committed.
                if born_claimed && self.slots[place].is_none() {
                    let key = |delivery: &DeliveryId| ClaimKey {
                        delivery: *delivery,
                        worker: "firing".into(),
                        at: now,
                    };
                    self.claims.extend(deliveries.iter().map(key).zip(of_model.iter().map(key)));
                }
                Ok(())
            }
            (Recorded::Duplicate { of }, Recorded::Duplicate { of: expected }) => {
                same("the earlier event", self.events.get(of), Some(expected))
            }
            (recorded, expected) => Err(format!("the store says {recorded:?}, the model {expected:?}")),
        }
    }

    async fn operate(&mut self, event: u8, what: u8, receivers: u8, delay: u8) -> Result<(), String> {
        let back = usize::from(event) % self.events.len().clamp(1, 9);
        let Some((of_store, of_model)) = self.events.iter().rev().nth(back).map(|(a, b)| (*a, *b)) else {
            return Ok(());
        };
        // Nobody else knows an event before its commit: some databases wait for it, some don't see it.
        let known = EventQuery { ids: Some(vec![of_model]), ..EventQuery::page(1) };
        let pruned = said("reading", self.model.events(&known).await)?.is_empty();
        if pruned && self.slots.iter().any(Option::is_some) {
            return Ok(());
        }
        let rows = self.model_rows().await?;
        let mine: Vec<_> = rows.values().filter(|row| row.event_id == of_model).map(|row| row.id).collect();
        if self.must_not_write() || mine.iter().any(|id| self.is_locked(*id)) {
            return Ok(());
        }
        let theirs: Vec<_> =
            self.deliveries.iter().filter(|(_, m)| mine.contains(m)).map(|(s, _)| *s).collect();
        let now = self.clock_now();
        let at = now + Duration::from_secs(u64::from(delay) * 20);
        let again: Vec<_> = self.receivers(receivers).iter().map(|key| owed_to(key, at)).collect();
        let store = said("begin", self.store.begin().await)?;
        let model = said("begin", self.model.begin().await)?;
        let there = said("lock_events", self.store.lock_events(&store, &[of_store]).await)?.len();
        same(
            "lock_events",
            there,
            said("lock_events", self.model.lock_events(&model, &[of_model]).await)?.len(),
        )?;
        match what {
            0 => {
                let done = said("cancel", self.store.cancel(&store, &theirs, now).await)?;
                same("cancel", done, said("cancel", self.model.cancel(&model, &mine, now).await)?)?;
            }
            1 => {
                let done = said("requeue", self.store.requeue(&store, &theirs, now).await)?;
                same("requeue", done, said("requeue", self.model.requeue(&model, &mine, now).await)?)?;
            }
            _ if there > 0 => {
                let done = said("reopen", self.store.reopen(&store, of_store, &again).await)?;
                same("reopen", done, said("reopen", self.model.reopen(&model, of_model, &again).await)?)?;
            }
            _ => {}
        }
        said("commit", self.store.commit(store).await)?;
        said("commit", self.model.commit(model).await)?;
        // What was added has an id that only its store knows.
        let of = |id| EventQuery { ids: Some(vec![id]), ..EventQuery::default() };
        let query = |id| DeliveryQuery { of: of(id), ..DeliveryQuery::page(1_000) };
        let there = said("reading", self.store.deliveries(&query(of_store)).await)?;
        for expected in said("reading", self.model.deliveries(&query(of_model)).await)? {
            let row = there
                .iter()
                .find(|row| (&row.receiver_key, &row.target) == (&expected.receiver_key, &expected.target))
                .ok_or_else(|| format!("the store does not have {expected:?}"))?;
            self.deliveries.insert(row.id, expected.id);
        }
        Ok(())
    }

    /// Prunes this history's events alone: there may be others' in the same tables.
    async fn prune(&mut self, kind: u8, seconds: u8) -> Result<(), String> {
        if self.must_not_write() {
            return Ok(());
        }
        let until = self.clock_now() - Duration::from_secs(u64::from(seconds));
        let kind = match kind {
            0 => Prunable::Succeeded,
            1 => Prunable::Settled,
            2 => Prunable::Window { seconds: Some(30), until },
            _ => Prunable::Window { seconds: None, until },
        };
        let (store, model): (Vec<_>, Vec<_>) = self.events.iter().map(|(a, b)| (*a, *b)).unzip();
        let pruned = said("prune", self.store.prune(&kind, &store, 100_000).await)?;
        same("prune", pruned, said("prune", self.model.prune(&kind, &model, 100_000).await)?)?;
        let mine = |found: Vec<(String, Timestamp)>| -> Vec<_> {
            found.into_iter().filter(|(key, _)| key.starts_with(&self.prefix)).collect()
        };
        let successes = said("last_successes", self.store.last_successes().await)?;
        let expected = said("last_successes", self.model.last_successes().await)?;
        same("last_successes", mine(successes), mine(expected))
    }

    /// The store's choice among rows that became available at one instant is free; everything else is not.
    async fn claim(&mut self, worker: u8, receivers: u8, limit: u8) -> Result<(), String> {
        if self.must_not_write() {
            return Ok(());
        }
        let now = self.clock_now();
        let mut keys = self.receivers(receivers);
        // In another order now and then.
        let turned = usize::from(worker) % keys.len().max(1);
        keys.rotate_left(turned);
        let receivers: Vec<_> =
            keys.iter().map(|key| ReceiverLease { key: Arc::from(key.as_str()), lease: LEASE }).collect();
        let request = ClaimRequest::new(format!("w{worker}").into(), receivers, u32::from(limit), now);
        let before = self.model_rows().await?;
        let mut expected: Vec<(usize, Timestamp)> = Vec::new();
        for (place, key) in keys.iter().enumerate() {
            let mut free: Vec<_> = before
                .values()
                .filter(|row| row.receiver_key == *key && !self.is_locked(row.id))
                .filter_map(|row| row.available_at.filter(|at| *at <= now))
                .collect();
            free.sort_unstable();
            expected.extend(free.into_iter().map(|at| (place, at)));
        }
        expected.truncate(usize::from(limit));
        let claimed = said("claim", self.store.claim(&request).await)?;
        let mut chosen = Vec::new();
        let mut order = Vec::new();
        for one in &claimed {
            let id = *self.deliveries.get(&one.delivery.id).ok_or("a row of nobody's was claimed")?;
            let row = before.get(&id).ok_or("a row that is not committed was claimed")?;
            let place =
                keys.iter().position(|key| *key == row.receiver_key).ok_or("another's row was claimed")?;
            order.push((place, row.available_at.ok_or("a settled row was claimed")?));
            chosen.push(id);
            same(
                "the claimed row's event",
                self.events.get(&one.delivery.event_id).copied(),
                Some(row.event_id),
            )?;
            same("whether its event came along", one.event.is_some(), true)?;
        }
        same("what was claimed, in order", order, expected)?;
        let mut on_model = ClaimRequest { only: Some(chosen.clone()), ..request };
        on_model.limit = u32::MAX;
        let by_model = said("claim", self.model.claim(&on_model).await)?;
        let mut by_model: HashMap<_, _> = by_model.into_iter().map(|one| (one.delivery.id, one)).collect();
        for (one, id) in claimed.into_iter().zip(chosen) {
            let of_model = by_model.remove(&id).ok_or("the model would not have given that row")?;
            same("lapses", one.delivery.lapses, of_model.delivery.lapses)?;
            self.claims.push((one.claim.key().clone(), of_model.claim.key().clone()));
        }
        Ok(())
    }

    async fn model_rows(&self) -> Result<BTreeMap<DeliveryId, DeliveryRow>, String> {
        let rows = said("reading", self.model.deliveries(&DeliveryQuery::page(u32::MAX)).await)?;
        Ok(rows.into_iter().map(|row| (row.id, row)).collect())
    }

    /// Every row of this history, on both sides.
    async fn compare(&self) -> Result<(), String> {
        let ids: Vec<_> = self.deliveries.keys().copied().collect();
        let query = DeliveryQuery { ids: Some(ids), ..DeliveryQuery::page(1_000_000) };
        let mut expected = self.model_rows().await?;
        for mut row in said("reading", self.store.deliveries(&query).await)? {
            row.id = *self.deliveries.get(&row.id).ok_or("a delivery of nobody's")?;
            row.event_id = *self.events.get(&row.event_id).ok_or("an event of nobody's")?;
            let of_model =
                expected.remove(&row.id).ok_or_else(|| format!("the model does not have {row:?}"))?;
            same("a row", row, of_model)?;
        }
        if let Some(row) = expected.into_values().next() {
            return Err(format!("the store does not have {row:?}"));
        }
        let query =
            EventQuery { ids: Some(self.events.keys().copied().collect()), ..EventQuery::page(1_000_000) };
        let events: Vec<_> = said("reading", self.store.events(&query).await)?
            .into_iter()
            .map(|row| (self.events.get(&row.id).copied(), row.dedupe_key))
            .collect();
        let of_model = said("reading", self.model.events(&EventQuery::page(u32::MAX)).await)?;
        let mut events = events;
        events.sort_unstable();
        same("events", events, of_model.into_iter().map(|row| (Some(row.id), row.dedupe_key)).collect())
    }
}
