use owed::{Event, Failure, MemoryStore, Outbox, Receiver};
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn handle(_: Placed) -> Result<(), Failure> {
    Ok(())
}

fn main() {
    let _ = Outbox::builder(MemoryStore::new())
        .receiver(Receiver::on::<Placed>("k").durable().due(Duration::from_secs(1)).targets(|_, _| vec![]).run(handle))
        .build();
}
