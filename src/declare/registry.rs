//! What was declared, put together and checked.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::Arc,
};

use owed_core::{ReceiverLease, Store, limits};

use super::{DEFAULT_LANE, receiver::Declared};
use crate::{
    event::{Listens, Registration},
    settings::Settings,
};

/// Every mistake in a set of declarations, found by [`OutboxBuilder::build`](crate::OutboxBuilder::build).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildError {
    /// The mistakes, in the order of the declarations.
    pub mistakes: Vec<Mistake>,
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mistakes.as_slice() {
            [one] => write!(f, "the outbox can't be built: {one}"),
            many => {
                write!(f, "the outbox can't be built, for {} reasons:", many.len())?;
                many.iter().try_for_each(|mistake| write!(f, "\n  - {mistake}"))
            }
        }
    }
}

impl std::error::Error for BuildError {}

/// One mistake in a declaration or a setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mistake {
    /// A name or key is empty, too long, or holds a NUL.
    #[error("{of} {named:?}: {refused}")]
    Text {
        /// What kind of thing has the name.
        of: &'static str,
        /// The first characters of the name.
        named: String,
        /// What is wrong with it.
        #[source]
        refused: limits::Refused,
    },
    /// Two receivers share a key.
    #[error(
        "two receivers are declared under the key {key:?}; delivery rows are found by it, so each needs its own"
    )]
    SameKey {
        /// The key.
        key: String,
    },
    /// Two types share an event name.
    #[error(
        "two types are events named {name:?}: {first} and {second}; give one of them another #[event(name = ..)]"
    )]
    SameName {
        /// The name.
        name: &'static str,
        /// One type.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// An option of a receiver makes no sense.
    #[error("receiver {key:?}: {why}")]
    Option {
        /// The receiver's key.
        key: String,
        /// What is wrong, with the values.
        why: String,
    },
    /// A setting makes no sense.
    #[error("setting {name}: {why}")]
    Setting {
        /// The setting's name.
        name: &'static str,
        /// What is wrong, with the values.
        why: String,
    },
    /// A setting that there is not.
    #[error("there is no setting {name:?}{}", nearest.map(|near| format!("; did you mean {near}?")).unwrap_or_default())]
    UnknownSetting {
        /// The name that was given.
        name: String,
        /// The setting whose name is most like it.
        nearest: Option<&'static str>,
    },
}

/// The declarations of one outbox.
pub(crate) struct Registry<S: Store> {
    receivers: BTreeMap<Arc<str>, Arc<Declared<S>>>,
    events: HashMap<&'static str, Registration>,
    /// By event name; wildcards are in `wildcards` alone.
    listening: HashMap<&'static str, Vec<Arc<Declared<S>>>>,
    wildcards: Vec<Arc<Declared<S>>>,
    lanes: BTreeMap<Arc<str>, Vec<ReceiverLease>>,
}

impl<S: Store> Registry<S> {
    pub(crate) fn build(
        declared: Vec<Declared<S>>,
        events: Vec<Registration>,
        settings: &Settings,
        takes_tasks: bool,
    ) -> Result<Self, BuildError> {
        let mut mistakes = settings.mistakes();
        let mut registry = Registry {
            receivers: BTreeMap::new(),
            events: HashMap::new(),
            listening: HashMap::new(),
            wildcards: Vec::new(),
            lanes: BTreeMap::from([(DEFAULT_LANE.into(), Vec::new())]),
        };
        for event in events.into_iter().chain(declared.iter().filter_map(|receiver| receiver.registration)) {
            check_text(&mut mistakes, "event", "the event's name", event.name);
            let first = *registry.events.entry(event.name).or_insert(event);
            if first.type_id != event.type_id {
                let mistake =
                    Mistake::SameName { name: event.name, first: first.type_name, second: event.type_name };
                if !mistakes.contains(&mistake) {
                    mistakes.push(mistake);
                }
            }
        }
        for receiver in declared {
            check_text(&mut mistakes, "receiver", "the receiver's key", &receiver.key);
            check_options(&mut mistakes, &receiver, settings, takes_tasks);
            if registry.receivers.contains_key(&receiver.key) {
                mistakes.push(Mistake::SameKey { key: receiver.key.to_string() });
                continue;
            }
            if let Some(spec) = receiver.durable() {
                let lease = spec.claim_lease(settings);
                let lane = registry.lanes.entry(spec.lane.clone()).or_default();
                lane.push(ReceiverLease { key: receiver.key.clone(), lease });
            }
            let receiver = Arc::new(receiver);
            registry.receivers.insert(receiver.key.clone(), receiver.clone());
            match receiver.listens {
                Listens::To(name) => registry.listening.entry(name).or_default().push(receiver),
                Listens::ToEverything => registry.wildcards.push(receiver),
            }
        }
        if mistakes.is_empty() { Ok(registry) } else { Err(BuildError { mistakes }) }
    }

