use owed::{Event, MemoryStore, Outbox, Receiver, Refusal};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn refuse(_: Placed) -> Result<(), Refusal> {
    Ok(())
}

fn main() {
    let _ = Outbox::builder(MemoryStore::new())
        .receiver(Receiver::on::<Placed>("k").on_commit().max_attempts(3).run(refuse))
        .build();
}
