//! The guide's programs, compiled and run as they are printed.

macro_rules! pages {
    ($($page:ident in $file:literal)+) => {
        $(
            #[cfg(doctest)]
            #[doc = include_str!(concat!("../docs/guide/", $file, ".md"))]
            mod $page {}
        )+
    };
}

pages! {
    getting_started in "getting-started"
    declaring in "declaring"
    firing in "firing"
    delivering in "delivering"
    scheduling in "scheduling"
    fan_out in "fan-out"
    lanes in "lanes"
    scope in "scope"
    task_engines in "task-engines"
    versions in "versions"
    operating in "operating"
    retention in "retention"
    testing in "testing"
    settings in "settings"
}
