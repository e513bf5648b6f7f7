//! The claim of 100 rows on a small table, and on one that is full of what it must not read; on any database.

use std::time::{Duration, Instant};

use owed::{
    MysqlStore, PostgresStore, SqliteStore, Store,
    store::{ClaimRequest, ReceiverLease},
};
use sea_orm::{ConnectionTrait, DatabaseConnection};

use crate::{Result, operate};

/// How one database spells what the filling needs.
struct Words {
    /// Three binary texts.
    empty: &'static str,
    other: &'static str,
    third: &'static str,
    uuid: &'static str,
    now: &'static str,
    earlier: &'static str,
    later: &'static str,
    no_time: &'static str,
    analyze: &'static [&'static str],
}

/// Measures it on the database of this URL, in tables named `bench_..`, which are dropped.
pub(crate) async fn measure(url: &str, settled: i64) -> Result<()> {
    if url.starts_with("sqlite:") {
        let store = SqliteStore::builder(url).prefix("bench_").connect().await?;
        store.migrate().await?;
        let words = Words {
            empty: "x''",
            other: "x'01'",
            third: "x'02'",
            uuid: "x'00000000000000000000000000000000'",
            now: "CAST(unixepoch('subsec') * 1000000 AS INTEGER)",
            earlier: "CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 60000000",
            later: "CAST(unixepoch('subsec') * 1000000 AS INTEGER) + 86400000000",
            no_time: "NULL",
            analyze: &["ANALYZE"],
        };
        compare(&store, store.connection(), &words, settled, async |request| {
            Ok(store.explain_claim(request).await?)
        })
        .await?;
        Ok(())
    } else if url.starts_with("mysql:") {
        let store = MysqlStore::builder(url).prefix("bench_").connect().await?;
        store.drop_tables().await?;
        store.migrate().await?;
        let words = Words {
            empty: "''",
            other: "x'01'",
            third: "x'02'",
            uuid: "x'00000000000000000000000000000000'",
            now: "UTC_TIMESTAMP(6)",
            earlier: "UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE",
            later: "UTC_TIMESTAMP(6) + INTERVAL 1 DAY",
            no_time: "NULL",
            analyze: &["ANALYZE TABLE bench_delivery", "ANALYZE TABLE bench_event"],
        };
        compare(&store, store.connection(), &words, settled, async |request| {
            Ok(store.explain_claim(request).await?)
        })
        .await?;
        Ok(store.drop_tables().await?)
    } else {
        let store = PostgresStore::builder(url).prefix("bench_").connect().await?;
        store.drop_tables().await?;
        store.migrate().await?;
        let words = Words {
            empty: "''::bytea",
            other: "'\\x01'::bytea",
            third: "'\\x02'::bytea",
            uuid: "'00000000-0000-0000-0000-000000000000'::uuid",
            now: "now()",
            earlier: "now() - interval '1 minute'",
            later: "now() + interval '1 day'",
            no_time: "NULL::timestamptz",
            analyze: &["VACUUM ANALYZE bench_delivery", "VACUUM ANALYZE bench_event"],
        };
        compare(&store, store.connection(), &words, settled, async |request| {
            Ok(store.explain_claim(request).await?)
        })
        .await?;
        Ok(store.drop_tables().await?)
    }
}

