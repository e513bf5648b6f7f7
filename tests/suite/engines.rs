//! Task engines, on their real servers: messages are lost, doubled, delayed and damaged, connections cut.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions};
use owed::{Failure, ManualClock, MemoryStore, Outbox, Receiver, Status, Task, TaskBackend, async_trait};
use owed_nats::NatsTasks;
use owed_rabbitmq::RabbitTasks;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, oneshot, watch},
    task::JoinHandle,
};

use crate::bed::{Bed, Placed, Seen, place, settings, start, until};

macro_rules! on_every_engine {
    ($($test:ident),+ $(,)?) => {
        mod nats {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(<super::Nats as super::Engine>::open().await).await })+
        }
        mod rabbitmq {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(<super::Rabbit as super::Engine>::open().await).await })+
        }
    };
}

on_every_engine!(
    tasks_are_run_by_a_worker_and_their_messages_are_gone,
    a_lost_message_is_handed_off_again,
    copies_of_a_message_run_once,
    a_late_message_is_turned_away,
    what_is_no_task_is_removed_and_the_rest_goes_on,
    a_worker_whose_connections_are_cut_goes_on,
    a_relay_whose_connections_are_cut_goes_on,
    rows_stay_with_the_relay_while_the_server_is_away,
    a_message_is_acknowledged_after_its_outcome_and_not_before,
    a_worker_that_stops_finishes_what_runs_and_leaves_the_rest,
    a_worker_without_concurrency_is_refused,
);

fn server(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!(
            "{variable} is not set: run the tests with `cargo xtask test`, which finds or starts the servers"
        )
    })
}

/// An engine with a queue of its own for one test.
#[async_trait]
trait Engine: Sized + Send + Sync + 'static {
    type Tasks: TaskBackend + Clone;

    async fn open() -> Self;
    /// The queue, by the server's own address or through a proxy.
    async fn tasks(&self, through: Option<SocketAddr>) -> Self::Tasks;
    fn address(&self) -> SocketAddr;
    async fn work(
        tasks: Self::Tasks,
        outbox: Outbox<MemoryStore>,
        concurrency: u16,
        stop: oneshot::Receiver<()>,
    ) -> Result<(), String>;
    /// Puts any bytes into the queue.
    async fn publish(&self, payload: Vec<u8>);
    /// Loses every message that waits.
    async fn lose(&self);
    /// How many messages the queue holds that no worker has.
    async fn waiting(&self) -> u64;
    async fn close(self);
}

struct Nats {
    url: String,
    client: async_nats::Client,
    name: String,
}

impl Nats {
    fn stream(&self) -> String {
        self.name.to_uppercase()
    }
}

#[async_trait]
impl Engine for Nats {
    type Tasks = NatsTasks;

    async fn open() -> Self {
        let url = server("OWED_TEST_NATS_URL");
        let client = async_nats::connect(&url).await.expect("a reachable NATS");
        let nats = Nats { url, client, name: format!("t{:012x}", rand::random::<u64>() >> 16) };
        nats.tasks(None).await;
        nats
    }

    async fn tasks(&self, through: Option<SocketAddr>) -> NatsTasks {
        let client = match through {
            None => self.client.clone(),
            Some(proxy) => async_nats::connect(format!("nats://{proxy}")).await.expect("a reachable proxy"),
        };
        NatsTasks::on(client)
            .stream(self.stream())
            .subject(format!("{}.tasks", self.name))
            // Soon, so that a test need not wait long for what its worker has left.
            .ack_wait(Duration::from_secs(1))
            .open()
            .await
            .expect("rights to make a stream")
    }

    fn address(&self) -> SocketAddr {
        self.url.trim_start_matches("nats://").parse().expect("nats://IP:PORT")
    }

    async fn work(
        tasks: NatsTasks,
        outbox: Outbox<MemoryStore>,
        concurrency: u16,
        stop: oneshot::Receiver<()>,
    ) -> Result<(), String> {
        let worker = tasks.worker(&outbox).concurrency(concurrency.into());
        worker.run_until(async { drop(stop.await) }).await.map_err(|error| error.to_string())
    }

