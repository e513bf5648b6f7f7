//! Real input: webhook payloads, each an event, delivered to a receiver that knows none of them.

use std::{collections::HashMap, path::Path, time::Instant};

use owed::{
    AnyEvent, Codec, DeliveryContext, Event, EventId, Failure, Outbox, Receiver, Settings, Store, Tx,
};
use sea_orm::{ActiveModelTrait, ActiveValue::Set, DatabaseConnection, DatabaseTransaction, EntityTrait};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Result, tables::webhook};

/// A payload as it came: any JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(name = "shop.WebhookReceived")]
#[serde(transparent)]
struct WebhookReceived(Value);

#[derive(Deserialize)]
struct Kind {
    examples: Vec<Value>,
}

pub async fn run<S>(store: S, db: &DatabaseConnection, file: &Path) -> Result<bool>
where
    S: Store<Tx = DatabaseTransaction>,
{
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let kinds: Vec<Kind> =
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
    let payloads: Vec<Value> = kinds.into_iter().flat_map(|kind| kind.examples).collect();
    println!("{} payloads, on {}", payloads.len(), store.capabilities().database);
    let mut all_equal = true;
    for codec in [Codec::Cbor, Codec::Json] {
        all_equal &= through(store.clone(), db, codec, &payloads).await?;
    }
    Ok(all_equal)
}

async fn through<S>(store: S, db: &DatabaseConnection, codec: Codec, payloads: &[Value]) -> Result<bool>
where
    S: Store<Tx = DatabaseTransaction>,
{
    let mut settings = Settings::default();
    settings.codec = codec;
    let outbox = Outbox::builder(store)
        .settings(settings)
        .event::<WebhookReceived>()
        .receiver(Receiver::on::<AnyEvent>("shop.webhooks").durable().run(keep))
        .build()?;
    let started = Instant::now();
    let events = payloads.iter().map(|payload| WebhookReceived(payload.clone()));
    let fired = outbox.transaction(async |tx| tx.fire_all(events).await).await?;
    let ids: Vec<EventId> = fired.iter().filter_map(|fired| fired.id()).collect();
    let delivered = outbox.deliver_pending().await?;
    let got: HashMap<i64, Vec<u8>> =
        webhook::Entity::find().all(db).await?.into_iter().map(|row| (row.event_id, row.got)).collect();
    let equal = ids
        .iter()
        .zip(payloads)
        .filter(|(id, payload)| {
            let got = got.get(&id.0).and_then(|got| serde_json::from_slice::<Value>(got).ok());
            got.as_ref() == Some(payload)
        })
        .count();
    println!(
        "{}  {} fired, {} delivered, {equal} of {} came out as they went in, {:.2} s",
        codec.as_str(),
        ids.len(),
        delivered.succeeded,
        payloads.len(),
        started.elapsed().as_secs_f64()
    );
    Ok(equal == payloads.len() && delivered.succeeded as usize >= payloads.len())
}

/// Writes what it got, in the transaction that acknowledges it.
async fn keep<S>(event: AnyEvent, context: DeliveryContext, tx: Tx<S>) -> std::result::Result<(), Failure>
where
    S: Store<Tx = DatabaseTransaction>,
{
    let got = serde_json::to_vec(&event.to_json()?)?;
    webhook::ActiveModel { event_id: Set(context.event_id.0), got: Set(got) }.insert(&tx).await?;
    Ok(())
}
