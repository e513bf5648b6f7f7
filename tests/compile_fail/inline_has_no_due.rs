use owed::{Event, MemoryStore, Outbox, Receiver, Refusal};
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn refuse(_: Placed) -> Result<(), Refusal> {
    Ok(())
}

fn main() {
    let _ = Outbox::builder(MemoryStore::new())
        .receiver(Receiver::on::<Placed>("k").inline().due(Duration::from_secs(1)).run(refuse))
        .build();
}
