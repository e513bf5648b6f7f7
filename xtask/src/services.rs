//! The servers that the tests need: given by URL, found on this machine, started from installed binaries, or
//! installed. Whatever was started here is stopped when this is dropped.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::{Engine, Result, StoreName};

pub struct Services {
    urls: Vec<(StoreName, String)>,
    engines: Vec<(Engine, String)>,
    started: Vec<Server>,
    /// Whether what answers on a usual port is passed over.
    private: bool,
}

struct Server {
    process: Child,
    folder: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Asked first, so that it leaves no shared memory behind.
        let _ = Command::new("kill").arg(self.process.id().to_string()).status();
        let patience = Instant::now() + Duration::from_secs(20);
        while Instant::now() < patience {
            if matches!(self.process.try_wait(), Ok(Some(_))) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn variable(store: StoreName) -> Option<&'static str> {
    match store {
        StoreName::Postgres => Some("OWED_TEST_POSTGRES_URL"),
        StoreName::Mysql => Some("OWED_TEST_MYSQL_URL"),
        StoreName::Mariadb => Some("OWED_TEST_MARIADB_URL"),
        StoreName::Memory | StoreName::Sqlite => None,
    }
}

impl Services {
    pub fn up(stores: &[StoreName], engines: &[Engine], private: bool) -> Result<Self> {
        let (urls, started) = (Vec::new(), Vec::new());
        let mut services = Services { urls, engines: Vec::new(), started, private };
        for engine in engines {
            let url = match (std::env::var(engine.variable()), engine) {
                (Ok(url), _) => url,
                (Err(_), Engine::Nats) => services.nats()?,
                (Err(_), Engine::Rabbitmq) => services.rabbitmq()?,
            };
            println!("{}: {url}", engine.name());
            services.engines.push((*engine, url));
        }
        for store in stores {
            let Some(variable) = variable(*store) else { continue };
            let url = match std::env::var(variable) {
                Ok(url) => url,
                Err(_) => match store {
                    StoreName::Postgres => services.postgres()?,
                    StoreName::Mysql => services.mysql()?,
                    _ => services.mariadb()?,
                },
            };
            println!("{}: {url}", store.name());
            services.urls.push((*store, url));
        }
        Ok(services)
    }

    /// The URLs as the test programs read them.
    pub fn variables(&self) -> Vec<(String, String)> {
        let named =
            self.urls.iter().filter_map(|(store, url)| Some((variable(*store)?.to_owned(), url.clone())));
        let engines = self.engines.iter().map(|(engine, url)| (engine.variable().to_owned(), url.clone()));
        named.chain(engines).collect()
    }

    pub fn url(&self, store: StoreName) -> Option<&str> {
        self.urls.iter().find(|(one, _)| *one == store).map(|(_, url)| url.as_str())
    }

    fn answers(&self, port: u16) -> bool {
        !self.private && port_answers(port)
    }

    fn nats(&mut self) -> Result<String> {
        if self.answers(4222) {
            return Ok("nats://127.0.0.1:4222".into());
        }
        let find_server = || find("nats-server", &["/usr/sbin", "/usr/local/sbin"]);
        let server = match find_server() {
            Some(server) => server,
            None => {
                apt_install("NATS", &["nats-server"])?;
                find_server().ok_or("NATS was installed, and its nats-server is nowhere")?
            }
        };
        let folder = folder("nats")?;
        let port = free_port()?;
        let (server, port_text, data) = (text(&server), port.to_string(), text(&folder.join("data")));
        let serve = [&server, "-js", "-sd", &data, "-a", "127.0.0.1", "-p", &port_text];
        self.start(&[], &serve, &folder, "NATS", || port_answers(port))?;
        Ok(format!("nats://127.0.0.1:{port}"))
    }

