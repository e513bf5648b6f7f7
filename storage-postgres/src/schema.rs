//! The tables, as PostgreSQL has them.

use owed_core::StoreError;
use owed_sql::{Migration, Migrator, TableNames, classify};
use sea_orm::{ConnectionTrait, DatabaseTransaction, Statement};

use crate::DIALECT;

/// Lets one process migrate at a time, and puts unqualified names (the migration table's) where the tables are.
pub(crate) async fn prepare(tx: &DatabaseTransaction, names: &TableNames) -> Result<(), StoreError> {
    let preparing = |error| classify("preparing to migrate", error);
    let lock = "SELECT pg_advisory_xact_lock(hashtextextended('owed migrations', 0))";
    tx.execute_unprepared(lock).await.map_err(preparing)?;
    if let Some(schema) = names.schema() {
        // Asked for first: `IF NOT EXISTS` wants the right to make one even where there is one.
        let asked = format!("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = '{schema}'");
        let there = tx.query_one_raw(Statement::from_string(DIALECT.backend(), asked)).await;
        let schema = DIALECT.quote(schema);
        if there.map_err(preparing)?.is_none() {
            tx.execute_unprepared(&format!("CREATE SCHEMA {schema}")).await.map_err(preparing)?;
        }
        let there = format!("SET LOCAL search_path TO {schema}");
        tx.execute_unprepared(&there).await.map_err(preparing)?;
    }
    Ok(())
}

/// A sequence's name as text for `nextval`.
pub(crate) fn sequence(names: &TableNames, table: &str) -> String {
    let sequence = DIALECT.quote(&format!("{}{table}_id_seq", names.prefix()));
    match names.schema() {
        Some(schema) => format!("{}.{sequence}", DIALECT.quote(schema)),
        None => sequence,
    }
}

pub(crate) fn drop(names: &TableNames) -> String {
    let tables = names.tables(DIALECT);
    let migration = names.schema().map_or(String::new(), |schema| format!("{}.", DIALECT.quote(schema)));
    format!(
        "DROP TABLE IF EXISTS {}, {}, {}, {}, {migration}{}",
        tables.lane_pause,
        tables.receiver_success,
        tables.delivery,
        tables.event,
        DIALECT.quote(&format!("{}migration", names.prefix())),
    )
}

pub(crate) fn migrator(names: &TableNames) -> Migrator {
    let tables = names.tables(DIALECT);
    let (event, delivery) = (&tables.event, &tables.delivery);
    let (success, pause) = (&tables.receiver_success, &tables.lane_pause);
    let index = |name: &str| DIALECT.quote(&format!("{}{name}", names.prefix()));
    let (event_ids, delivery_ids) = (sequence(names, "event"), sequence(names, "delivery"));
    let up = vec![
        format!("CREATE SEQUENCE {event_ids}"),
        format!("CREATE SEQUENCE {delivery_ids}"),
        // Fixed widths first. Keys are compared and sorted by their bytes.
        format!(
            r#"CREATE TABLE {event} (
                id                bigint      NOT NULL DEFAULT nextval('{event_ids}') PRIMARY KEY,
                causation_id      bigint,
                occurred_at       timestamptz NOT NULL,
                recorded_at       timestamptz NOT NULL,
                correlation_id    uuid        NOT NULL,
                retention_seconds bigint,
                version           integer     NOT NULL,
                name              text        COLLATE "C" NOT NULL,
                codec             text        COLLATE "C" NOT NULL,
                actor_key         text        COLLATE "C" NOT NULL,
                actor_label       text        NOT NULL,
                delete_when       text        COLLATE "C",
                dedupe_key        text        COLLATE "C",
                suppressed        text,
                trace_context     text,
                scope             bytea,
                payload           bytea       NOT NULL
            )"#
        ),
        format!(
            "CREATE UNIQUE INDEX {} ON {event} (dedupe_key) WHERE dedupe_key IS NOT NULL",
            index("event_dedupe")
        ),
        // Events come in the order of their recording, near enough: a summary of each range of pages is a
        // thousandth of a tree's size, and costs an insert nothing.
        format!("CREATE INDEX {} ON {event} USING brin (recorded_at)", index("event_recorded")),
        format!("CREATE INDEX {} ON {event} (correlation_id)", index("event_correlation")),
        // The prune's: by window, the ordinary one as null, then by time.
        format!("CREATE INDEX {} ON {event} (retention_seconds, recorded_at, id)", index("event_retention")),
        format!(
            "CREATE INDEX {} ON {event} (delete_when, id) WHERE delete_when IS NOT NULL",
            index("event_consumed")
        ),
        // No foreign key to the event: it would cost a look-up and a row lock for each row written. The claim
        // joins the event anyway, and a delivery whose event somebody deleted is dead-lettered with that said.
        format!(
            r#"CREATE TABLE {delivery} (
                id            bigint      NOT NULL DEFAULT nextval('{delivery_ids}') PRIMARY KEY,
                event_id      bigint      NOT NULL,
                available_at  timestamptz,
                due_at        timestamptz NOT NULL,
                claimed_at    timestamptz,
                completed_at  timestamptz,
                succeeded_at  timestamptz,
                attempts      integer     NOT NULL DEFAULT 0,
                max_attempts  integer     NOT NULL,
                lapses        integer     NOT NULL DEFAULT 0,
                status        text        COLLATE "C" NOT NULL,
                receiver_key  text        COLLATE "C" NOT NULL,
                target        text        NOT NULL,
                target_digest bytea       NOT NULL,
                claimed_by    text        COLLATE "C",
                last_error    text
            )"#
        ),
        format!(
            "CREATE UNIQUE INDEX {} ON {delivery} (event_id, receiver_key, target_digest)",
            index("delivery_owed")
        ),
        // The claim's: what is settled is not in it. With the id, rows that fall due in one moment (a large batch
        // does) have an order too, and a claim of some of them need not sort them all.
        format!(
            "CREATE INDEX {} ON {delivery} (receiver_key, available_at, id) WHERE available_at IS NOT NULL",
            index("delivery_claim")
        ),
        format!("CREATE INDEX {} ON {delivery} (id) WHERE status = 'dead'", index("delivery_dead")),
        // A sequence goes with its table.
        format!("ALTER SEQUENCE {event_ids} OWNED BY {event}.id"),
        format!("ALTER SEQUENCE {delivery_ids} OWNED BY {delivery}.id"),
        format!(
            r#"CREATE TABLE {success} (
                receiver_key text        COLLATE "C" NOT NULL PRIMARY KEY,
                succeeded_at timestamptz NOT NULL
            )"#
        ),
        format!(
            r#"CREATE TABLE {pause} (
                lane   text        COLLATE "C" NOT NULL,
                worker text        COLLATE "C" NOT NULL,
                since  timestamptz NOT NULL,
                until  timestamptz NOT NULL,
                PRIMARY KEY (lane, worker)
            )"#
        ),
    ];
    let down = [pause, success, delivery, event].map(|table| format!("DROP TABLE {table}")).to_vec();
    Migrator::new(names.clone(), vec![Migration::new(names, "m0001_tables", up, down)])
}
