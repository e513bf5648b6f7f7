//! Transactions that events are fired from.

use std::{
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use owed_core::Store;

use super::{After, AfterCommit, Fire, FireAll, run_after};
use crate::{
    error::Error,
    event::Event,
    operate::{Cancel, DeliveryFilter, EventFilter, Operation, Replay, Requeue},
    outbox::Outbox,
};

/// A transaction to work in and to fire from, without the right to end it: what handlers are lent, and what a
/// function that fires takes as `&Tx<S>`. [`Transaction`], [`Savepoint`] and [`Joined`] all are one.
///
/// It is the store's own transaction to whoever wants to run statements on it: with a SQL feature it implements
/// SeaORM's `ConnectionTrait`, and `*tx` is the `DatabaseTransaction`.
pub struct Tx<S: Store> {
    shared: Arc<Shared<S>>,
}

struct Shared<S: Store> {
    outbox: Outbox<S>,
    raw: S::Tx,
    state: Mutex<State<S>>,
}

struct State<S: Store> {
    after: After<S>,
    poison: Option<String>,
}

impl<S: Store> fmt::Debug for Tx<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tx").finish_non_exhaustive()
    }
}

impl<S: Store> Deref for Tx<S> {
    type Target = S::Tx;

    fn deref(&self) -> &S::Tx {
        &self.shared.raw
    }
}

impl<S: Store> Tx<S> {
    pub(crate) fn new(outbox: Outbox<S>, raw: S::Tx) -> Self {
        let state = Mutex::new(State { after: After::default(), poison: None });
        Tx { shared: Arc::new(Shared { outbox, raw, state }) }
    }

    /// Another handle on the same transaction, to lend to a handler.
    pub(crate) fn lend(&self) -> Self {
        Tx { shared: self.shared.clone() }
    }

    pub(crate) fn outbox(&self) -> &Outbox<S> {
        &self.shared.outbox
    }

    pub(crate) fn raw(&self) -> &S::Tx {
        &self.shared.raw
    }

