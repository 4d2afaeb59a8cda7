//! Hand-overs between two sidecars over TCP: from the last commit of one engine's prompt to the end of another
//! engine's load, with every loaded byte compared.
//!
//! `PILLION_HANDOVERS` is the number of prompts. With `PILLION_EARLIER`, the path of another release's program, two
//! sidecars of that program and a lone one of this program hand over as many prompts in turn. For a slower wire the
//! test runs in a network namespace of its own, with `tc qdisc` on the loopback there.

mod client;

use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

use client::sidecar::{Sidecar, free_port};
use client::{BLOCKS, Kv, Session, WATCHDOG, hello, now, watch};
use rustix::fs::MemfdFlags;
use shm_protocol::handshake::{BlockRegion, Copier, Role};
use shm_protocol::key::BlockHash;
use shm_protocol::message::{Kind, LOAD_ARRIVING, Message, Outcome, SAVE_HANDOVER, Status};
use shm_protocol::request::{Append, LogKeys, Query, SchedulerRequest};

/// Bytes of a block: a prompt has 992 KiB. The time is that of the hand-over, and hardly of its bytes.
const BYTES: u64 = 8 << 10;
/// Blocks of a prompt: all but block 0 of the engine, of which vLLM makes no use, in whole steps.
const COUNT: u32 = 124;
/// Steps of a prompt.
const STEPS: u32 = 4;
const MODEL: &str = "handover";

/// An engine of one rank.
struct Engine {
    kv: Kv,
    rank: Session,
    scheduler: Session,
    op: u64,
    step: u64,
}

/// Two pods, or one pod with both engines.
struct Pods {
    name: &'static str,
    sidecars: Vec<Sidecar>,
    producer: Engine,
    consumer: Engine,
    _folders: Vec<tempfile::TempDir>,
    took: Vec<Duration>,
}

