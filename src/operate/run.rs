//! Cancel, requeue and replay: over what is selected, a page at a time.

use std::{
    collections::{BTreeSet, VecDeque},
    future::IntoFuture,
    ops::AddAssign,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures::{
    future::BoxFuture,
    stream::{self, BoxStream, StreamExt},
};
use owed_core::{
    Cancelled, DeliveryId, DeliveryQuery, EventId, EventQuery, EventRow, Reopened, Status, Store,
};

use super::{DeliveryFilter, EventFilter};
use crate::{
    error::Error,
    fire::{After, Halfway, Tx, again},
    outbox::Outbox,
};

/// The most rows in one transaction.
const PAGE: u32 = 500;
/// How often a transaction of our own is tried while the database asks for it.
const TRIES: u32 = 5;

/// What a replay did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replayed {
    /// Events that were looked at.
    pub events: u64,
    /// Deliveries that were terminal and are owed again.
    pub reopened: u64,
    /// Deliveries of receivers (or targets) that had none.
    pub added: u64,
}

impl AddAssign for Replayed {
    fn add_assign(&mut self, more: Self) {
        self.events += more.events;
        self.reopened += more.reopened;
        self.added += more.added;
    }
}

/// What kind of operation it is. Public for its `Done` alone, and can't be named outside.
#[async_trait]
pub trait Work<S: Store>: Send + Sync {
    type Done: AddAssign + Copy + Default + Send + Sync;

    /// The next page of what is selected, at most `limit` rows, and the events to lock for it.
    async fn page(
        &mut self,
        outbox: &Outbox<S>,
        tx: Option<&S::Tx>,
        limit: u32,
    ) -> Result<Option<BTreeSet<EventId>>, Error>;

    /// How many rows the page has.
    fn rows(&self) -> u64;

    /// What doing it would come to, as far as can be told.
    async fn foresee(&self, outbox: &Outbox<S>, tx: Option<&S::Tx>) -> Result<Self::Done, Error>;

    /// Does it to the page, in `tx`.
    async fn act(
        &self,
        outbox: &Outbox<S>,
        tx: &S::Tx,
        events: &BTreeSet<EventId>,
    ) -> Result<Self::Done, Error>;

    /// Whether relays have something to do now.
    fn wakes(done: &Self::Done) -> bool;
}

/// An operation on what was selected: await it, or follow it with [`progress`](Operation::progress).
///
/// It goes over what is selected a page at a time, oldest first, each page in a short transaction of its own that locks
/// the events first; on a [`Tx`] all of it is part of that transaction. Deadlocks are tried again inside, where the
/// transaction is its own.
///
/// # Cancel safety
/// Dropped, the pages that are done stay done, and the one under way is done or not. Dropped on a [`Tx`], that can only
/// be rolled back.
#[must_use = "nothing happens until it is awaited"]
pub struct Operation<'t, S: Store, W> {
    outbox: Outbox<S>,
    tx: Option<&'t Tx<S>>,
    work: W,
    dry_run: bool,
    limit: Option<u64>,
    per_second: Option<u32>,
}

impl<S: Store, W> std::fmt::Debug for Operation<'_, S, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Operation").field("dry_run", &self.dry_run).finish_non_exhaustive()
    }
}

impl<'t, S: Store, W> Operation<'t, S, W> {
    pub(crate) fn new(outbox: Outbox<S>, tx: Option<&'t Tx<S>>, work: W) -> Self {
        Operation { outbox, tx, work, dry_run: false, limit: None, per_second: None }
    }

    /// Changes nothing, and answers what it would come to now.
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }

    /// Stops after so many rows (events, for a replay). Zero is none.
    pub fn limit(mut self, rows: u64) -> Self {
        self.limit = Some(rows);
        self
    }
}

impl<'t, S: Store> Operation<'t, S, Requeue> {
    /// Goes no faster than so many rows a second, so that what failed before is not run over again at once. At least 1.
    pub fn per_second(mut self, rows: u32) -> Self {
        self.per_second = Some(rows.max(1));
        self
    }
}