    async fn publish(&self, payload: Vec<u8>) {
        let context = async_nats::jetstream::new(self.client.clone());
        context.publish(format!("{}.tasks", self.name), payload.into()).await.unwrap().await.unwrap();
    }

    async fn lose(&self) {
        let context = async_nats::jetstream::new(self.client.clone());
        context.get_stream(self.stream()).await.unwrap().purge().await.unwrap();
    }

    async fn waiting(&self) -> u64 {
        let context = async_nats::jetstream::new(self.client.clone());
        let mut stream = context.get_stream(self.stream()).await.unwrap();
        stream.info().await.unwrap().state.messages
    }

    async fn close(self) {
        async_nats::jetstream::new(self.client.clone()).delete_stream(self.stream()).await.unwrap();
    }
}

struct Rabbit {
    url: String,
    channel: lapin::Channel,
    _connection: lapin::Connection,
    queue: String,
}

#[async_trait]
impl Engine for Rabbit {
    type Tasks = RabbitTasks;

    async fn open() -> Self {
        let url = server("OWED_TEST_RABBITMQ_URL");
        let properties = lapin::ConnectionProperties::default();
        let connection = lapin::Connection::connect(&url, properties).await.expect("a reachable RabbitMQ");
        let channel = connection.create_channel().await.unwrap();
        let queue = format!("owed.t{:012x}", rand::random::<u64>() >> 16);
        let rabbit = Rabbit { url, channel, _connection: connection, queue };
        rabbit.tasks(None).await;
        rabbit
    }

    async fn tasks(&self, through: Option<SocketAddr>) -> RabbitTasks {
        let url = match through {
            None => self.url.clone(),
            Some(proxy) => self.url.replace(&self.address().to_string(), &proxy.to_string()),
        };
        RabbitTasks::builder(url).queue(&self.queue).open().await.expect("rights to make a queue")
    }

    fn address(&self) -> SocketAddr {
        let (_, place) = self.url.rsplit_once('@').expect("amqp://USER:PASSWORD@IP:PORT");
        place.split('/').next().unwrap().parse().expect("amqp://USER:PASSWORD@IP:PORT")
    }

    async fn work(
        tasks: RabbitTasks,
        outbox: Outbox<MemoryStore>,
        concurrency: u16,
        stop: oneshot::Receiver<()>,
    ) -> Result<(), String> {
        let worker = tasks.worker(&outbox).concurrency(concurrency);
        worker.run_until(async { drop(stop.await) }).await.map_err(|error| error.to_string())
    }

    async fn publish(&self, payload: Vec<u8>) {
        let (queue, options) = (self.queue.as_str().into(), BasicPublishOptions::default());
        let sent = self.channel.basic_publish("".into(), queue, options, &payload, Default::default()).await;
        sent.unwrap().await.unwrap();
    }

    async fn lose(&self) {
        self.channel.queue_purge(self.queue.as_str().into(), QueuePurgeOptions::default()).await.unwrap();
    }

    async fn waiting(&self) -> u64 {
        let queue = self.queue.as_str().into();
        let declared =
            self.channel.queue_declare(queue, QueueDeclareOptions::durable(), Default::default()).await;
        declared.unwrap().message_count().into()
    }

    async fn close(self) {
        self.channel.queue_delete(self.queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    }
}

/// Passes bytes on to a server, until it is told to cut.
struct Proxy {
    address: SocketAddr,
    cuts: watch::Sender<u64>,
    away: Arc<AtomicBool>,
    _accepting: tokio::task::JoinSet<()>,
}

impl Proxy {
    async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cuts, cut) = watch::channel(0);
        let away = Arc::new(AtomicBool::new(false));
        let mut accepting = tokio::task::JoinSet::new();
        let gone = away.clone();
        accepting.spawn(async move {
            loop {
                let Ok((mut here, _)) = listener.accept().await else { return };
                if gone.load(Ordering::SeqCst) {
                    continue;
                }
                let mut cut = cut.clone();
                cut.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut there) = TcpStream::connect(server).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut here, &mut there) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Proxy { address, cuts, away, _accepting: accepting }
    }

    fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Cuts everything and takes nothing more, or takes it again.
    fn away(&self, away: bool) {
        self.away.store(away, Ordering::SeqCst);
        self.cut();
    }
}

struct Worker {
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), String>>,
}

impl Worker {
    fn start<N: Engine>(tasks: &N::Tasks, outbox: &Outbox<MemoryStore>, concurrency: u16) -> Self {
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(N::work(tasks.clone(), outbox.clone(), concurrency, stopped));
        Worker { stop, running }
    }

    async fn stop(self) {
        self.stop.send(()).expect("a worker that runs until it is told to stop");
        self.running.await.unwrap().unwrap();
    }
}

/// Rows in memory, since this is about what lies between them and the handler.
struct Service {
    bed: Bed<MemoryStore>,
    outbox: Outbox<MemoryStore>,
    ran: Seen<i64>,
    /// Handlers that start wait for a permit each.
    gate: Arc<Semaphore>,
    started: Seen<i64>,
}

fn service(tasks: impl TaskBackend) -> Service {
    let clock = ManualClock::at(start());
    let bed = Bed { store: MemoryStore::with_clock(clock.clone()), clock };
    let (ran, started) = (Seen::default(), Seen::default());
    let gate = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
    let receiver = Receiver::on::<Placed>("test.task").durable().task().run({
        let (ran, started, gate) = (ran.clone(), started.clone(), gate.clone());
        move |event: Placed| {
            let (ran, started, gate) = (ran.clone(), started.clone(), gate.clone());
            async move {
                started.see(event.n);
                gate.acquire().await?.forget();
                ran.see(event.n);
                Ok::<(), Failure>(())
            }
        }
    });
    let outbox = bed.outbox().task_backend(tasks).receiver(receiver).build().unwrap();
    Service { bed, outbox, ran, gate, started }
}

impl Service {
    async fn fire(&self, numbers: std::ops::Range<i64>) {
        for n in numbers {
            place(&self.outbox, n).await;
        }
    }

    async fn hand_off(&self) -> u64 {
        self.outbox.deliver_pending().await.unwrap().handed_off
    }

    async fn hand_off_until_all_are_done(&self, count: usize) {
        until("every delivery", || async {
            self.bed.pass(settings().poll_interval);
            self.hand_off().await;
            self.succeeded().await == count
        })
        .await;
    }

    async fn succeeded(&self) -> usize {
        self.bed.deliveries().await.iter().filter(|row| row.status == Status::Succeeded).count()
    }

    /// Past the time that a task may wait for its worker.
    fn pass_task_lease(&self) {
        self.bed.pass(self.outbox.settings().task_lease);
    }
}

async fn empty<N: Engine>(engine: &N) {
    until("the queue to be empty", || async { engine.waiting().await == 0 }).await;
}

async fn tasks_are_run_by_a_worker_and_their_messages_are_gone<N: Engine>(engine: N) {
    let tasks = engine.tasks(None).await;
    let service = service(tasks.clone());
    service.fire(0..50).await;
    assert_eq!(service.hand_off().await, 50);
    assert_eq!(engine.waiting().await, 50);
    let worker = Worker::start::<N>(&tasks, &service.outbox, 4);
    until("every delivery", || async { service.succeeded().await == 50 }).await;
    empty(&engine).await;
    worker.stop().await;
    let mut ran = service.ran.all();
    ran.sort_unstable();
    assert_eq!(ran, (0..50).collect::<Vec<_>>());
    engine.close().await;
}

async fn a_lost_message_is_handed_off_again<N: Engine>(engine: N) {
    let tasks = engine.tasks(None).await;
    let service = service(tasks.clone());
    service.fire(0..3).await;
    assert_eq!(service.hand_off().await, 3);
    engine.lose().await;
    let worker = Worker::start::<N>(&tasks, &service.outbox, 4);
    assert_eq!(service.hand_off().await, 0, "handed off twice within its claim");
    service.pass_task_lease();
    assert_eq!(service.hand_off().await, 3);
    until("every delivery", || async { service.succeeded().await == 3 }).await;
    worker.stop().await;
    assert_eq!(service.ran.count(), 3);
    engine.close().await;
}

