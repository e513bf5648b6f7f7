//! How fast it is on PostgreSQL, beside the floor: the same work on the bare driver, on the same server, in the same
//! run, round by round in turns. `cargo run --release -p owed-bench -- postgres://..`

mod claim;
mod latency;
mod operate;

use std::time::{Duration, Instant};

use clap::Parser;
use owed::{Event, Failure, Outbox, PostgresStore, Receiver, Settings, Store, Tx};
use sea_orm::sqlx::{self, Executor, PgPool};
use serde::{Deserialize, Serialize};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Parser)]
struct Options {
    /// postgres://USER@HOST/DATABASE; with --full also mysql:// and sqlite://. Its tables named bench_.. are dropped
    url: String,
    /// How often each figure is taken; the median is shown
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Measures only the claim, with so many settled rows in the table (at most 1,000,000), and a fifth of that
    /// scheduled and in another lane
    #[arg(long)]
    full: Option<i64>,
    /// Measures only how long after a commit the handler starts, on an idle relay
    #[arg(long)]
    latency: bool,
}

#[derive(Clone, Serialize, Deserialize, Event)]
#[event(name = "bench.Placed")]
struct Placed {
    order: i64,
    email: String,
}

fn placed(order: i64) -> Placed {
    Placed { order, email: format!("customer{order}@mail.example") }
}

async fn nothing(_: Placed) -> std::result::Result<(), Failure> {
    Ok(())
}

async fn nothing_in_transaction(_: Placed, _: Tx<PostgresStore>) -> std::result::Result<(), Failure> {
    Ok(())
}

/// The tables of one store, emptied.
async fn fresh(url: &str, prefix: &str) -> Result<PostgresStore> {
    let store = PostgresStore::builder(url).prefix(prefix).max_connections(24).connect().await?;
    store.drop_tables().await?;
    store.migrate().await?;
    Ok(store)
}

struct Figure {
    what: &'static str,
    ours: Vec<f64>,
    floor: Vec<f64>,
}

impl Figure {
    fn new(what: &'static str) -> Self {
        Figure { what, ours: Vec::new(), floor: Vec::new() }
    }

    fn show(&mut self) {
        let median = |figures: &mut Vec<f64>| {
            figures.sort_unstable_by(f64::total_cmp);
            (figures[figures.len() / 2], figures[0], figures[figures.len() - 1])
        };
        let ((ours, low, high), (floor, _, _)) = (median(&mut self.ours), median(&mut self.floor));
        println!(
            "{:<52} {ours:>9.0}/s ({low:.0} to {high:.0})  floor {floor:>9.0}/s  ratio {:.2}",
            self.what,
            ours / floor
        );
    }
}

