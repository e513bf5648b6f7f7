use owed::Event;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
#[event(nmae = "shop.OrderPlaced")]
struct Misspelled {}

#[derive(Serialize, Deserialize, Event)]
#[event(name = "")]
struct Nameless {}

#[derive(Serialize, Deserialize, Event)]
#[event(name = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")]
struct TooLong {}

#[derive(Serialize, Deserialize, Event)]
#[event(version = 0)]
struct Unversioned {}

#[derive(Serialize, Deserialize, Event)]
#[event(retention = weeks(2))]
struct Kept {}

#[derive(Serialize, Deserialize, Event)]
struct Generic<T> {
    value: T,
}

fn main() {}
