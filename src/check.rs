//! What a service should know before it serves: rows that wait for what nobody here knows.

use std::fmt;

use owed_core::{DeliveryRow, EventId, EventQuery, Store, Timestamp};

use crate::{error::Error, event::Listens, outbox::Outbox};

/// Something that [`Outbox::check`] found. Its text says what it means and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// Rows are owed to a receiver that is not declared here.
    UnknownReceiver {
        /// Its key.
        receiver: String,
        /// How many rows were seen: at most 20 are looked at.
        rows: usize,
        /// When the oldest of them became due.
        oldest: Timestamp,
    },
    /// Rows are owed to a receiver for events that it does not listen on here.
    UnknownEvent {
        /// The receiver's key.
        receiver: String,
        /// The event's name.
        event: String,
        /// How many rows were seen: at most 20 of each receiver are looked at.
        rows: usize,
    },
    /// Rows whose payload can't be decoded as the event is declared here.
    Undecodable {
        /// The receiver's key.
        receiver: String,
        /// The event's name.
        event: String,
        /// How many rows were seen: at most 20 of each receiver are looked at.
        rows: usize,
        /// What the first one failed with, without its values.
        error: String,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let many = |rows: &usize| match rows {
            1 => "1 row is".to_owned(),
            20.. => "20 rows or more are".to_owned(),
            _ => format!("{rows} rows are"),
        };
        match self {
            Finding::UnknownReceiver { receiver, rows, oldest } => write!(
                f,
                "{} owed to the receiver {receiver}, which is not declared here, since {oldest}: declare it, or name this service's own receivers in the setting own_receivers; else they are orphaned after the setting unknown_grace",
                many(rows)
            ),
            Finding::UnknownEvent { receiver, event, rows } => write!(
                f,
                "{} owed to the receiver {receiver} for the event {event}, which it does not listen on here: they end as dead letters after the setting unknown_grace",
                many(rows)
            ),
            Finding::Undecodable { receiver, event, rows, error } => write!(
                f,
                "{} owed to the receiver {receiver} with a payload of {event} that can't be decoded, and would end as dead letters: {error}",
                many(rows)
            ),
        }
    }
}

/// The most rows of each receiver that are looked at.
const LOOKED_AT: u32 = 20;

pub(crate) async fn check<S: Store>(outbox: &Outbox<S>) -> Result<Vec<Finding>, Error> {
    let store = outbox.store();
    let mut findings = Vec::new();
    for key in store.owed_receivers().await? {
        if !outbox.settings().owns(&key) {
            continue;
        }
        let rows = store.owed(&key, LOOKED_AT).await?;
        let Some(oldest) = rows.iter().map(|row| row.due_at).min() else { continue };
        let declared = outbox.registry().receiver(&key).filter(|receiver| receiver.durable().is_some());
        let Some(receiver) = declared else {
            findings.push(Finding::UnknownReceiver { receiver: key, rows: rows.len(), oldest });
            continue;
        };
        for event in events(outbox, &rows).await? {
            let owed = rows.iter().filter(|row| row.event_id == event.id).count();
            match receiver.listens {
                Listens::To(name) if name != event.name => count(&mut findings, owed, |rows| {
                    Finding::UnknownEvent { receiver: key.clone(), event: event.name.clone(), rows }
                }),
                _ => {
                    if let Err(error) = receiver.decodes(&event) {
                        count(&mut findings, owed, |rows| Finding::Undecodable {
                            receiver: key.clone(),
                            event: event.name.clone(),
                            rows,
                            error: crate::declare::chain(&error),
                        });
                    }
                }
            }
        }
    }
    Ok(findings)
}

/// Adds to what was found of the same kind, or begins it.
fn count(findings: &mut Vec<Finding>, owed: usize, found: impl Fn(usize) -> Finding) {
    use Finding::{Undecodable, UnknownEvent};
    let new = found(owed);
    for before in findings.iter_mut() {
        match (before, &new) {
            (UnknownEvent { receiver, event, rows }, UnknownEvent { receiver: of, event: named, .. })
            | (Undecodable { receiver, event, rows, .. }, Undecodable { receiver: of, event: named, .. })
                if receiver == of && event == named =>
            {
                *rows += owed;
                return;
            }
            _ => {}
        }
    }
    findings.push(new);
}

async fn events<S: Store>(
    outbox: &Outbox<S>,
    rows: &[DeliveryRow],
) -> Result<Vec<std::sync::Arc<owed_core::EventRow>>, Error> {
    let ids: Vec<EventId> = rows.iter().map(|row| row.event_id).collect();
    let query = EventQuery { ids: Some(ids), ..EventQuery::page(LOOKED_AT) };
    Ok(outbox.store().events(&query).await?.into_iter().map(std::sync::Arc::new).collect())
}
