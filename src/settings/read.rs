//! Settings from configuration: serde, the environment, pairs of texts.

use std::{fmt, time::Duration};

use owed_core::Codec;
use serde::{Deserialize, Deserializer, de};

use super::{Settings, Wake};
use crate::declare::Mistake;

/// Everything that is wrong with settings that were read, at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError {
    /// The mistakes, in the order of the settings.
    pub mistakes: Vec<Mistake>,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mistakes.as_slice() {
            [one] => write!(f, "the settings can't be used: {one}"),
            many => {
                write!(f, "the settings can't be used, for {} reasons:", many.len())?;
                many.iter().try_for_each(|mistake| write!(f, "\n  - {mistake}"))
            }
        }
    }
}

impl std::error::Error for SettingsError {}

/// A value as configuration files have it.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Given {
    Whole(i64),
    Text(String),
    List(Vec<String>),
    Other(de::IgnoredAny),
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Given::Whole(number) => number.fmt(f),
            Given::Text(text) => write!(f, "{:?}", text.chars().take(40).collect::<String>()),
            Given::List(_) => f.write_str("a list"),
            Given::Other(_) => f.write_str("of a type that no setting has"),
        }
    }
}

/// How one field is read: the same for each field of a type.
trait Read: Sized {
    fn read(given: &Given) -> Result<Self, String>;
}

impl Read for u32 {
    fn read(given: &Given) -> Result<Self, String> {
        let number = match given {
            Given::Whole(number) => u32::try_from(*number).ok(),
            Given::Text(text) => text.trim().parse().ok(),
            _ => None,
        };
        number.ok_or_else(|| format!("is {given}, and must be a whole number from 0 to {}", u32::MAX))
    }
}

impl Read for Duration {
    fn read(given: &Given) -> Result<Self, String> {
        let wrong = || {
            format!("is {given}, and must be a time with its unit, such as \"250ms\", \"30s\" or \"2h 30m\"")
        };
        match given {
            Given::Text(text) => humantime::parse_duration(text.trim()).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

impl Read for Codec {
    fn read(given: &Given) -> Result<Self, String> {
        match given {
            Given::Text(text) => Codec::parse(text.trim()),
            _ => None,
        }
        .ok_or_else(|| format!("is {given}, and must be \"cbor\" or \"json\""))
    }
}

impl Read for Wake {
    fn read(given: &Given) -> Result<Self, String> {
        match given {
            Given::Text(text) if text.trim() == "notify" => Ok(Wake::Notify),
            Given::Text(text) if text.trim() == "poll" => Ok(Wake::Poll),
            _ => Err(format!("is {given}, and must be \"notify\" or \"poll\"")),
        }
    }
}

impl Read for Vec<String> {
    fn read(given: &Given) -> Result<Self, String> {
        match given {
            Given::List(list) => Ok(list.clone()),
            // In an environment variable, between commas.
            Given::Text(text) => Ok(text
                .split(',')
                .map(str::trim)
                .filter(|entry| !entry.is_empty())
                .map(str::to_owned)
                .collect()),
            _ => Err(format!("is {given}, and must be a list of texts")),
        }
    }
}

/// Each field under its own name.
macro_rules! fields {
    ($($field:ident),+ $(,)?) => {
        const NAMES: &[&str] = &[$(stringify!($field)),+];

        /// `None` for a name that is no setting.
        fn set(settings: &mut Settings, name: &str, given: &Given) -> Option<Result<(), Mistake>> {
            $(if name == stringify!($field) {
                return Some(match Read::read(given) {
                    Ok(value) => {
                        settings.$field = value;
                        Ok(())
                    }
                    Err(why) => Err(Mistake::Setting { name: stringify!($field), why }),
                });
            })+
            None
        }

        /// Does not compile where a field has no name above.
        fn _complete(settings: Settings) {
            let Settings { $($field: _),+ } = settings;
        }
    };
}

fields!(
    batch_size,
    lease,
    poll_interval,
    wake,
    notify_coalescing,
    backoff_base,
    backoff_cap,
    max_retry_delay,
    max_attempts,
    max_lapses,
    task_lease,
    own_receivers,
    unknown_grace,
    codec,
    claim_backoff_cap,
    retention,
    prune_batch,
    prune_interval,
);

/// The setting whose name is most like this one, if one is.
fn nearest(name: &str) -> Option<&'static str> {
    NAMES
        .iter()
        .map(|known| (distance(name, known), *known))
        .filter(|(distance, known)| *distance <= known.len() / 3)
        .min()
        .map(|(_, known)| known)
}

/// How many single changes lie between two texts (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, from) in one.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in other.iter().enumerate() {
            let change = before + usize::from(from != *to);
            before = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(before + 1);
        }
    }
    row[other.len()]
}

