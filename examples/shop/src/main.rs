//! A small shop: it takes orders in its own tables, and fires an event for each in the same transaction.
//!
//! `cargo run -p shop` places some orders on an embedded SQLite file, delivers what they owe, and shows that the
//! books add up. `--kill` ends the process hard in the middle; the next run picks up where it was.

mod books;
mod events;
mod ingest;
mod serve;
mod tables;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Parser)]
#[command(
    about = "Takes orders, fires an event for each in the same transaction, and delivers what they owe",
    version
)]
struct Options {
    #[command(flatten)]
    shop: Shop,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Args, Clone)]
struct Shop {
    /// Where the shop's tables are: sqlite://FILE, postgres://USER@HOST/DATABASE or mysql://USER@HOST/DATABASE
    #[arg(long, global = true, env = "DATABASE_URL", default_value = "sqlite://shop.sqlite")]
    database_url: String,
    /// The mailbox: each receipt that is sent is a line of this file
    #[arg(long, global = true, default_value = "shop.mail")]
    mail: PathBuf,
    /// How many orders to place
    #[arg(long, global = true, default_value_t = 500)]
    orders: u32,
    /// Ends the process hard, in the middle of the work
    #[arg(long)]
    kill: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Fires a file of webhook payloads, and compares what a receiver got with what the file says
    Ingest {
        /// An array of {name, examples: [payload, ..]}
        file: PathBuf,
    },
    /// Places orders and delivers nothing
    Place,
    /// Delivers until it is interrupted
    Relay,
    /// Shows the books, and fails if they don't add up
    Check {
        /// For programs
        #[arg(long)]
        json: bool,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "error".into()),
        )
        .with_writer(std::io::stderr)
        .init();
    let options = Options::parse();
    match run(options).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprint!("shop: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprint!(": {cause}");
                source = cause.source();
            }
            eprintln!();
            ExitCode::FAILURE
        }
    }
}

/// Picks the store by the URL; everything after that is the same on each.
async fn run(options: Options) -> Result<bool> {
    let url = options.shop.database_url.clone();
    match url.split(':').next() {
        #[cfg(feature = "sqlite")]
        Some("sqlite") => {
            let store = owed::SqliteStore::connect(url).await?;
            store.migrate().await?;
            let db = store.connection().clone();
            serve::run(store, db, options).await
        }
        #[cfg(feature = "postgres")]
        Some("postgres" | "postgresql") => {
            let store = owed::PostgresStore::connect(url).await?;
            store.migrate().await?;
            let db = store.connection().clone();
            serve::run(store, db, options).await
        }
        #[cfg(feature = "mysql")]
        Some("mysql" | "mariadb") => {
            let store = owed::MysqlStore::connect(url).await?;
            store.migrate().await?;
            let db = store.connection().clone();
            serve::run(store, db, options).await
        }
        other => Err(format!(
            "the database's URL starts with {:?}; this shop knows sqlite, postgres and mysql",
            other.unwrap_or_default()
        )
        .into()),
    }
}
