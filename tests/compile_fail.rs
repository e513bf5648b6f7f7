//! What must not compile, and what the compiler says instead: each message has to name the way out.

#[test]
fn what_makes_no_sense_does_not_compile_and_the_message_names_the_way_out() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
