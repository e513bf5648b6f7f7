//! Declaring: what `build()` refuses. It does no I/O, so one store shows it.

use std::time::Duration;

use owed::{Event, Failure, MemoryStore, Mistake, Outbox, Receiver, Settings};
use serde::{Deserialize, Serialize};

use crate::bed::Placed;

async fn nothing(_: Placed) -> Result<(), Failure> {
    Ok(())
}

#[test]
fn every_mistake_is_reported_at_once_and_named() {
    let mut settings = Settings::default();
    settings.batch_size = 0;
    let error = Outbox::builder(MemoryStore::new())
        .settings(settings)
        .receiver(Receiver::on::<Placed>("twice").durable().run(nothing))
        .receiver(Receiver::on::<Placed>("twice").durable().run(nothing))
        .receiver(Receiver::on::<Placed>("k".repeat(256)).durable().run(nothing))
        .receiver(
            Receiver::on::<Placed>("curve")
                .durable()
                .backoff_base(Duration::from_secs(60))
                .backoff_cap(Duration::from_secs(30))
                .max_attempts(0)
                .run(nothing),
        )
        .receiver(Receiver::on::<Placed>("lane").durable().lane("").run(nothing))
        .build()
        .unwrap_err();
    let said = error.to_string();
    assert_eq!(error.mistakes.len(), 6, "{said}");
    for part in [
        "setting batch_size: is 0",
        "two receivers are declared under the key \"twice\"",
        "the receiver's key is 256 characters long, and the limit is 255",
        "receiver \"curve\": backoff_cap is 30s, below its backoff_base of 60s",
        "receiver \"curve\": max_attempts is 0",
        "the lane's name is empty",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
}

#[test]
fn two_types_of_one_name_are_refused_and_one_type_declared_twice_is_not() {
    #[derive(Serialize, Deserialize, Event)]
    #[event(name = "test.Placed")]
    struct Other {}

    assert!(Outbox::builder(MemoryStore::new()).event::<Placed>().event::<Placed>().build().is_ok());
    let error = Outbox::builder(MemoryStore::new()).event::<Placed>().event::<Other>().build().unwrap_err();
    assert!(matches!(&error.mistakes[..], [Mistake::SameName { name: "test.Placed", .. }]), "{error}");
}

#[test]
fn an_events_default_name_is_its_crate_and_its_type() {
    mod somewhere {
        pub(super) mod deep {
            #[derive(serde::Serialize, serde::Deserialize, owed::Event)]
            pub(in super::super) struct Moved {}
        }
    }
    assert_eq!(somewhere::deep::Moved::NAME, "owed-tests.Moved");
    assert_eq!(somewhere::deep::Moved::VERSION, 1);
}