    pub(crate) fn event(&self, name: &str) -> Option<&Registration> {
        self.events.get(name)
    }

    pub(crate) fn receiver(&self, key: &str) -> Option<&Arc<Declared<S>>> {
        self.receivers.get(key)
    }

    /// Who receives the event, in the order of declaration, wildcards last.
    pub(crate) fn listening(&self, name: &str) -> impl Iterator<Item = &Arc<Declared<S>>> {
        self.listening.get(name).into_iter().flatten().chain(&self.wildcards)
    }

    /// Every lane that somebody declared, and the default one.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Arc<str>> {
        self.lanes.keys()
    }

    /// The durable receivers of a lane; `None` for a lane that nobody declared.
    pub(crate) fn lane(&self, lane: &str) -> Option<&[ReceiverLease]> {
        self.lanes.get(lane).map(Vec::as_slice)
    }

    pub(crate) fn durable_keys(&self) -> BTreeSet<&str> {
        self.receivers.values().filter(|r| r.durable().is_some()).map(|r| &*r.key).collect()
    }
}

fn check_text(mistakes: &mut Vec<Mistake>, of: &'static str, what: &'static str, value: &str) {
    if let Err(refused) = limits::text(what, value, limits::TEXT) {
        let mistake = Mistake::Text { of, named: value.chars().take(40).collect(), refused };
        if !mistakes.contains(&mistake) {
            mistakes.push(mistake);
        }
    }
}

fn check_options<S: Store>(
    mistakes: &mut Vec<Mistake>,
    receiver: &Declared<S>,
    settings: &Settings,
    takes_tasks: bool,
) {
    let Some(spec) = receiver.durable() else { return };
    check_text(mistakes, "lane", "the lane's name", &spec.lane);
    let mut wrong = |why: String| mistakes.push(Mistake::Option { key: receiver.key.to_string(), why });
    if spec.task && !takes_tasks {
        wrong(
            "it is a task, and the outbox has no task backend: give its builder one with `task_backend`"
                .into(),
        );
    }
    if !settings.owns(&receiver.key) {
        wrong(format!(
            "no entry of the setting own_receivers is the start of its key: {}",
            settings.own_receivers.join(", ")
        ));
    }
    if let Some(attempts) = spec.max_attempts
        && !(1..=i32::MAX as u32).contains(&attempts)
    {
        wrong(format!("max_attempts is {attempts}, and must be from 1 to {}", i32::MAX));
    }
    for (name, value) in [
        ("lease", spec.lease),
        ("timeout", spec.timeout),
        ("backoff_cap", spec.backoff_cap),
        ("give_up_after", spec.give_up_after),
    ] {
        match value {
            Some(value) if value.is_zero() => wrong(format!("{name} is zero")),
            Some(value) if value > Settings::LONGEST => {
                wrong(format!("{name} is {value:?}, and the limit is {:?}", Settings::LONGEST));
            }
            _ => {}
        }
    }
    let base = spec.backoff_base.unwrap_or(settings.backoff_base);
    let cap = spec.backoff_cap.unwrap_or(settings.backoff_cap);
    if cap < base && spec.backoff_base.is_some() && spec.backoff_cap.is_some() {
        wrong(format!("backoff_cap is {cap:?}, below its backoff_base of {base:?}"));
    }
}
