use owed::{Event, Failure, MemoryStore, Outbox, Receiver};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn handle(_: Placed) -> Result<(), Failure> {
    Ok(())
}

fn main() {
    let _ = Outbox::builder(MemoryStore::new())
        .receiver(Receiver::on::<Placed>("k").durable().targets(async |_, _| Vec::<String>::new()).run(handle))
        .build();
}
