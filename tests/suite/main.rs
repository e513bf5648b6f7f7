//! What is promised, on every store. Each test is one behaviour, written once and run on each of them:
//! `cargo xtask test` brings up the servers, and `cargo xtask test --store sqlite` narrows it.

#![allow(missing_docs, reason = "tests are named as sentences")]
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails, and says where")]

mod bed;
mod broken;
mod conforming;
mod declaring;
mod delivering;
mod deploying;
mod engines;
mod firing;
mod hooking;
mod kept;
mod operating;
mod relaying;
mod scoping;
mod tasking;
mod telling;
