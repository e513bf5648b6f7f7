//! The project's own commands.

mod crash;
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

#[derive(Parser)]
#[command(about = "The project's own commands", bin_name = "cargo xtask")]
enum Command {
    /// Runs the tests, on servers that it finds, starts or installs
    ///
    /// A server is taken from OWED_TEST_POSTGRES_URL, OWED_TEST_MYSQL_URL or OWED_TEST_MARIADB_URL where that is
    /// set; else from this machine's usual port; else it is started from installed binaries in a folder of its own,
    /// and stopped again at the end; else, as root on Debian, it is installed.
    Test {
        /// Runs these stores' tests alone; default: all
        #[arg(long, value_enum)]
        store: Vec<StoreName>,
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
    Up,
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
        Command::Test { store, rest } => {
            let stores = if store.is_empty() { StoreName::ALL.to_vec() } else { store };
            let services = Services::up(&stores)?;
            run::test(&stores, &services, &rest)
        }
        Command::Lint => run::lint(),
        Command::Crash { store, kills, relays } => {
            let services = Services::up(&[store])?;
            crash::run(store, &services, kills, relays)
        }
        Command::Services { what: ServiceCommand::Up } => {
            let services = Services::up(&StoreName::ALL)?;
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
