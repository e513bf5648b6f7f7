//! What people and monitors ask: how far behind is it, and who has fallen silent.

use std::{collections::BTreeMap, time::Duration};

use chrono::TimeDelta;
use owed_core::{Backlog, Pause, Store, Timestamp};

use crate::{declare::DEFAULT_LANE, error::Error, outbox::Outbox};

/// The most rows that are counted of each receiver, and of dead letters.
const BOUND: u32 = 10_000;

/// How far behind an outbox is. Made by [`Outbox::health`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// When it was asked, by the store's clock.
    pub at: Timestamp,
    /// What all receivers are owed together.
    pub total: Backlog,
    /// Dead letters of all receivers.
    pub dead: u64,
    /// Whether there may be more dead letters: counting ended at 10,000.
    pub dead_bounded: bool,
    /// How much of what is owed is for receivers that nobody here declares.
    pub unknown: u64,
    /// Receivers that are declared here or owed something, the worst first: most owed, then most dead, then by key.
    pub receivers: Vec<ReceiverHealth>,
    /// Every lane, in the order of their names.
    pub lanes: Vec<LaneHealth>,
}

/// One receiver's part of [`Health`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReceiverHealth {
    /// Its key.
    pub receiver: String,
    /// Its lane: the default one where nobody declares it.
    pub lane: String,
    /// Whether it is declared here.
    pub declared: bool,
    /// What it is owed.
    pub backlog: Backlog,
    /// Its dead letters.
    pub dead: u64,
}

/// One lane's part of [`Health`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneHealth {
    /// Its name.
    pub lane: String,
    /// What its receivers are owed together.
    pub backlog: Backlog,
    /// Their dead letters.
    pub dead: u64,
    /// Relays that leave it alone now, because a receiver in it deferred.
    pub pauses: Vec<Pause>,
}

/// A receiver that has succeeded at nothing for a while. Made by [`Outbox::quiet`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quiet {
    /// Its key.
    pub receiver: String,
    /// When it last succeeded, if ever.
    pub last_success: Option<Timestamp>,
    /// What it is owed: one that is owed nothing may be silent for a reason.
    pub backlog: Backlog,
}

fn add(total: &mut Backlog, more: &Backlog) {
    total.owed += more.owed;
    total.scheduled += more.scheduled;
    total.claimed += more.claimed;
    total.lapsed += more.lapsed;
    total.oldest_owed = [total.oldest_owed, more.oldest_owed].into_iter().flatten().min();
    total.bounded |= more.bounded;
}

pub(crate) async fn health<S: Store>(outbox: &Outbox<S>) -> Result<Health, Error> {
    let (store, registry, now) = (outbox.store(), outbox.registry(), outbox.now());
    let lane_of = |key: &str| {
        let declared = registry.receiver(key).and_then(|receiver| receiver.durable());
        (declared.map_or(DEFAULT_LANE, |spec| &*spec.lane).to_owned(), declared.is_some())
    };
    let mut dead: BTreeMap<String, u64> = store.dead_letters(BOUND).await?.into_iter().collect();
    let all_dead = dead.values().sum();
    let mut keys = store.owed_receivers().await?;
    keys.extend(registry.durable_keys().into_iter().map(str::to_owned));
    keys.extend(dead.keys().cloned());
    keys.sort_unstable();
    keys.dedup();
    let mut lanes: BTreeMap<String, LaneHealth> = registry
        .lanes()
        .map(|lane| {
            let empty = LaneHealth {
                lane: lane.to_string(),
                backlog: Backlog::default(),
                dead: 0,
                pauses: Vec::new(),
            };
            (lane.to_string(), empty)
        })
        .collect();
    let mut health = Health {
        at: now,
        total: Backlog::default(),
        dead: all_dead,
        dead_bounded: all_dead >= u64::from(BOUND),
        unknown: 0,
        receivers: Vec::new(),
        lanes: Vec::new(),
    };
    for receiver in keys {
        let backlog = store.backlog(&receiver, now, BOUND).await?;
        let dead = dead.remove(&receiver).unwrap_or(0);
        let (lane, declared) = lane_of(&receiver);
        add(&mut health.total, &backlog);
        if !declared {
            health.unknown += backlog.owed;
        }
        if let Some(lane) = lanes.get_mut(&lane) {
            add(&mut lane.backlog, &backlog);
            lane.dead += dead;
        }
        health.receivers.push(ReceiverHealth { receiver, lane, declared, backlog, dead });
    }
    health.receivers.sort_by(|one, other| {
        let worst = |receiver: &ReceiverHealth| (receiver.backlog.owed, receiver.dead);
        worst(other).cmp(&worst(one)).then_with(|| one.receiver.cmp(&other.receiver))
    });
    for pause in store.pauses(now).await? {
        if let Some(lane) = lanes.get_mut(&pause.lane) {
            lane.pauses.push(pause);
        }
    }
    health.lanes = lanes.into_values().collect();
    Ok(health)
}

pub(crate) async fn quiet<S: Store>(outbox: &Outbox<S>, within: Duration) -> Result<Vec<Quiet>, Error> {
    let (store, now) = (outbox.store(), outbox.now());
    let since = TimeDelta::from_std(within).ok().and_then(|window| now.checked_sub_signed(window));
    let last: BTreeMap<String, Timestamp> = store.last_successes().await?.into_iter().collect();
    let mut quiet = Vec::new();
    for key in outbox.registry().durable_keys() {
        let last_success = last.get(key).copied();
        let recent = last_success.is_some_and(|at| since.is_none_or(|since| at >= since));
        if !recent {
            let backlog = store.backlog(key, now, BOUND).await?;
            quiet.push(Quiet { receiver: key.to_owned(), last_success, backlog });
        }
    }
    quiet.sort_by(|one, other| (one.last_success, &one.receiver).cmp(&(other.last_success, &other.receiver)));
    Ok(quiet)
}