impl<'t, S: Store> Operation<'t, S, Replay> {
    /// Goes no faster than so many events a second. At least 1.
    pub fn per_second(mut self, events: u32) -> Self {
        self.per_second = Some(events.max(1));
        self
    }

    /// Replays to these receivers alone: others are neither reopened nor added.
    pub fn receivers<K: Into<String>>(mut self, keys: impl IntoIterator<Item = K>) -> Self {
        self.work.receivers = Some(keys.into_iter().map(Into::into).collect());
        self
    }
}

struct Run<'t, S: Store, W: Work<S>> {
    operation: Operation<'t, S, W>,
    total: W::Done,
    seen: u64,
}

impl<S: Store, W: Work<S>> Run<'_, S, W> {
    /// Does the next page. Answers the total so far; `None` at the end.
    async fn step(&mut self) -> Result<Option<W::Done>, Error> {
        let Operation { outbox, tx, work, dry_run, limit, per_second } = &mut self.operation;
        let left = limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.seen));
        if left == 0 {
            return Ok(None);
        }
        let mut page = PAGE.min(u32::try_from(left).unwrap_or(u32::MAX));
        if let Some(rate) = *per_second {
            page = page.min(rate);
            if self.seen > 0 && !*dry_run {
                // As long as the page before may take.
                tokio::time::sleep(Duration::from_secs_f64(work.rows() as f64 / f64::from(rate))).await;
            }
        }
        let raw = tx.map(|tx| tx.raw());
        let Some(events) = work.page(outbox, raw, page).await? else { return Ok(None) };
        self.seen += work.rows();
        self.total += match tx {
            _ if *dry_run => work.foresee(outbox, raw).await?,
            Some(tx) => work.act(outbox, tx.raw(), &events).await?,
            None => committed(outbox, work, &events).await?,
        };
        Ok(Some(self.total))
    }
}

/// Does it in a transaction of its own.
async fn committed<S: Store, W: Work<S>>(
    outbox: &Outbox<S>,
    work: &W,
    events: &BTreeSet<EventId>,
) -> Result<W::Done, Error> {
    let store = outbox.store();
    let mut tries = 1;
    loop {
        let attempt = async {
            let tx = store.begin().await?;
            let done = work.act(outbox, &tx, events).await?;
            store.commit(tx).await?;
            Ok(done)
        };
        match attempt.await {
            Err(Error::Store(owed_core::StoreError::Retry { .. })) if tries < TRIES => tries += 1,
            Ok(done) => {
                if W::wakes(&done) {
                    outbox.waker().wake();
                }
                return Ok(done);
            }
            Err(error) => return Err(error),
        }
    }
}

impl<'t, S: Store, W: Work<S> + 't> Operation<'t, S, W> {
    fn start(self) -> Run<'t, S, W> {
        Run { operation: self, total: W::Done::default(), seen: 0 }
    }

    /// The total so far, after each page: for whoever shows progress. Ends with the operation, or with its first error.
    ///
    /// ```
    /// # use futures::TryStreamExt;
    /// # use owed::{DeliveryFilter, MemoryStore, Outbox};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
    /// let mut progress = outbox.requeue(DeliveryFilter::receiver("shop.receipt")).progress();
    /// while let Some(so_far) = progress.try_next().await? {
    ///     println!("{so_far} requeued");
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Panics
    /// On a [`Tx`]: there, await it.
    pub fn progress(self) -> BoxStream<'t, Result<W::Done, Error>> {
        assert!(self.tx.is_none(), "an operation in a transaction is awaited as a whole");
        stream::try_unfold(self.start(), async |mut run| Ok(run.step().await?.map(|total| (total, run))))
            .boxed()
    }
}

impl<'t, S: Store, W: Work<S> + 't> IntoFuture for Operation<'t, S, W> {
    type Output = Result<W::Done, Error>;
    type IntoFuture = BoxFuture<'t, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let (tx, dry_run) = (self.tx, self.dry_run);
            let halfway = tx.map(|tx| Halfway::new(tx, "an operation on deliveries"));
            let mut run = self.start();
            while run.step().await?.is_some() {}
            if let Some(halfway) = halfway {
                halfway.ended();
            }
            if let Some(tx) = tx.filter(|_| !dry_run && W::wakes(&run.total)) {
                tx.then(After { owes: true, ..After::default() });
            }
            Ok(run.total)
        })
    }
}