fn read(entries: impl IntoIterator<Item = (String, Given)>) -> Result<Settings, SettingsError> {
    let mut settings = Settings::default();
    let mut mistakes = Vec::new();
    let mut entries: Vec<(String, Given)> = entries.into_iter().collect();
    entries.sort_by(|one, other| one.0.cmp(&other.0));
    for (name, given) in entries {
        match set(&mut settings, &name, &given) {
            Some(Ok(())) => {}
            Some(Err(mistake)) => mistakes.push(mistake),
            None => mistakes.push(Mistake::UnknownSetting { nearest: nearest(&name), name }),
        }
    }
    // What could not be read kept its default, which is no mistake.
    mistakes.extend(settings.mistakes());
    if mistakes.is_empty() { Ok(settings) } else { Err(SettingsError { mistakes }) }
}

impl Settings {
    /// Reads settings from pairs of names and texts: `("lease", "45s")`, `("batch_size", "200")`. What is not named
    /// keeps its default.
    ///
    /// ```
    /// # use owed::Settings;
    /// # use std::time::Duration;
    /// let settings = Settings::from_pairs([("lease", "45s"), ("wake", "poll")])?;
    /// assert_eq!(settings.lease, Duration::from_secs(45));
    ///
    /// let wrong = Settings::from_pairs([("leese", "45s"), ("batch_size", "0")]).unwrap_err();
    /// assert_eq!(
    ///     wrong.to_string(),
    ///     "the settings can't be used, for 2 reasons:\
    ///     \n  - there is no setting \"leese\"; did you mean lease?\
    ///     \n  - setting batch_size: is 0, and must be from 1 to 10,000"
    /// );
    /// # Ok::<(), owed::SettingsError>(())
    /// ```
    ///
    /// # Errors
    /// With every unknown name and bad value at once.
    pub fn from_pairs<K, V>(pairs: impl IntoIterator<Item = (K, V)>) -> Result<Self, SettingsError>
    where
        K: Into<String>,
        V: Into<String>,
    {
        read(pairs.into_iter().map(|(name, value)| (name.into(), Given::Text(value.into()))))
    }

    /// Reads settings from the environment variables that start with `prefix`: with `"SHOP_OUTBOX_"` the lease is
    /// `SHOP_OUTBOX_LEASE=45s`. Every variable with that prefix has to be a setting, so that a misspelt one is
    /// refused rather than ignored: choose a prefix that nothing else uses.
    ///
    /// # Errors
    /// With every unknown name and bad value at once.
    pub fn from_env(prefix: &str) -> Result<Self, SettingsError> {
        let named = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.to_str()?.strip_prefix(prefix)?.to_ascii_lowercase();
            Some((name, value.to_string_lossy().into_owned()))
        });
        Settings::from_pairs(named)
    }
}

/// From a map of names and values, of any self-describing format: `lease = "45s"`, `batch_size = 200`. Times are
/// texts with their unit. Every unknown name and bad value is told at once.
impl<'de> Deserialize<'de> for Settings {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let entries = std::collections::BTreeMap::<String, Given>::deserialize(from)?;
        read(entries).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_near_another_by_few_changes() {
        assert_eq!(distance("lease", "leese"), 1);
        assert_eq!(distance("", "lease"), 5);
        assert_eq!(nearest("max_atempts"), Some("max_attempts"));
        assert_eq!(nearest("colour"), None);
    }
}