    fn rabbitmq(&mut self) -> Result<String> {
        let usual = "amqp://guest:guest@127.0.0.1:5672";
        if self.answers(5672) {
            return Ok(usual.into());
        }
        // Not the wrapper of the same name in /usr/sbin, which insists on the service's own folders.
        let find_server = || {
            let debian = Path::new("/usr/lib/rabbitmq/bin/rabbitmq-server");
            if debian.is_file() {
                Some(debian.to_owned())
            } else {
                find("rabbitmq-server", &["/usr/local/sbin"])
            }
        };
        let server = match find_server() {
            Some(server) => server,
            None => {
                apt_install("RabbitMQ", &["rabbitmq-server"])?;
                if self.answers(5672) {
                    return Ok(usual.into());
                }
                find_server().ok_or("RabbitMQ was installed, and its rabbitmq-server is nowhere")?
            }
        };
        let server = text(&server);
        let folder = folder("rabbitmq")?;
        let user = unprivileged(&folder, "rabbitmq")?;
        let (port, distribution) = (free_port()?, free_port()?);
        let home = text(&folder);
        let settings = [
            format!("HOME={home}"),
            format!("RABBITMQ_NODENAME=owed{port}@localhost"),
            "RABBITMQ_NODE_IP_ADDRESS=127.0.0.1".to_owned(),
            format!("RABBITMQ_NODE_PORT={port}"),
            format!("RABBITMQ_DIST_PORT={distribution}"),
            format!("RABBITMQ_MNESIA_BASE={home}/data"),
            format!("RABBITMQ_LOG_BASE={home}/logs"),
            format!("RABBITMQ_PID_FILE={home}/pid"),
            format!("RABBITMQ_ENABLED_PLUGINS_FILE={home}/plugins"),
            format!("RABBITMQ_CONF_ENV_FILE={home}/env"),
            format!("RABBITMQ_CONFIG_FILE={home}/config"),
        ];
        let serve: Vec<&str> =
            ["env"].into_iter().chain(settings.iter().map(String::as_str)).chain([server.as_str()]).collect();
        self.start(&user, &serve, &folder, "RabbitMQ", || port_answers(port))?;
        Ok(format!("amqp://guest:guest@127.0.0.1:{port}"))
    }

    fn postgres(&mut self) -> Result<String> {
        let bin = |folder: &Path| {
            (folder.join("initdb").exists() && folder.join("pg_isready").exists()).then(|| folder.to_owned())
        };
        if self.answers(5432)
            && let Some(psql) = find("psql", &[])
            && quiet(Command::new(&psql).args(["-h", "127.0.0.1", "-U", "postgres", "-w", "-c", "SELECT 1"]))
        {
            let create = "CREATE DATABASE owed_test";
            let _ =
                quiet(Command::new(&psql).args(["-h", "127.0.0.1", "-U", "postgres", "-w", "-c", create]));
            return Ok("postgres://postgres@127.0.0.1:5432/owed_test".into());
        }
        let installed = || {
            // A link to one program of an installation leads to the folder that has them all.
            let from_path = find("initdb", &[]).and_then(|path| fs::canonicalize(path).ok());
            let from_path = from_path.and_then(|path| path.parent().and_then(bin));
            from_path.or_else(|| versions("/usr/lib/postgresql").iter().find_map(|one| bin(&one.join("bin"))))
        };
        let bin = match installed() {
            Some(bin) => bin,
            None => {
                apt_install("PostgreSQL", &["postgresql"])?;
                installed().ok_or("PostgreSQL was installed, and its initdb is nowhere")?
            }
        };
        let folder = folder("postgres")?;
        let data = folder.join("data");
        let user = unprivileged(&folder, "postgres")?;
        let initdb =
            [&text(&bin.join("initdb")), "-D", &text(&data), "-U", "postgres", "-A", "trust", "-E", "UTF8"];
        run(&user, &initdb, "initdb")?;
        let port = free_port()?;
        let postgres = text(&bin.join("postgres"));
        let data = text(&data);
        let port_text = port.to_string();
        let socket = text(&folder);
        let serve = [
            postgres.as_str(),
            "-D",
            &data,
            "-p",
            &port_text,
            "-h",
            "127.0.0.1",
            "-k",
            &socket,
            "-c",
            "max_connections=200",
        ];
        self.start(&user, &serve, &folder, "PostgreSQL", || {
            let ready = text(&bin.join("pg_isready"));
            quiet(Command::new(ready).args(["-h", "127.0.0.1", "-p", &port_text]))
        })?;
        let psql = text(&bin.join("psql"));
        let create = [
            psql.as_str(),
            "-h",
            "127.0.0.1",
            "-p",
            &port_text,
            "-U",
            "postgres",
            "-c",
            "CREATE DATABASE owed_test",
        ];
        run(&[], &create, "psql")?;
        Ok(format!("postgres://postgres@127.0.0.1:{port}/owed_test"))
    }

