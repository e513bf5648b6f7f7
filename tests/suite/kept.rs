//! Histories that have found a fault once, as `history::run` printed them. They are run on every store; what one finds
//! is added here.

use owed::conformance::history::Op::{self, *};

fn fire(receivers: u8) -> Op {
    Fire { slot: 0, receivers, key: None, delay: 0, born_claimed: false }
}

fn claim(receivers: u8) -> Op {
    Claim { worker: 0, receivers, limit: 1 }
}

/// A store that claims before a row's time.
pub(crate) fn claimed_early() -> Vec<Op> {
    vec![fire(3), claim(1)]
}

/// A batch that settles one claim twice.
pub(crate) fn settled_twice() -> Vec<Op> {
    vec![fire(3), claim(1), SettleAll { claims: vec![(0, 0), (0, 0)] }]
}

/// A rollback that keeps what it undoes.
pub(crate) fn undone() -> Vec<Op> {
    vec![Begin { slot: 0 }, fire(0), Rollback { slot: 0 }]
}

/// A renewal that holds for longer than it was asked for.
pub(crate) fn renewed() -> Vec<Op> {
    vec![fire(1), claim(1), Renew { claims: vec![0] }]
}

/// A claim over two receivers that takes more than its limit.
pub(crate) fn limited() -> Vec<Op> {
    vec![fire(5), claim(5)]
}

/// A prune that deletes before a window's end.
pub(crate) fn pruned() -> Vec<Op> {
    vec![fire(0), Prune { kind: 3, seconds: 5 }]
}

/// A replay that owes a row before its time.
pub(crate) fn reopened() -> Vec<Op> {
    let operate = |what, receivers, delay| Operate { event: 0, what, receivers, delay };
    vec![fire(1), operate(0, 0, 0), operate(2, 1, 2)]
}

pub(crate) fn all() -> Vec<Vec<Op>> {
    vec![claimed_early(), settled_twice(), undone(), renewed(), limited(), pruned(), reopened()]
}
