use owed::{Event, Failure, MemoryStore, Outbox, Receiver};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn wrong(_: i64) -> Result<(), Failure> {
    Ok(())
}

fn main() {
    let _ = Outbox::builder(MemoryStore::new())
        .receiver(Receiver::on::<Placed>("k").durable().run(wrong))
        .build();
}
