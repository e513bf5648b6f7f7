use owed::{Event, MemoryStore, Outbox};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn fire(outbox: &Outbox<MemoryStore>) {
    let _ = outbox.fire(Placed { n: 1 }).await;
}

fn main() {
    let _ = fire;
}
