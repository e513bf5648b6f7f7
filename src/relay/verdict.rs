//! Turns how an attempt ended into an outcome. Pure: every rule can be tested without a store.

use std::time::Duration;

use owed_core::{DeliveryRow, Outcome, Timestamp, limits};

use crate::{
    declare::{DurableSpec, Verdict},
    settings::Settings,
};

/// How long to wait before retry `attempt`, counted from 1: full jitter, drawn from zero up to the curve.
///
/// `jitter` is a number from 0 up to 1. It is drawn from the whole window and not added on top of it, so that
/// deliveries that failed together do not come back together.
///
/// ```
/// # use std::time::Duration;
/// let (base, cap) = (Duration::from_secs(2), Duration::from_secs(3_600));
/// assert_eq!(owed::backoff(3, base, cap, 0.5), Duration::from_secs(4)); // half of 2 * 2^2
/// assert_eq!(owed::backoff(90, base, cap, 0.5), Duration::from_secs(1_800)); // half of the cap
/// ```
pub fn backoff(attempt: u32, base: Duration, cap: Duration, jitter: f64) -> Duration {
    let doubled = 2f64.powi(i32::try_from(attempt.saturating_sub(1)).unwrap_or(i32::MAX));
    let ceiling = (base.as_secs_f64() * doubled).min(cap.as_secs_f64());
    Duration::from_secs_f64(ceiling * jitter.clamp(0.0, 1.0))
}

/// What a failure leads to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) outcome: Outcome,
    /// How long this relay leaves the receiver's lane alone.
    pub(super) pause: Option<Duration>,
    /// A wait that was asked for and cut, for the log.
    pub(super) cut: Option<Duration>,
}

/// Decides about a failed attempt of `row` at `now`. `random` is a number from 0 up to 1.
pub(super) fn decide(
    settings: &Settings,
    spec: &DurableSpec,
    row: &DeliveryRow,
    verdict: Verdict,
    error: &str,
    now: Timestamp,
    random: f64,
) -> Decision {
    let error = limits::storable(error, limits::ERROR);
    let attempt = row.attempts.saturating_add(1);
    let last = attempt >= row.max_attempts;
    let just = |outcome| Decision { outcome, pause: None, cut: None };
    let cut = |asked: Duration| (asked > settings.max_retry_delay).then_some(asked);
    match verdict {
        Verdict::Permanent => just(Outcome::Dead { error, counted: true }),
        Verdict::Defer(delay) => {
            // A receiver can only defer with a bound; without one (a type that was got around) it counts.
            let Some(bound) = spec.give_up_after else {
                return decide(settings, spec, row, Verdict::RetryAfter(delay), &error, now, random);
            };
            if (now - row.due_at).to_std().unwrap_or_default() >= bound {
                let error = format!("gave up after being deferred for {bound:?}, its bound: {error}");
                return just(Outcome::Dead {
                    error: limits::storable(&error, limits::ERROR),
                    counted: false,
                });
            }
            let asked = delay.min(settings.max_retry_delay);
            let wait = asked.mul_f64(1.0 + random).min(settings.max_retry_delay).max(asked);
            Decision {
                outcome: Outcome::Deferred { error, available_at: owed_core::micros(now + wait) },
                pause: Some(asked),
                cut: cut(delay),
            }
        }
        Verdict::NotYet(until) if until > now && limits::time("", until).is_ok() => {
            just(Outcome::NotYet { until: owed_core::micros(until) })
        }
        Verdict::NotYet(until) => {
            let error =
                format!("answered not yet until {until}, which is no time ahead: counted as a failure");
            decide(settings, spec, row, Verdict::Counted, &error, now, random)
        }
        Verdict::Counted | Verdict::RetryAfter(_) if last => just(Outcome::Dead { error, counted: true }),
        Verdict::RetryAfter(delay) => {
            let wait = delay.min(settings.max_retry_delay);
            Decision {
                outcome: Outcome::Failed { error, available_at: owed_core::micros(now + wait) },
                pause: None,
                cut: cut(delay),
            }
        }
        Verdict::Counted => {
            let base = spec.backoff_base.unwrap_or(settings.backoff_base);
            let cap = spec.backoff_cap.unwrap_or(settings.backoff_cap);
            let wait = backoff(attempt.unsigned_abs(), base, cap, random);
            just(Outcome::Failed { error, available_at: owed_core::micros(now + wait) })
        }
    }
}

#[cfg(test)]
mod tests {
    use owed_core::{DeliveryId, EventId, Status};

    use super::*;

    const NOW: &str = "2026-01-02T03:04:05Z";

    fn now() -> Timestamp {
        NOW.parse().unwrap()
    }

    fn spec() -> DurableSpec {
        DurableSpec {
            lane: "default".into(),
            max_attempts: None,
            lease: None,
            timeout: None,
            backoff_base: None,
            backoff_cap: None,
            give_up_after: None,
            on_failure: None,
            task: false,
            eager: false,
            due: None,
            targets: None,
        }
    }

