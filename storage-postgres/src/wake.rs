//! Wake-ups: NOTIFY on a connection of its own, never in a caller's transaction, where it would be a lock that
//! every committing transaction waits for.

use async_trait::async_trait;
use futures::FutureExt;
use owed_core::{Listener, Signal, StoreError};
use owed_sql::{TableNames, classify_sqlx};
use sea_orm::sqlx::{
    self, PgPool,
    postgres::{PgListener, PgPoolOptions},
};

/// The channel of one set of tables.
fn channel(names: &TableNames) -> String {
    match names.schema() {
        Some(schema) => format!("owed:{schema}.{}", names.prefix()),
        None => format!("owed:{}", names.prefix()),
    }
}

pub(crate) async fn notify(pool: &PgPool, names: &TableNames) -> Result<(), StoreError> {
    let sent = sqlx::query("SELECT pg_notify($1, '')").bind(channel(names)).execute(pool).await;
    sent.map(|_| ()).map_err(|error| classify_sqlx("waking relays", error))
}

pub(crate) async fn listen(
    pool: &PgPool,
    names: &TableNames,
    signal: Signal,
) -> Result<Box<dyn Listener>, StoreError> {
    let listening = |error| classify_sqlx("listening for wake-ups", error);
    // A pool of its own with one connection: listening must not take one away from those who work.
    let own =
        PgPoolOptions::new().max_connections(1).connect_lazy_with(pool.connect_options().as_ref().clone());
    let mut listener = PgListener::connect_with(&own).await.map_err(listening)?;
    // A lost connection is an error to whoever waits, so that what was missed meanwhile is looked for.
    listener.eager_reconnect(false);
    listener.listen(&channel(names)).await.map_err(listening)?;
    Ok(Box::new(PgWakes { listener, signal, lost: false }))
}

struct PgWakes {
    listener: PgListener,
    signal: Signal,
    /// The connection was lost while what had queued up was taken in: nobody has been told yet.
    lost: bool,
}

#[async_trait]
impl Listener for PgWakes {
    async fn wait(&mut self) -> Result<(), StoreError> {
        let doing = "listening for wake-ups";
        if !std::mem::take(&mut self.lost) {
            tokio::select! {
                () = self.signal.raised() => {}
                notified = self.listener.try_recv() => {
                    self.lost = notified.map_err(|error| classify_sqlx(doing, error))?.is_none();
                }
            }
            if !self.lost {
                // What has arrived by now says the same.
                while let Some(notified) = self.listener.try_recv().now_or_never() {
                    if !matches!(notified, Ok(Some(_))) {
                        self.lost = true;
                        break;
                    }
                }
                return Ok(());
            }
            self.lost = false;
        }
        Err(StoreError::Unavailable { doing, source: "the connection was lost".into() })
    }
}
