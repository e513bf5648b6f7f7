//! What logs, spans and settings tell people. The engine's own, so on one store.

use std::{
    io::Write,
    sync::{Arc, Mutex},
    time::Duration,
};

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use owed::{
    Codec, DeliveryContext, Failure, ManualClock, MemoryStore, Outbox, Receiver, Scope, Settings, Wake,
    state::Bounded,
};
use tracing::Instrument;
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

use crate::bed::{Placed, place, start};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs a test in a process of its own, and is true in that process.
///
/// While one subscriber lives, `tracing` asks the thread that first meets a callsite whether anybody wants it, and
/// keeps the answer for the process: another test's thread would turn a span or a line off.
fn alone(test: &str) -> bool {
    const ALONE: &str = "OWED_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let test = format!("telling::{test}");
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
    false
}

impl Log {
    /// Logs of this thread go here while the guard lives.
    fn start(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || log.clone());
        tracing_subscriber::registry().with(lines).set_default()
    }

    fn lines(&self, with: &str) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(with)).map(str::to_owned).collect()
    }
}

fn store() -> MemoryStore {
    MemoryStore::with_clock(ManualClock::at(start()))
}

#[tokio::test]
async fn a_failed_attempt_is_one_warning_without_what_may_be_private() {
    if !alone("a_failed_attempt_is_one_warning_without_what_may_be_private") {
        return;
    }
    let log = Log::default();
    let _logging = log.start();
    let outbox = Outbox::builder(store())
        .receiver(
            Receiver::on::<Placed>("test.a")
                .durable()
                .targets(|_: &Placed, _: &DeliveryContext| vec!["private-target".to_owned()])
                .run(async |_: Placed| Err::<(), Failure>("private-error".into())),
        )
        .build()
        .unwrap();
    Scope::new()
        .actor("private-actor", "private-label")
        .data("k", "private-data")
        .unwrap()
        .run(place(&outbox, 987_654_321))
        .await;
    outbox.deliver_pending().await.unwrap();
    let warnings = log.lines("WARN");
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    for part in
        ["a delivery failed", "receiver=\"test.a\"", "attempt=1", "failure=\"error\"", "status=failed"]
    {
        assert!(warnings[0].contains(part), "{part} is not in {}", warnings[0]);
    }
    assert_eq!(log.lines("private"), [] as [String; 0]);
    assert_eq!(log.lines("987654321"), [] as [String; 0]);
}

#[tokio::test]
async fn a_wait_that_is_cut_is_a_warning_with_both_numbers() {
    if !alone("a_wait_that_is_cut_is_a_warning_with_both_numbers") {
        return;
    }
    let log = Log::default();
    let _logging = log.start();
    let outbox = Outbox::builder(store())
        .receiver(
            Receiver::on::<Placed>("test.a")
                .durable()
                .give_up_after(Duration::from_secs(10_000_000))
                .run(async |_: Placed| Err::<(), _>(Failure::<Bounded>::defer(Duration::from_secs(90_000)))),
        )
        .build()
        .unwrap();
    place(&outbox, 1).await;
    outbox.deliver_pending().await.unwrap();
    let cut = log.lines("max_retry_delay");
    assert_eq!(cut.len(), 1, "{cut:#?}");
    assert!(cut[0].contains("90000s") && cut[0].contains("86400s"), "{}", cut[0]);
}

#[tokio::test]
async fn a_relay_says_at_its_start_what_waits_for_nobody_here() {
    if !alone("a_relay_says_at_its_start_what_waits_for_nobody_here") {
        return;
    }
    let store = store();
    let old = Outbox::builder(store.clone())
        .receiver(Receiver::on::<Placed>("test.gone").durable().run(async |_: Placed| Ok::<(), Failure>(())))
        .build()
        .unwrap();
    place(&old, 1).await;
    let log = Log::default();
    let _logging = log.start();
    let outbox = Outbox::builder(store).build().unwrap();
    let running = outbox.relay().run_until(async {
        for _ in 0..1_000 {
            if !log.lines("test.gone").is_empty() {
                break;
            }
            tokio::task::yield_now().await;
        }
    });
    running.await.unwrap();
    let told = log.lines("1 row is owed to the receiver test.gone");
    assert_eq!(told.len(), 1, "{told:#?}");
}

fn span<'s>(spans: &'s [SpanData], name: &str) -> &'s SpanData {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name} among {spans:#?}"))
}

#[tokio::test]
async fn a_delivery_links_to_the_span_that_fired_its_event_and_spans_keep_their_fields() {
    if !alone("a_delivery_links_to_the_span_that_fired_its_event_and_spans_keep_their_fields") {
        return;
    }
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _tracing = tracing_subscriber::registry().with(layer).set_default();
    let outbox = Outbox::builder(store())
        .receiver(Receiver::on::<Placed>("test.a").durable().run(async |_: Placed| Ok::<(), Failure>(())))
        .build()
        .unwrap();
    place(&outbox, 1).instrument(tracing::info_span!("request")).await;
    outbox.deliver_pending().await.unwrap();
    let spans = exporter.get_finished_spans().unwrap();
    let (fire, deliver) = (span(&spans, "owed.fire"), span(&spans, "owed.deliver"));
    assert_eq!(fire.span_context.trace_id(), span(&spans, "request").span_context.trace_id());
    let link = deliver.links.iter().next().expect("a link");
    assert_eq!(link.span_context.span_id(), fire.span_context.span_id());
    assert_eq!(link.span_context.trace_id(), fire.span_context.trace_id());
    assert_ne!(
        deliver.span_context.trace_id(),
        fire.span_context.trace_id(),
        "a delivery is a trace of its own"
    );
    for (name, fields) in [
        ("owed.fire", &["event", "count"][..]),
        ("owed.deliver", &["delivery", "event", "receiver", "attempt"]),
        ("owed.settle", &["count"]),
    ] {
        let span = span(&spans, name);
        for field in fields {
            assert!(span.attributes.iter().any(|one| one.key.as_str() == *field), "{name} has no {field}");
        }
    }
}

