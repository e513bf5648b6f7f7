//! The shop's own tables, as SeaORM entities.

use sea_orm::{ConnectionTrait, DatabaseConnection, Schema, sea_query::OnConflict};

use crate::Result;

pub mod order {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "shop_order")]
    pub struct Model {
        #[sea_orm(primary_key)]
        pub id: i64,
        pub email: String,
        pub item: String,
        pub total_cents: i64,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

pub mod stock {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "shop_stock")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false, column_type = "String(StringLen::N(100))")]
        pub item: String,
        pub on_hand: i64,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

/// Not unique by order, so that a second line would show.
pub mod ledger {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "shop_ledger")]
    pub struct Model {
        #[sea_orm(primary_key)]
        pub id: i64,
        pub order_id: i64,
        pub amount_cents: i64,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

/// What came in from outside, and what a receiver got of it.
pub mod webhook {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "shop_webhook")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub event_id: i64,
        #[sea_orm(column_type = "Blob")]
        pub got: Vec<u8>,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

pub const ITEMS: [&str; 4] = ["teapot", "lamp", "kite", "compass"];
/// What each item starts with: enough for all but the unlucky.
const ON_HAND: i64 = 1_000_000;

pub async fn create(db: &DatabaseConnection) -> Result<()> {
    let schema = Schema::new(db.get_database_backend());
    for mut table in [
        schema.create_table_from_entity(order::Entity),
        schema.create_table_from_entity(stock::Entity),
        schema.create_table_from_entity(ledger::Entity),
        schema.create_table_from_entity(webhook::Entity),
    ] {
        db.execute(table.if_not_exists()).await?;
    }
    use sea_orm::{ActiveValue::Set, EntityTrait};
    let items = ITEMS.map(|item| stock::ActiveModel {
        item: Set(item.to_owned()),
        // The last compass was sold long ago.
        on_hand: Set(if item == "compass" { 0 } else { ON_HAND }),
    });
    let there = OnConflict::column(stock::Column::Item).do_nothing_on([stock::Column::Item]).to_owned();
    stock::Entity::insert_many(items).on_conflict(there).exec_without_returning(db).await?;
    Ok(())
}
