//! What the documents say of the project's own files has to be there.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::Result;

/// The table whose last column names tests.
const TABLE: &str = "docs/from-django-domain-events.md";

/// # Errors
/// With every test that is named and every file that is linked, and that is not there.
pub fn check(root: &Path) -> Result<()> {
    let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    files(&root.join("docs"), "md", &mut pages)?;
    let mut missing = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page).map_err(|error| format!("{}: {error}", page.display()))?;
        let folder = page.parent().unwrap_or(root);
        let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        missing.extend(
            links
                .filter(|link| !link.is_empty() && !link.contains("://") && !folder.join(link).exists())
                .map(|link| format!("{} links to {link}", page.display())),
        );
    }
    let mut sources = Vec::new();
    for folder in ["tests/suite", "src/conformance"] {
        files(&root.join(folder), "rs", &mut sources)?;
    }
    let mut tests = String::new();
    for source in sources {
        tests += &fs::read_to_string(&source).map_err(|error| format!("{}: {error}", source.display()))?;
    }
    let table = fs::read_to_string(root.join(TABLE)).map_err(|error| format!("{TABLE}: {error}"))?;
    let rows = table.lines().filter(|line| line.starts_with('|'));
    let proofs = rows.filter_map(|row| row.trim_end_matches([' ', '|']).rsplit(" | ").next());
    let names = proofs.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let is_name = |name: &&str| name.len() > 5 && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let mut named = 0;
    for name in names.filter(is_name) {
        named += 1;
        let there = tests.contains(&format!("fn {name}"))
            || root.join("tests/compile_fail").join(name).with_extension("rs").exists();
        if !there {
            missing.push(format!("{TABLE} names the test {name}"));
        }
    }
    if named == 0 {
        missing.push(format!("{TABLE} names no test"));
    }
    if missing.is_empty() {
        Ok(())
    } else {
        Err(format!("the documents speak of what is not there:\n  {}", missing.join("\n  ")))
    }
}

fn files(folder: &Path, extension: &str, into: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for entry in entries {
        let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
        if path.is_dir() {
            files(&path, extension, into)?;
        } else if path.extension().is_some_and(|has| has == extension) {
            into.push(path);
        }
    }
    Ok(())
}
