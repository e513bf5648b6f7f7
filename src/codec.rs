//! Payloads: how an event becomes bytes, and comes back.

use owed_core::{Codec, EventRow};
use serde::{Serialize, de::DeserializeOwned};

use crate::declare::BoxError;
use crate::event::Event;

/// A self-describing payload, which upgrades of older versions work on.
pub use ciborium::Value;

/// A payload could not be turned into the event that it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The payload does not fit the type, or is damaged.
    #[error("the payload of {event} version {version} can't be decoded from {codec}: {reason}")]
    Malformed {
        /// The event's name.
        event: String,
        /// The version on the row.
        version: i32,
        /// The codec on the row.
        codec: String,
        /// What did not fit.
        reason: String,
    },
    /// The row names a codec that this build doesn't have.
    #[error("the payload of {event} is encoded as {codec:?}, which this build can't read")]
    UnknownCodec {
        /// The event's name.
        event: String,
        /// The codec on the row.
        codec: String,
    },
    /// The event's upgrade function failed on a row of an older version.
    #[error("{event} could not be upgraded from version {from} to {to}")]
    Upgrade {
        /// The event's name.
        event: String,
        /// The version on the row.
        from: i32,
        /// The version declared.
        to: i32,
        /// What the function said.
        #[source]
        source: BoxError,
    },
    /// [`AnyEvent::decode`](crate::AnyEvent::decode) was asked for an event that this is not.
    #[error("this is a {is}, not a {wanted}")]
    AnotherEvent {
        /// The event's name.
        is: String,
        /// The one asked for.
        wanted: &'static str,
    },
}

/// Encodes an event.
pub(crate) fn encode<E: Event>(codec: Codec, event: &E) -> Result<Vec<u8>, BoxError> {
    encode_value(codec, event)
}

fn encode_value<T: Serialize>(codec: Codec, value: &T) -> Result<Vec<u8>, BoxError> {
    match codec {
        Codec::Cbor => {
            let mut bytes = Vec::with_capacity(128);
            ciborium::into_writer(value, &mut bytes)?;
            Ok(bytes)
        }
        #[cfg(feature = "json")]
        Codec::Json => Ok(serde_json::to_vec(value)?),
        other => Err(format!("the codec {other:?} needs its Cargo feature").into()),
    }
}

/// Whether a value comes back as it was: what is nested deeper than a reader follows does not.
pub(crate) fn reads_back(value: &Value) -> Result<(), BoxError> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes)?;
    let _: Value = ciborium::from_reader(bytes.as_slice())?;
    Ok(())
}

/// Decodes a row as the event `E`, through its upgrade function if the row is older than the declaration.
pub(crate) fn decode<E: Event>(row: &EventRow) -> Result<E, DecodeError> {
    if !E::UPGRADES || row.version >= E::VERSION {
        return decode_as(row);
    }
    let upgraded = E::upgrade(row.version, decode_as(row)?).map_err(|source| DecodeError::Upgrade {
        event: row.name.clone(),
        from: row.version,
        to: E::VERSION,
        source,
    })?;
    upgraded.deserialized().map_err(|error| DecodeError::Upgrade {
        event: row.name.clone(),
        from: row.version,
        to: E::VERSION,
        source: format!("what the upgrade function answered is no {}: {error}", E::NAME).into(),
    })
}

/// serde quotes the value that did not fit ("invalid type: string "…", expected i64"), and a payload can be
/// private: only what was expected is kept.
fn without_values(reason: &str) -> String {
    match (reason.split_once(':'), reason.rsplit_once(", expected ")) {
        (Some((kind, _)), Some((_, expected))) => format!("{kind}, expected {expected}"),
        (None, Some((said, expected))) => {
            let kind = said.split('`').next().unwrap_or_default().trim_end();
            format!("{kind}, expected {expected}")
        }
        _ => reason.to_owned(),
    }
}

/// Decodes a row's payload as any type.
pub(crate) fn decode_as<T: DeserializeOwned>(row: &EventRow) -> Result<T, DecodeError> {
    let malformed = |reason: String| DecodeError::Malformed {
        event: row.name.clone(),
        version: row.version,
        codec: row.codec.clone(),
        reason: without_values(&reason),
    };
    match Codec::parse(&row.codec) {
        Some(Codec::Cbor) => {
            let mut rest = row.payload.as_slice();
            let value = ciborium::from_reader(&mut rest).map_err(|error| {
                malformed(match error {
                    // The plain text of serde's error, without the debug form of its wrapper.
                    ciborium::de::Error::Semantic(_, said) => said,
                    other => other.to_string(),
                })
            })?;
            if rest.is_empty() {
                Ok(value)
            } else {
                Err(malformed(format!("{} bytes follow its end", rest.len())))
            }
        }
        #[cfg(feature = "json")]
        Some(Codec::Json) => {
            serde_json::from_slice(&row.payload).map_err(|error| malformed(error.to_string()))
        }
        _ => Err(DecodeError::UnknownCodec { event: row.name.clone(), codec: row.codec.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_fit_is_told_without_the_value() {
        for (said, kept) in [
            (r#"invalid type: string "secret, expected: x", expected i64"#, "invalid type, expected i64"),
            ("unknown variant `secret`, expected `a` or `b`", "unknown variant, expected `a` or `b`"),
            ("missing field `order`", "missing field `order`"),
        ] {
            assert_eq!(without_values(said), kept);
        }
    }
}