    fn mariadb(&mut self) -> Result<String> {
        if self.answers(3306)
            && let Some(client) = find("mariadb", &[])
        {
            let query = |sql: &str| {
                let mut command = Command::new(&client);
                command.args(["-h", "127.0.0.1", "-P", "3306", "-u", "root", "-N", "-e", sql]);
                command.output().ok().filter(|output| output.status.success())
            };
            let version =
                query("SELECT VERSION()").map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            if version.is_some_and(|version| version.contains("MariaDB"))
                && query("CREATE DATABASE IF NOT EXISTS owed_test").is_some()
            {
                return Ok("mysql://root@127.0.0.1:3306/owed_test".into());
            }
        }
        let find_server = || find("mariadbd", &["/usr/sbin", "/usr/local/sbin", "/usr/libexec"]);
        let server = match find_server() {
            Some(server) => server,
            None => {
                apt_install("MariaDB", &["mariadb-server"])?;
                find_server().ok_or("MariaDB was installed, and its mariadbd is nowhere")?
            }
        };
        let install = find("mariadb-install-db", &["/usr/bin", "/usr/local/bin"])
            .ok_or("mariadbd is there, and mariadb-install-db is not")?;
        let folder = folder("mariadb")?;
        let user = unprivileged(&folder, "mysql")?;
        let data = format!("--datadir={}", text(&folder.join("data")));
        let init = [&text(&install), "--no-defaults", &data, "--auth-root-authentication-method=normal"];
        run(&user, &init, "mariadb-install-db")?;
        self.mysqld(&user, &[text(&server)], &folder, "MariaDB")
    }

    fn mysql(&mut self) -> Result<String> {
        let mysqld = find("mysqld", &["/usr/sbin", "/usr/local/sbin", "/usr/libexec"]).filter(|path| {
            let said = Command::new(path).arg("--version").output();
            said.is_ok_and(|said| !String::from_utf8_lossy(&said.stdout).contains("MariaDB"))
        });
        if let Some(mysqld) = mysqld {
            let folder = folder("mysql")?;
            let user = unprivileged(&folder, "mysql")?;
            let data = format!("--datadir={}", text(&folder.join("data")));
            run(
                &user,
                &[&text(&mysqld), "--no-defaults", "--initialize-insecure", &data],
                "mysqld --initialize",
            )?;
            return self.mysqld(&user, &[text(&mysqld)], &folder, "MySQL");
        }
        self.mysql_in_a_root_of_its_own()
    }

    /// Debian's stable packages hold MariaDB alone, and the two can't be installed beside each other: MySQL comes
    /// from Debian's unstable packages into a root folder of its own, once for this machine.
    fn mysql_in_a_root_of_its_own(&mut self) -> Result<String> {
        let how = "set OWED_TEST_MYSQL_URL to a MySQL 8.4 or 9 server, or install its mysqld";
        if !is_root() || find("apt-get", &[]).is_none() {
            return Err(format!(
                "there is no MySQL here, and it can't be installed without root on Debian: {how}"
            ));
        }
        let cache =
            std::env::var("XDG_CACHE_HOME").map(PathBuf::from).unwrap_or_else(|_| "/var/cache".into());
        let root = cache.join("owed-mysql-root");
        let inside = |arguments: &[&str], what: &str| {
            let root = text(&root);
            run(&[], &[&["chroot", &root], arguments].concat(), what)
        };
        if !root.join("usr/sbin/mysqld").exists() {
            println!("installing MySQL in {}, which takes a minute", root.display());
            apt_install("debootstrap", &["debootstrap"])?;
            // Put in place only once it is whole, so that an interrupted installation is begun anew.
            let _ = fs::remove_dir_all(&root);
            fs::create_dir_all(&cache).map_err(|error| error.to_string())?;
            run(&[], &["debootstrap", "--variant=minbase", "sid", &text(&root)], "debootstrap")?;
            inside(
                &["apt-get", "-o", "Acquire::Check-Valid-Until=false", "-qq", "update"],
                "apt-get update",
            )?;
            let install = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq"];
            let packages = ["--no-install-recommends", "mysql-server-core", "mysql-client-core"];
            inside(&[&install[..], &packages[..]].concat(), "apt-get install mysql-server-core")?;
        }
        let name = format!("/var/lib/owed-mysql-{:08x}", rand::random::<u32>());
        let folder = PathBuf::from(format!("{}{name}", root.display()));
        fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        if !quiet(Command::new("chroot").args([&text(&root), "id", "mysql"])) {
            inside(&["useradd", "-r", "mysql"], "useradd")?;
        }
        inside(&["chown", "mysql", &name], "chown")?;
        let data = format!("--datadir={name}/data");
        inside(
            &["mysqld", "--no-defaults", "--initialize-insecure", &data, "--user=mysql"],
            "mysqld --initialize",
        )?;
        let port = free_port()?;
        let root_text = text(&root);
        let (port_text, socket) = (format!("--port={port}"), format!("--socket={name}/socket"));
        let pid = format!("--pid-file={name}/pid");
        let serve = [
            "chroot",
            &root_text,
            "mysqld",
            "--no-defaults",
            &data,
            "--user=mysql",
            &port_text,
            "--bind-address=127.0.0.1",
            "--mysqlx=OFF",
            "--secure-file-priv=",
            "--max-connections=300",
            &socket,
            &pid,
        ];
        let client = |sql: &str| {
            let port = port.to_string();
            quiet(Command::new("chroot").args([
                &root_text,
                "mysql",
                "-h127.0.0.1",
                "-P",
                &port,
                "-uroot",
                "-e",
                sql,
            ]))
        };
        self.start(&[], &serve, &folder, "MySQL", || client("CREATE DATABASE IF NOT EXISTS owed_test"))?;
        Ok(format!("mysql://root@127.0.0.1:{port}/owed_test"))
    }

