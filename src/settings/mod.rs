//! The numbers that decide how an outbox and its relays behave.

mod read;

use std::time::Duration;

use owed_core::{Codec, limits};

use crate::declare::Mistake;
pub use read::SettingsError;

/// How relays learn that something may be owed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Wake {
    /// By a notification of the store after each commit that owes something, with the poll as the floor.
    #[default]
    Notify,
    /// By the poll alone.
    Poll,
}

/// The numbers that decide how an outbox and its relays behave. Checked by `build()`.
///
/// ```
/// # use owed::{MemoryStore, Outbox, Settings};
/// # use std::time::Duration;
/// let mut settings = Settings::default();
/// settings.lease = Duration::from_secs(60);
/// let outbox = Outbox::builder(MemoryStore::new()).settings(settings).build()?;
/// # Ok::<(), owed::BuildError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Settings {
    /// The most rows that one claim takes. Default 50; a relay takes more at once where its concurrency asks
    /// for more.
    pub batch_size: u32,
    /// How long a claim holds without being renewed: how long a row waits once its relay has died. Relays renew
    /// their claims every third of it. Default 30 s.
    pub lease: Duration,
    /// How often a relay looks for work when nothing wakes it. Default 1 s.
    pub poll_interval: Duration,
    /// How relays learn that something may be owed. Default [`Wake::Notify`].
    pub wake: Wake,
    /// The least time between two notifications of one process. One more is sent at its end if something
    /// committed in between. Default 1 ms; zero sends one for each commit that finds none under way.
    pub notify_coalescing: Duration,
    /// The wait before retry `n` is drawn from zero up to this times `2^(n-1)`. Default 2 s.
    pub backoff_base: Duration,
    /// The most that a backoff may come to. Default 1 h.
    pub backoff_cap: Duration,
    /// The longest wait that a handler may ask for with `retry_after` or `defer`. Default 24 h.
    pub max_retry_delay: Duration,
    /// The attempts of a delivery whose receiver declares none. Default 5.
    pub max_attempts: u32,
    /// How many claims in a row may end without an outcome, because their process died while the handler ran,
    /// before the delivery is dead-lettered. Default 5.
    pub max_lapses: u32,
    /// How long a delivery that was handed to the task backend may wait for its worker before it is handed off anew.
    /// Default 5 min.
    pub task_lease: Duration,
    /// How the keys of the receivers start that are declared in this service, where several services share one set of
    /// tables: rows of all other receivers are left alone for good. Default none: every row is this service's.
    pub own_receivers: Vec<String>,
    /// How long a delivery whose receiver nobody here declares is left for a relay that knows it, before it is
    /// orphaned. Default 1 h.
    pub unknown_grace: Duration,
    /// How payloads are encoded. Rows say how they were, so changing it is safe at any time. Default CBOR.
    pub codec: Codec,
    /// The most that a claim which fails backs off to. Default 15 s.
    pub claim_backoff_cap: Duration,
    /// How long an event is kept whose type declares no retention. Default 90 days.
    pub retention: Duration,
    /// The most rows, of events and deliveries alike, that one transaction of a prune deletes. Default 5,000.
    pub prune_batch: u32,
    /// How often a relay prunes, the first time an interval after its start; zero for never. Default 1 min.
    pub prune_interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            batch_size: 50,
            lease: Duration::from_secs(30),
            poll_interval: Duration::from_secs(1),
            wake: Wake::Notify,
            notify_coalescing: Duration::from_millis(1),
            backoff_base: Duration::from_secs(2),
            backoff_cap: Duration::from_secs(3_600),
            max_retry_delay: Duration::from_secs(86_400),
            max_attempts: 5,
            max_lapses: 5,
            task_lease: Duration::from_secs(300),
            own_receivers: Vec::new(),
            unknown_grace: Duration::from_secs(3_600),
            codec: Codec::Cbor,
            claim_backoff_cap: Duration::from_secs(15),
            retention: Duration::from_secs(90 * 86_400),
            prune_batch: 5_000,
            prune_interval: Duration::from_secs(60),
        }
    }
}

impl Settings {
    /// No duration may be longer: ten years.
    pub(crate) const LONGEST: Duration = Duration::from_secs(10 * 365 * 86_400);

    /// Whether rows of this receiver are this service's.
    pub(crate) fn owns(&self, receiver: &str) -> bool {
        self.own_receivers.is_empty()
            || self.own_receivers.iter().any(|own| receiver.starts_with(own.as_str()))
    }

    pub(crate) fn mistakes(&self) -> Vec<Mistake> {
        let mut mistakes = Vec::new();
        let mut wrong = |name, why| mistakes.push(Mistake::Setting { name, why });
        if !(1..=10_000).contains(&self.batch_size) {
            wrong("batch_size", format!("is {}, and must be from 1 to 10,000", self.batch_size));
        }
        if !(1..=100_000).contains(&self.prune_batch) {
            wrong("prune_batch", format!("is {}, and must be from 1 to 100,000", self.prune_batch));
        }
        for (name, value) in [("max_attempts", self.max_attempts), ("max_lapses", self.max_lapses)] {
            if !(1..=i32::MAX as u32).contains(&value) {
                wrong(name, format!("is {value}, and must be from 1 to {}", i32::MAX));
            }
        }
        for (name, value, may_be_zero) in [
            ("lease", self.lease, false),
            ("task_lease", self.task_lease, false),
            ("poll_interval", self.poll_interval, false),
            ("notify_coalescing", self.notify_coalescing, true),
            ("backoff_base", self.backoff_base, true),
            ("backoff_cap", self.backoff_cap, true),
            ("max_retry_delay", self.max_retry_delay, false),
            ("unknown_grace", self.unknown_grace, true),
            ("claim_backoff_cap", self.claim_backoff_cap, false),
            ("retention", self.retention, true),
            ("prune_interval", self.prune_interval, true),
        ] {
            if value.is_zero() && !may_be_zero {
                wrong(name, "is zero".to_owned());
            } else if value > Settings::LONGEST {
                wrong(name, format!("is {value:?}, and the limit is {:?}", Settings::LONGEST));
            }
        }
        for own in &self.own_receivers {
            if let Err(refused) = limits::text("an entry", own, limits::TEXT) {
                wrong("own_receivers", refused.to_string());
            }
        }
        if self.backoff_cap < self.backoff_base {
            wrong(
                "backoff_cap",
                format!("is {:?}, below backoff_base, {:?}", self.backoff_cap, self.backoff_base),
            );
        }
        #[cfg(not(feature = "json"))]
        if self.codec == Codec::Json {
            wrong("codec", "is json, which needs the Cargo feature `json` of owed".to_owned());
        }
        mistakes
    }
}