    fn row(attempts: i32) -> DeliveryRow {
        DeliveryRow {
            id: DeliveryId(1),
            event_id: EventId(1),
            receiver_key: "r".into(),
            target: String::new(),
            status: Status::Claimed,
            attempts,
            max_attempts: 5,
            available_at: None,
            due_at: now(),
            claimed_by: None,
            claimed_at: None,
            lapses: 0,
            last_error: None,
            completed_at: None,
            succeeded_at: None,
        }
    }

    fn outcome(
        spec: &DurableSpec,
        row: &DeliveryRow,
        verdict: Verdict,
        at: Timestamp,
        random: f64,
    ) -> Outcome {
        decide(&Settings::default(), spec, row, verdict, "no", at, random).outcome
    }

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn a_failure_waits_on_the_curve_of_its_own_attempt() {
        let failed =
            |wait| Outcome::Failed { error: "no".into(), available_at: now() + Duration::from_millis(wait) };
        assert_eq!(outcome(&spec(), &row(0), Verdict::Counted, now(), 0.5), failed(1_000));
        assert_eq!(outcome(&spec(), &row(3), Verdict::Counted, now(), 0.25), failed(4_000));
    }

    #[test]
    fn a_receivers_own_curve_outweighs_the_setting() {
        let spec = DurableSpec { backoff_base: Some(seconds(60)), backoff_cap: Some(seconds(90)), ..spec() };
        let Outcome::Failed { available_at, .. } = outcome(&spec, &row(1), Verdict::Counted, now(), 0.5)
        else {
            panic!("it has attempts left");
        };
        assert_eq!(available_at, now() + seconds(45));
    }

    #[test]
    fn the_last_attempt_of_the_budget_is_dead_whatever_it_asked_for() {
        let dead = Outcome::Dead { error: "no".into(), counted: true };
        assert_eq!(outcome(&spec(), &row(4), Verdict::Counted, now(), 0.5), dead);
        assert_eq!(outcome(&spec(), &row(4), Verdict::RetryAfter(seconds(9)), now(), 0.5), dead);
        assert_eq!(outcome(&spec(), &row(0), Verdict::Permanent, now(), 0.5), dead);
    }

    #[test]
    fn a_wait_that_is_too_long_is_cut_and_both_numbers_are_known() {
        let asked = seconds(100_000);
        let decision =
            decide(&Settings::default(), &spec(), &row(0), Verdict::RetryAfter(asked), "no", now(), 0.5);
        assert_eq!(decision.cut, Some(asked));
        let Outcome::Failed { available_at, .. } = decision.outcome else { panic!("it has attempts left") };
        assert_eq!(available_at, now() + seconds(86_400));
    }

    #[test]
    fn a_deferral_waits_between_what_it_asked_for_and_twice_that_and_pauses_the_lane() {
        let spec = DurableSpec { give_up_after: Some(seconds(600)), ..spec() };
        for (random, wait) in [(0.0, 60), (0.5, 90), (1.0, 120)] {
            let decision = decide(
                &Settings::default(),
                &spec,
                &row(4),
                Verdict::Defer(seconds(60)),
                "no",
                now(),
                random,
            );
            assert_eq!(
                decision.outcome,
                Outcome::Deferred { error: "no".into(), available_at: now() + seconds(wait) }
            );
            assert_eq!(decision.pause, Some(seconds(60)));
        }
    }

    #[test]
    fn a_deferral_gives_up_at_exactly_its_bound() {
        let spec = DurableSpec { give_up_after: Some(seconds(600)), ..spec() };
        let at = |age: Duration| outcome(&spec, &row(0), Verdict::Defer(seconds(1)), now() + age, 0.0);
        assert!(matches!(at(seconds(600) - Duration::from_micros(1)), Outcome::Deferred { .. }));
        let Outcome::Dead { error, counted: false } = at(seconds(600)) else { panic!("its bound has come") };
        assert!(error.contains("600s"), "{error}");
    }

    #[test]
    fn not_yet_moves_the_row_and_a_time_that_has_come_is_a_counted_failure() {
        let ahead = now() + Duration::from_micros(1);
        assert_eq!(
            outcome(&spec(), &row(4), Verdict::NotYet(ahead), now(), 0.5),
            Outcome::NotYet { until: ahead }
        );
        let Outcome::Dead { error, counted: true } =
            outcome(&spec(), &row(4), Verdict::NotYet(now()), now(), 0.5)
        else {
            panic!("it was its last attempt");
        };
        assert!(error.contains("not yet"), "{error}");
    }

    #[test]
    fn no_curve_runs_over() {
        let cap = seconds(3_600);
        for attempt in [0, 1, 2, 100, u32::MAX] {
            assert!(backoff(attempt, seconds(2), cap, 1.0) <= cap);
        }
    }
}
