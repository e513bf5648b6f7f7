//! Where time comes from.
//!
//! Every time on a row is read from its store's clock, never from the worker's own: a worker whose clock is
//! minutes off neither steals rows nor leaves them lying.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use chrono::{DateTime, DurationRound, TimeDelta, Utc};

/// A moment in UTC. Stores keep microseconds; see [`micros`].
pub type Timestamp = DateTime<Utc>;

/// Cuts a moment to whole microseconds, which is what every store keeps. A time that went into a row then
/// equals the time that comes out of it.
pub fn micros(at: Timestamp) -> Timestamp {
    at.duration_trunc(TimeDelta::microseconds(1)).unwrap_or(at)
}

/// Tells a store's time. Cheap: called for every claim and settlement.
pub trait Clock: Send + Sync + 'static {
    /// The time now, in whole microseconds.
    fn now(&self) -> Timestamp;
}

/// A clock that stands still until a test moves it.
///
/// ```
/// # use owed_core::{Clock, ManualClock};
/// # use std::time::Duration;
/// let clock = ManualClock::at("2026-01-02T03:04:05Z".parse().unwrap());
/// clock.advance(Duration::from_secs(60));
/// assert_eq!(clock.now().to_rfc3339(), "2026-01-02T03:05:05+00:00");
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<Mutex<Timestamp>>);

impl ManualClock {
    /// A clock that says `at`.
    pub fn at(at: Timestamp) -> Self {
        ManualClock(Arc::new(Mutex::new(micros(at))))
    }

    /// Moves it on by `by`.
    pub fn advance(&self, by: Duration) {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *now += by;
    }

    /// Sets it, back or forth.
    pub fn set(&self, at: Timestamp) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = micros(at);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The database's clock, sampled now and then and carried on by this machine's monotonic clock in between, so
/// that reading it costs no round trip and a stepped system clock does not move it.
#[derive(Debug)]
pub struct SampledClock(Mutex<(Instant, Timestamp)>);

impl Default for SampledClock {
    /// Starts from this machine's own time, until the first sample.
    fn default() -> Self {
        SampledClock(Mutex::new((Instant::now(), Utc::now())))
    }
}

impl SampledClock {
    /// Takes a reading of the database's clock that was asked for at `sent` and has just arrived: half the
    /// time in between is taken for its way back.
    pub fn sample(&self, sent: Instant, database_said: Timestamp) {
        let arrived = Instant::now();
        let at = database_said + (arrived - sent) / 2;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (arrived, at);
    }
}

impl Clock for SampledClock {
    fn now(&self) -> Timestamp {
        let (since, at) = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        micros(at + since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_outweighs_what_this_machine_believes() {
        let clock = SampledClock::default();
        let database: Timestamp = "2001-02-03T04:05:06Z".parse().unwrap();
        clock.sample(Instant::now(), database);
        let now = clock.now();
        assert!(now >= database && now < database + Duration::from_secs(60), "{now}");
    }

    #[test]
    fn times_are_cut_to_the_microsecond_that_a_row_keeps() {
        let at: Timestamp = "2026-01-01T00:00:00.123456789Z".parse().unwrap();
        assert_eq!(micros(at).timestamp_subsec_nanos(), 123_456_000);
    }
}