#[test]
fn settings_are_read_from_serde_with_every_mistake_told_at_once() {
    let settings: Settings = serde_json::from_value(serde_json::json!({
        "batch_size": 200,
        "lease": "45s",
        "poll_interval": "250ms",
        "wake": "poll",
        "codec": "json",
        "own_receivers": ["shop."],
    }))
    .unwrap();
    assert_eq!((settings.batch_size, settings.lease), (200, Duration::from_secs(45)));
    assert_eq!((settings.poll_interval, settings.wake), (Duration::from_millis(250), Wake::Poll));
    assert_eq!((settings.codec, settings.own_receivers), (Codec::Json, vec!["shop.".to_owned()]));
    assert_eq!(serde_json::from_str::<Settings>("{}").unwrap(), Settings::default());

    let wrong = serde_json::from_value::<Settings>(serde_json::json!({
        "lease": 45,
        "batch_size": -1,
        "wake": "shout",
        "max_attempts": 0,
        "max_atempts": 3,
        "own_receivers": 7,
        "poll_interval": {"secs": 1},
    }))
    .unwrap_err()
    .to_string();
    assert_eq!(
        wrong,
        "the settings can't be used, for 7 reasons:
  - setting batch_size: is -1, and must be a whole number from 0 to 4294967295
  - setting lease: is 45, and must be a time with its unit, such as \"250ms\", \"30s\" or \"2h 30m\"
  - there is no setting \"max_atempts\"; did you mean max_attempts?
  - setting own_receivers: is 7, and must be a list of texts
  - setting poll_interval: is of a type that no setting has, and must be a time with its unit, such as \"250ms\", \"30s\" or \"2h 30m\"
  - setting wake: is \"shout\", and must be \"notify\" or \"poll\"
  - setting max_attempts: is 0, and must be from 1 to 2147483647"
    );
}

#[test]
fn settings_are_read_from_the_environment() {
    const PREFIX: &str = "OWED_TEST_SETTINGS_";
    if std::env::var_os("OWED_TEST_SETTINGS_LEASE").is_some() {
        // The child: its environment is the test's.
        let read = Settings::from_env(PREFIX).unwrap();
        assert_eq!((read.lease, read.max_attempts), (Duration::from_secs(90), 9));
        assert_eq!(read.own_receivers, ["shop.", "till."]);
        let wrong = Settings::from_env("OWED_TEST_SETTINGS_L").unwrap_err().to_string();
        assert!(wrong.contains("there is no setting \"ease\""), "{wrong}");
        return;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "telling::settings_are_read_from_the_environment"])
        .env("OWED_TEST_SETTINGS_LEASE", "1m 30s")
        .env("OWED_TEST_SETTINGS_MAX_ATTEMPTS", "9")
        .env("OWED_TEST_SETTINGS_OWN_RECEIVERS", "shop., till.")
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
}

/// Runs this test binary again, as a service that ends when it is told.
#[cfg(unix)]
mod signals {
    use std::{
        io::{BufRead, BufReader, Read},
        process::{Child, Command, Stdio},
    };

    const CHILD: &str = "OWED_TEST_SIGNALLED_CHILD";

    /// What the child does; passes at once where it is run as a test.
    #[tokio::test]
    async fn child() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        let outbox = owed::Outbox::builder(owed::MemoryStore::new()).build().unwrap();
        let shutdown = owed::shutdown().unwrap();
        say("ready");
        outbox.relay().run_until(shutdown).await.unwrap();
        say("stopped");
        if std::env::var(CHILD).unwrap() == "ends" {
            return;
        }
        std::future::pending::<()>().await;
    }

    #[allow(clippy::print_stdout, reason = "what the parent reads")]
    fn say(what: &str) {
        println!("child {what}");
    }

    fn start(mode: &str) -> (Child, BufReader<impl Read>) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "telling::signals::child", "--nocapture"])
            .env(CHILD, mode)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        (child, said)
    }

    fn wait_for(said: &mut BufReader<impl Read>, what: &str) {
        let mut line = String::new();
        while !line.contains(what) {
            line.clear();
            assert_ne!(said.read_line(&mut line).unwrap(), 0, "the child ended before it said {what}");
        }
    }

    fn signal(child: &Child, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    #[test]
    fn a_first_signal_stops_a_relay_cleanly() {
        for name in ["TERM", "INT"] {
            let (mut child, mut said) = start("ends");
            wait_for(&mut said, "child ready");
            signal(&child, name);
            wait_for(&mut said, "child stopped");
            assert!(child.wait().unwrap().success());
        }
    }

    #[test]
    fn a_second_signal_ends_the_process_at_once_with_its_number() {
        for (name, code) in [("TERM", 143), ("INT", 130)] {
            let (mut child, mut said) = start("hangs");
            wait_for(&mut said, "child ready");
            signal(&child, "TERM");
            wait_for(&mut said, "child stopped");
            signal(&child, name);
            assert_eq!(child.wait().unwrap().code(), Some(code));
        }
    }
}