async fn compare<S: Store>(
    store: &S,
    db: &DatabaseConnection,
    words: &Words,
    settled: i64,
    explain: impl AsyncFn(&ClaimRequest) -> Result<String>,
) -> Result<()> {
    let Words { empty, other, third, uuid, now, earlier, later, no_time, analyze } = words;
    println!("{}", store.capabilities().database);
    db.execute_unprepared("DROP TABLE IF EXISTS bench_number").await?;
    db.execute_unprepared("CREATE TABLE bench_number (n INTEGER NOT NULL)").await?;
    let numbers: Vec<String> = (0..1_000).map(|n| format!("({n})")).collect();
    db.execute_unprepared(&format!("INSERT INTO bench_number VALUES {}", numbers.join(", "))).await?;
    let numbers = |count: i64| {
        format!(
            "(SELECT a.n + 1000 * b.n + 1 AS n FROM bench_number a, bench_number b WHERE a.n + 1000 * b.n < {count}) numbers"
        )
    };
    let rows = |key: &str, digest: &str, status: &str, at: &str, count: i64| {
        format!(
            "INSERT INTO bench_delivery (event_id, receiver_key, target, target_digest, status, max_attempts, available_at, due_at)
             SELECT n, '{key}', '', {digest}, '{status}', 5, {at}, {now} FROM {}",
            numbers(count)
        )
    };
    let receivers = vec![ReceiverLease { key: "bench.claimed".into(), lease: Duration::from_secs(30) }];
    let (mut medians, mut looked) = (Vec::new(), Vec::new());
    for fill in [0, settled] {
        db.execute_unprepared("DELETE FROM bench_delivery").await?;
        db.execute_unprepared("DELETE FROM bench_event").await?;
        db.execute_unprepared(&format!(
            "INSERT INTO bench_event (id, name, version, codec, payload, occurred_at, recorded_at, actor_key, actor_label, correlation_id)
             SELECT n, 'bench.Placed', 1, 'cbor', {other}, {now}, {now}, '', '', {uuid} FROM {}",
            numbers(fill.max(20_000))
        ))
        .await?;
        // More of each than health counts, so that it counts as many on both tables.
        for (key, at) in [("bench.scheduled", later), ("bench.other", earlier)] {
            db.execute_unprepared(&rows(key, third, "pending", at, 12_000)).await?;
        }
        db.execute_unprepared(&rows("bench.dead", empty, "dead", no_time, 2_000)).await?;
        if fill > 0 {
            for sql in [
                rows("bench.claimed", empty, "succeeded", no_time, fill),
                rows("bench.scheduled", empty, "pending", later, fill / 10),
                // Ahead of time for the claimed receiver as well.
                rows("bench.claimed", third, "pending", later, fill / 10),
                rows("bench.other", empty, "pending", earlier, fill / 5),
            ] {
                db.execute_unprepared(&sql).await?;
            }
        }
        db.execute_unprepared(&rows("bench.claimed", other, "pending", earlier, 20_000)).await?;
        for sql in *analyze {
            db.execute_unprepared(sql).await?;
        }
        let request = |now| ClaimRequest::new("bench".into(), receivers.clone(), 100, now);
        if fill > 0 {
            println!("{}", explain(&request(store.now())).await?);
        }
        let mut times = Vec::new();
        for _ in 0..150 {
            let request = request(store.now());
            let started = Instant::now();
            assert_eq!(store.claim(&request).await?.len(), 100);
            times.push(started.elapsed().as_secs_f64() * 1_000.0);
        }
        times.sort_unstable_by(f64::total_cmp);
        medians.push(times[times.len() / 2]);
        looked.push(operate::looks(store).await?);
    }
    let first = 10_000_000;
    let mut due = vec![format!(
        "INSERT INTO bench_event (id, name, version, codec, payload, occurred_at, recorded_at, actor_key, actor_label, correlation_id, delete_when)
         SELECT {first} + n, 'bench.Placed', 1, 'cbor', {other}, {now}, {now}, '', '', {uuid}, 'settled' FROM {}",
        numbers(operate::PRUNED)
    )];
    for key in ["bench.x", "bench.y", "bench.z"] {
        due.push(format!(
            "INSERT INTO bench_delivery (event_id, receiver_key, target, target_digest, status, max_attempts, due_at, succeeded_at)
             SELECT {first} + n, '{key}', '', {empty}, 'succeeded', 5, {now}, {now} FROM {}",
            numbers(operate::PRUNED)
        ));
    }
    operate::prune(store, db, &due, first).await?;
    for (small, full) in looked[0].iter().zip(&looked[1]) {
        println!(
            "{}: {:.2} ms on a small table, {:.2} ms on the full one: ratio {:.2}",
            small.0,
            small.1,
            full.1,
            full.1 / small.1
        );
    }
    db.execute_unprepared("DROP TABLE bench_number").await?;
    println!(
        "claim of 100 rows: {:.2} ms on a small table, {:.2} ms with {settled} settled, {} scheduled and {} of another receiver: ratio {:.2}",
        medians[0],
        medians[1],
        settled / 5,
        settled / 5,
        medians[1] / medians[0]
    );
    Ok(())
}
