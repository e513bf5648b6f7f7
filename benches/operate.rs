//! What operators ask for and do: health, a page of dead letters, a prune with nothing due; and pruning itself beside
//! the bare DELETE of the same rows.

use std::time::Instant;

use owed::{DeliveryQuery, Outbox, Status, Store};
use sea_orm::{ConnectionTrait, DatabaseConnection, TransactionTrait};

use crate::Result;

/// The medians of what does not change anything, in milliseconds.
pub(crate) async fn looks<S: Store>(store: &S) -> Result<[(&'static str, f64); 3]> {
    let outbox = Outbox::builder(store.clone()).build()?;
    let dead = DeliveryQuery { statuses: vec![Status::Dead], ..DeliveryQuery::page(100) };
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..21 {
        let started = Instant::now();
        assert!(outbox.health().await?.total.bounded);
        times[0].push(started.elapsed());
        let started = Instant::now();
        assert_eq!(store.deliveries(&dead).await?.len(), 100);
        times[1].push(started.elapsed());
        let started = Instant::now();
        assert_eq!(outbox.prune().await?.events, 0);
        times[2].push(started.elapsed());
    }
    let median = |of: &mut Vec<std::time::Duration>| {
        of.sort_unstable();
        of[of.len() / 2].as_secs_f64() * 1_000.0
    };
    let [health, page, prune] = &mut times;
    Ok([
        ("health", median(health)),
        ("a page of 100 dead letters", median(page)),
        ("a prune with nothing due", median(prune)),
    ])
}

/// Events that are due, with three settled deliveries each.
const EVENTS: i64 = 25_000;
/// Events that the floor deletes at once: as many rows as one batch of a prune.
const BATCH: i64 = 1_250;

/// Prunes, and deletes the same rows by hand, in turns.
pub(crate) async fn prune<S: Store>(
    store: &S,
    db: &DatabaseConnection,
    fill: &[String],
    first: i64,
) -> Result<()> {
    let outbox = Outbox::builder(store.clone()).build()?;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        for by_hand in [false, true] {
            for sql in fill {
                db.execute_unprepared(sql).await?;
            }
            let started = Instant::now();
            if by_hand {
                for from in (first..first + EVENTS).step_by(BATCH as usize) {
                    let tx = db.begin().await?;
                    let range = format!("> {from} AND {{}} <= {}", from + BATCH);
                    for (table, column) in [("bench_delivery", "event_id"), ("bench_event", "id")] {
                        let range = range.replace("{}", column);
                        tx.execute_unprepared(&format!("DELETE FROM {table} WHERE {column} {range}")).await?;
                    }
                    tx.commit().await?;
                }
                floor.push(started.elapsed().as_secs_f64());
            } else {
                let pruned = outbox.prune().await?;
                assert_eq!((pruned.events, pruned.deliveries), (EVENTS as u64, 3 * EVENTS as u64));
                ours.push(started.elapsed().as_secs_f64());
            }
        }
    }
    let rows = (4 * EVENTS) as f64;
    let rate = |times: &mut Vec<f64>| {
        times.sort_unstable_by(f64::total_cmp);
        rows / times[times.len() / 2]
    };
    let (ours, floor) = (rate(&mut ours), rate(&mut floor));
    println!("pruned: {ours:.0} rows/s, {floor:.0} by hand: ratio {:.2}", ours / floor);
    Ok(())
}

pub(crate) const PRUNED: i64 = EVENTS;