/// A page of deliveries.
#[derive(Default)]
struct Page {
    query: Option<DeliveryQuery>,
    ids: Vec<DeliveryId>,
    claimed: u64,
}

impl Page {
    async fn next<S: Store>(
        &mut self,
        outbox: &Outbox<S>,
        tx: Option<&S::Tx>,
        limit: u32,
        filter: &DeliveryFilter,
        statuses: &[Status],
    ) -> Result<Option<BTreeSet<EventId>>, Error> {
        let mut query = match self.query.take() {
            Some(query) => query,
            None => filter.query(outbox, statuses)?,
        };
        query.limit = limit;
        let rows = match tx {
            Some(tx) => outbox.store().deliveries_in(tx, &query).await?,
            None => outbox.store().deliveries(&query).await?,
        };
        let Some(last) = rows.last() else { return Ok(None) };
        query.after = Some(last.id);
        self.query = Some(query);
        self.ids = rows.iter().map(|row| row.id).collect();
        self.claimed = rows.iter().filter(|row| row.status == Status::Claimed).count() as u64;
        Ok(Some(rows.iter().map(|row| row.event_id).collect()))
    }
}

async fn lock<S: Store>(
    outbox: &Outbox<S>,
    tx: &S::Tx,
    events: &BTreeSet<EventId>,
) -> Result<Vec<EventRow>, Error> {
    let events: Vec<EventId> = events.iter().copied().collect();
    Ok(outbox.store().lock_events(tx, &events).await?)
}

/// Withdraws deliveries. Made by [`Outbox::cancel`].
pub struct Cancel {
    filter: DeliveryFilter,
    page: Page,
}

impl Cancel {
    pub(crate) fn new(filter: DeliveryFilter) -> Self {
        Cancel { filter, page: Page::default() }
    }
}

#[async_trait]
impl<S: Store> Work<S> for Cancel {
    type Done = Cancelled;

    async fn page(
        &mut self,
        outbox: &Outbox<S>,
        tx: Option<&S::Tx>,
        limit: u32,
    ) -> Result<Option<BTreeSet<EventId>>, Error> {
        let owed = [Status::Pending, Status::Failed, Status::Claimed];
        self.page.next(outbox, tx, limit, &self.filter, &owed).await
    }

    fn rows(&self) -> u64 {
        self.page.ids.len() as u64
    }

    async fn foresee(&self, _: &Outbox<S>, _: Option<&S::Tx>) -> Result<Cancelled, Error> {
        Ok(Cancelled::new(self.page.ids.len() as u64 - self.page.claimed, self.page.claimed))
    }

    async fn act(
        &self,
        outbox: &Outbox<S>,
        tx: &S::Tx,
        events: &BTreeSet<EventId>,
    ) -> Result<Cancelled, Error> {
        lock(outbox, tx, events).await?;
        Ok(outbox.store().cancel(tx, &self.page.ids, outbox.now()).await?)
    }

    fn wakes(_: &Cancelled) -> bool {
        false
    }
}

/// Gives dead letters their budget back. Made by [`Outbox::requeue`].
pub struct Requeue {
    filter: DeliveryFilter,
    page: Page,
}

impl Requeue {
    pub(crate) fn new(filter: DeliveryFilter) -> Self {
        Requeue { filter, page: Page::default() }
    }
}

#[async_trait]
impl<S: Store> Work<S> for Requeue {
    type Done = u64;

    async fn page(
        &mut self,
        outbox: &Outbox<S>,
        tx: Option<&S::Tx>,
        limit: u32,
    ) -> Result<Option<BTreeSet<EventId>>, Error> {
        self.page.next(outbox, tx, limit, &self.filter, &[Status::Dead]).await
    }

    fn rows(&self) -> u64 {
        self.page.ids.len() as u64
    }