    fn state(&self) -> MutexGuard<'_, State<S>> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn then(&self, more: After<S>) {
        self.state().after.extend(more);
    }

    pub(crate) fn poison(&self, because: String) {
        self.state().poison.get_or_insert(because);
    }

    /// Fires an event: records it, and what it owes, in this transaction. Nothing is written before it is
    /// awaited.
    ///
    /// In this order: the event is checked, encoded, and written with one delivery row for each durable
    /// receiver (or target); inline receivers run; on-commit receivers, eager attempts and the wake-up are
    /// noted for after the commit.
    ///
    /// ```
    /// # use owed::{Event, Fired, MemoryStore, Outbox};
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, Event)] struct OrderPlaced { order: i64 }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let outbox = Outbox::builder(MemoryStore::new()).event::<OrderPlaced>().build()?;
    /// let tx = outbox.begin().await?;
    /// let first = tx.fire(OrderPlaced { order: 42 }).dedupe_key("order-42").await?;
    /// let again = tx.fire(OrderPlaced { order: 42 }).dedupe_key("order-42").await?;
    /// assert_eq!(again, Fired::Duplicate { of: first.id().unwrap() });
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::NotDeclared`], [`Error::Encode`], [`Error::Owing`]: nothing was written, and
    /// the transaction is usable. [`Error::Inline`], [`Error::Store`]: it can only be rolled back.
    ///
    /// # Cancel safety
    /// Dropped before its end, it may have written the event or not, so the transaction can only be rolled back:
    /// `commit` refuses.
    pub fn fire<E: Event>(&self, event: E) -> Fire<'_, S, E> {
        Fire::new(self, event)
    }

    /// Fires many events of one type at once, in as few round trips as the store allows. The answer has one
    /// entry for each, in order. On the same terms as [`Tx::fire`]: one that is refused refuses all of them
    /// before anything is written.
    pub fn fire_all<E: Event>(&self, events: impl IntoIterator<Item = E>) -> FireAll<'_, S, E> {
        FireAll::new(self, events.into_iter().collect())
    }

    /// As [`Outbox::cancel`], as part of this transaction: it counts with its commit.
    ///
    /// # Cancel safety
    /// Dropped before its end, the transaction can only be rolled back. So after an error.
    pub fn cancel(&self, filter: DeliveryFilter) -> Operation<'_, S, Cancel> {
        Operation::new(self.outbox().clone(), Some(self), Cancel::new(filter))
    }

    /// As [`Outbox::requeue`], as part of this transaction. Relays are woken after its commit.
    ///
    /// # Cancel safety
    /// As [`Tx::cancel`].
    pub fn requeue(&self, filter: DeliveryFilter) -> Operation<'_, S, Requeue> {
        Operation::new(self.outbox().clone(), Some(self), Requeue::new(filter))
    }

    /// As [`Outbox::replay`], as part of this transaction. Relays are woken after its commit.
    ///
    /// # Cancel safety
    /// As [`Tx::cancel`].
    pub fn replay(&self, filter: EventFilter) -> Operation<'_, S, Replay> {
        Operation::new(self.outbox().clone(), Some(self), Replay::new(filter))
    }

    /// Opens a savepoint. Until it is released or rolled back, this transaction can't be used but through it.
    /// What was fired in one that is rolled back leaves no row, no on-commit call and no eager attempt.
    ///
    /// # Errors
    /// If the store can't make one.
    ///
    /// # Cancel safety
    /// Dropped halfway, the transaction can only be rolled back: `commit` refuses. What a driver makes of a
    /// savepoint that nobody waited for is not the same everywhere.
    pub async fn savepoint(&mut self) -> Result<Savepoint<'_, S>, Error> {
        let halfway = Halfway::new(self, "opening a savepoint");
        let raw = self.outbox().store().savepoint(self.raw()).await?;
        halfway.ended();
        let tx = Tx::new(self.outbox().clone(), raw);
        Ok(Savepoint { tx, around: self })
    }

    /// Takes the transaction apart, to end it. Refuses one that is poisoned, or that somebody still holds.
    pub(crate) async fn finish(self) -> Result<(Outbox<S>, S::Tx, After<S>), Error> {
        let poison = self.state().poison.clone();
        let Ok(shared) = Arc::try_unwrap(self.shared) else { return Err(Error::StillShared) };
        let Shared { outbox, raw, state } = shared;
        match poison {
            None => Ok((outbox, raw, state.into_inner().unwrap_or_else(PoisonError::into_inner).after)),
            Some(because) => {
                outbox.store().rollback(raw).await?;
                Err(Error::Poisoned { because })
            }
        }
    }

    pub(crate) async fn undo(self) -> Result<(), Error> {
        let Ok(shared) = Arc::try_unwrap(self.shared) else { return Err(Error::StillShared) };
        Ok(shared.outbox.store().rollback(shared.raw).await?)
    }
}

/// Work in a transaction that may end halfway: unless it says that it came to its end, the transaction can't be
/// committed.
pub(crate) struct Halfway<'t, S: Store> {
    tx: &'t Tx<S>,
    doing: &'static str,
    ended: bool,
}

impl<'t, S: Store> Halfway<'t, S> {
    pub(crate) fn new(tx: &'t Tx<S>, doing: &'static str) -> Self {
        Halfway { tx, doing, ended: false }
    }

    pub(crate) fn ended(mut self) {
        self.ended = true;
    }
}

impl<S: Store> Drop for Halfway<'_, S> {
    fn drop(&mut self) {
        if !self.ended {
            self.tx.poison(format!("{} did not come to its end", self.doing));
        }
    }
}

/// A transaction that the outbox opened. Dropped, it rolls back.
///
/// Ending it takes it away, so it can't be committed twice or fired from afterwards.
#[must_use = "a transaction that is dropped rolls back: call `commit`"]
pub struct Transaction<S: Store> {
    tx: Tx<S>,
}

impl<S: Store> fmt::Debug for Transaction<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").finish_non_exhaustive()
    }
}

impl<S: Store> Deref for Transaction<S> {
    type Target = Tx<S>;

    fn deref(&self) -> &Tx<S> {
        &self.tx
    }
}

impl<S: Store> DerefMut for Transaction<S> {
    fn deref_mut(&mut self) -> &mut Tx<S> {
        &mut self.tx
    }
}

impl<S: Store> Transaction<S> {
    pub(crate) fn new(outbox: Outbox<S>, raw: S::Tx) -> Self {
        Transaction { tx: Tx::new(outbox, raw) }
    }

    /// Commits it, then runs what waits for the commit: on-commit receivers (waited for, each on its own),
    /// eager attempts (not waited for), the wake-up.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if an inline receiver refused in it: it was rolled back. [`Error::StillShared`] if a
    /// handler kept it. [`Error::Store`] if the database refused; if that is
    /// [`Unavailable`](crate::StoreError::Unavailable), whether it committed is not known, and a dedupe key is
    /// what makes trying again safe.
    ///
    /// # Cancel safety
    /// Once it has begun it goes on, and so does what waits for it, even if this future is dropped.
    pub async fn commit(self) -> Result<(), Error> {
        let (outbox, raw, after) = self.tx.finish().await?;
        let committing = tokio::spawn(async move {
            outbox.store().commit(raw).await?;
            run_after(&outbox, after).await;
            Ok(())
        });
        crate::task::join(committing).await
    }

    /// Rolls it back, and waits for it.
    ///
    /// # Errors
    /// If the database can't be reached; it has then not committed either.
    ///
    /// # Cancel safety
    /// Dropped, the transaction is rolled back all the same.
    pub async fn rollback(self) -> Result<(), Error> {
        self.tx.undo().await
    }
}

/// A savepoint in a transaction. Dropped, what was done since it is undone.
#[must_use = "a savepoint that is dropped is undone: call `release`"]
pub struct Savepoint<'t, S: Store> {
    tx: Tx<S>,
    around: &'t mut Tx<S>,
}

impl<S: Store> fmt::Debug for Savepoint<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Savepoint").finish_non_exhaustive()
    }
}

impl<S: Store> Deref for Savepoint<'_, S> {
    type Target = Tx<S>;

    fn deref(&self) -> &Tx<S> {
        &self.tx
    }
}

impl<S: Store> DerefMut for Savepoint<'_, S> {
    fn deref_mut(&mut self) -> &mut Tx<S> {
        &mut self.tx
    }
}

impl<S: Store> Savepoint<'_, S> {
    /// Keeps what was done since the savepoint, as part of the transaction around it.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if an inline receiver refused in it: it was undone, and the transaction around it is
    /// as it was before. [`Error::Store`] if the database refused.
    ///
    /// # Cancel safety
    /// Dropped halfway, it is not known which of the two it is, so the transaction around it can only be rolled
    /// back.
    pub async fn release(self) -> Result<(), Error> {
        let (outbox, raw, after) = self.tx.finish().await?;
        let halfway = Halfway::new(self.around, "releasing a savepoint");
        outbox.store().commit(raw).await?;
        halfway.ended();
        self.around.then(after);
        Ok(())
    }

    /// Undoes what was done since the savepoint.
    ///
    /// # Errors
    /// If the database can't be reached.
    ///
    /// # Cancel safety
    /// Dropped, it is undone all the same.
    pub async fn rollback(self) -> Result<(), Error> {
        self.tx.undo().await
    }
}

/// A place to fire from in a transaction that the service opened itself. See [`Outbox::join`].
#[must_use = "what is fired in a joined transaction is undone unless it is closed: call `close`"]
pub struct Joined<'t, S: Store> {
    tx: Tx<S>,
    service: PhantomData<&'t S::Tx>,
}

impl<S: Store> fmt::Debug for Joined<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joined").finish_non_exhaustive()
    }
}

impl<S: Store> Deref for Joined<'_, S> {
    type Target = Tx<S>;

    fn deref(&self) -> &Tx<S> {
        &self.tx
    }
}

impl<S: Store> DerefMut for Joined<'_, S> {
    fn deref_mut(&mut self) -> &mut Tx<S> {
        &mut self.tx
    }
}

impl<S: Store> Joined<'_, S> {
    pub(crate) fn new(outbox: Outbox<S>, raw: S::Tx) -> Self {
        Joined { tx: Tx::new(outbox, raw), service: PhantomData }
    }

    /// Makes what was fired part of the service's transaction, and answers what has to run once the service has
    /// committed it.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if an inline receiver refused: what was done since `join` is undone. [`Error::Store`]
    /// if the database refused.
    ///
    /// # Cancel safety
    /// Dropped halfway, it is not known which of the two it is: roll the transaction back.
    pub async fn close(self) -> Result<AfterCommit<S>, Error> {
        let (outbox, raw, after) = self.tx.finish().await?;
        outbox.store().commit(raw).await?;
        Ok(AfterCommit::new(outbox, after))
    }
}
