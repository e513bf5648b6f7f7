//! `#[derive(Event)]`. Use it through the crate `owed`, where it is documented on the trait.

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::{
    DeriveInput, Error, Expr, ExprCall, ExprLit, ExprPath, Lit, LitInt, LitStr, Path, parse_macro_input,
};

/// Makes a serde type an event. See the trait `owed::Event` for its attributes.
#[proc_macro_derive(Event, attributes(event))]
pub fn derive_event(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

#[derive(Default)]
struct Options {
    name: Option<LitStr>,
    version: Option<LitInt>,
    retention: Option<Tokens>,
    upgrade: Option<Path>,
}

fn expand(input: &DeriveInput) -> Result<Tokens, Error> {
    if let Some(parameter) = input.generics.params.first() {
        return Err(Error::new_spanned(
            parameter,
            "an event has one name, so its type can't be generic: derive it for each concrete type instead",
        ));
    }
    let options = options(input)?;
    let ident = &input.ident;
    let name = match &options.name {
        Some(name) => quote!(#name),
        // The crate and the type, without the modules between them: moving the type keeps the name.
        None => {
            let ident = ident.to_string();
            quote!(::core::concat!(::core::env!("CARGO_PKG_NAME"), ".", #ident))
        }
    };
    let version = options.version.map_or_else(|| quote!(1), |version| quote!(#version));
    let retention = options.retention.unwrap_or_else(|| quote!(Ordinary));
    let upgrade = options.upgrade.map(|upgrade| {
        quote! {
            const UPGRADES: bool = true;

            fn upgrade(
                from: i32,
                payload: ::owed::Value,
            ) -> ::core::result::Result<::owed::Value, ::owed::BoxError> {
                ::core::result::Result::map_err(#upgrade(from, payload), ::core::convert::Into::into)
            }
        }
    });
    Ok(quote! {
        impl ::owed::Event for #ident {
            const NAME: &'static str = #name;
            const VERSION: i32 = #version;
            type Retention = ::owed::retention::#retention;
            #upgrade
        }
    })
}

fn options(input: &DeriveInput) -> Result<Options, Error> {
    let mut options = Options::default();
    for attribute in input.attrs.iter().filter(|attribute| attribute.path().is_ident("event")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("name") {
                let name: LitStr = meta.value()?.parse()?;
                check_name(&name)?;
                options.name = Some(name);
            } else if meta.path.is_ident("version") {
                let version: LitInt = meta.value()?.parse()?;
                if !version.base10_parse::<i32>().is_ok_and(|version| version > 0) {
                    return Err(Error::new_spanned(version, "a version is a whole number from 1 up"));
                }
                options.version = Some(version);
            } else if meta.path.is_ident("retention") {
                options.retention = Some(retention(&meta.value()?.parse()?)?);
            } else if meta.path.is_ident("upgrade") {
                options.upgrade = Some(meta.value()?.parse()?);
            } else {
                return Err(meta.error("an event has the options name, version, retention and upgrade"));
            }
            Ok(())
        })?;
    }
    Ok(options)
}

fn check_name(name: &LitStr) -> Result<(), Error> {
    let size = name.value().chars().count();
    if size == 0 {
        return Err(Error::new_spanned(name, "an event's name is not empty"));
    }
    if size > 255 {
        let said = format!("an event's name has at most 255 characters, and this one has {size}");
        return Err(Error::new_spanned(name, said));
    }
    if name.value().contains('\0') {
        return Err(Error::new_spanned(name, "an event's name holds no NUL character"));
    }
    Ok(())
}

fn retention(value: &Expr) -> Result<Tokens, Error> {
    const FORMS: &str = "a retention is days(n), hours(n), seconds(n), succeeded or settled";
    match value {
        Expr::Path(ExprPath { path, .. }) if path.is_ident("succeeded") => Ok(quote!(UntilSucceeded)),
        Expr::Path(ExprPath { path, .. }) if path.is_ident("settled") => Ok(quote!(UntilSettled)),
        Expr::Call(ExprCall { func, args, .. }) => {
            let unit: i64 = match &**func {
                Expr::Path(ExprPath { path, .. }) if path.is_ident("days") => 86_400,
                Expr::Path(ExprPath { path, .. }) if path.is_ident("hours") => 3_600,
                Expr::Path(ExprPath { path, .. }) if path.is_ident("seconds") => 1,
                other => return Err(Error::new_spanned(other, FORMS)),
            };
            let Some(Expr::Lit(ExprLit { lit: Lit::Int(count), .. })) = args.first() else {
                return Err(Error::new_spanned(args, "how many? A whole number"));
            };
            let seconds = count.base10_parse::<i64>()?.checked_mul(unit);
            let Some(seconds) = seconds.filter(|seconds| *seconds > 0) else {
                return Err(Error::new_spanned(
                    count,
                    "a retention is above zero, and below the end of time",
                ));
            };
            Ok(quote!(For<#seconds>))
        }
        other => Err(Error::new_spanned(other, FORMS)),
    }
}