fn kv() -> Kv {
    let fds = [BYTES * u64::from(BLOCKS), 4096].map(|bytes| {
        let fd = rustix::fs::memfd_create("kv", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        fd
    });
    Kv { fds, regions: vec![BlockRegion { fd: 0, offset: 0, stride: BYTES, bytes: BYTES }] }
}

/// The first and last word of a block of prompt `number`.
fn stamp(number: u64, block: u32) -> [u8; 8] {
    (number << 32 | u64::from(block) << 1 | 1).to_le_bytes()
}

fn keys(number: u64) -> Vec<BlockHash> {
    (0..COUNT).map(|block| BlockHash::from_words([number, block.into(), 3, 1])).collect()
}

// === impl Engine ===

impl Engine {
    fn connect(sidecar: &Sidecar, name: &str) -> Self {
        let (kv, run) = (kv(), [name.len() as u8; 16]);
        let worker = Role::Worker(kv.stated(MODEL, 0, 1, Copier::Sidecar));
        let rank = Session::rank(&sidecar.socket, &hello(name, 1, worker), &kv, run);
        rank.fences(1, 1);
        let scheduler = Session::open(&sidecar.socket, &hello(name, 1, Role::Scheduler { run }), &[]);
        Self { kv, rank, scheduler, op: 0, step: 1 }
    }

    fn next_op(&mut self) -> u64 {
        self.op += 1;
        self.op
    }

    fn write(&self, number: u64) {
        for block in 1..=COUNT {
            for at in [u64::from(block) * BYTES, u64::from(block + 1) * BYTES - 8] {
                assert_eq!(rustix::io::pwrite(&self.kv.fds[0], &stamp(number, block), at), Ok(8));
            }
        }
    }

    fn holds(&self, number: u64) -> bool {
        (1..=COUNT).all(|block| {
            let ends = [u64::from(block) * BYTES, u64::from(block + 1) * BYTES - 8];
            ends.into_iter().all(|at| {
                let mut word = [0; 8];
                rustix::io::pread(&self.kv.fds[0], &mut word, at) == Ok(8) && word == stamp(number, block)
            })
        })
    }

    /// Opens log 0 with the keys of a prompt, promised or not.
    fn open(&mut self, keys: &[BlockHash], promised: bool) {
        self.scheduler.post(SchedulerRequest::Open { log: 0 });
        for (index, key) in keys.iter().enumerate() {
            self.scheduler.memory.write_key((index / 64) as u32, index % 64, key);
        }
        for from in (0..keys.len()).step_by(64) {
            let chunks = [(from / 64) as u32, 0, 0, 0, 0, 0];
            let keys = LogKeys::new(0, from as u32..keys.len().min(from + 64) as u32);
            self.scheduler.post(SchedulerRequest::Append(Append { keys, chunks, promised, tail: false }));
        }
    }

    fn close(&mut self) {
        self.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
        self.scheduler.wait_read();
    }

    /// Asks for all blocks of another engine's prompt.
    fn ask(&mut self) -> u64 {
        let op = self.next_op();
        let query = Query { arriving: true, awaits: true, ..Query::new(op, LogKeys::new(0, 0..COUNT)) };
        self.scheduler.post(SchedulerRequest::Query(query));
        op
    }

    /// Computes and saves a part of the prompt in a step of its own. Returns the save's operation.
    fn compute(&mut self, part: u32) -> u64 {
        let (op, count) = (self.next_op(), COUNT / STEPS);
        self.step += 1;
        let blocks: Vec<u32> = (1 + part * count..=(part + 1) * count).collect();
        let save = Message {
            op,
            from: part * count,
            step: self.step,
            flags: SAVE_HANDOVER,
            ..Message::new(Kind::Save)
        };
        self.scheduler.with_blocks(save, &blocks);
        self.rank.fences(self.step, self.step);
        self.rank.ring();
        op
    }

    fn load(&mut self, lease: u64, outcome: &Outcome) -> u64 {
        let op = self.next_op();
        let flags = if outcome.status == Status::Arriving { LOAD_ARRIVING } else { 0 };
        let load = Message { op, lease, step: 1, flags, ..Message::new(Kind::Load) };
        self.scheduler.with_blocks(load, &(1..=COUNT).collect::<Vec<_>>());
        op
    }
}

// === impl Pods ===

impl Pods {
    /// So many pods with sidecars of this program.
    fn start(name: &'static str, program: impl AsRef<OsStr>, pods: usize) -> Self {
        let folders: Vec<_> = (0..pods).map(|_| tempfile::tempdir().unwrap()).collect();
        let addresses: Vec<String> = (0..pods).map(|_| format!("127.0.0.1:{}", free_port())).collect();
        let start = |(at, folder): (usize, &tempfile::TempDir)| {
            let mut arguments: Vec<String> = ["--dram", "512MiB"].map(String::from).into();
            if pods > 1 {
                let node = format!("node-{at}");
                arguments.extend(["--mesh-plaintext", "--node-id", &node, "--mesh-listen"].map(String::from));
                arguments.extend([addresses[at].clone(), format!("--peer={}", addresses[1 - at])]);
            }
            let arguments: Vec<&dyn AsRef<OsStr>> =
                arguments.iter().map(|it| it as &dyn AsRef<OsStr>).collect();
            Sidecar::start_by(Command::new(&program), folder.path(), &arguments)
        };
        let sidecars: Vec<Sidecar> = folders.iter().enumerate().map(start).collect();
        sidecars.iter().for_each(Sidecar::wait_started);
        if pods > 1 {
            sidecars.iter().for_each(|one| _ = one.wait_metric("pillion_mesh_peers", |peers| peers == 1));
        }
        let producer = Engine::connect(&sidecars[0], "producer");
        let consumer = Engine::connect(&sidecars[pods - 1], "consumer-of-it");
        Self { name, sidecars, producer, consumer, _folders: folders, took: Vec::new() }
    }

    /// Hands over a prompt, and notes the time from its last commit to the end of the load.
    fn hand_over(&mut self, number: u64) {
        let (keys, began) = (keys(number), now());
        let alive = || assert!(began.elapsed() < WATCHDOG, "{}: prompt {number}", self.name);
        self.producer.write(number);
        self.producer.open(&keys, true);
        // As with a router that asks both engines at once.
        std::thread::sleep(Duration::from_millis(30));
        self.consumer.open(&keys, false);
        let query = self.consumer.ask();
        std::thread::sleep(Duration::from_millis(30));
        let (mut committed, mut load, mut part) = (None, None, 0);
        self.producer.compute(part);
        loop {
            alive();
            if let Some(saved) = self.producer.scheduler.try_saved() {
                assert_eq!(saved.committed, COUNT / STEPS, "{}", self.name);
                part += 1;
                if part == STEPS {
                    committed = Some(now());
                } else {
                    std::thread::sleep(Duration::from_millis(10));
                    self.producer.compute(part);
                }
            }
            let found = self.consumer.scheduler.memory.load_outcome(query);
            if load.is_none()
                && let Some(outcome) = found.filter(|it| matches!(it.status, Status::Ok | Status::Arriving))
            {
                assert_eq!(outcome.value, COUNT, "{}: {outcome:?}", self.name);
                load = Some(self.consumer.load(query, &outcome));
            }
            let ended = load.and_then(|op| self.consumer.rank.memory.load_outcome(op));
            if let (Some(committed), Some(ended)) = (committed, ended)
                && ended.status != Status::Pending
            {
                self.took.push(committed.elapsed());
                assert_eq!(ended.status, Status::Ok, "{}", self.name);
                break;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        assert!(self.consumer.holds(number), "{}: wrong bytes of prompt {number}", self.name);
        self.producer.close();
        self.consumer.close();
    }

    /// The figures of its hand-overs.
    fn figures(&self) -> String {
        let mut took = self.took.clone();
        took.sort_unstable();
        let ms = |part: usize| took[(took.len() - 1) * part / 100].as_secs_f64() * 1e3;
        format!("{}: p50 {:.2} ms, p90 {:.2} ms of {}", self.name, ms(50), ms(90), took.len())
    }
}

#[test]
fn what_one_pod_promises_is_in_another_behind_its_commit() {
    let own = env!("CARGO_BIN_EXE_pillion");
    let mut all = vec![Pods::start("two sidecars", own, 2)];
    let earlier = std::env::var_os("PILLION_EARLIER");
    if let Some(earlier) = &earlier {
        all.push(Pods::start("two earlier sidecars", earlier, 2));
        all.push(Pods::start("one sidecar", own, 1));
    }
    let rounds =
        std::env::var_os("PILLION_HANDOVERS").map_or(8, |count| count.to_str().unwrap().parse().unwrap());
    for number in 1..=rounds {
        all.iter_mut().for_each(|pods| pods.hand_over(number));
    }
    let text: Vec<String> = all.iter().map(Pods::figures).collect();
    eprintln!("{}", text.join("\n"));
    let [producing, consuming] = &all[0].sidecars[..] else { panic!("two sidecars") };
    let blocks = rounds * u64::from(COUNT);
    consuming.wait_metric("pillion_mesh_standing_blocks_total", |standing| standing > 0);
    producing.wait_metric("pillion_mesh_kept_asks_granted_total", |granted| granted > 0);
    consuming.wait_metric("pillion_mesh_fetched_blocks_total", |fetched| fetched >= blocks);
    assert_eq!(consuming.metric("pillion_mesh_fetched_blocks_total"), blocks, "each block came once");
    assert_eq!(consuming.metric("pillion_handover_exhausted_total"), 0);
}

#[test]
fn asks_end_with_the_pod_at_which_they_stand() {
    let mut pods = Pods::start("a killed one", env!("CARGO_BIN_EXE_pillion"), 2);
    pods.hand_over(1);
    let standing = "pillion_mesh_standing_blocks_total";
    let before = pods.sidecars[1].metric(standing);
    pods.producer.open(&keys(2), true);
    pods.consumer.open(&keys(2), false);
    let query = pods.consumer.ask();
    pods.sidecars[1].wait_metric(standing, |blocks| blocks > before);
    pods.sidecars.remove(0).kill();
    let known = |outcome: &Outcome| outcome.status != Status::Pending;
    let outcome = watch("an answer", || Some(pods.consumer.scheduler.outcome(query)).filter(known));
    assert_eq!((outcome.status, outcome.value), (Status::Ok, 0));
    // The slots of its blocks are free again.
    pods.sidecars[0].wait_metric("pillion_tier_reading_blocks", |blocks| blocks == 0);
    pods.consumer.close();
}
