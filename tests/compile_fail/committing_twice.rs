use owed::{MemoryStore, Transaction};

async fn twice(tx: Transaction<MemoryStore>) {
    let _ = tx.commit().await;
    let _ = tx.commit().await;
}

fn main() {
    let _ = twice;
}
