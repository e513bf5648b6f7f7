//! What the shop announces, and who reacts to it.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use owed::{DeliveryContext, Event, Failure, Outbox, Receiver, Refusal, Settings, Store, Tx};
use sea_orm::{
    ActiveModelTrait, ActiveValue::Set, ColumnTrait, DatabaseTransaction, EntityTrait, ExprTrait,
    QueryFilter, sea_query::Expr,
};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;

use crate::{
    Result,
    tables::{ledger, stock},
};

#[derive(Clone, Debug, Serialize, Deserialize, Event)]
#[event(name = "shop.OrderPlaced")]
pub struct OrderPlaced {
    pub order: i64,
    pub email: String,
    pub item: String,
    pub total_cents: i64,
}

/// How many orders this process knows of: what an on-commit receiver keeps warm.
pub static CACHED: AtomicU64 = AtomicU64::new(0);

pub fn outbox<S>(store: S, mail: PathBuf) -> Result<Outbox<S>>
where
    S: Store<Tx = DatabaseTransaction>,
{
    let mut settings = Settings::default();
    // So short that a run after a kill goes on at once, and retries can be watched. Relays renew their leases.
    settings.lease = Duration::from_secs(3);
    settings.backoff_base = Duration::from_millis(50);
    settings.poll_interval = Duration::from_millis(200);
    let mail = Arc::new(mail);
    let outbox = Outbox::builder(store)
        .settings(settings)
        .receiver(Receiver::on::<OrderPlaced>("shop.reserve_stock").inline().run(reserve_stock))
        .receiver(Receiver::on::<OrderPlaced>("shop.cache").on_commit().run(refresh_cache))
        .receiver(Receiver::on::<OrderPlaced>("shop.ledger").durable().run(book))
        .receiver(
            Receiver::on::<OrderPlaced>("shop.receipt")
                .durable()
                .lane("mail")
                .max_attempts(8)
                .run(move |event, context| send_receipt(mail.clone(), event, context)),
        )
        .build()?;
    Ok(outbox)
}

/// Inline: in the order's own transaction, which it refuses when there is nothing left to sell.
async fn reserve_stock<S>(event: OrderPlaced, tx: Tx<S>) -> std::result::Result<(), Refusal>
where
    S: Store<Tx = DatabaseTransaction>,
{
    let reserved = stock::Entity::update_many()
        .col_expr(stock::Column::OnHand, Expr::col(stock::Column::OnHand).sub(1))
        .filter(stock::Column::Item.eq(&event.item))
        .filter(stock::Column::OnHand.gt(0))
        .exec(&tx)
        .await?;
    if reserved.rows_affected == 0 {
        return Err(format!("no {} is left", event.item).into());
    }
    Ok(())
}

/// On commit: in this process, best effort.
async fn refresh_cache(_: OrderPlaced) -> std::result::Result<(), Refusal> {
    CACHED.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Durable, in a transaction that commits with its acknowledgement: exactly one line for each order.
async fn book<S>(event: OrderPlaced, tx: Tx<S>) -> std::result::Result<(), Failure>
where
    S: Store<Tx = DatabaseTransaction>,
{
    let line = ledger::ActiveModel {
        order_id: Set(event.order),
        amount_cents: Set(event.total_cents),
        ..Default::default()
    };
    line.insert(&tx).await?;
    Ok(())
}

/// Durable, to the world outside: at least one receipt for each order. Mail servers are what they are.
async fn send_receipt(
    mail: Arc<PathBuf>,
    event: OrderPlaced,
    context: DeliveryContext,
) -> std::result::Result<(), Failure> {
    if event.email.ends_with("@nowhere.example") {
        return Err(Failure::permanent("550 no such mailbox"));
    }
    if event.order % 10 == 3 && context.attempt == 1 {
        return Err("451 try again later".into());
    }
    let line = format!("order {} to {}\n", event.order, event.email);
    let mut file = tokio::fs::OpenOptions::new().create(true).append(true).open(&*mail).await?;
    // One write, so that two processes never mix their lines.
    file.write_all(line.as_bytes()).await?;
    file.flush().await?;
    Ok(())
}
