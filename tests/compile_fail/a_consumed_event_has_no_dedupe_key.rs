use owed::{Event, MemoryStore, Tx};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

#[derive(Serialize, Deserialize, Event)]
#[event(retention = succeeded)]
struct Consumed {}

async fn fire(tx: &Tx<MemoryStore>) {
    let _ = tx.fire(Consumed {}).dedupe_key("once").await;
}

fn main() {
    let _ = fire;
}