    async fn foresee(&self, _: &Outbox<S>, _: Option<&S::Tx>) -> Result<u64, Error> {
        Ok(self.page.ids.len() as u64)
    }

    async fn act(&self, outbox: &Outbox<S>, tx: &S::Tx, events: &BTreeSet<EventId>) -> Result<u64, Error> {
        lock(outbox, tx, events).await?;
        Ok(outbox.store().requeue(tx, &self.page.ids, outbox.now()).await?)
    }

    fn wakes(done: &u64) -> bool {
        *done > 0
    }
}

/// Owes events again. Made by [`Outbox::replay`].
pub struct Replay {
    query: EventQuery,
    receivers: Option<BTreeSet<String>>,
    /// A page of events; the first of them is the one at hand.
    events: VecDeque<EventRow>,
}

impl Replay {
    pub(crate) fn new(filter: EventFilter) -> Self {
        Replay { query: filter.0, receivers: None, events: VecDeque::new() }
    }
}

#[async_trait]
impl<S: Store> Work<S> for Replay {
    type Done = Replayed;

    /// One event: each is a transaction of its own, since one may owe very many rows.
    async fn page(
        &mut self,
        outbox: &Outbox<S>,
        tx: Option<&S::Tx>,
        _: u32,
    ) -> Result<Option<BTreeSet<EventId>>, Error> {
        self.events.pop_front();
        if self.events.is_empty() {
            self.query.limit = PAGE;
            self.events = match tx {
                Some(tx) => outbox.store().events_in(tx, &self.query).await?,
                None => outbox.store().events(&self.query).await?,
            }
            .into();
            if let Some(last) = self.events.back() {
                self.query.after = Some(last.id);
            }
        }
        Ok(self.events.front().map(|event| BTreeSet::from([event.id])))
    }

    fn rows(&self) -> u64 {
        1
    }

    async fn foresee(&self, outbox: &Outbox<S>, tx: Option<&S::Tx>) -> Result<Replayed, Error> {
        let Some(event) = self.events.front() else { return Ok(Replayed::default()) };
        let rows = self.owed(outbox, event)?;
        let of = EventQuery { ids: Some(vec![event.id]), ..EventQuery::default() };
        let mut query = DeliveryQuery { of, ..DeliveryQuery::page(10_000) };
        let mut there = std::collections::HashMap::new();
        loop {
            let page = match tx {
                Some(tx) => outbox.store().deliveries_in(tx, &query).await?,
                None => outbox.store().deliveries(&query).await?,
            };
            let Some(last) = page.last() else { break };
            query.after = Some(last.id);
            there.extend(page.into_iter().map(|row| ((row.receiver_key, row.target), row.status)));
        }
        let mut foreseen = Replayed { events: 1, ..Replayed::default() };
        for row in rows {
            match there.get(&(row.receiver_key.to_string(), row.target)) {
                None => foreseen.added += 1,
                Some(status) if status.is_terminal() => foreseen.reopened += 1,
                Some(_) => {}
            }
        }
        Ok(foreseen)
    }

    async fn act(
        &self,
        outbox: &Outbox<S>,
        tx: &S::Tx,
        events: &BTreeSet<EventId>,
    ) -> Result<Replayed, Error> {
        let mut done = Replayed::default();
        // What is gone by now is left out.
        for event in lock(outbox, tx, events).await? {
            let rows = self.owed(outbox, &event)?;
            let Reopened { reopened, added, .. } = outbox.store().reopen(tx, event.id, &rows).await?;
            done += Replayed { events: 1, reopened, added };
        }
        Ok(done)
    }

    fn wakes(done: &Replayed) -> bool {
        done.reopened + done.added > 0
    }
}

impl Replay {
    fn owed<S: Store>(
        &self,
        outbox: &Outbox<S>,
        event: &EventRow,
    ) -> Result<Vec<owed_core::NewDelivery>, Error> {
        let only = |key: &str| self.receivers.as_ref().is_none_or(|keys| keys.contains(key));
        again(outbox, &Arc::new(event.clone()), outbox.now(), only)
    }
}
