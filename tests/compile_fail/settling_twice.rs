use owed::{store::{Claim, Outcome, Settlement}};

fn twice(claim: Claim) {
    let _ = Settlement::new(claim, Outcome::Succeeded);
    let _ = Settlement::new(claim, Outcome::Succeeded);
}

fn main() {
    let _ = twice;
}
