//! Runs one delivery: looks its receiver up, runs the handler, and says what is to be written.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::FutureExt;
use owed_core::{
    Claim, ClaimKey, Claimed, DeliveryRow, EventRow, Outcome, Settled, Settlement, Status, Store, Timestamp,
    limits,
};
use tracing::{Instrument, info, info_span, warn};

use super::{Attempted, DeliveryFailure, around::around, lease::Held, verdict};
use crate::{
    context::DeliveryContext,
    declare::{BoxError, Declared, DurableSpec, Ran, Verdict, chain},
    fire::{Tx, run_after},
    outbox::Outbox,
    scope::Scope,
    trace,
};

/// A claimed row that waits its turn or runs, with its lease kept.
pub(super) struct Work {
    pub(super) claimed: Claimed,
    pub(super) held: Held,
}

/// How an attempt ended.
pub(super) enum Conclusion {
    /// The handler's transaction has committed together with its acknowledgement.
    Acknowledged,
    /// Somebody else has the row.
    Lost,
    /// A task engine has it.
    HandedOff,
    /// It was given back unrun.
    Left,
    /// To be written.
    Unsettled(Box<Unsettled>),
}

/// An outcome that is still to be written, and what follows once it is.
pub(super) struct Unsettled {
    pub(super) settlement: Settlement,
    pub(super) status: Status,
    /// What to tell once it is written, for a failure.
    pub(super) failure: Option<Told>,
    /// How long to leave the lane alone.
    pub(super) pause: Option<Duration>,
    /// Keeps the lease until it is written.
    pub(super) held: Held,
}

pub(super) struct Told {
    pub(super) failure: DeliveryFailure,
    pub(super) kind: &'static str,
    pub(super) tell_hook: bool,
}

pub(super) async fn attempt<S: Store>(outbox: &Outbox<S>, work: Work) -> Conclusion {
    let Work { claimed: Claimed { claim, delivery, event }, held } = work;
    let span = info_span!(
        "owed.deliver",
        delivery = %delivery.id,
        event = %delivery.event_id,
        receiver = delivery.receiver_key.as_str(),
        attempt = delivery.attempts.saturating_add(1),
    );
    if let Some(trace) = event.as_ref().and_then(|event| event.trace_context.as_deref()) {
        trace::link(&span, trace);
    }
    deliver(outbox, claim, delivery, event, held).instrument(span).await
}

