//! The contract of [`Store`], as checks to run: what every store is proven against, a third party's too.
//!
//! ```
//! # use owed::{MemoryStore, ManualClock, async_trait, conformance::{self, Harness}};
//! struct Mine;
//!
//! #[async_trait]
//! impl Harness for Mine {
//!     type Store = MemoryStore;
//!
//!     async fn open(&self, clock: ManualClock) -> MemoryStore {
//!         MemoryStore::with_clock(clock) // empty, and on that clock
//!     }
//! }
//!
//! # #[tokio::main] async fn main() {
//! conformance::test_all(&Mine).await; // panics with the name of each check that failed
//! # }
//! ```
//!
//! [`history`] drives a store and the in-memory one with the same random operations, and compares their rows after
//! each.

#![allow(clippy::unwrap_used, reason = "a check that can't go on fails, and says where")]

mod cancel;
mod claim;
pub mod history;
mod inspect;
mod lease;
mod operate;
mod races;
mod record;
mod settle;
mod transactions;

use std::{sync::Arc, time::Duration};

use owed_core::{
    ClaimRequest, Claimed, Codec, DeliveryId, DeliveryQuery, DeliveryRow, EventId, ManualClock, NewDelivery,
    NewEvent, ReceiverLease, Recorded, RetentionRule, Store, Timestamp,
};
use uuid::Uuid;

use crate::async_trait;

/// Opens stores for the checks.
#[async_trait]
pub trait Harness: Send + Sync {
    /// The store that is proven.
    type Store: Store;

    /// An empty store that takes its time from `clock`.
    async fn open(&self, clock: ManualClock) -> Self::Store;

    /// Called when a check is done with a store, to take its tables away.
    async fn close(&self, store: Self::Store) {
        drop(store);
    }

    /// Whether an open transaction that has written keeps every other writer waiting (as in SQLite). Checks that
    /// need two writers at once are then not applicable, and say so.
    fn one_writer(&self) -> bool {
        false
    }
}

/// A store under proof.
pub(crate) struct Bed<S: Store> {
    pub(crate) store: S,
    pub(crate) clock: ManualClock,
}

