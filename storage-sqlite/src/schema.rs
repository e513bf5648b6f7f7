//! The tables, as SQLite has them.

use owed_sql::{Migration, Migrator, TableNames};

use crate::DIALECT;

pub(crate) fn migrator(names: &TableNames) -> Migrator {
    let tables = names.tables(DIALECT);
    let (event, delivery) = (&tables.event, &tables.delivery);
    let (success, pause) = (&tables.receiver_success, &tables.lane_pause);
    let index = |name: &str| DIALECT.quote(&format!("{}{name}", names.prefix()));
    let up = vec![
        format!(
            "CREATE TABLE {event} (
                id                INTEGER PRIMARY KEY AUTOINCREMENT,
                name              TEXT    NOT NULL,
                version           INTEGER NOT NULL,
                codec             TEXT    NOT NULL,
                payload           BLOB    NOT NULL,
                dedupe_key        TEXT,
                occurred_at       INTEGER NOT NULL,
                recorded_at       INTEGER NOT NULL,
                actor_key         TEXT    NOT NULL,
                actor_label       TEXT    NOT NULL,
                scope             BLOB,
                correlation_id    BLOB    NOT NULL,
                causation_id      INTEGER,
                suppressed        TEXT,
                retention_seconds INTEGER,
                delete_when       TEXT,
                trace_context     TEXT
            ) STRICT"
        ),
        format!(
            "CREATE UNIQUE INDEX {} ON {event} (dedupe_key) WHERE dedupe_key IS NOT NULL",
            index("event_dedupe")
        ),
        // The prune's: by window, the ordinary one as null, then by time.
        format!("CREATE INDEX {} ON {event} (retention_seconds, recorded_at)", index("event_retention")),
        format!(
            "CREATE INDEX {} ON {event} (delete_when) WHERE delete_when IS NOT NULL",
            index("event_consumed")
        ),
        format!("CREATE INDEX {} ON {event} (correlation_id)", index("event_correlation")),
        // No foreign key to the event: it would be checked for each row written, and the claim joins the event
        // anyway and finds out.
        format!(
            "CREATE TABLE {delivery} (
                id            INTEGER PRIMARY KEY AUTOINCREMENT,
                event_id      INTEGER NOT NULL,
                receiver_key  TEXT    NOT NULL,
                target        TEXT    NOT NULL,
                target_digest BLOB    NOT NULL,
                status        TEXT    NOT NULL,
                attempts      INTEGER NOT NULL DEFAULT 0,
                max_attempts  INTEGER NOT NULL,
                available_at  INTEGER,
                due_at        INTEGER NOT NULL,
                claimed_by    TEXT,
                claimed_at    INTEGER,
                lapses        INTEGER NOT NULL DEFAULT 0,
                last_error    TEXT,
                completed_at  INTEGER,
                succeeded_at  INTEGER
            ) STRICT"
        ),
        format!(
            "CREATE UNIQUE INDEX {} ON {delivery} (event_id, receiver_key, target_digest)",
            index("delivery_owed")
        ),
        // The claim's: what is settled is not in it.
        format!(
            "CREATE INDEX {} ON {delivery} (receiver_key, available_at) WHERE available_at IS NOT NULL",
            index("delivery_claim")
        ),
        format!("CREATE INDEX {} ON {delivery} (id) WHERE status = 'dead'", index("delivery_dead")),
        format!(
            "CREATE TABLE {success} (
                receiver_key TEXT    NOT NULL PRIMARY KEY,
                succeeded_at INTEGER NOT NULL
            ) STRICT"
        ),
        format!(
            "CREATE TABLE {pause} (
                lane   TEXT    NOT NULL,
                worker TEXT    NOT NULL,
                since  INTEGER NOT NULL,
                until  INTEGER NOT NULL,
                PRIMARY KEY (lane, worker)
            ) STRICT"
        ),
    ];
    let down = [pause, success, delivery, event].map(|table| format!("DROP TABLE {table}")).to_vec();
    Migrator::new(names.clone(), vec![Migration::new(names, "m0001_tables", up, down)])
}
