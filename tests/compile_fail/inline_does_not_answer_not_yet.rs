use owed::{Event, Refusal};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
struct Placed {
    n: i64,
}

async fn refuse(_: Placed) -> Result<(), Refusal> {
    Err(Refusal::not_yet("2026-01-01T00:00:00Z".parse().unwrap()))
}

fn main() {
    let _ = refuse;
}
