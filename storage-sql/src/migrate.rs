//! Migrations, to run, to compose into a service's own migrator, or to print.

use async_trait::async_trait;
use owed_core::StoreError;
use sea_orm::{ConnectionTrait, DbErr};
use sea_orm_migration::{
    MigrationName, MigrationTrait, MigratorTraitSelf, SchemaManager,
    sea_query::{Alias, DynIden, IntoIden},
};

use crate::{TableNames, classify};

/// One migration: the statements of a database, written by hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    name: String,
    up: Vec<String>,
    down: Vec<String>,
}

impl Migration {
    /// A migration. Its name carries the prefix, so that two sets of tables in one database do not take each
    /// other's migrations for their own.
    pub fn new(names: &TableNames, name: &str, up: Vec<String>, down: Vec<String>) -> Self {
        Migration { name: format!("{name}_{}", names.prefix().trim_end_matches('_')), up, down }
    }

    /// The statements, as SQL to run by hand.
    pub fn sql(&self) -> String {
        let statements: String = self.up.iter().map(|statement| format!("{statement};\n\n")).collect();
        format!("-- {}\n{statements}", self.name)
    }
}

impl MigrationName for Migration {
    fn name(&self) -> &str {
        &self.name
    }
}

async fn run(manager: &SchemaManager<'_>, statements: &[String]) -> Result<(), DbErr> {
    for statement in statements {
        manager.get_connection().execute_unprepared(statement).await?;
    }
    Ok(())
}

#[async_trait]
#[allow(elided_lifetimes_in_paths, reason = "the trait's own signature, as async_trait has to see it")]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, &self.up).await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, &self.down).await
    }
}

/// The migrations of one set of tables, with a migration table of their own.
#[derive(Clone, Debug)]
pub struct Migrator {
    names: TableNames,
    migrations: Vec<Migration>,
}

impl Migrator {
    /// The migrations in order.
    pub fn new(names: TableNames, migrations: Vec<Migration>) -> Self {
        Migrator { names, migrations }
    }

    /// The migrations, for a service's own migrator.
    pub fn boxed(&self) -> Vec<Box<dyn MigrationTrait>> {
        self.migrations.iter().map(|one| Box::new(one.clone()) as Box<dyn MigrationTrait>).collect()
    }

    /// All of them, as SQL to run by hand.
    pub fn sql(&self) -> String {
        self.migrations.iter().map(Migration::sql).collect()
    }

    /// The name of the table in which the migrations that ran are noted.
    pub fn table(&self) -> String {
        format!("{}migration", self.names.prefix())
    }

    /// Runs what has not run yet. The caller holds whatever keeps another process from doing so at the same time.
    ///
    /// # Errors
    /// If a statement fails.
    pub async fn run<'c>(&self, db: impl sea_orm::IntoDatabaseExecutor<'c>) -> Result<(), StoreError> {
        MigratorTraitSelf::up(self, db, None).await.map_err(|error| classify("running migrations", error))
    }
}

impl MigratorTraitSelf for Migrator {
    fn migrations(&self) -> Vec<Box<dyn MigrationTrait>> {
        self.boxed()
    }

    fn migration_table_name(&self) -> DynIden {
        Alias::new(self.table()).into_iden()
    }
}
