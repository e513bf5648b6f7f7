//! The tables, as MySQL and MariaDB have them.

use owed_sql::{Migration, Migrator, TableNames};

use crate::{DIALECT, connect::Kind};

/// The table of dedupe keys.
pub(crate) fn dedupe(names: &TableNames) -> String {
    names.table(DIALECT, "dedupe")
}

pub(crate) fn drop(names: &TableNames) -> String {
    let tables = names.tables(DIALECT);
    format!(
        "DROP TABLE IF EXISTS {}, {}, {}, {}, {}, {}",
        dedupe(names),
        tables.lane_pause,
        tables.receiver_success,
        tables.delivery,
        tables.event,
        DIALECT.quote(&format!("{}migration", names.prefix())),
    )
}

pub(crate) fn migrator(names: &TableNames, kind: Kind) -> Migrator {
    let tables = names.tables(DIALECT);
    let (event, delivery) = (&tables.event, &tables.delivery);
    let (success, pause) = (&tables.receiver_success, &tables.lane_pause);
    let dedupe = dedupe(names);
    let index = |name: &str| DIALECT.quote(&format!("{}{name}", names.prefix()));
    // By bytes, and without padding: 'a' and 'a ' are two keys. The two servers name it differently.
    let collation = match kind {
        Kind::Mysql => "utf8mb4_0900_bin",
        Kind::Mariadb => "utf8mb4_nopad_bin",
    };
    let table =
        format!("ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}");
    let up = vec![
        format!(
            "CREATE TABLE IF NOT EXISTS {event} (
                id                BIGINT       NOT NULL AUTO_INCREMENT PRIMARY KEY,
                name              VARCHAR(255) NOT NULL,
                version           INT          NOT NULL,
                codec             VARCHAR(20)  NOT NULL,
                payload           LONGBLOB     NOT NULL,
                dedupe_key        VARCHAR(255),
                occurred_at       DATETIME(6)  NOT NULL,
                recorded_at       DATETIME(6)  NOT NULL,
                actor_key         VARCHAR(255) NOT NULL,
                actor_label       VARCHAR(255) NOT NULL,
                scope             MEDIUMBLOB,
                correlation_id    BINARY(16)   NOT NULL,
                causation_id      BIGINT,
                suppressed        VARCHAR(255),
                retention_seconds BIGINT,
                delete_when       VARCHAR(20),
                trace_context     TEXT,
                KEY {} (retention_seconds, recorded_at),
                KEY {} (delete_when),
                KEY {} (correlation_id)
            ) {table}",
            index("event_retention"),
            index("event_consumed"),
            index("event_correlation"),
        ),
        // A table, and not a unique index of the event's: InnoDB finds a duplicate in a secondary index by a lock
        // that holds the gap before it as well, at any isolation level, until the transaction ends. Nobody else
        // could write a neighbouring key meanwhile, and next to the smallest key lie the nulls: all events without
        // a key. In a primary key, at READ COMMITTED, it is the one row.
        //
        // No foreign key, which would lock gaps again. The row of an event that is gone is taken over by the next
        // one with its key.
        format!(
            "CREATE TABLE IF NOT EXISTS {dedupe} (
                dedupe_key VARCHAR(255) NOT NULL PRIMARY KEY,
                event_id   BIGINT       NOT NULL
            ) {table}"
        ),
        // No foreign key to the event: it would cost a look-up and a row lock for each row written. The claim
        // reads the event anyway, and a delivery whose event somebody deleted is dead-lettered with that said.
        //
        // There are no partial indexes. The claim's holds the settled rows as well, but with a null, which sorts
        // before every time: a range of times never meets one. That of dead letters holds a null for each other row.
        format!(
            "CREATE TABLE IF NOT EXISTS {delivery} (
                id            BIGINT        NOT NULL AUTO_INCREMENT PRIMARY KEY,
                event_id      BIGINT        NOT NULL,
                receiver_key  VARCHAR(255)  NOT NULL,
                target        TEXT          NOT NULL,
                target_digest VARBINARY(32) NOT NULL,
                status        VARCHAR(20)   NOT NULL,
                attempts      INT           NOT NULL DEFAULT 0,
                max_attempts  INT           NOT NULL,
                available_at  DATETIME(6),
                due_at        DATETIME(6)   NOT NULL,
                claimed_by    VARCHAR(255),
                claimed_at    DATETIME(6),
                lapses        INT           NOT NULL DEFAULT 0,
                last_error    TEXT,
                completed_at  DATETIME(6),
                succeeded_at  DATETIME(6),
                dead          TINYINT AS (CASE WHEN status = 'dead' THEN 1 END) VIRTUAL,
                UNIQUE KEY {} (event_id, receiver_key, target_digest),
                KEY {} (receiver_key, available_at),
                KEY {} (dead)
            ) {table}",
            index("delivery_owed"),
            index("delivery_claim"),
            index("delivery_dead"),
        ),
        format!(
            "CREATE TABLE IF NOT EXISTS {success} (
                receiver_key VARCHAR(255) NOT NULL PRIMARY KEY,
                succeeded_at DATETIME(6)  NOT NULL
            ) {table}"
        ),
        format!(
            "CREATE TABLE IF NOT EXISTS {pause} (
                lane    VARCHAR(255) NOT NULL,
                worker  VARCHAR(255) NOT NULL,
                since   DATETIME(6)  NOT NULL,
                `until` DATETIME(6)  NOT NULL,
                PRIMARY KEY (lane, worker)
            ) {table}"
        ),
    ];
    let down = [pause, success, delivery, &dedupe, event]
        .map(|table| format!("DROP TABLE IF EXISTS {table}"))
        .to_vec();
    Migrator::new(names.clone(), vec![Migration::new(names, "m0001_tables", up, down)])
}
