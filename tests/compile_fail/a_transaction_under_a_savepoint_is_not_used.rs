use owed::{Event, MemoryStore, Transaction};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn use_both(mut tx: Transaction<MemoryStore>) -> Result<(), owed::Error> {
    let savepoint = tx.savepoint().await?;
    tx.fire(Placed { n: 1 }).await?;
    savepoint.release().await
}

fn main() {
    let _ = use_both;
}