fn rate(count: i64, since: Instant) -> f64 {
    count as f64 / since.elapsed().as_secs_f64()
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(settled) = options.full {
        return claim::measure(&options.url, settled.clamp(10, 1_000_000)).await;
    }
    if options.latency {
        return latency::measure(&options.url, options.rounds).await;
    }
    let store = fresh(&options.url, "bench_").await?;
    println!(
        "{}, {} rounds, {} threads",
        store.capabilities().database,
        options.rounds,
        std::thread::available_parallelism()?
    );
    let pool = store.connection().get_postgres_connection_pool().clone();
    pool.execute("DROP TABLE IF EXISTS bench_order; CREATE TABLE bench_order (id bigserial PRIMARY KEY, email text NOT NULL)").await?;
    let plain = Outbox::builder(store.clone())
        .receiver(Receiver::on::<Placed>("bench.plain").durable().run(nothing))
        .build()?;
    for tasks in [1, 8] {
        let what = if tasks == 1 {
            "fire with one business insert, 1 task"
        } else {
            "fire with one business insert, 8 tasks"
        };
        let mut figure = Figure::new(what);
        for _ in 0..options.rounds {
            figure.ours.push(in_tasks(tasks, 2_000, |n| fire(plain.clone(), n)).await?);
            figure.floor.push(in_tasks(tasks, 2_000, |n| fire_bare(pool.clone(), n)).await?);
        }
        figure.show();
    }
    let mut figure = Figure::new("fire_all of 1,000 events in a transaction");
    for _ in 0..options.rounds {
        let started = Instant::now();
        plain.transaction(async |tx| tx.fire_all((0..1_000).map(placed)).await).await?;
        figure.ours.push(rate(1_000, started));
        figure.floor.push(fire_all_bare(&pool, 1_000).await?);
    }
    figure.show();
    truncate(&pool).await?;

    const DELIVERIES: i64 = 50_000;
    let mut figure = Figure::new("deliver without the transaction, no-op handler");
    for _ in 0..options.rounds {
        owe(&plain, DELIVERIES).await?;
        figure.ours.push(relay(&plain, 64, 1_000, DELIVERIES).await?);
        truncate(&pool).await?;
        owe(&plain, DELIVERIES).await?;
        figure.floor.push(claim_and_settle_bare(&pool, 1_000, DELIVERIES).await?);
        truncate(&pool).await?;
    }
    figure.show();

    let in_transaction = Outbox::builder(store.clone())
        .settings(Settings::default())
        .receiver(Receiver::on::<Placed>("bench.plain").durable().run(nothing_in_transaction))
        .build()?;
    const TRANSACTIONS: i64 = 10_000;
    let mut figure = Figure::new("deliver with the handler's transaction");
    for _ in 0..options.rounds {
        owe(&plain, TRANSACTIONS).await?;
        figure.ours.push(relay(&in_transaction, 16, 500, TRANSACTIONS).await?);
        truncate(&pool).await?;
        owe(&plain, TRANSACTIONS).await?;
        figure.floor.push(transactions_bare(&pool, 16, TRANSACTIONS).await?);
        truncate(&pool).await?;
    }
    figure.show();
    store.drop_tables().await?;
    pool.execute("DROP TABLE bench_order").await?;
    Ok(())
}

async fn truncate(pool: &PgPool) -> Result<()> {
    pool.execute("TRUNCATE bench_event, bench_delivery").await?;
    Ok(())
}

async fn in_tasks<F>(tasks: i64, count: i64, mut call: impl FnMut(i64) -> F) -> Result<f64>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let started = Instant::now();
    let running: Vec<_> = (0..tasks).map(|_| tokio::spawn(call(count / tasks))).collect();
    for task in running {
        task.await??;
    }
    Ok(rate(count, started))
}

async fn fire(outbox: Outbox<PostgresStore>, count: i64) -> Result<()> {
    use sea_orm::{ConnectionTrait, DbBackend, Statement};
    for n in 0..count {
        let event = placed(n);
        let tx = outbox.begin().await?;
        let insert = "INSERT INTO bench_order (email) VALUES ($1) RETURNING id";
        tx.query_one_raw(Statement::from_sql_and_values(
            DbBackend::Postgres,
            insert,
            [event.email.clone().into()],
        ))
        .await?;
        tx.fire(event).await?;
        tx.commit().await?;
    }
    Ok(())
}

const RECORD: &str = "WITH e AS (
        INSERT INTO bench_event (name, version, codec, payload, occurred_at, recorded_at, actor_key, actor_label, correlation_id)
        SELECT 'bench.Placed', 1, 'cbor', p, now(), now(), '', '', '00000000-0000-0000-0000-000000000000'
        FROM unnest($1::bytea[]) p
        RETURNING id
    )
    INSERT INTO bench_delivery (event_id, receiver_key, target, target_digest, status, max_attempts, available_at, due_at)
    SELECT id, 'bench.plain', '', '', 'pending', 5, now(), now() FROM e RETURNING id";

fn payload(n: i64) -> Vec<u8> {
    format!("order {n}, customer{n}@mail.example").into_bytes()
}

async fn fire_bare(pool: PgPool, count: i64) -> Result<()> {
    for n in 0..count {
        let mut tx = pool.begin().await?;
        sqlx::query("INSERT INTO bench_order (email) VALUES ($1) RETURNING id")
            .bind(format!("customer{n}@mail.example"))
            .fetch_one(&mut *tx)
            .await?;
        sqlx::query(RECORD).bind(vec![payload(n)]).fetch_all(&mut *tx).await?;
        tx.commit().await?;
    }
    Ok(())
}

