//! Transactions and savepoints.

use owed_core::{EventQuery, Store};

use super::{Bed, owing};

async fn count<S: Store>(bed: &Bed<S>) -> usize {
    bed.store.events(&EventQuery::page(1_000)).await.unwrap().len()
}

pub(super) async fn what_is_not_committed_is_seen_by_nobody_else<S: Store>(bed: Bed<S>) {
    let tx = bed.store.begin().await.unwrap();
    bed.store.record(&tx, &[owing(bed.now(), &["a"])]).await.unwrap();
    assert_eq!((count(&bed).await, bed.rows().await.len()), (0, 0));
    assert!(bed.store.owed_receivers().await.unwrap().is_empty());
    bed.store.commit(tx).await.unwrap();
    assert_eq!((count(&bed).await, bed.rows().await.len()), (1, 1));
}

pub(super) async fn what_is_rolled_back_never_was<S: Store>(bed: Bed<S>) {
    let tx = bed.store.begin().await.unwrap();
    bed.store.record(&tx, &[owing(bed.now(), &["a"])]).await.unwrap();
    bed.store.rollback(tx).await.unwrap();
    assert_eq!((count(&bed).await, bed.rows().await.len()), (0, 0));
    assert!(bed.claim("w", &["a"], 1).await.is_empty());
}

pub(super) async fn a_dropped_transaction_is_rolled_back<S: Store>(bed: Bed<S>) {
    let tx = bed.store.begin().await.unwrap();
    bed.store.record(&tx, &[owing(bed.now(), &["a"])]).await.unwrap();
    drop(tx);
    bed.owe(&["a"]).await;
    assert_eq!(count(&bed).await, 1);
}

pub(super) async fn a_savepoint_undoes_what_came_after_it_alone<S: Store>(bed: Bed<S>) {
    let tx = bed.store.begin().await.unwrap();
    bed.store.record(&tx, &[owing(bed.now(), &["before"])]).await.unwrap();
    let savepoint = bed.store.savepoint(&tx).await.unwrap();
    bed.store.record(&savepoint, &[owing(bed.now(), &["undone"])]).await.unwrap();
    bed.store.rollback(savepoint).await.unwrap();
    let savepoint = bed.store.savepoint(&tx).await.unwrap();
    bed.store.record(&savepoint, &[owing(bed.now(), &["dropped"])]).await.unwrap();
    drop(savepoint);
    let savepoint = bed.store.savepoint(&tx).await.unwrap();
    bed.store.record(&savepoint, &[owing(bed.now(), &["released"])]).await.unwrap();
    bed.store.commit(savepoint).await.unwrap();
    assert_eq!(count(&bed).await, 0, "a released savepoint is not a commit");
    bed.store.record(&tx, &[owing(bed.now(), &["after"])]).await.unwrap();
    bed.store.commit(tx).await.unwrap();
    let kept: Vec<String> = bed.rows().await.into_iter().map(|row| row.receiver_key).collect();
    assert_eq!(kept, ["before", "released", "after"]);
}

pub(super) async fn savepoints_nest<S: Store>(bed: Bed<S>) {
    let tx = bed.store.begin().await.unwrap();
    let outer = bed.store.savepoint(&tx).await.unwrap();
    bed.store.record(&outer, &[owing(bed.now(), &["outer"])]).await.unwrap();
    let inner = bed.store.savepoint(&outer).await.unwrap();
    bed.store.record(&inner, &[owing(bed.now(), &["inner"])]).await.unwrap();
    bed.store.commit(inner).await.unwrap();
    bed.store.rollback(outer).await.unwrap();
    bed.store.record(&tx, &[owing(bed.now(), &["last"])]).await.unwrap();
    bed.store.commit(tx).await.unwrap();
    let kept: Vec<String> = bed.rows().await.into_iter().map(|row| row.receiver_key).collect();
    assert_eq!(kept, ["last"], "released into a savepoint that was undone");
}

/// More than any pool has connections: one that is left open would be missed.
pub(super) async fn many_transactions_end_with_nothing_left_open<S: Store>(bed: Bed<S>) {
    for n in 0..60 {
        let tx = bed.store.begin().await.unwrap();
        bed.store.record(&tx, &[owing(bed.now(), &["a"])]).await.unwrap();
        match n % 3 {
            0 => bed.store.commit(tx).await.unwrap(),
            1 => bed.store.rollback(tx).await.unwrap(),
            _ => drop(tx),
        }
    }
    assert_eq!(count(&bed).await, 20);
}
