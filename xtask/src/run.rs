//! Running cargo.

use std::{path::Path, process::Command};

use crate::{Engine, Result, StoreName, docs, services::Services};

pub fn cargo(arguments: &[&str], variables: &[(String, String)]) -> Result<()> {
    println!("$ cargo {}", arguments.join(" "));
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let status = Command::new(cargo)
        .args(arguments)
        .envs(variables.iter().cloned())
        .status()
        .map_err(|error| format!("cargo can't be run: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("`cargo {}` failed", arguments.join(" "))) }
}

/// The packages whose tests need no server.
const PLAIN: [&str; 4] = ["owed", "owed-core", "owed-memory", "owed-sql"];

pub fn test(stores: &[StoreName], engines: &[Engine], services: &Services, rest: &[String]) -> Result<()> {
    let variables = services.variables();
    let all = stores.len() == StoreName::ALL.len() && engines.len() == Engine::ALL.len();
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    let mut arguments = vec!["test"];
    if all {
        // `owed` on its own first: what must not compile is compiled with as little as it needs.
        let own = [
            "test",
            "-p",
            "owed",
            "-p",
            "owed-core",
            "-p",
            "owed-memory",
            "--features",
            "owed/json,owed/signal",
            "--",
        ];
        cargo(&[&own[..], &rest[..]].concat(), &variables)?;
        let others = [
            "test",
            "--workspace",
            "--exclude",
            "owed",
            "--exclude",
            "owed-core",
            "--exclude",
            "owed-memory",
            "--",
        ];
        return cargo(&[&others[..], &rest[..]].concat(), &variables);
    }
    for package in PLAIN {
        arguments.extend(["-p", package]);
    }
    for store in stores {
        match store {
            StoreName::Memory => {}
            StoreName::Sqlite => arguments.extend(["-p", "owed-sqlite"]),
            StoreName::Postgres => arguments.extend(["-p", "owed-postgres"]),
            StoreName::Mysql | StoreName::Mariadb => arguments.extend(["-p", "owed-mysql"]),
        }
    }
    arguments.extend(["--features", "owed/json", "--"]);
    let others = skipped(stores, engines);
    let skips: Vec<&str> = others.iter().flat_map(|skip| ["--skip", skip.as_str()]).collect();
    arguments.extend(skips.iter().copied());
    arguments.extend(&rest);
    cargo(&arguments, &variables)?;
    let mut arguments = vec!["test", "-p", "owed-tests", "--"];
    arguments.extend(skips);
    arguments.extend(&rest);
    cargo(&arguments, &variables)
}

/// The modules of the stores and engines that were not asked for: each test of one is in a module of its name.
fn skipped(stores: &[StoreName], engines: &[Engine]) -> Vec<String> {
    let stores = StoreName::ALL.iter().filter(|store| !stores.contains(store)).map(|store| store.name());
    let engines = Engine::ALL.iter().filter(|engine| !engines.contains(engine)).map(|engine| engine.name());
    stores.chain(engines).map(|name| format!("{name}::")).collect()
}

/// Each feature of `owed` on its own, since features are additive and a service picks what it needs.
const FEATURES: [&str; 9] =
    ["", "memory", "sqlite", "postgres", "mysql", "json", "postgres,tls", "signal,otel", "conformance"];

pub fn lint() -> Result<()> {
    cargo(&["fmt", "--all", "--check"], &[])?;
    docs::check(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))?;
    let denied = [("RUSTDOCFLAGS".to_owned(), "-D warnings".to_owned())];
    cargo(
        &["clippy", "--workspace", "--all-targets", "--features", "owed/json", "--", "-D", "warnings"],
        &[],
    )?;
    for features in FEATURES {
        let arguments =
            ["clippy", "-p", "owed", "--no-default-features", "--features", features, "--", "-D", "warnings"];
        cargo(&arguments, &[])?;
    }
    cargo(
        &[
            "doc",
            "--workspace",
            "--no-deps",
            "--features",
            "owed/json,owed/sqlite,owed/postgres,owed/mysql,owed/signal,owed/otel",
        ],
        &denied,
    )
}
