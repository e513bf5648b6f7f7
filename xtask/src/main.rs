//! The project's own commands.

mod crash;
mod docs;
mod run;
mod services;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use services::Services;

type Result<T> = std::result::Result<T, String>;

/// Where a suite can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum StoreName {
    Memory,
    Sqlite,
    Postgres,
    Mysql,
    Mariadb,
}

impl StoreName {
    const ALL: [StoreName; 5] =
        [StoreName::Memory, StoreName::Sqlite, StoreName::Postgres, StoreName::Mysql, StoreName::Mariadb];

    fn name(self) -> &'static str {
        match self {
            StoreName::Memory => "memory",
            StoreName::Sqlite => "sqlite",
            StoreName::Postgres => "postgres",
            StoreName::Mysql => "mysql",
            StoreName::Mariadb => "mariadb",
        }
    }
}

/// A task engine that its tests can run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Engine {
    Nats,
    Rabbitmq,
}

impl Engine {
    const ALL: [Engine; 2] = [Engine::Nats, Engine::Rabbitmq];

    fn name(self) -> &'static str {
        match self {
            Engine::Nats => "nats",
            Engine::Rabbitmq => "rabbitmq",
        }
    }

    fn variable(self) -> &'static str {
        match self {
            Engine::Nats => "OWED_TEST_NATS_URL",
            Engine::Rabbitmq => "OWED_TEST_RABBITMQ_URL",
        }
    }
}

#[derive(Parser)]
#[command(about = "The project's own commands", bin_name = "cargo xtask")]
enum Command {
    /// Runs the tests, on servers that it finds, starts or installs
    ///
    /// A server is taken from OWED_TEST_POSTGRES_URL, OWED_TEST_MYSQL_URL, OWED_TEST_MARIADB_URL, OWED_TEST_NATS_URL
    /// or OWED_TEST_RABBITMQ_URL where that is set; else from this machine's usual port; else it is started from
    /// installed binaries in a folder of its own, and stopped again at the end; else, as root on Debian, it is
    /// installed.
    Test {
        /// Runs these stores' tests alone; default: all
        #[arg(long, value_enum)]
        store: Vec<StoreName>,
        /// Runs these task engines' tests; default: all, or none where stores are named
        #[arg(long, value_enum)]
        engine: Vec<Engine>,
        /// Starts servers of its own, whatever answers on the usual ports
        #[arg(long)]
        private: bool,
        /// Passed on to the test programs
        #[arg(last = true)]
        rest: Vec<String>,
    },
    /// Checks formatting, lints, documentation, and that each feature compiles alone
    Lint,
    /// Kills relays at random moments while orders are placed, and checks that the books add up
    Crash {
        /// Which database
        #[arg(long, value_enum)]
        store: StoreName,
        /// How many relays to kill
        #[arg(long, default_value_t = 50)]
        kills: u32,
        /// Relays that run at once
        #[arg(long, default_value_t = 2)]
        relays: u32,
    },
    /// Starts the servers, says how to use them, and waits
    Services {
        #[command(subcommand)]
        what: ServiceCommand,
    },
}

#[derive(Subcommand)]
enum ServiceCommand {
    /// Starts what is missing, prints the URLs, and keeps it running until Enter is pressed
    Up {
        /// Starts servers of its own, whatever answers on the usual ports
        #[arg(long)]
        private: bool,
    },
}

fn main() -> ExitCode {
    match go(Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn go(command: Command) -> Result<()> {
    match command {
        Command::Test { store, engine, private, rest } => {
            let (stores, engines) = match (store.is_empty(), engine.is_empty()) {
                (true, true) => (StoreName::ALL.to_vec(), Engine::ALL.to_vec()),
                // The engines' own tests keep their rows in memory.
                (true, false) => (vec![StoreName::Memory], engine),
                (false, _) => (store, engine),
            };
            let services = Services::up(&stores, &engines, private)?;
            run::test(&stores, &engines, &services, &rest)
        }
        Command::Lint => run::lint(),
        Command::Crash { store, kills, relays } => {
            let services = Services::up(&[store], &[], false)?;
            crash::run(store, &services, kills, relays)
        }
        Command::Services { what: ServiceCommand::Up { private } } => {
            let services = Services::up(&StoreName::ALL, &Engine::ALL, private)?;
            for (variable, url) in services.variables() {
                println!("export {variable}={url}");
            }
            println!("# Enter stops what was started here");
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).map_err(|error| error.to_string())?;
            Ok(())
        }
    }
}
