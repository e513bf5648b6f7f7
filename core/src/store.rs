//! The trait that a database backend implements.

use async_trait::async_trait;

use crate::{
    Backlog, Cancelled, ClaimKey, ClaimRequest, Claimed, DeliveryId, DeliveryQuery, DeliveryRow, EventId,
    EventQuery, EventRow, Listener, NewDelivery, NewEvent, Pause, Prunable, PruneMark, Pruned, Recorded,
    Reopened, Settled, Settlement, StoreError, Tally, Timestamp,
};

/// What a database can do, as data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The database and its version, for people: `PostgreSQL 15.4`.
    pub database: String,
    /// Whether two processes that claim at once can never be given one row.
    pub atomic_claims: bool,
    /// Whether a wake-up reaches relays in other processes.
    pub wakes_other_processes: bool,
}

impl Capabilities {
    /// A database that does everything.
    pub fn new(database: impl Into<String>) -> Self {
        Capabilities { database: database.into(), atomic_claims: true, wakes_other_processes: true }
    }
}

/// Where events and deliveries are kept.
///
/// Everything that `owed` promises rests on what is written here; the feature `conformance` of the crate
/// `owed` proves each sentence of it against a store.
///
/// # Rules that hold for every method
///
/// 1. **Rows are chosen by state and time, never by id.** A transaction with a lower id can commit later.
/// 2. **A write to a claimed row is a compare-and-set on its claim**: it happens where the row is still
///    `claimed` by exactly that worker since exactly that moment, and nowhere else. A worker that lost its row
///    writes nothing over whoever took it.
/// 3. **Ownership ends by itself.** A claim holds until `available_at`; after that anybody may claim the row.
///    Nothing else has to happen first, and nothing but the row is read to know it.
/// 4. **Uncommitted writes are seen by their own transaction alone.** Rolled back, they never were.
/// 5. **A call that is not given a transaction makes its own**, short, at READ COMMITTED or better, takes its
///    row locks in ascending order of id, and retries a deadlock or a serialisation failure itself, a few times.
/// 6. **No connection, lock or transaction is held after a call returns**, except by a `Tx`.
/// 7. **Dropping a call's future leaves nothing behind**: either the call's whole effect or none of it, no open
///    transaction in the pool, no lock. Dropping a `Tx` rolls it back.
/// 8. **Texts are compared by their bytes.** Keys that differ in case or accent are different keys.
/// 9. **Times are kept to the microsecond**, in UTC, whatever the session's time zone.
///
/// # Errors
///
/// Every method fails with a [`StoreError`] whose variant says what the caller can do. After an error inside a
/// transaction the transaction can only be rolled back, unless a method says otherwise.
#[async_trait]
pub trait Store: Clone + Send + Sync + 'static {
    /// An open transaction. For a SQL store it is what the service's own statements run on. Dropped, it rolls
    /// back.
    type Tx: Send + Sync + 'static;

    /// What this database can do.
    fn capabilities(&self) -> Capabilities;

    /// The time by this store's clock, in whole microseconds. The same for all clones.
    fn now(&self) -> Timestamp;

    /// Compares this store's clock with the database's, where it has one. Called now and then.
    async fn sync_clock(&self) -> Result<(), StoreError>;

    // --- transactions -----------------------------------------------------------------------------------

    /// Opens a transaction.
    ///
    /// Dropped in flight, it leaves no open transaction on a connection that others will use.
    async fn begin(&self) -> Result<Self::Tx, StoreError>;

    /// Opens a savepoint inside `tx`. Until it ends, everything done on `tx` is done inside it.
    async fn savepoint(&self, tx: &Self::Tx) -> Result<Self::Tx, StoreError>;

    /// Commits a transaction, or releases a savepoint into the one around it.
    ///
    /// Once begun it goes on, even if its future is dropped. If it fails with
    /// [`StoreError::Unavailable`], whether it committed is not known.
    async fn commit(&self, tx: Self::Tx) -> Result<(), StoreError>;

    /// Undoes a transaction, or what was done since a savepoint.
    async fn rollback(&self, tx: Self::Tx) -> Result<(), StoreError>;

    // --- fire -------------------------------------------------------------------------------------------

    /// Writes events and what they owe, in `tx`. The answer has one entry for each event, in order.
    ///
    /// - An event whose dedupe key is already there (committed, or earlier in this transaction, or earlier in
    ///   this very call) is [`Recorded::Duplicate`], names the earlier one, writes nothing, and **leaves the
    ///   transaction usable**. A key that another open transaction has written is waited for: if that one
    ///   commits this is a duplicate, if it rolls back this is new.
    /// - A delivery's `claimed_by` makes it born claimed at its event's `recorded_at`: no other worker can take
    ///   it before `available_at`.
    /// - The values have been checked with [`limits::event`](crate::limits::event) by the caller.
    async fn record(&self, tx: &Self::Tx, events: &[NewEvent]) -> Result<Vec<Recorded>, StoreError>;

    // --- relay ------------------------------------------------------------------------------------------

    /// Takes up to `limit` rows of the named receivers that may be taken at `now`: those with
    /// `available_at <= now`, whatever their status.
    ///
    /// - Receivers are served in the order given; within one, the oldest `available_at` first.
    /// - Each becomes `claimed` by the worker at `now`, with `available_at = now + lease`. One that was
    ///   `claimed` before has lapsed: its `lapses` becomes at least 1 (see [`Store::suspect`]).
    /// - Rows that another transaction holds are passed over, not waited for. No row is given to two workers.
    /// - The cost follows neither the settled rows, nor the rows that are scheduled ahead, nor those of
    ///   receivers that were not asked for.
    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Claimed>, StoreError>;

    /// Moves a claim: the row becomes claimed by `worker` at `now` until `until`, if it is still claimed under
    /// exactly `key`. `None` where it is not. Committed before it returns.
    async fn take(
        &self,
        key: &ClaimKey,
        worker: &str,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<Option<Claimed>, StoreError>;

    /// Moves the end of these leases to `until`, and says which of them are still held.
    async fn renew(&self, keys: &[ClaimKey], until: Timestamp) -> Result<Vec<DeliveryId>, StoreError>;

    /// Hands rows back unrun: they are what they were before the claim (`failed` if an error is kept, else
    /// `pending`), and may be taken from `at` on. Lapses are left as they are. Says how many were still held.
    async fn release(&self, keys: &[ClaimKey], at: Timestamp) -> Result<u64, StoreError>;

    /// Notes, before its handler starts, that a row which has lapsed before is being run: adds one to `lapses`.
    /// A process that dies with many rows in hand makes them all lapse, but only those it was running are
    /// charged for it again.
    async fn suspect(&self, key: &ClaimKey) -> Result<Settled, StoreError>;

    /// Writes one settlement in `tx`, at `now`. See [`Settlement::columns`]. Takes effect with the commit.
    async fn settle(
        &self,
        tx: &Self::Tx,
        settlement: &Settlement,
        now: Timestamp,
    ) -> Result<Settled, StoreError>;

    /// Writes many settlements at once, each on its own condition, at `now`. The answer has one entry for each,
    /// in order. Writing the same ones again after an error is safe: those that were written are
    /// [`Settled::Lost`] the second time.
    async fn settle_all(
        &self,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<Vec<Settled>, StoreError>;

    /// Ends the backoff of these receivers' failed rows: `available_at` becomes the later of `now` and
    /// `due_at`. Says how many were moved. A row that is scheduled is never moved before its time.
    async fn expedite(&self, receivers: &[&str], now: Timestamp) -> Result<u64, StoreError>;

    /// Every receiver that has rows which are not settled, in order. The cost follows the number of receivers,
    /// not of rows.
    async fn owed_receivers(&self) -> Result<Vec<String>, StoreError>;

    /// Records that a worker pauses a lane, in place of what it recorded for that lane before, and removes the pauses
    /// that had ended by `since`.
    async fn pause(&self, pause: &Pause) -> Result<(), StoreError>;

    // --- operate ----------------------------------------------------------------------------------------

    /// Locks these events until `tx` ends, in ascending order of id whatever the order given, and reads those that
    /// are there. Whoever cancels, requeues, reopens or prunes rows of an event holds this lock, so that they never
    /// meet half-way; claims and settlements do not take it.
    async fn lock_events(&self, tx: &Self::Tx, events: &[EventId]) -> Result<Vec<EventRow>, StoreError>;

    /// Withdraws those of these rows that are pending or failed, in `tx`: they become `cancelled` at `now`, nothing
    /// else about them changes, and `available_at` becomes null. A row that is claimed is counted, and left alone.
    /// The caller has locked their events.
    async fn cancel(
        &self,
        tx: &Self::Tx,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<Cancelled, StoreError>;

    /// Gives those of these rows that are dead their budget back, in `tx`: pending, owed from `now`, no attempts, no
    /// error. Says how many. The caller has locked their events.
    async fn requeue(
        &self,
        tx: &Self::Tx,
        deliveries: &[DeliveryId],
        now: Timestamp,
    ) -> Result<u64, StoreError>;

    /// Owes these rows of one event again, in `tx`. Each is known by its receiver and target: where there is none, it
    /// is written; one that is terminal becomes pending, with no attempts and no error, owed from the new `due_at`
    /// (`succeeded_at` and the budget are kept); one that is owed or claimed is left alone. The caller has locked the
    /// event.
    async fn reopen(
        &self,
        tx: &Self::Tx,
        event: EventId,
        rows: &[NewDelivery],
    ) -> Result<Reopened, StoreError>;

    /// The windows of their own that events here have, in seconds and in ascending order. The cost follows the number
    /// of windows, not of events.
    async fn retention_windows(&self) -> Result<Vec<i64>, StoreError>;

    /// Up to `limit` events that a prune may delete, from after `after` on, in the order of [`PruneMark`] for a window
    /// and of ids else. Only reads. With nothing due, the cost follows neither settled history nor events of other
    /// kinds.
    async fn prunable(
        &self,
        kind: &Prunable,
        after: Option<PruneMark>,
        limit: u32,
    ) -> Result<Vec<PruneMark>, StoreError>;

    /// Deletes those of these events that are due, with their deliveries, at most about `rows` rows in all: the
    /// deliveries of one event may go in several steps, and the event with the last of them.
    ///
    /// In one transaction: the events are locked in ascending order (those that others have locked are passed over),
    /// *then* it is checked that they are due, the newest success of each receiver among what goes is kept (see
    /// [`Store::last_successes`]), and they are deleted. A dedupe key is free again afterwards.
    async fn prune(&self, kind: &Prunable, events: &[EventId], rows: u32) -> Result<Pruned, StoreError>;

    // --- inspect ----------------------------------------------------------------------------------------

    /// The pauses that end after `now`, ordered by lane and worker.
    async fn pauses(&self, now: Timestamp) -> Result<Vec<Pause>, StoreError>;

    /// The rows of a receiver that are not settled, those that may be taken soonest first. The cost follows `limit`,
    /// not the settled rows.
    async fn owed(&self, receiver: &str, limit: u32) -> Result<Vec<DeliveryRow>, StoreError>;

    /// Counts what a receiver is owed at `now`, looking at no more than `bound` rows, those that may be taken soonest
    /// first. The cost follows the bound, not the settled rows.
    async fn backlog(&self, receiver: &str, now: Timestamp, bound: u32) -> Result<Backlog, StoreError>;

    /// How many dead letters each receiver has, in the order of their keys, looking at no more than `bound` of them.
    /// The cost follows the bound, not the other rows.
    async fn dead_letters(&self, bound: u32) -> Result<Vec<(String, u64)>, StoreError>;

    /// Counts deliveries by receiver and status, in that order. Reads the whole table.
    async fn tally(&self) -> Result<Vec<Tally>, StoreError>;

    /// Reads a page of events.
    async fn events(&self, query: &EventQuery) -> Result<Vec<EventRow>, StoreError>;

    /// Reads a page of events as `tx` sees them.
    async fn events_in(&self, tx: &Self::Tx, query: &EventQuery) -> Result<Vec<EventRow>, StoreError>;

    /// Reads a page of deliveries. The cost of a page of dead ones follows their number, not that of the others.
    async fn deliveries(&self, query: &DeliveryQuery) -> Result<Vec<DeliveryRow>, StoreError>;

    /// Reads a page of deliveries as `tx` sees them.
    async fn deliveries_in(
        &self,
        tx: &Self::Tx,
        query: &DeliveryQuery,
    ) -> Result<Vec<DeliveryRow>, StoreError>;

    /// When each receiver last succeeded, in the order of their keys: the later of what its rows say and what a prune
    /// kept. Those that never did are not in the answer. Reads the whole table.
    async fn last_successes(&self) -> Result<Vec<(String, Timestamp)>, StoreError>;

    // --- wake -------------------------------------------------------------------------------------------

    /// Says that something may be owed. Never part of a transaction; may fail or be lost without harm.
    async fn wake(&self) -> Result<(), StoreError>;

    /// Starts to listen for [`Store::wake`], of this process and, where the database can, of others.
    async fn listen(&self) -> Result<Box<dyn Listener>, StoreError>;

    /// The same store over at most so many connections of its own, made on the runtime that calls it. The relay
    /// renews its leases through one, on a thread of their own, so that handlers that block the others can't lose
    /// them; a pool of tasks works on another.
    async fn detached(&self, connections: u32) -> Result<Self, StoreError>;
}
