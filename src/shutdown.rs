//! The wish of a process's surroundings that it ends.

/// Completes when the process is told to end: SIGTERM or SIGINT, Ctrl-C on Windows. For
/// [`Relay::run_until`](crate::Relay::run_until). A second one ends the process at once, with the exit code 128 + its
/// number, so that a relay whose handlers won't end can still be stopped by hand.
///
/// ```no_run
/// # use owed::{MemoryStore, Outbox};
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let outbox = Outbox::builder(MemoryStore::new()).build()?;
/// outbox.relay().run_until(owed::shutdown()?).await?;
/// # Ok(()) }
/// ```
///
/// The signals are taken over when this is called, for the rest of the process's life.
///
/// # Errors
/// If the process can't listen for its signals.
///
/// # Cancel safety
/// Dropped, the next signal is the second one all the same.
pub fn shutdown() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    let (told, mut asked) = tokio::sync::watch::channel(false);
    let mut signals = Signals::listen()?;
    tokio::spawn(async move {
        let first = signals.next().await;
        tracing::info!(
            signal = first,
            "told to end: stopping cleanly, a second signal ends this process at once"
        );
        told.send_replace(true);
        let second = signals.next().await;
        tracing::warn!(signal = second, "told to end again: ending at once");
        std::process::exit(128 + second);
    });
    Ok(async move {
        // An end of the sender comes with the end of the runtime.
        let _ = asked.wait_for(|told| *told).await;
    })
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Its number.
    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
        }
    }
}

#[cfg(windows)]
struct Signals(tokio::signal::windows::CtrlC);

#[cfg(windows)]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Signals(tokio::signal::windows::ctrl_c()?))
    }

    async fn next(&mut self) -> i32 {
        self.0.recv().await;
        2
    }
}
