//! What can go wrong in a store, by what the caller can do about it.

use std::error::Error;

type Source = Box<dyn Error + Send + Sync + 'static>;

/// A store's failure. The variants say what a caller can do; the database's own error is the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The same call may well work if it is made again at once: a deadlock, a serialisation failure. In a
    /// transaction, the whole transaction has to be made again.
    #[error("the database asks to try again while {doing}")]
    Retry {
        /// What was being done.
        doing: &'static str,
        /// What the database said.
        #[source]
        source: Source,
    },
    /// The database can't be reached, or has no connection to spare. Try again later.
    #[error("the database is not reachable while {doing}")]
    Unavailable {
        /// What was being done.
        doing: &'static str,
        /// What the driver said.
        #[source]
        source: Source,
    },
    /// This store can't do that: a server that is too old, an isolation level that can't serve, a bad table
    /// prefix. Change the set-up.
    #[error("{what}")]
    Unsupported {
        /// What is not possible, and what would be.
        what: String,
    },
    /// Anything else the database refused: missing tables, missing rights, a row that can't be read.
    #[error("the database refused while {doing}")]
    Failed {
        /// What was being done.
        doing: &'static str,
        /// What the database said.
        #[source]
        source: Source,
    },
}

impl StoreError {
    /// Whether making the same call (or, in a transaction, the same transaction) again may work.
    pub fn is_transient(&self) -> bool {
        matches!(self, StoreError::Retry { .. } | StoreError::Unavailable { .. })
    }

    /// A refusal that names what can't be done.
    pub fn unsupported(what: impl Into<String>) -> Self {
        StoreError::Unsupported { what: what.into() }
    }

    /// A failure with no better name.
    pub fn failed(doing: &'static str, source: impl Into<Source>) -> Self {
        StoreError::Failed { doing, source: source.into() }
    }
}
