//! Relays killed at random moments while orders go on being placed. At the end the books must add up.

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::{Result, StoreName, run::cargo, services::Services};

pub fn run(store: StoreName, services: &Services, kills: u32, relays: u32) -> Result<()> {
    cargo(&["build", "--quiet", "-p", "shop"], &[])?;
    let folder = std::env::temp_dir().join(format!("owed-crash-{:08x}", rand::random::<u32>()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let database = Database::fresh(store, services, &folder)?;
    let shop = Shop { url: database.url.clone(), mail: folder.join("mail") };
    println!("{} relays at once on {}, {kills} of them to be killed", relays, store.name());

    // Makes the tables, so that nobody is killed while he does.
    shop.start(&["place", "--orders", "1"])?.wait().map_err(|error| error.to_string())?;
    let mut running: Vec<Child> = Vec::new();
    for _ in 0..relays {
        running.push(shop.start(&["relay"])?);
    }
    let mut placing = shop.start(&["place", "--orders", "200"])?;
    let mut placers = 1;
    let started = Instant::now();
    for kill in 0..kills {
        std::thread::sleep(Duration::from_millis(rand::random_range(20..600)));
        let victim = rand::random_range(0..running.len());
        running[victim].kill().map_err(|error| error.to_string())?;
        let _ = running[victim].wait();
        running[victim] = shop.start(&["relay"])?;
        // Some of those who place orders are killed as well, the others end by themselves.
        if kill % 5 == 4 {
            let _ = placing.kill();
        }
        if matches!(placing.try_wait(), Ok(Some(_))) {
            placing = shop.start(&["place", "--orders", "200"])?;
            placers += 1;
        }
    }
    let _ = placing.wait();
    println!(
        "{kills} killed in {:.0} s, {placers} processes placed orders; waiting for what is owed",
        started.elapsed().as_secs_f64()
    );
    let patience = Instant::now() + Duration::from_secs(120);
    let books = loop {
        std::thread::sleep(Duration::from_millis(500));
        let books = shop.books()?;
        let owed = books["deliveries"].as_array().into_iter().flatten();
        let owed: u64 = owed
            .filter(|line| {
                ["pending", "failed", "claimed"].contains(&line["status"].as_str().unwrap_or_default())
            })
            .filter_map(|line| line["count"].as_u64())
            .sum();
        if owed == 0 || Instant::now() > patience {
            break books;
        }
    };
    for relay in &mut running {
        let _ = Command::new("kill").args(["-INT", &relay.id().to_string()]).status();
        let _ = relay.wait();
    }
    let open = database.open_transactions()?;
    let shown = shop.start_with(&["check"], Stdio::inherit())?.wait().map_err(|error| error.to_string())?;
    println!("sessions left in an open transaction: {open}");
    drop(database);
    let _ = std::fs::remove_dir_all(&folder);
    if shown.success() && open == 0 { Ok(()) } else { Err(format!("the books don't add up: {books}")) }
}

struct Shop {
    url: String,
    mail: PathBuf,
}

impl Shop {
    fn start(&self, arguments: &[&str]) -> Result<Child> {
        self.start_with(arguments, Stdio::null())
    }

    fn start_with(&self, arguments: &[&str], output: Stdio) -> Result<Child> {
        self.command(arguments)
            .stdout(output)
            .spawn()
            .map_err(|error| format!("the shop can't be started: {error}"))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".into());
        let mut command = Command::new(PathBuf::from(target).join("debug/shop"));
        command
            .args(arguments)
            .args(["--database-url", &self.url, "--mail"])
            .arg(&self.mail)
            .stdin(Stdio::null());
        command
    }

    fn books(&self) -> Result<serde_json::Value> {
        let output = self.command(&["check", "--json"]).output().map_err(|error| error.to_string())?;
        serde_json::from_slice(&output.stdout).map_err(|error| {
            format!("the shop's books can't be read: {error}: {}", String::from_utf8_lossy(&output.stderr))
        })
    }
}

/// A database of this run's own.
struct Database {
    store: StoreName,
    url: String,
    name: String,
    server: String,
}

impl Database {
    fn fresh(store: StoreName, services: &Services, folder: &std::path::Path) -> Result<Self> {
        let name = format!("owed_crash_{:08x}", rand::random::<u32>());
        if store == StoreName::Sqlite {
            let url = format!("sqlite://{}", folder.join("shop.sqlite").display());
            return Ok(Database { store, url, name, server: String::new() });
        }
        let server = services.url(store).ok_or("this store has no server that could be crashed")?.to_owned();
        let (base, _) = server.rsplit_once('/').ok_or("a URL of a server ends with a database")?;
        let database = Database { store, url: format!("{base}/{name}"), name, server: server.clone() };
        database.query(&format!("CREATE DATABASE {}", database.name))?;
        Ok(database)
    }

    /// Asks the server with its own client.
    fn query(&self, sql: &str) -> Result<String> {
        let mut command = if self.store == StoreName::Postgres {
            let mut psql = Command::new("psql");
            psql.args([self.server.as_str(), "-A", "-t", "-c", sql]);
            psql
        } else {
            let address =
                self.server.split('@').nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
            let (host, port) = address.split_once(':').unwrap_or((address, "3306"));
            let mut client = Command::new("mariadb");
            client.args(["-h", host, "-P", port, "-u", "root", "-N", "-e", sql]);
            client
        };
        let output =
            command.output().map_err(|error| format!("the server's client can't be run: {error}"))?;
        if !output.status.success() {
            return Err(format!("{sql}: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn open_transactions(&self) -> Result<u64> {
        let sql = match self.store {
            StoreName::Memory | StoreName::Sqlite => return Ok(0),
            StoreName::Postgres => format!(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND state LIKE 'idle in transaction%'",
                self.name
            ),
            StoreName::Mysql | StoreName::Mariadb => format!(
                "SELECT COUNT(*) FROM information_schema.innodb_trx t \
                 JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id WHERE p.db = '{}'",
                self.name
            ),
        };
        self.query(&sql)?.parse().map_err(|error| format!("{error}"))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if !self.server.is_empty() {
            let force = if self.store == StoreName::Postgres { " WITH (FORCE)" } else { "" };
            let _ = self.query(&format!("DROP DATABASE {}{force}", self.name));
        }
    }
}
