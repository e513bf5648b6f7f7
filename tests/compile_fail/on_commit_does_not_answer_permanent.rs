use owed::{Event, MemoryStore, Outbox, Receiver, Refusal};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

fn main() {
    let _ = Outbox::builder(MemoryStore::new())
        .receiver(Receiver::on::<Placed>("k").on_commit().run(async |_: Placed| Err(Refusal::permanent("gone"))))
        .build();
}
