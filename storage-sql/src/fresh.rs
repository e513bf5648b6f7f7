//! Which connections of a pool are still worth using.

use std::{
    error::Error,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use owed_core::StoreError;

use crate::error::is_read_only;

/// How long a connection that was idle is taken for alive without a look. The pool looks at each one that comes
/// back to it, so one that was used a moment ago is not worth a round trip before every use.
pub const TRUSTED: Duration = Duration::from_secs(1);

/// Remembers when a server last said that it takes no writes. After a fail-over the old connections lead to what
/// is a read-only replica now; they work, so a pool would hand them out for as long as it lives. Those that were
/// opened before that answer are not used again.
#[derive(Clone, Debug, Default)]
pub struct Fresh(Arc<Mutex<Option<Instant>>>);

impl Fresh {
    /// Whether a connection that was opened so long ago may be used.
    pub fn allows(&self, age: Duration) -> bool {
        let since = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        since.is_none_or(|since| age < since.elapsed())
    }

    /// Passes an answer on, and takes note if it says that the server takes no writes.
    ///
    /// # Errors
    /// As the answer.
    pub fn noting<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Err(error) = &answer
            && error.source().is_some_and(is_read_only)
        {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        answer
    }
}
