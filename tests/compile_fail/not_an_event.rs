use owed::{Receiver};

fn main() {
    let _ = Receiver::on::<String>("k");
}
