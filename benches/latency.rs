//! How long after a commit the handler starts, on a relay that has nothing else to do, beside the bare round trip of
//! a notification on the same server, in turns.

use std::time::{Duration, Instant};

use owed::{Failure, Outbox, PostgresStore, Receiver, Store};
use sea_orm::sqlx::{self, PgConnection, PgPool, pool::PoolConnection, postgres::PgListener};
use tokio::{sync::mpsc, time::interval};

use crate::{Placed, Result, fresh, nothing, placed};

/// The time between two events, and how many of them make a round.
const RATES: [(Duration, usize); 3] =
    [(Duration::from_millis(700), 40), (Duration::from_millis(50), 100), (Duration::from_millis(5), 500)];

pub(crate) async fn measure(url: &str, rounds: usize) -> Result<()> {
    // Fired through one outbox and delivered through another with a pool of its own, as by two processes.
    let firing = fresh(url, "bench_").await?;
    let delivering = PostgresStore::builder(url).prefix("bench_").connect().await?;
    let (started, mut starts) = mpsc::unbounded_channel();
    let handler = move |placed: Placed| {
        let _ = started.send((placed.order, Instant::now()));
        std::future::ready(Ok::<(), Failure>(()))
    };
    let service = Outbox::builder(firing.clone())
        .receiver(Receiver::on::<Placed>("bench.plain").durable().run(nothing))
        .build()?;
    let relaying = Outbox::builder(delivering)
        .receiver(Receiver::on::<Placed>("bench.plain").durable().run(handler))
        .build()?;
    let relay = relaying.relay().spawn()?;
    let mut bare = Bare::new(firing.connection().get_postgres_connection_pool()).await?;
    println!(
        "{}; from the return of a commit to the start of the handler, beside a notification's round trip",
        firing.capabilities().database
    );
    // What connections do once, such as preparing their statements, is done before.
    for n in 0..100 {
        service.transaction(async |tx| tx.fire(placed(n)).await).await?;
        starts.recv().await.ok_or("the relay has stopped")?;
    }
    for (pause, count) in RATES {
        let (mut ours, mut floor) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let mut ticks = interval(pause);
            let mut committed = Vec::new();
            for n in 0..count {
                ticks.tick().await;
                let tx = service.begin().await?;
                tx.fire(placed(n as i64)).await?;
                tx.commit().await?;
                committed.push(Instant::now());
            }
            for _ in 0..count {
                let (n, start) = starts.recv().await.ok_or("the relay has stopped")?;
                ours.push(start.saturating_duration_since(committed[n as usize]));
            }
            let mut ticks = interval(pause);
            for _ in 0..count {
                ticks.tick().await;
                floor.push(bare.round_trip().await?);
            }
        }
        let ((p50, p99), (floor50, floor99)) = (percentiles(&mut ours), percentiles(&mut floor));
        println!(
            "an event every {pause:>5.0?}  p50 {p50:.2} ms  p99 {p99:.2} ms  floor p50 {floor50:.2} ms  p99 {floor99:.2} ms  \
             ratio {:.2} and {:.2}",
            p50 / floor50,
            p99 / floor99
        );
    }
    relay.stop().await;
    Ok(firing.drop_tables().await?)
}

fn percentiles(waits: &mut [Duration]) -> (f64, f64) {
    waits.sort_unstable();
    let at = |share: usize| waits[(waits.len() * share / 100).min(waits.len() - 1)].as_secs_f64() * 1_000.0;
    (at(50), at(99))
}

struct Bare {
    sending: PoolConnection<sqlx::Postgres>,
    listener: PgListener,
}

impl Bare {
    async fn new(pool: &PgPool) -> Result<Self> {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen("bench_bare").await?;
        Ok(Bare { sending: pool.acquire().await?, listener })
    }

    async fn round_trip(&mut self) -> Result<Duration> {
        let sent = Instant::now();
        let sending: &mut PgConnection = &mut self.sending;
        sqlx::query("SELECT pg_notify('bench_bare', '')").execute(sending).await?;
        self.listener.recv().await?;
        Ok(sent.elapsed())
    }
}