async fn deliver<S: Store>(
    outbox: &Outbox<S>,
    claim: Claim,
    row: DeliveryRow,
    event: Option<Arc<EventRow>>,
    held: Held,
) -> Conclusion {
    let bury = |claim, error: String, kind, held| buried(claim, &row, event.as_deref(), error, kind, held);
    let Some(receiver) = outbox.registry().receiver(&row.receiver_key).cloned() else {
        // Claims name declared receivers alone: this came as a task, for a worker that is older than its relay.
        info!(delivery = %row.id, receiver = row.receiver_key.as_str(), "a task is given back: its receiver is not declared here");
        let at = outbox.now() + outbox.settings().poll_interval;
        return give_back(outbox, claim.key().clone(), at, held).await;
    };
    let Some(spec) = receiver.durable() else {
        let error = format!("the receiver {} is not declared durable any more", row.receiver_key);
        return bury(claim, error, "not durable", held);
    };
    let Some(event) = &event else {
        let error = format!("the event {} that owes it is gone from its table", row.event_id);
        return bury(claim, error, "event gone", held);
    };
    if let Some(Unknown { why, readable }) = unknown(&receiver, event) {
        let (now, settings) = (outbox.now(), outbox.settings());
        let owed_for = (now - row.due_at).to_std().unwrap_or_default();
        if owed_for < settings.unknown_grace {
            // Left for a relay that knows it, at first soon and then ever less often.
            let wait = (owed_for / 2).clamp(settings.poll_interval, CLAIM_AGAIN.max(settings.poll_interval));
            info!(delivery = %row.id, receiver = &*receiver.key, why = why.as_str(), "a delivery is left for a relay that knows more");
            return give_back(outbox, claim.key().clone(), now + wait, held).await;
        }
        // A payload that is newer than anybody knows may still be read as it is.
        if !readable {
            let grace = settings.unknown_grace;
            let error = format!(
                "{why}: nobody has known it since this became owed at {}, longer than the grace period of {grace:?}",
                row.due_at
            );
            return bury(claim, error, "unknown event", held);
        }
    }
    if row.lapses > i32::try_from(outbox.settings().max_lapses).unwrap_or(i32::MAX) {
        let error = format!(
            "its process ended {} times in a row while it ran, without reporting an outcome (the limit is {})",
            row.lapses,
            outbox.settings().max_lapses
        );
        return bury(claim, error, "lapsed", held);
    }
    if row.lapses > 0 {
        // It may be what takes its process down: noted first, so that it is counted if it does it again.
        match outbox.store().suspect(claim.key()).await {
            Ok(Settled::Applied) => {}
            Ok(Settled::Lost) => return Conclusion::Lost,
            Err(error) => {
                warn!(%error, delivery = %row.id, "a lapsed delivery could not be noted as running")
            }
        }
    }
    let context = DeliveryContext {
        delivery_id: Some(row.id),
        attempt: row.attempts.saturating_add(1).unsigned_abs(),
        max_attempts: row.max_attempts.unsigned_abs(),
        target: row.target.clone(),
        due_at: Some(row.due_at),
        ..DeliveryContext::of_event(receiver.key.clone(), event)
    };
    let key = claim.key().clone();
    let ended = match outbox.around() {
        None => run(outbox, &receiver, spec, event, context, claim).await,
        Some(hook) => {
            let running = run(outbox, &receiver, spec, event, context.clone(), claim);
            match around(hook, &context, running, shown).await {
                Ok(ended) => ended,
                // The attempt and the claim that it held are gone: if it had written its outcome, this one finds
                // none.
                Err(error) => {
                    let claim = Claim::granted(key.delivery, key.worker, key.at);
                    (Some(claim), broken(error, "around hook"))
                }
            }
        }
    };
    let (claim, ended) = match ended {
        (Some(claim), ended) => (claim, ended),
        (None, Ended::Lost) => {
            warn!(
                delivery = %row.id,
                receiver = row.receiver_key.as_str(),
                "a delivery was taken over while its handler ran, and its work was rolled back: raise the receiver's lease, or look for what blocks this process"
            );
            return Conclusion::Lost;
        }
        (None, _) => return Conclusion::Acknowledged,
    };
    match ended {
        Ended::Succeeded => Conclusion::Unsettled(Box::new(Unsettled {
            settlement: Settlement::new(claim, Outcome::Succeeded),
            status: Status::Succeeded,
            failure: None,
            pause: None,
            held,
        })),
        Ended::Lost => Conclusion::Lost,
        Ended::Undecodable(error) => {
            buried(claim, &row, Some(event), limits::storable(&error, limits::ERROR), "undecodable", held)
        }
        Ended::Failed { verdict, error, kind } => {
            let now = outbox.now();
            let decision =
                verdict::decide(outbox.settings(), spec, &row, verdict, &error, now, rand::random());
            if let Some(asked) = decision.cut {
                warn!(
                    receiver = row.receiver_key.as_str(),
                    asked = ?asked,
                    used = ?outbox.settings().max_retry_delay,
                    "a receiver asked for a longer wait than the setting max_retry_delay allows"
                );
            }
            let columns = Settlement::new(claim, decision.outcome);
            let status = columns.columns(now).status;
            // A row that is merely not due yet has not failed.
            let failure = (status != Status::Pending).then(|| Told {
                failure: failure(
                    &row,
                    Some(event),
                    status,
                    columns.columns(now).last_error.unwrap_or(&error),
                ),
                kind,
                tell_hook: true,
            });
            Conclusion::Unsettled(Box::new(Unsettled {
                settlement: columns,
                status,
                failure,
                pause: decision.pause,
                held,
            }))
        }
    }
}

/// The longest that a row which nobody here knows is left alone between two looks at it.
const CLAIM_AGAIN: Duration = Duration::from_secs(15);

/// Why this receiver, as it is declared here, can't tell what to do with the event.
struct Unknown {
    why: String,
    readable: bool,
}

fn unknown<S: Store>(receiver: &Declared<S>, event: &EventRow) -> Option<Unknown> {
    let known = receiver.registration?;
    if known.name != event.name {
        let why = format!(
            "the receiver {} is owed the event {}, and listens on {} here",
            receiver.key, event.name, known.name
        );
        Some(Unknown { why, readable: false })
    } else if event.version > known.version {
        let why = format!(
            "the event {} is of version {}, and declared as {} here",
            event.name, event.version, known.version
        );
        Some(Unknown { why, readable: true })
    } else {
        None
    }
}

async fn give_back<S: Store>(outbox: &Outbox<S>, key: ClaimKey, at: Timestamp, held: Held) -> Conclusion {
    drop(held);
    if let Err(error) = outbox.store().release(std::slice::from_ref(&key), at).await {
        warn!(%error, delivery = %key.delivery, "a delivery could not be given back; it is claimed again once its lease ends");
    }
    Conclusion::Left
}

/// Runs the receiver, in a transaction if it takes one. Answers the claim back wherever the outcome is still to be
/// written.
async fn run<S: Store>(
    outbox: &Outbox<S>,
    receiver: &Declared<S>,
    spec: &DurableSpec,
    event: &Arc<EventRow>,
    context: DeliveryContext,
    claim: Claim,
) -> (Option<Claim>, Ended) {
    if receiver.takes_tx {
        return in_transaction(outbox, receiver, spec, event, context, claim).await;
    }
    let running = receiver.run(event, context, None);
    (Some(claim), ended(guarded(event, spec, running).await))
}

fn shown((_, ended): &(Option<Claim>, Ended)) -> Attempted {
    match ended {
        Ended::Succeeded => Attempted::Succeeded,
        Ended::Lost => Attempted::Lost,
        Ended::Undecodable(error) | Ended::Failed { error, .. } => Attempted::Failed(error.clone()),
    }
}

