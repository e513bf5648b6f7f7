use owed::{Event, Failure, MemoryStore, Outbox, Receiver};
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn later(_: Placed) -> Result<(), Failure> {
    Err(Failure::defer(Duration::from_secs(1)))
}

fn main() {
    let _ = Outbox::builder(MemoryStore::new())
        .receiver(Receiver::on::<Placed>("k").durable().run(later))
        .build();
}