fn message_of(row: &owed::DeliveryRow) -> Vec<u8> {
    let task = Task {
        delivery_id: row.id,
        claimed_by: row.claimed_by.clone().unwrap(),
        claimed_at: row.claimed_at.unwrap(),
    };
    serde_json::to_vec(&task).unwrap()
}

async fn copies_of_a_message_run_once<N: Engine>(engine: N) {
    let tasks = engine.tasks(None).await;
    let service = service(tasks.clone());
    service.fire(0..1).await;
    service.hand_off().await;
    let copy = message_of(&service.bed.delivery().await);
    for _ in 0..5 {
        engine.publish(copy.clone()).await;
    }
    let worker = Worker::start::<N>(&tasks, &service.outbox, 6);
    empty(&engine).await;
    until("the delivery", || async { service.succeeded().await == 1 }).await;
    worker.stop().await;
    assert_eq!(service.ran.count(), 1);
    engine.close().await;
}

async fn a_late_message_is_turned_away<N: Engine>(engine: N) {
    let tasks = engine.tasks(None).await;
    let service = service(tasks.clone());
    service.fire(0..1).await;
    service.hand_off().await;
    let late = message_of(&service.bed.delivery().await);
    engine.lose().await;
    service.pass_task_lease();
    assert_eq!(service.hand_off().await, 1);
    engine.lose().await;
    // Only the late one comes.
    engine.publish(late).await;
    let worker = Worker::start::<N>(&tasks, &service.outbox, 2);
    empty(&engine).await;
    service.pass_task_lease();
    assert_eq!(service.hand_off().await, 1);
    until("the delivery", || async { service.succeeded().await == 1 }).await;
    worker.stop().await;
    assert_eq!(service.started.count(), 1, "the late one ran");
    engine.close().await;
}

