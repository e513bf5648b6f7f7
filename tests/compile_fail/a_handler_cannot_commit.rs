use owed::{MemoryStore, Tx};

async fn commit(tx: Tx<MemoryStore>) {
    let _ = tx.commit().await;
}

fn main() {
    let _ = commit;
}
