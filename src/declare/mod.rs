//! Declaring: receivers in their states, handlers, and what is refused when they are put together.

mod failure;
mod handler;
mod receiver;
mod registry;
pub mod state;

pub use failure::{BoxError, Failure, Refusal};
pub(crate) use failure::{Verdict, chain};
pub use handler::{Deliver, Handler};
pub use receiver::{Declared, Receiver};
pub(crate) use receiver::{DueTime, DurableSpec, Mode, Ran};
pub(crate) use registry::Registry;
pub use registry::{BuildError, Mistake};

/// The lane of every receiver that declared none.
pub const DEFAULT_LANE: &str = "default";