macro_rules! checks {
    ($($(#[$needs:ident])? $module:ident::$check:ident,)+) => {
        /// The names of all checks, each a sentence.
        pub fn checks() -> Vec<&'static str> {
            vec![$(stringify!($check)),+]
        }

        /// Runs one check by its name. Answers whether it applies to this store.
        ///
        /// # Panics
        /// If the check fails, or there is none of that name.
        pub async fn test<H: Harness>(harness: &H, check: &str) -> bool {
            match check {
                $(stringify!($check) => {
                    checks!(@needs harness $($needs)?);
                    let bed = open(harness).await;
                    let store = bed.store.clone();
                    // In a task of its own, so that the store is closed even if the check fails.
                    let ended = tokio::spawn($module::$check(bed)).await;
                    harness.close(store).await;
                    if let Err(failed) = ended {
                        std::panic::resume_unwind(failed.into_panic());
                    }
                    true
                })+
                other => panic!("there is no check named {other}"),
            }
        }
    };
    (@needs $harness:ident two_writers) => {
        if $harness.one_writer() {
            return false;
        }
    };
    (@needs $harness:ident) => {};
}

checks! {
    transactions::what_is_not_committed_is_seen_by_nobody_else,
    transactions::what_is_rolled_back_never_was,
    transactions::a_dropped_transaction_is_rolled_back,
    transactions::a_savepoint_undoes_what_came_after_it_alone,
    transactions::savepoints_nest,
    transactions::many_transactions_end_with_nothing_left_open,
    record::an_event_comes_back_as_it_was_written,
    record::ids_are_answered_in_the_order_of_what_was_given,
    record::a_fan_out_of_thousands_is_written_whole,
    record::an_empty_batch_is_nothing,
    record::a_duplicate_names_the_earlier_event_and_writes_nothing,
    record::a_duplicate_within_a_batch_names_the_first_of_it,
    record::a_key_undone_by_a_savepoint_is_free_again,
    #[two_writers] record::a_key_that_another_transaction_has_written_is_waited_for,
    #[two_writers] record::a_key_whose_writer_rolls_back_is_free,
    record::keys_are_compared_by_their_bytes,
    record::texts_at_their_limits_are_kept,
    record::a_large_payload_is_kept,
    record::times_are_kept_to_the_microsecond,
    record::pages_follow_each_other_and_filters_hold,
    record::ids_past_two_to_the_thirty_first_can_be_asked_for,
    claim::a_row_is_claimed_from_its_time_on_and_not_before,
    claim::a_claim_writes_who_when_and_until,
    claim::receivers_are_served_in_the_order_given_and_the_oldest_first,
    claim::no_more_than_the_limit_is_taken,
    claim::nobody_is_given_what_was_not_asked_for,
    claim::only_what_is_named_is_taken,
    claim::only_what_has_been_owed_for_long_enough_is_taken,
    claim::a_row_that_was_born_claimed_is_its_workers_until_the_lease_ends,
    claim::a_claim_lapses_at_its_end_and_not_before,
    claim::each_receiver_has_its_own_lease,
    claim::deliveries_of_one_event_share_it,
    claim::the_receivers_that_are_owed_something_are_known,
    claim::workers_that_claim_at_once_are_never_given_one_row,
    lease::a_renewed_lease_ends_later_and_only_for_its_holder,
    lease::a_row_handed_back_is_what_it_was,
    lease::a_claim_that_is_taken_over_is_its_takers_alone,
    lease::a_lapsed_row_is_noted_once_for_each_run,
    lease::ending_backoffs_never_comes_before_the_due_time,
    settle::every_outcome_writes_its_columns,
    settle::a_settlement_without_its_claim_writes_nothing,
    settle::a_settlement_is_written_once,
    settle::a_batch_settles_each_on_its_own_condition,
    settle::a_settlement_in_a_transaction_counts_with_its_commit,
    settle::an_error_text_is_made_storable,
    settle::counts_are_by_receiver_and_status,
    settle::large_batches_are_settled_whole,
    inspect::a_pause_is_seen_until_its_end_and_replaces_the_workers_own,
    inspect::what_a_receiver_is_owed_is_read_soonest_first_without_what_is_settled,
    operate::what_is_owed_is_withdrawn_and_what_is_claimed_or_settled_is_left,
    operate::a_cancel_counts_with_its_transactions_commit,
    operate::the_dead_alone_are_given_their_budget_back,
    operate::what_is_terminal_is_reopened_what_is_missing_is_added_and_what_is_owed_is_left,
    operate::a_fan_out_of_thousands_is_reopened_whole,
    operate::locked_events_are_read_in_order_and_those_that_are_not_there_left_out,
    #[two_writers] operate::a_lock_on_an_event_is_waited_for,
    #[two_writers] operate::a_cancel_does_not_wait_for_the_transaction_of_a_handler,
    #[two_writers] operate::a_duplicate_in_an_open_transaction_keeps_nobody_from_the_earlier_event,
    operate::an_event_is_pruned_at_the_end_of_its_window_and_not_before,
    operate::an_event_that_owes_anything_is_never_pruned,
    operate::a_prune_keeps_the_newest_success_of_each_receiver,
    operate::a_prune_is_bounded_and_goes_on_where_it_was,
    operate::a_pruned_events_dedupe_key_is_free_again,
    operate::pages_of_what_may_be_pruned_follow_each_other,
    #[two_writers] operate::an_event_that_somebody_holds_is_passed_over_by_a_prune,
    operate::a_backlog_is_counted_up_to_its_bound,
    operate::dead_letters_are_counted_up_to_their_bound,
    operate::filters_of_deliveries_hold_together,
    operate::a_transaction_reads_what_it_has_written,
    operate::operations_that_meet_on_the_same_rows_never_deadlock_to_the_caller,
    races::a_wake_up_reaches_who_listens,
    #[two_writers] races::a_row_settled_in_an_open_transaction_is_passed_over_by_a_claim,
    #[two_writers] races::a_renewal_does_not_wait_for_the_handlers_transaction,
    #[two_writers] races::a_batch_waits_for_the_transaction_that_has_its_row,
    #[two_writers] races::a_hand_back_waits_for_the_transaction_that_has_its_row,
    #[two_writers] races::a_take_over_waits_for_the_transaction_that_has_its_row,
    races::batches_that_overlap_in_other_orders_never_deadlock_to_the_caller,
    cancel::a_dropped_begin_leaves_no_transaction_open,
    cancel::a_dropped_commit_goes_on_or_never_began,
    cancel::a_dropped_record_leaves_all_or_nothing,
    cancel::a_dropped_claim_leaves_rows_claimed_or_free,
    cancel::a_dropped_settlement_is_written_or_not,
    cancel::a_dropped_renewal_or_hand_back_harms_nothing,
    cancel::a_dropped_prune_deletes_whole_events_or_none,
}

async fn open<H: Harness>(harness: &H) -> Bed<H::Store> {
    let clock = ManualClock::at(start());
    Bed { store: harness.open(clock.clone()).await, clock }
}

/// Runs every check.
///
/// # Panics
/// With the name of each check that failed.
pub async fn test_all<H: Harness>(harness: &H) {
    use futures::FutureExt;
    let mut failed = Vec::new();
    for check in checks() {
        let ran = std::panic::AssertUnwindSafe(test(harness, check)).catch_unwind().await;
        if ran.is_err() {
            failed.push(check);
        }
    }
    assert!(
        failed.is_empty(),
        "{} of {} checks failed:\n  {}",
        failed.len(),
        checks().len(),
        failed.join("\n  ")
    );
}

pub(crate) fn start() -> Timestamp {
    "2026-03-01T12:00:00.123456Z".parse().unwrap()
}

pub(crate) const LEASE: Duration = Duration::from_secs(30);
pub(crate) const MICRO: Duration = Duration::from_micros(1);

pub(crate) fn event(now: Timestamp) -> NewEvent {
    NewEvent {
        name: "conformance.Event".into(),
        version: 1,
        codec: Codec::Cbor,
        payload: vec![0xf6],
        dedupe_key: None,
        occurred_at: now,
        recorded_at: now,
        actor_key: String::new(),
        actor_label: String::new(),
        scope: None,
        correlation_id: Uuid::from_u128(7),
        causation_id: None,
        suppressed: None,
        retention: RetentionRule::Ordinary,
        trace_context: None,
        deliveries: Vec::new(),
    }
}

pub(crate) fn owed_to(receiver: &str, at: Timestamp) -> NewDelivery {
    NewDelivery {
        receiver_key: receiver.into(),
        target: String::new(),
        max_attempts: 5,
        available_at: at,
        due_at: at,
        claimed_by: None,
    }
}

/// An event that owes one row to each of these receivers, now.
pub(crate) fn owing(now: Timestamp, receivers: &[&str]) -> NewEvent {
    NewEvent { deliveries: receivers.iter().map(|key| owed_to(key, now)).collect(), ..event(now) }
}

pub(crate) fn keyed(now: Timestamp, key: &str) -> NewEvent {
    NewEvent { dedupe_key: Some(key.to_owned()), ..owing(now, &["a"]) }
}

pub(crate) fn new_of(recorded: &Recorded) -> (EventId, Vec<DeliveryId>) {
    match recorded {
        Recorded::New { event, deliveries } => (*event, deliveries.clone()),
        Recorded::Duplicate { of } => panic!("a duplicate of {of}, and it should be new"),
    }
}

impl<S: Store> Bed<S> {
    pub(crate) fn now(&self) -> Timestamp {
        self.store.now()
    }

    pub(crate) fn pass(&self, by: Duration) {
        self.clock.advance(by);
    }

    /// Records in a transaction of its own.
    pub(crate) async fn fire(&self, events: &[NewEvent]) -> Vec<Recorded> {
        let tx = self.store.begin().await.unwrap();
        let recorded = self.store.record(&tx, events).await.unwrap();
        self.store.commit(tx).await.unwrap();
        recorded
    }

    /// Records one event that owes a row to each receiver, and answers those rows' ids.
    pub(crate) async fn owe(&self, receivers: &[&str]) -> Vec<DeliveryId> {
        new_of(&self.fire(&[owing(self.now(), receivers)]).await[0]).1
    }

    pub(crate) fn request(&self, worker: &str, receivers: &[&str], limit: u32) -> ClaimRequest {
        let receivers =
            receivers.iter().map(|key| ReceiverLease { key: Arc::from(*key), lease: LEASE }).collect();
        ClaimRequest::new(worker.into(), receivers, limit, self.now())
    }

    pub(crate) async fn claim(&self, worker: &str, receivers: &[&str], limit: u32) -> Vec<Claimed> {
        self.store.claim(&self.request(worker, receivers, limit)).await.unwrap()
    }

    pub(crate) async fn claim_one(&self, worker: &str) -> Claimed {
        let mut claimed = self.claim(worker, &["a"], 1).await;
        claimed.pop().expect("a row to claim")
    }

    pub(crate) async fn rows(&self) -> Vec<DeliveryRow> {
        self.store.deliveries(&DeliveryQuery::page(100_000)).await.unwrap()
    }

    pub(crate) async fn row(&self, id: DeliveryId) -> DeliveryRow {
        let query = DeliveryQuery { ids: Some(vec![id]), ..DeliveryQuery::page(1) };
        self.store.deliveries(&query).await.unwrap().remove(0)
    }
}

/// Polls a call that must be waiting for somebody else's transaction: it has had a while, and has not come back.
pub(crate) async fn still_waits<F: Future + Unpin>(call: &mut F) {
    let waited = tokio::time::timeout(Duration::from_millis(150), call).await;
    assert!(waited.is_err(), "it came back, and should have waited for the other transaction");
}
