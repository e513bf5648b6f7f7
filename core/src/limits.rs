//! How long a text or a payload may be, checked in one place for every store.

use chrono::Datelike;

use crate::{NewEvent, Timestamp};

/// Event names, receiver keys, lanes, dedupe keys, actor keys and labels, suppression reasons: characters.
pub const TEXT: usize = 255;
/// A target of a fan-out receiver: characters.
pub const TARGET: usize = 2_000;
/// The error text kept on a delivery: characters.
pub const ERROR: usize = 2_000;
/// An encoded payload: bytes (10 MiB). What every supported database takes at its default settings.
pub const PAYLOAD: usize = 10 * 1024 * 1024;
/// The encoded free data of a scope: bytes.
pub const SCOPE: usize = 64 * 1024;

/// A value was refused before anything was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// It is over its limit. The value itself is not shown: it may be private.
    #[error("{what} is {size} {unit} long, and the limit is {limit}")]
    TooLong {
        /// Which value.
        what: &'static str,
        /// Its size.
        size: usize,
        /// The most it may have.
        limit: usize,
        /// What is counted.
        unit: &'static str,
    },
    /// It is empty.
    #[error("{what} is empty")]
    Empty {
        /// Which value.
        what: &'static str,
    },
    /// It holds a NUL character, which not every database can store in a text.
    #[error("{what} holds a NUL character (at byte {at} of {size}), which a database text can't store")]
    Nul {
        /// Which value.
        what: &'static str,
        /// Where the first one is.
        at: usize,
        /// The value's size in bytes.
        size: usize,
    },
    /// It is a time that not every database can store.
    #[error("{what} is {at}, and must be from the year 1000 to the year 9999")]
    Time {
        /// Which value.
        what: &'static str,
        /// The time.
        at: Timestamp,
    },
}

/// Checks a text that must not be empty.
///
/// # Errors
/// Empty, over `limit` characters, or with a NUL.
pub fn text(what: &'static str, value: &str, limit: usize) -> Result<(), Refused> {
    if value.is_empty() {
        return Err(Refused::Empty { what });
    }
    let size = value.chars().count();
    if size > limit {
        return Err(Refused::TooLong { what, size, limit, unit: "characters" });
    }
    match value.find('\0') {
        Some(at) => Err(Refused::Nul { what, at, size: value.len() }),
        None => Ok(()),
    }
}

/// Checks a number of bytes.
///
/// # Errors
/// Over `limit`.
pub fn bytes(what: &'static str, size: usize, limit: usize) -> Result<(), Refused> {
    if size > limit { Err(Refused::TooLong { what, size, limit, unit: "bytes" }) } else { Ok(()) }
}

/// Checks a time: the years 1000 to 9999, which every database can store.
///
/// # Errors
/// Before or after that.
pub fn time(what: &'static str, at: Timestamp) -> Result<(), Refused> {
    if (1000..=9999).contains(&at.year()) { Ok(()) } else { Err(Refused::Time { what, at }) }
}

/// Makes any text storable: NULs become U+FFFD, and what is over `limit` characters is cut.
pub fn storable(text: &str, limit: usize) -> String {
    text.chars().take(limit).map(|c| if c == '\0' { '\u{FFFD}' } else { c }).collect()
}

/// Checks everything in an event that a database could refuse.
///
/// # Errors
/// The first value that is empty, over its limit, or holds a NUL.
pub fn event(event: &NewEvent) -> Result<(), Refused> {
    text("the event's name", &event.name, TEXT)?;
    bytes("the event's payload", event.payload.len(), PAYLOAD)?;
    time("the event's occurred_at", event.occurred_at)?;
    if let Some(key) = &event.dedupe_key {
        text("the dedupe key", key, TEXT)?;
    }
    if let Some(reason) = &event.suppressed {
        text("the suppression reason", reason, TEXT)?;
    }
    bytes("the scope's data", event.scope.as_ref().map_or(0, Vec::len), SCOPE)?;
    for delivery in &event.deliveries {
        text("the receiver's key", &delivery.receiver_key, TEXT)?;
        if !delivery.target.is_empty() {
            text("a target", &delivery.target, TARGET)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_counted_and_not_bytes() {
        let wide = "𝔘".repeat(TEXT);
        assert_eq!(text("a key", &wide, TEXT), Ok(()));
        let over = text("a key", &format!("{wide}x"), TEXT).unwrap_err();
        assert_eq!(over.to_string(), "a key is 256 characters long, and the limit is 255");
    }

    #[test]
    fn a_refusal_says_where_a_nul_is_and_never_shows_the_value() {
        let refused = text("the dedupe key", "secret\0", TEXT).unwrap_err().to_string();
        assert!(refused.contains("at byte 6 of 7"), "{refused}");
        assert!(!refused.contains("secret"));
    }

    #[test]
    fn any_error_text_is_made_storable() {
        assert_eq!(storable("a\0b", 10), "a\u{FFFD}b");
        assert_eq!(storable("𝔘𝔘𝔘", 2), "𝔘𝔘");
    }
}
