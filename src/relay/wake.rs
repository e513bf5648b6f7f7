//! Shortens waits: tells relays that something may be owed, and listens for it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};
use std::time::Duration;

use owed_core::Store;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::{
    outbox::Outbox,
    settings::{Settings, Wake},
};

/// Sends wake-ups: at once, then at most one in each window, with one more at the window's end for what
/// committed inside it. Never waited for by whoever fires.
pub(crate) struct Waker<S: Store> {
    enabled: bool,
    window: Duration,
    sending: Arc<Sending<S>>,
}

struct Sending<S> {
    store: S,
    asked: AtomicBool,
    under_way: AtomicBool,
}

/// Lets the next one send, even if the runtime of this one is gone.
struct UnderWay<'a>(&'a AtomicBool);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl<S: Store> Waker<S> {
    pub(crate) fn new(store: S, settings: &Settings) -> Self {
        let sending = Sending { store, asked: AtomicBool::new(false), under_way: AtomicBool::new(false) };
        Waker {
            enabled: settings.wake == Wake::Notify,
            window: settings.notify_coalescing,
            sending: Arc::new(sending),
        }
    }

    pub(crate) fn wake(&self) {
        if !self.enabled {
            return;
        }
        self.sending.asked.store(true, Ordering::SeqCst);
        if self.sending.under_way.swap(true, Ordering::SeqCst) {
            return;
        }
        let (sending, window) = (self.sending.clone(), self.window);
        tokio::spawn(async move {
            loop {
                let under_way = UnderWay(&sending.under_way);
                while sending.asked.swap(false, Ordering::SeqCst) {
                    if let Err(error) = sending.store.wake().await {
                        debug!(%error, "a wake-up was not sent; relays find the rows at their next poll");
                    }
                    tokio::time::sleep(window).await;
                }
                drop(under_way);
                // Somebody may have asked between the last look and now, and found this one under way.
                let again =
                    sending.asked.load(Ordering::SeqCst) && !sending.under_way.swap(true, Ordering::SeqCst);
                if !again {
                    break;
                }
            }
        });
    }
}

/// Listens for wake-ups for as long as anybody reads `woken`, and counts them there.
pub(super) async fn listen<S: Store>(outbox: Outbox<S>, woken: watch::Sender<u64>) {
    let poll = outbox.settings().poll_interval;
    let mut failing = false;
    while !woken.is_closed() {
        let error = match outbox.store().listen().await {
            Err(error) => error,
            Ok(mut listener) => {
                if std::mem::take(&mut failing) {
                    info!("wake-ups are being listened for again");
                    // What came in between was not heard.
                    woken.send_modify(|count| *count += 1);
                }
                loop {
                    let waited = tokio::select! {
                        waited = listener.wait() => waited,
                        () = woken.closed() => return,
                    };
                    match waited {
                        Ok(()) => woken.send_modify(|count| *count += 1),
                        Err(error) => break error,
                    }
                }
            }
        };
        if !std::mem::replace(&mut failing, true) {
            warn!(%error, "wake-ups can't be listened for; polling every {poll:?} meanwhile");
        }
        tokio::time::sleep(poll).await;
    }
}
