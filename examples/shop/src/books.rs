//! The books: what was sold, what was owed, and whether it adds up.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    path::Path,
};

use owed::{Status, Store};
use sea_orm::{DatabaseConnection, EntityTrait};
use serde::Serialize;

use crate::{
    Result,
    tables::{ledger, order},
};

#[derive(Clone, Debug, Serialize)]
pub struct Books {
    pub orders: u64,
    pub deliveries: Vec<Line>,
    /// Orders with no line in the ledger, and with more than one.
    pub without_line: u64,
    pub with_more_lines: u64,
    /// Orders that were owed a receipt which was delivered, and of which the mailbox knows nothing.
    pub without_receipt: u64,
    pub receipts: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Line {
    pub receiver: String,
    pub status: Status,
    pub count: u64,
    pub attempts: u64,
}

pub async fn read<S: Store>(store: &S, db: &DatabaseConnection, mail: &Path) -> Result<Books> {
    let orders: Vec<order::Model> = order::Entity::find().all(db).await?;
    let mut lines: HashMap<i64, u64> = HashMap::new();
    for line in ledger::Entity::find().all(db).await? {
        *lines.entry(line.order_id).or_default() += 1;
    }
    let mail = match std::fs::read_to_string(mail) {
        Ok(mail) => mail,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error.into()),
    };
    let sent: HashSet<i64> =
        mail.lines().filter_map(|line| line.split(' ').nth(1).and_then(|id| id.parse().ok())).collect();
    let reachable = |order: &&order::Model| !order.email.ends_with("@nowhere.example");
    let deliveries = store
        .tally()
        .await?
        .into_iter()
        .map(|one| Line {
            receiver: one.receiver_key,
            status: one.status,
            count: one.count,
            attempts: one.attempts,
        })
        .collect();
    Ok(Books {
        orders: orders.len() as u64,
        without_line: orders.iter().filter(|order| !lines.contains_key(&order.id)).count() as u64,
        with_more_lines: lines.values().filter(|count| **count > 1).count() as u64,
        without_receipt: orders.iter().filter(reachable).filter(|order| !sent.contains(&order.id)).count()
            as u64,
        receipts: mail.lines().count() as u64,
        deliveries,
    })
}

impl Books {
    /// Whether nothing is owed, nothing is missing and nothing was done twice.
    pub fn add_up(&self) -> bool {
        self.owed() == 0 && self.without_line == 0 && self.with_more_lines == 0 && self.without_receipt == 0
    }

    fn sum(&self, status: Status) -> u64 {
        self.deliveries.iter().filter(|line| line.status == status).map(|line| line.count).sum()
    }
}

impl fmt::Display for Books {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<14} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "receiver", "owed", "succeeded", "dead", "other", "retries"
        )?;
        let mut receivers: Vec<&str> = self.deliveries.iter().map(|line| line.receiver.as_str()).collect();
        receivers.dedup();
        for receiver in receivers {
            let lines = || self.deliveries.iter().filter(|line| line.receiver == receiver);
            let count = |wanted: fn(Status) -> bool| {
                lines().filter(|line| wanted(line.status)).map(|line| line.count).sum::<u64>()
            };
            let settled: u64 = lines().filter(|line| line.status.is_terminal()).map(|line| line.count).sum();
            let attempts: u64 = lines().map(|line| line.attempts).sum();
            writeln!(
                f,
                "{receiver:<14} {:>9} {:>9} {:>9} {:>9} {:>9}",
                count(|status| !status.is_terminal()),
                count(|status| status == Status::Succeeded),
                count(|status| status == Status::Dead),
                count(|status| matches!(status, Status::Orphaned | Status::Cancelled)),
                attempts.saturating_sub(settled),
            )?;
        }
        writeln!(f)?;
        writeln!(f, "events     {}", self.orders)?;
        writeln!(f, "receipts   {} sent, {} missing", self.receipts, self.without_receipt)?;
        writeln!(f, "dead       {} (mailboxes that do not exist)", self.sum(Status::Dead))?;
        let verdict = match (self.without_line, self.with_more_lines) {
            (0, 0) => "every order has exactly one line".to_owned(),
            (none, 0) => format!("{none} orders have no line yet"),
            (none, more) => format!("WRONG: {none} orders have no line, {more} have more than one"),
        };
        writeln!(f, "ledger     {verdict}")
    }
}