/// A delivery that ends here without its failure hook being called.
fn buried(
    claim: Claim,
    row: &DeliveryRow,
    event: Option<&EventRow>,
    error: String,
    kind: &'static str,
    held: Held,
) -> Conclusion {
    let told = Told { failure: failure(row, event, Status::Dead, &error), kind, tell_hook: false };
    Conclusion::Unsettled(Box::new(Unsettled {
        settlement: Settlement::new(claim, Outcome::Dead { error, counted: true }),
        status: Status::Dead,
        failure: Some(told),
        pause: None,
        held,
    }))
}

fn failure(row: &DeliveryRow, event: Option<&EventRow>, status: Status, error: &str) -> DeliveryFailure {
    DeliveryFailure {
        delivery_id: row.id,
        event_id: row.event_id,
        event_name: event.map(|event| event.name.clone()).unwrap_or_default(),
        receiver: row.receiver_key.as_str().into(),
        target: row.target.clone(),
        attempt: row.attempts.saturating_add(1).unsigned_abs(),
        status,
        error: error.to_owned(),
    }
}

enum Ended {
    Succeeded,
    Lost,
    Undecodable(String),
    Failed { verdict: Verdict, error: String, kind: &'static str },
}

/// Runs a handler with causation set, inside its timeout, catching its panic.
async fn guarded(
    event: &EventRow,
    spec: &DurableSpec,
    running: impl Future<Output = Ran>,
) -> Result<Ran, (&'static str, String)> {
    let scoped = AssertUnwindSafe(Scope::of_delivery(event.id, event.correlation_id, running)).catch_unwind();
    let ran = match spec.timeout {
        None => scoped.await,
        Some(timeout) => match tokio::time::timeout(timeout, scoped).await {
            Ok(ran) => ran,
            Err(_) => {
                return Err(("timeout", format!("it was still running after its timeout of {timeout:?}")));
            }
        },
    };
    ran.map_err(|panic| {
        let said = panic
            .downcast_ref::<&str>()
            .map(|said| (*said).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned());
        ("panic", format!("it panicked: {}", said.as_deref().unwrap_or("with a value that is no text")))
    })
}

fn ended(ran: Result<Ran, (&'static str, String)>) -> Ended {
    match ran {
        Ok(Ran::Succeeded) => Ended::Succeeded,
        Ok(Ran::Failed { verdict, error }) => Ended::Failed {
            kind: match verdict {
                Verdict::Counted => "error",
                Verdict::Permanent => "permanent",
                Verdict::RetryAfter(_) => "retry after",
                Verdict::Defer(_) => "deferred",
                Verdict::NotYet(_) => "not yet",
            },
            verdict,
            error: chain(&*error),
        },
        Ok(Ran::Undecodable(error)) => Ended::Undecodable(chain(&error)),
        Err((kind, error)) => Ended::Failed { verdict: Verdict::Counted, error, kind },
    }
}

fn broken(error: impl Into<BoxError>, kind: &'static str) -> Ended {
    Ended::Failed { verdict: Verdict::Counted, error: chain(&*error.into()), kind }
}

/// Runs a handler in a transaction that commits with its acknowledgement.
async fn in_transaction<S: Store>(
    outbox: &Outbox<S>,
    receiver: &Declared<S>,
    spec: &DurableSpec,
    event: &Arc<EventRow>,
    context: DeliveryContext,
    claim: Claim,
) -> (Option<Claim>, Ended) {
    let raw = match outbox.store().begin().await {
        Ok(raw) => raw,
        Err(error) => return (Some(claim), broken(error, "database")),
    };
    let tx = Tx::new(outbox.clone(), raw);
    let running = receiver.run(event, context, Some(tx.lend()));
    match ended(guarded(event, spec, running).await) {
        Ended::Succeeded => {}
        failed => {
            // What it did is undone before its failure is recorded.
            if let Err(error) = tx.undo().await {
                warn!(%error, receiver = &*receiver.key, "a failed handler's transaction could not be rolled back at once");
            }
            return (Some(claim), failed);
        }
    }
    let (_, raw, after) = match tx.finish().await {
        Ok(parts) => parts,
        Err(error) => return (Some(claim), broken(error, "transaction")),
    };
    let settlement = Settlement::new(claim, Outcome::Succeeded);
    match outbox.store().settle(&raw, &settlement, outbox.now()).await {
        Ok(Settled::Applied) => {}
        Ok(Settled::Lost) => {
            if let Err(error) = outbox.store().rollback(raw).await {
                warn!(%error, receiver = &*receiver.key, "a transaction that lost its row could not be rolled back at once");
            }
            return (None, Ended::Lost);
        }
        Err(error) => return (Some(settlement.unwritten()), broken(error, "database")),
    }
    if let Err(error) = outbox.store().commit(raw).await {
        // If it did commit and only the answer was lost, the failure finds no claim and writes nothing.
        return (Some(settlement.unwritten()), broken(error, "database"));
    }
    run_after(outbox, after).await;
    (None, Ended::Succeeded)
}
