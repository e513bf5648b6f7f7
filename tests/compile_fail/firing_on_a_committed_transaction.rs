use owed::{Event, MemoryStore, Transaction};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn fire(tx: Transaction<MemoryStore>) {
    let _ = tx.commit().await;
    let _ = tx.fire(Placed { n: 1 }).await;
}

fn main() {
    let _ = fire;
}