    fn mysqld(&mut self, user: &[String], server: &[String], folder: &Path, what: &str) -> Result<String> {
        let port = free_port()?;
        let port_text = port.to_string();
        let mut serve: Vec<String> = server.to_vec();
        serve.extend([
            "--no-defaults".into(),
            format!("--datadir={}", text(&folder.join("data"))),
            format!("--port={port}"),
            "--bind-address=127.0.0.1".into(),
            "--max-connections=300".into(),
            format!("--socket={}", text(&folder.join("socket"))),
            format!("--pid-file={}", text(&folder.join("pid"))),
        ]);
        let serve: Vec<&str> = serve.iter().map(String::as_str).collect();
        let client = find("mariadb", &[]).or_else(|| find("mysql", &[]));
        let client = client.ok_or_else(|| format!("{what} is there, and no client for it"))?;
        self.start(user, &serve, folder, what, || {
            let create = "CREATE DATABASE IF NOT EXISTS owed_test";
            quiet(Command::new(&client).args([
                "-h",
                "127.0.0.1",
                "-P",
                &port_text,
                "-u",
                "root",
                "-e",
                create,
            ]))
        })?;
        Ok(format!("mysql://root@127.0.0.1:{port}/owed_test"))
    }

    fn start(
        &mut self,
        user: &[String],
        arguments: &[&str],
        folder: &Path,
        what: &str,
        ready: impl Fn() -> bool,
    ) -> Result<()> {
        let log = folder.join("log");
        let file = fs::File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let errors = file.try_clone().map_err(|error| error.to_string())?;
        let process = command(user, arguments)
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(errors)
            .spawn()
            .map_err(|error| format!("{what} can't be started: {error}"))?;
        let mut server = Server { process, folder: folder.to_owned() };
        let patience = Instant::now() + Duration::from_secs(60);
        while !ready() {
            let ended = server.process.try_wait().ok().flatten();
            if ended.is_some() || Instant::now() > patience {
                let said = fs::read_to_string(&log).unwrap_or_default();
                let last: Vec<&str> = said.lines().rev().take(20).collect();
                let last: Vec<&str> = last.into_iter().rev().collect();
                return Err(format!("{what} did not come up; its log ends with:\n{}", last.join("\n")));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        self.started.push(server);
        Ok(())
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Servers refuse to run as root: who they run as instead, as the words in front of a command.
fn unprivileged(folder: &Path, name: &str) -> Result<Vec<String>> {
    if !is_root() {
        return Ok(Vec::new());
    }
    run(&[], &["chown", name, &text(folder)], "chown")?;
    Ok(["setpriv", "--reuid", name, "--regid", name, "--clear-groups"].map(str::to_owned).to_vec())
}

fn command(user: &[String], arguments: &[&str]) -> Command {
    let words: Vec<&str> = user.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).current_dir("/");
    command
}

fn run(user: &[String], arguments: &[&str], what: &str) -> Result<()> {
    let output = command(user, arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{what} can't be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{what} failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

fn quiet(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn find(name: &str, more: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(more.iter().map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

fn versions(folder: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found.reverse();
    found
}

fn port_answers(port: u16) -> bool {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    TcpStream::connect_timeout(&address, Duration::from_millis(500)).is_ok()
}

fn free_port() -> Result<u16> {
    let listener =
        TcpListener::bind(("127.0.0.1", 0)).map_err(|error| format!("no port is free: {error}"))?;
    listener.local_addr().map(|address| address.port()).map_err(|error| error.to_string())
}

/// A folder for one server. Short, since a socket's path may have some hundred characters.
fn folder(name: &str) -> Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("owed-{name}-{:08x}", rand::random::<u32>()));
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(folder)
}

fn apt_install(what: &str, packages: &[&str]) -> Result<()> {
    if packages.iter().all(|package| find(package, &["/usr/sbin"]).is_some()) {
        return Ok(());
    }
    if !is_root() || find("apt-get", &[]).is_none() {
        return Err(format!(
            "{what} is not on this machine, and it can't be installed without root on Debian: install {}, or set its OWED_TEST_.._URL",
            packages.join(" ")
        ));
    }
    println!("installing {}", packages.join(" "));
    run(&[], &["apt-get", "-qq", "update"], "apt-get update")?;
    let install = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq"];
    run(&[], &[&install[..], packages].concat(), "apt-get install")
}
