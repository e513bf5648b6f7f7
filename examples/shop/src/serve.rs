//! Taking orders, and delivering what they owe.

use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use owed::{Error, Outbox, Status, Store};
use sea_orm::{ActiveModelTrait, ActiveValue::Set, DatabaseConnection, DatabaseTransaction};

use crate::{
    Command, Options, Result, Shop,
    books::{self, Books},
    events::{self, OrderPlaced},
    ingest,
    tables::{self, ITEMS, order},
};

pub async fn run<S>(store: S, db: DatabaseConnection, options: Options) -> Result<bool>
where
    S: Store<Tx = DatabaseTransaction>,
{
    tables::create(&db).await?;
    let shop = options.shop;
    match options.command {
        None => trade(&events::outbox(store, shop.mail.clone())?, &db, &shop).await,
        Some(Command::Ingest { file }) => ingest::run(store, &db, &file).await,
        Some(Command::Place) => {
            let outbox = events::outbox(store, shop.mail.clone())?;
            for n in 0..shop.orders {
                place(&outbox, n).await?;
            }
            Ok(true)
        }
        Some(Command::Relay) => {
            let outbox = events::outbox(store, shop.mail.clone())?;
            outbox.relay().run_until(owed::shutdown()?).await?;
            Ok(true)
        }
        Some(Command::Check { json }) => {
            let books = books::read(&store, &db, &shop.mail).await?;
            if json {
                println!("{}", serde_json::to_string(&books)?)
            } else {
                print!("{books}")
            }
            Ok(books.add_up())
        }
    }
}

/// One order: its row and its event commit together, or neither does. Answers whether there was anything to sell.
async fn place<S>(outbox: &Outbox<S>, n: u32) -> Result<bool>
where
    S: Store<Tx = DatabaseTransaction>,
{
    let item = ITEMS[n as usize % ITEMS.len()];
    let host = if n % 50 == 49 { "nowhere.example" } else { "mail.example" };
    let tx = outbox.begin().await?;
    let placed = order::ActiveModel {
        email: Set(format!("customer{n}@{host}")),
        item: Set(item.to_owned()),
        total_cents: Set(1_000 + i64::from(n)),
        ..Default::default()
    };
    let placed = placed.insert(&*tx).await?;
    let fired = tx
        .fire(OrderPlaced {
            order: placed.id,
            email: placed.email,
            item: placed.item,
            total_cents: placed.total_cents,
        })
        .dedupe_key(format!("order-{}", placed.id))
        .await;
    match fired {
        Ok(_) => {
            tx.commit().await?;
            Ok(true)
        }
        // The stock is reserved by an inline receiver; what it refuses leaves no order behind.
        Err(Error::Inline { .. }) => {
            tx.rollback().await?;
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

fn bars(shop: &Shop) -> (MultiProgress, ProgressBar, ProgressBar) {
    let style = |what: &str| {
        ProgressStyle::with_template(&format!(
            "{{spinner:.green}} {what:<10} {{bar:40.green/dim}} {{pos:>6}}/{{len}}"
        ))
        .unwrap_or_else(|_| ProgressStyle::default_bar())
    };
    let all = MultiProgress::new();
    let orders = all.add(ProgressBar::new(shop.orders.into()).with_style(style("orders")));
    let deliveries = all.add(ProgressBar::new(0).with_style(style("deliveries")));
    (all, orders, deliveries)
}

async fn trade<S>(outbox: &Outbox<S>, db: &DatabaseConnection, shop: &Shop) -> Result<bool>
where
    S: Store<Tx = DatabaseTransaction>,
{
    let started = Instant::now();
    println!("on {}", outbox.store().capabilities().database);
    let before = books::read(outbox.store(), db, &shop.mail).await?;
    if before.owed() > 0 {
        println!("{} deliveries are still owed from an earlier run", before.owed());
    }
    let (all, orders, deliveries) = bars(shop);
    let relay = outbox.relay().concurrency(8).spawn()?;
    let mut refused = 0;
    for n in 0..shop.orders {
        if !place(outbox, n).await? {
            refused += 1;
        }
        orders.inc(1);
        if n % 20 == 0 {
            follow(outbox, &deliveries).await?;
        }
        if shop.kill && n == shop.orders / 2 {
            let _ = all.clear();
            println!("killed on purpose after {n} orders: run it again, and it picks up where this one was");
            // No destructor runs, no connection is closed, nothing is handed back.
            std::process::abort();
        }
    }
    while follow(outbox, &deliveries).await? > 0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    relay.stop().await;
    let _ = all.clear();
    let books = books::read(outbox.store(), db, &shop.mail).await?;
    print!("{books}");
    println!("refused    {refused} of this run's {} orders: the shop was out of compasses", shop.orders);
    println!("elapsed    {:.1} s", started.elapsed().as_secs_f64());
    Ok(books.add_up())
}

/// Moves the bar; answers how many deliveries are still owed.
async fn follow<S: Store>(outbox: &Outbox<S>, bar: &ProgressBar) -> Result<u64> {
    let tally = outbox.store().tally().await?;
    let count = |done: bool| -> u64 {
        tally.iter().filter(|one| one.status.is_terminal() == done).map(|one| one.count).sum()
    };
    bar.set_length(count(true) + count(false));
    bar.set_position(count(true));
    Ok(count(false))
}

impl Books {
    /// Deliveries that nobody has settled.
    pub fn owed(&self) -> u64 {
        self.deliveries.iter().filter(|one| !Status::is_terminal(one.status)).map(|one| one.count).sum()
    }
}
