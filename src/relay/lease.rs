//! Keeps leases, on a thread of its own: a handler that blocks every thread of the runtime does not lose its row.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use owed_core::{ClaimKey, Store};
use tokio::sync::Notify;
use tracing::{info, warn};

/// The claims that this process holds.
pub(crate) struct Leases<S: Store> {
    store: S,
    kept: Arc<Kept>,
}

#[derive(Default)]
pub(crate) struct Kept {
    state: Mutex<State>,
    /// Raised when a shorter lease than any before is held, and when everything is dropped.
    changed: Condvar,
    eager_done: Notify,
}

struct State {
    held: HashMap<ClaimKey, Keep>,
    eager: usize,
    keeping: bool,
    /// The shortest lease that was ever held: the thread looks at least three times in it.
    shortest: Duration,
}

impl Default for State {
    fn default() -> Self {
        State { held: HashMap::new(), eager: 0, keeping: false, shortest: 6 * LOOK }
    }
}

struct Keep {
    lease: Duration,
    renewed: Instant,
}

/// A lease that is kept until this is dropped.
pub(crate) struct Held {
    key: ClaimKey,
    kept: Weak<Kept>,
}

/// An eager attempt that is under way until this is dropped.
pub(crate) struct Eager(Weak<Kept>);

impl Kept {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(kept) = self.kept.upgrade() {
            kept.state().held.remove(&self.key);
        }
    }
}

impl Drop for Eager {
    fn drop(&mut self) {
        if let Some(kept) = self.0.upgrade() {
            kept.state().eager -= 1;
            kept.eager_done.notify_waiters();
        }
    }
}

impl<S: Store> Leases<S> {
    pub(crate) fn new(store: S) -> Self {
        Leases { store, kept: Arc::default() }
    }

    /// Keeps a lease until what it answers is dropped.
    pub(super) fn keep(&self, key: ClaimKey, lease: Duration) -> Held {
        let mut state = self.kept.state();
        state.held.insert(key.clone(), Keep { lease, renewed: Instant::now() });
        if !state.keeping {
            state.keeping = true;
            let (store, kept) = (self.store.clone(), Arc::downgrade(&self.kept));
            let spawned = std::thread::Builder::new()
                .name("owed-leases".into())
                .spawn(move || keep_them(&store, &kept));
            if let Err(error) = spawned {
                state.keeping = false;
                warn!(%error, "no thread could be started to renew leases: handlers longer than their lease lose their row");
            }
        }
        if lease < state.shortest {
            state.shortest = lease;
            self.kept.changed.notify_one();
        }
        drop(state);
        Held { key, kept: Arc::downgrade(&self.kept) }
    }

    pub(super) fn eager(&self) -> Eager {
        self.kept.state().eager += 1;
        Eager(Arc::downgrade(&self.kept))
    }

    /// Waits until no eager attempt is under way.
    pub(crate) async fn idle(&self) {
        loop {
            let done = self.kept.eager_done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            if self.kept.state().eager == 0 {
                return;
            }
            done.await;
        }
    }
}

impl<S: Store> Drop for Leases<S> {
    fn drop(&mut self) {
        self.kept.changed.notify_one();
    }
}

/// The longest that the thread sleeps before it looks again, and whether its outbox is still there at all.
const LOOK: Duration = Duration::from_secs(1);
/// The most leases that one statement renews.
const BATCH: usize = 1_000;

fn keep_them<S: Store>(store: &S, kept: &Weak<Kept>) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return warn!(%error, "no runtime could be started to renew leases"),
    };
    // Connections of its own, made on this thread's runtime: those of the others are driven by theirs.
    let mut detached: Option<S> = None;
    let mut failing = false;
    while let Some(kept) = kept.upgrade() {
        let due = {
            let state = kept.state();
            // Twice as often as they come due, so that each is renewed by half of its lease at the latest.
            let wait = state.shortest / 6;
            let state = kept.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
            due(&state.held)
        };
        for (lease, keys) in due {
            // A database that hangs must not keep other leases from being renewed for longer than one of them.
            let renewing =
                async { tokio::time::timeout(lease, renew(store, &mut detached, &keys, lease)).await };
            let renewed = match runtime.block_on(renewing) {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err(format!("no answer within {lease:?}")),
            };
            match renewed {
                Ok(()) => {
                    if std::mem::take(&mut failing) {
                        info!("leases are being renewed again");
                    }
                    let mut state = kept.state();
                    for key in &keys {
                        if let Some(keep) = state.held.get_mut(key) {
                            keep.renewed = Instant::now();
                        }
                    }
                }
                Err(error) => {
                    detached = None;
                    if !std::mem::replace(&mut failing, true) {
                        warn!(error, leases = keys.len(), "leases could not be renewed; trying on");
                    }
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }
}

/// What has gone a third of its lease without renewal, by lease.
fn due(held: &HashMap<ClaimKey, Keep>) -> Vec<(Duration, Vec<ClaimKey>)> {
    let mut by_lease: HashMap<Duration, Vec<ClaimKey>> = HashMap::new();
    for (key, keep) in held.iter().filter(|(_, keep)| keep.renewed.elapsed() >= keep.lease / 3) {
        by_lease.entry(keep.lease).or_default().push(key.clone());
    }
    let mut due = Vec::new();
    for (lease, mut keys) in by_lease {
        keys.sort_unstable_by_key(|key| key.delivery);
        due.extend(keys.chunks(BATCH).map(|chunk| (lease, chunk.to_vec())));
    }
    due.sort_unstable_by_key(|(lease, _)| *lease);
    due
}

async fn renew<S: Store>(
    store: &S,
    detached: &mut Option<S>,
    keys: &[ClaimKey],
    lease: Duration,
) -> Result<(), owed_core::StoreError> {
    let own = match detached {
        Some(own) => own,
        None => detached.insert(store.detached(2).await?),
    };
    own.renew(keys, own.now() + lease).await?;
    Ok(())
}