async fn fire_all_bare(pool: &PgPool, count: i64) -> Result<f64> {
    let started = Instant::now();
    let mut tx = pool.begin().await?;
    sqlx::query(RECORD).bind((0..count).map(payload).collect::<Vec<_>>()).fetch_all(&mut *tx).await?;
    tx.commit().await?;
    Ok(rate(count, started))
}

async fn owe(outbox: &Outbox<PostgresStore>, count: i64) -> Result<()> {
    for chunk in 0..count / 5_000 {
        let events = (chunk * 5_000..(chunk + 1) * 5_000).map(placed);
        outbox.transaction(async |tx| tx.fire_all(events).await).await?;
    }
    let pool = outbox.store().connection().get_postgres_connection_pool();
    pool.execute("VACUUM ANALYZE bench_event, bench_delivery").await?;
    pool.execute("CHECKPOINT").await?;
    Ok(())
}

/// From the start of a relay until everything is settled.
async fn relay(outbox: &Outbox<PostgresStore>, concurrency: usize, batch: u32, count: i64) -> Result<f64> {
    let started = Instant::now();
    let relay = outbox.relay().concurrency(concurrency).batch_size(batch).spawn()?;
    while !outbox.store().owed_receivers().await?.is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let rate = rate(count, started);
    let delivered = relay.stop().await;
    assert_eq!(delivered.succeeded, count.unsigned_abs());
    Ok(rate)
}

const CLAIM: &str = "WITH picked AS MATERIALIZED (
        SELECT id FROM bench_delivery
        WHERE receiver_key = 'bench.plain' AND available_at <= now()
        ORDER BY available_at LIMIT $1 FOR UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE bench_delivery d SET status = 'claimed', claimed_by = 'bare', claimed_at = now(),
            available_at = now() + interval '30 s'
        FROM picked WHERE d.id = picked.id RETURNING d.*
    )
    SELECT taken.id, taken.attempts, e.name, e.payload FROM taken JOIN bench_event e ON e.id = taken.event_id";

const SETTLE: &str =
    "UPDATE bench_delivery SET status = 'succeeded', attempts = attempts + 1, available_at = NULL,
        completed_at = now(), succeeded_at = now(), claimed_by = NULL, claimed_at = NULL
    WHERE id = ANY($1) AND status = 'claimed' AND claimed_by = 'bare'";

/// Two loops, each of one claim and one settlement.
async fn claim_and_settle_bare(pool: &PgPool, batch: i64, count: i64) -> Result<f64> {
    let started = Instant::now();
    let loops: Vec<_> = (0..2)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move {
                loop {
                    let rows: Vec<(i64, i32, String, Vec<u8>)> =
                        sqlx::query_as(CLAIM).bind(batch).fetch_all(&pool).await?;
                    if rows.is_empty() {
                        return Ok::<(), sqlx::Error>(());
                    }
                    let ids: Vec<i64> = rows.into_iter().map(|row| row.0).collect();
                    sqlx::query(SETTLE).bind(ids).execute(&pool).await?;
                }
            })
        })
        .collect();
    for one in loops {
        one.await??;
    }
    Ok(rate(count, started))
}

/// Claims of 500, each row settled in a transaction of its own.
async fn transactions_bare(pool: &PgPool, concurrency: usize, count: i64) -> Result<f64> {
    let started = Instant::now();
    loop {
        let rows: Vec<(i64, i32, String, Vec<u8>)> =
            sqlx::query_as(CLAIM).bind(500i64).fetch_all(pool).await?;
        if rows.is_empty() {
            return Ok(rate(count, started));
        }
        let ids: Vec<i64> = rows.into_iter().map(|row| row.0).collect();
        let share = ids.len().div_ceil(concurrency);
        let running: Vec<_> = ids
            .chunks(share)
            .map(|ids| {
                let (pool, ids) = (pool.clone(), ids.to_vec());
                tokio::spawn(async move {
                    for id in ids {
                        let mut tx = pool.begin().await?;
                        sqlx::query(SETTLE).bind(vec![id]).execute(&mut *tx).await?;
                        tx.commit().await?;
                    }
                    Ok::<(), sqlx::Error>(())
                })
            })
            .collect();
        for one in running {
            one.await??;
        }
    }
}