async fn what_is_no_task_is_removed_and_the_rest_goes_on<N: Engine>(engine: N) {
    let tasks = engine.tasks(None).await;
    let service = service(tasks.clone());
    for wrong in
        [&b""[..], b"\xff\xfe", b"{}", br#"{"delivery_id":"one","claimed_by":1,"claimed_at":""}"#, b"[[[["]
    {
        engine.publish(wrong.to_vec()).await;
    }
    // A claim that nobody ever had.
    engine
        .publish(br#"{"delivery_id":7,"claimed_by":"x","claimed_at":"2026-01-01T00:00:00Z"}"#.to_vec())
        .await;
    service.fire(0..3).await;
    service.hand_off().await;
    let worker = Worker::start::<N>(&tasks, &service.outbox, 1);
    until("every delivery", || async { service.succeeded().await == 3 }).await;
    empty(&engine).await;
    worker.stop().await;
    engine.close().await;
}

async fn a_worker_whose_connections_are_cut_goes_on<N: Engine>(engine: N) {
    let proxy = Proxy::to(engine.address()).await;
    let (direct, through) = (engine.tasks(None).await, engine.tasks(Some(proxy.address)).await);
    let service = service(direct);
    let worker = Worker::start::<N>(&through, &service.outbox, 4);
    for round in 0..4 {
        service.fire(round * 10..round * 10 + 10).await;
        service.hand_off().await;
        proxy.cut();
        let done = usize::try_from(round + 1).unwrap() * 10;
        until("every delivery of this round", || async {
            // A message that was being taken when it was cut may be lost to this claim.
            service.bed.pass(Duration::from_secs(1));
            service.hand_off().await;
            service.succeeded().await == done
        })
        .await;
    }
    worker.stop().await;
    assert!(service.bed.deliveries().await.iter().all(|row| row.attempts == 1));
    engine.close().await;
}

async fn a_relay_whose_connections_are_cut_goes_on<N: Engine>(engine: N) {
    let proxy = Proxy::to(engine.address()).await;
    let (direct, through) = (engine.tasks(None).await, engine.tasks(Some(proxy.address)).await);
    let service = service(through);
    let worker = Worker::start::<N>(&direct, &service.outbox, 4);
    service.fire(0..5).await;
    service.hand_off_until_all_are_done(5).await;
    proxy.cut();
    service.fire(5..10).await;
    service.hand_off_until_all_are_done(10).await;
    worker.stop().await;
    assert_eq!(service.ran.count(), 10);
    engine.close().await;
}

async fn rows_stay_with_the_relay_while_the_server_is_away<N: Engine>(engine: N) {
    let proxy = Proxy::to(engine.address()).await;
    let (direct, through) = (engine.tasks(None).await, engine.tasks(Some(proxy.address)).await);
    let service = service(through);
    proxy.away(true);
    service.fire(0..1).await;
    let delivered = service.outbox.deliver_pending().await.unwrap();
    assert_eq!((delivered.left, delivered.total()), (1, 1));
    let row = service.bed.delivery().await;
    assert_eq!((row.status, row.attempts, row.claimed_by), (Status::Pending, 0, None));
    proxy.away(false);
    let worker = Worker::start::<N>(&direct, &service.outbox, 4);
    service.hand_off_until_all_are_done(1).await;
    empty(&engine).await;
    worker.stop().await;
    assert_eq!(service.ran.count(), 1);
    engine.close().await;
}

async fn a_message_is_acknowledged_after_its_outcome_and_not_before<N: Engine>(engine: N) {
    let proxy = Proxy::to(engine.address()).await;
    let (direct, through) = (engine.tasks(None).await, engine.tasks(Some(proxy.address)).await);
    let service = service(direct.clone());
    service.gate.forget_permits(Semaphore::MAX_PERMITS);
    service.fire(0..1).await;
    service.hand_off().await;
    let dies = Worker::start::<N>(&through, &service.outbox, 1);
    until("the handler to run", || async { service.started.count() == 1 }).await;
    dies.running.abort();
    assert!(dies.running.await.unwrap_err().is_cancelled());
    proxy.away(true);
    // Its message comes to another worker, whom its claim turns away.
    let worker = Worker::start::<N>(&direct, &service.outbox, 1);
    empty(&engine).await;
    assert_eq!(service.bed.delivery().await.status, Status::Claimed);
    assert_eq!(service.started.count(), 1, "a copy ran");
    service.gate.add_permits(1);
    service.pass_task_lease();
    assert_eq!(service.hand_off().await, 1);
    until("the delivery", || async { service.succeeded().await == 1 }).await;
    worker.stop().await;
    assert_eq!(service.ran.count(), 1);
    engine.close().await;
}

async fn a_worker_that_stops_finishes_what_runs_and_leaves_the_rest<N: Engine>(engine: N) {
    let tasks = engine.tasks(None).await;
    let service = service(tasks.clone());
    service.gate.forget_permits(Semaphore::MAX_PERMITS);
    service.fire(0..3).await;
    service.hand_off().await;
    let first = Worker::start::<N>(&tasks, &service.outbox, 1);
    until("a handler to run", || async { service.started.count() == 1 }).await;
    let stopping = tokio::spawn(first.stop());
    service.gate.add_permits(1);
    stopping.await.unwrap();
    assert_eq!((service.ran.count(), service.started.count()), (1, 1), "it started another");
    service.gate.add_permits(2);
    let second = Worker::start::<N>(&tasks, &service.outbox, 1);
    until("the rest", || async { service.succeeded().await == 3 }).await;
    second.stop().await;
    engine.close().await;
}

async fn a_worker_without_concurrency_is_refused<N: Engine>(engine: N) {
    let tasks = engine.tasks(None).await;
    let service = service(tasks.clone());
    let refused = Worker::start::<N>(&tasks, &service.outbox, 0).running.await.unwrap().unwrap_err();
    assert!(refused.contains("concurrency is 0"), "{refused}");
    engine.close().await;
}
