//! A whole sidecar in this process, with sessions of engines.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::client::in_process::InProcess;
use crate::client::{BLOCK_BYTES, Kv, Session, greet, hello, keys, save, save_log, watch};
use shm_protocol::gate;
use shm_protocol::handshake::{self, Copier, CudaAllocation, CudaMemory, Reply, Role};
use shm_protocol::layout;
use shm_protocol::message::{Kind, LOAD_BY_ENGINE, Message, SAVE_CHECKED, Status};
use shm_protocol::request::{LoadEnd, SchedulerRequest, WorkerRequest};
use shm_protocol::transport;
use sidecar::config::{ServeOptions, UseGpu};

const RUN: [u8; 16] = [7; 16];
const SAVED: std::ops::Range<u32> = 1..71;

struct Sidecar(InProcess);

impl Sidecar {
    fn start() -> Self {
        Self::start_with(ServeOptions::default())
    }

    fn start_with(options: ServeOptions) -> Self {
        Self(InProcess::start(options))
    }

    fn socket(&self) -> &Path {
        &self.0.socket
    }

    fn scheduler(&self, world_size: u32) -> Session {
        Session::scheduler(self.socket(), "engine", world_size, RUN)
    }

    fn rank(&self, kv: &Kv, rank: u32, world_size: u32, copy: Copier) -> Session {
        let hello = hello("engine", world_size, kv.worker(rank, world_size, copy));
        let session = Session::rank(self.socket(), &hello, kv, RUN);
        assert_eq!(session.welcome.namespace.len(), 32);
        session
    }

    /// Checks that the sidecar serves a new engine from hello to answer.
    fn assert_serves(&self) {
        let kv = Kv::new();
        let _rank = self.rank(&kv, 0, 1, Copier::Engine);
        let mut scheduler = self.scheduler(1);
        scheduler.open_log(0, &keys(3));
        assert_eq!(scheduler.query(0, 1, 3).status, Status::Ok);
    }
}

/// Saves 70 blocks from every rank, finds them from a new engine, loads them into other blocks of other memory.
fn round_trip(world_size: u32, copy: Copier) {
    let sidecar = Sidecar::start();
    let kvs: Vec<Kv> = (0..world_size).map(|_| Kv::new()).collect();
    for (rank, kv) in kvs.iter().enumerate() {
        SAVED.for_each(|block| kv.fill(block, u64::from(block) * 100 + rank as u64));
    }
    let ranks: Vec<Session> =
        (0..).zip(&kvs).map(|(rank, kv)| sidecar.rank(kv, rank, world_size, copy)).collect();
    let mut scheduler = sidecar.scheduler(world_size);
    scheduler.open_log(0, &keys(SAVED.len()));
    scheduler.query_ready(0, 101, 70);
    scheduler.with_blocks(save(1000, 0, 5), &SAVED.collect::<Vec<_>>());
    ranks.iter().for_each(|rank| rank.fences(5, 5));
    let saved = scheduler.saved();
    assert_eq!((saved.op, saved.committed, saved.dropped, saved.cancelled), (1000, 70, 0, 0));
    drop((ranks, scheduler));
    load_back(&sidecar, world_size, copy);
}

fn load_back(sidecar: &Sidecar, world_size: u32, copy: Copier) {
    let kvs: Vec<Kv> = (0..world_size).map(|_| Kv::new()).collect();
    let mut ranks: Vec<Session> =
        (0..).zip(&kvs).map(|(rank, kv)| sidecar.rank(kv, rank, world_size, copy)).collect();
    let mut scheduler = sidecar.scheduler(world_size);
    scheduler.open_log(3, &keys(SAVED.len()));
    assert_eq!(scheduler.query_ready(3, 1, 70).value, 70);
    // In reverse order, and at other numbers: block 101 gets the bytes of block 1.
    let targets: Vec<u32> = (0..70).map(|index| if index < 27 { 101 + index } else { index }).collect();
    let by_engine = copy == Copier::Engine;
    let flags = if by_engine { LOAD_BY_ENGINE } else { 0 };
    let load = Message { log: 3, op: 2000, lease: 1, step: 9, flags, ..Message::new(Kind::Load) };
    scheduler.with_blocks(load, &targets);
    for (rank, session) in ranks.iter_mut().enumerate() {
        session.fences(9, 0);
        if by_engine {
            check_pool(&scheduler, session, rank as u64);
            session.post(WorkerRequest::Loaded { op: 2000, end: LoadEnd::Whole });
        } else {
            assert_eq!(session.outcome(2000).status, Status::Ok);
            let kv = &kvs[rank];
            for (&target, source) in targets.iter().zip(SAVED) {
                assert!(
                    kv.holds(target, u64::from(source) * 100 + rank as u64),
                    "rank {rank} block {target}"
                );
            }
            assert!(!kv.holds(100, 100 * 100 + rank as u64));
        }
    }
}

/// Checks the saved bytes in the pool, as an engine that copies for itself reads them.
fn check_pool(scheduler: &Session, rank: &Session, number: u64) {
    for (index, block) in SAVED.enumerate() {
        let slot = scheduler.memory.read_ref((index / 64) as u32, index % 64);
        let expected: Vec<u8> = (0..crate::client::LAYERS)
            .flat_map(|layer| crate::client::pattern(u64::from(block) * 100 + number, layer))
            .collect();
        let start = slot.offset + number * BLOCK_BYTES;
        let aligned = (start / 8 * 8) as usize;
        let words = rank.pool.words64(aligned, (BLOCK_BYTES as usize).div_ceil(8) + 1);
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.load(Ordering::Acquire).to_le_bytes()).collect();
        let skip = start as usize - aligned;
        assert_eq!(bytes[skip..skip + BLOCK_BYTES as usize], expected[..], "block {block} of rank {number}");
    }
}

#[test]
fn one_rank_copied_by_the_sidecar_byte_for_byte() {
    round_trip(1, Copier::Sidecar);
}

#[test]
fn two_ranks_copied_by_the_sidecar_byte_for_byte() {
    round_trip(2, Copier::Sidecar);
}

#[test]
fn two_ranks_that_copy_for_themselves_byte_for_byte() {
    round_trip(2, Copier::Engine);
}

#[test]
fn a_closed_gate_stops_a_load() {
    let sidecar = Sidecar::start();
    let kv = Kv::new();
    kv.fill(1, 77);
    let rank = sidecar.rank(&kv, 0, 1, Copier::Sidecar);
    let mut scheduler = sidecar.scheduler(1);
    scheduler.open_log(0, &keys(1));
    scheduler.query_ready(0, 1, 1);
    scheduler.with_blocks(save(1000, 0, 1), &[1]);
    rank.fences(1, 1);
    assert_eq!(scheduler.saved().committed, 1);
    assert_eq!(scheduler.query(0, 1001, 1).value, 1);
    gate::close_gate(rank.memory.region(), 1002);
    let load = Message { op: 1002, lease: 1001, step: 1, ..Message::new(Kind::Load) };
    scheduler.with_blocks(load, &[2]);
    assert_eq!(rank.outcome(1002).status, Status::Failed);
    assert!(!kv.holds(2, 77), "nothing was written behind a closed gate");
    gate::close_gate(rank.memory.region(), 1006);
    assert_eq!(scheduler.query(0, 1003, 1).value, 1);
    scheduler.with_blocks(Message { op: 1004, lease: 1003, ..load }, &[2]);
    assert_eq!(rank.outcome(1004).status, Status::Ok, "saves cancelled before and after it do not change it");
    assert!(kv.holds(2, 77));
    let ended = rank.memory.region().word64(layout::header::FENCE_ENDED);
    assert_eq!(ended.load(Ordering::Acquire), 1, "blocks of loads that were written");
}

#[test]
fn other_versions_and_bad_hellos_are_refused_with_a_reason() {
    let sidecar = Sidecar::start();
    let scheduler = || hello("engine", 1, Role::Scheduler { run: RUN });
    let reason = |hello: &handshake::Hello, fds: &[&OwnedFd]| match greet(sidecar.socket(), hello, fds).1 {
        Reply::Refused { reason, .. } => reason,
        Reply::Welcome(_) => panic!("{hello:?} was welcomed"),
    };
    let foreign = reason(&handshake::Hello { version: 99, oldest: None, ..scheduler() }, &[]);
    assert!(foreign.contains("version 99 (") && foreign.contains("versions 2 to 3 ("), "{foreign}");
    let patient = handshake::Hello { miss_wait_ms: Some(2001), ..scheduler() };
    assert!(reason(&patient, &[]).contains("set a smaller pillion.miss_wait_ms"));
    assert!(reason(&handshake::Hello { world_size: 65, ..scheduler() }, &[]).contains("world_size"));
    let kv = Kv::new();
    let worker = hello("engine", 1, kv.worker(0, 1, Copier::Engine));
    assert!(reason(&worker, &[&kv.fds[0]]).contains("below the number of memories"));
    assert!(reason(&worker, &[&kv.fds[1], &kv.fds[0]]).contains("smaller"), "sizes are checked");
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    assert!(reason(&worker, &[&pipe, &kv.fds[1]]).contains("shared memory"));
    let connection = transport::connect_socket(sidecar.socket(), Duration::from_secs(10)).unwrap();
    transport::send_record(&connection, b"GET / HTTP/1.1", &[]).unwrap();
    let (record, _) = transport::receive_record(&connection).unwrap();
    assert!(matches!(handshake::decode_reply(&record), Ok(Reply::Refused { .. })));
    sidecar.assert_serves();
}

/// A rank with its memory on a GPU.
fn gpu_worker(kv: &Kv, pid: u32) -> handshake::Hello {
    let mut worker = kv.stated("tiny", 0, 1, Copier::Sidecar);
    let bytes = |memory| worker.descriptor_bytes(memory);
    let allocations = (0..2).map(|memory| CudaAllocation { handle: [0; 64], bytes: bytes(memory) }).collect();
    let cuts = vec![worker.block_bytes().unwrap()];
    worker.cuda = Some(CudaMemory { uuid: [0xee; 16], pid, allocations, cuts });
    hello("engine", 1, Role::Worker(worker))
}

#[test]
fn a_rank_on_a_gpu_that_is_not_served_is_told_why() {
    let kv = Kv::new();
    let reason = |sidecar: &Sidecar, pid: u32| match greet(sidecar.socket(), &gpu_worker(&kv, pid), &[]).1 {
        Reply::Refused { reason, .. } => reason,
        Reply::Welcome(_) => panic!("no machine has a GPU of this name"),
    };
    let without = Sidecar::start_with(ServeOptions { gpu: Some(UseGpu::Off), ..ServeOptions::default() });
    let text = reason(&without, 1);
    assert!(text.contains("--gpu off"), "{text}");
    without.assert_serves();
    let sidecar = Sidecar::start();
    let text = reason(&sidecar, 1);
    assert!(text.contains("GPU") && text.contains("container"), "the remedy: {text}");
    let text = reason(&sidecar, std::process::id());
    assert!(text.contains("both process") && text.contains("PID namespace"), "{text}");
    sidecar.assert_serves();
}

#[test]
fn malformed_messages_close_only_their_session() {
    let sidecar = Sidecar::start();
    let kv = Kv::new();
    let mut neighbour = sidecar.scheduler(1);
    let _rank = sidecar.rank(&kv, 0, 1, Copier::Engine);
    neighbour.open_log(0, &keys(2));
    let message = Message::new;
    let bad: [[u64; 8]; 9] = [
        [0; 8],
        [u64::MAX; 8],
        Message { log: layout::LOGS as u32, ..message(Kind::Open) }.encode_slot(),
        Message { count: 0, ..message(Kind::Append) }.encode_slot(),
        Message { count: 385, ..message(Kind::Append) }.encode_slot(),
        Message { count: 1, data: [layout::CHUNKS as u32; 6], ..message(Kind::Append) }.encode_slot(),
        Message { from: u32::MAX, count: u32::MAX, ..message(Kind::Query) }.encode_slot(),
        Message { count: layout::BLOCK_IDS as u32 + 1, ..message(Kind::Save) }.encode_slot(),
        message(Kind::Join).encode_slot(),
    ];
    // The schedulers have other runs: a run has one scheduler.
    let other = |number| Session::scheduler(sidecar.socket(), "engine", 1, [number; 16]);
    for (number, slot) in (100..).zip(bad) {
        let mut session = other(number);
        session.post_raw(slot);
        session.closed();
    }
    let liar = other(200);
    liar.lie_about_tail();
    liar.closed();
    let mut worker = sidecar.rank(&kv, 0, 1, Copier::Engine);
    worker.post(Message { flags: 9, ..message(Kind::Loaded) });
    worker.closed();
    assert_eq!(neighbour.query(0, 1, 2).op, 1, "the neighbour is still served");
}

#[test]
fn a_silent_client_is_dropped_and_holds_nobody_up() {
    let sidecar = Sidecar::start();
    let silent = transport::connect_socket(sidecar.socket(), Duration::from_secs(30)).unwrap();
    sidecar.assert_serves();
    let (record, _) = transport::receive_record(&silent).unwrap();
    let Ok(Reply::Refused { reason, .. }) = handshake::decode_reply(&record) else { panic!("{record:?}") };
    assert!(reason.contains("hello"), "{reason}");
    assert!(transport::receive_record(&silent).unwrap().0.is_empty(), "and hung up");
}

#[test]
fn the_heartbeat_moves_while_nothing_happens() {
    let sidecar = Sidecar::start();
    let session = sidecar.scheduler(1);
    let first = watch("a first beat", || Some(session.heartbeat()).filter(|beat| *beat != 0));
    watch("a later beat", || (session.heartbeat() > first + 100).then_some(()));
}

#[test]
fn a_memory_that_shrinks_fails_the_save_and_nothing_else() {
    let sidecar = Sidecar::start();
    let kv = Kv::new();
    let rank = sidecar.rank(&kv, 0, 1, Copier::Engine);
    let mut scheduler = sidecar.scheduler(1);
    scheduler.open_log(0, &keys(2));
    scheduler.query_ready(0, 1, 2);
    rustix::fs::ftruncate(&kv.fds[0], 0).unwrap();
    scheduler.with_blocks(save(1000, 0, 1), &[1, 2]);
    rank.fences(1, 1);
    assert_eq!(scheduler.saved().dropped, 2);
    assert_eq!(scheduler.query(0, 1001, 2).value, 0);
}

#[test]
fn an_engine_whose_memory_holds_other_bytes_than_are_kept_is_in_doubt_and_barred_by_its_ninth_chain() {
    let sidecar = Sidecar::start();
    let kv = Kv::new();
    (1..4).for_each(|block| kv.fill(block, block.into()));
    let rank = sidecar.rank(&kv, 0, 1, Copier::Sidecar);
    let mut scheduler = sidecar.scheduler(1);
    for (log, step) in (0..9).zip(1..) {
        rank.fences(step, step);
        scheduler.open_log(log, &keys(27)[3 * log as usize..][..3]);
        scheduler.with_blocks(save_log(step, log, step), &[1, 2, 3]);
        assert_eq!(scheduler.saved().committed, 3);
    }
    let check = |op, log| Message { flags: SAVE_CHECKED, ..save_log(op, log, 9).into() };
    scheduler.with_blocks(check(13, 0), &[1, 2, 3]);
    let saved = scheduler.saved();
    assert_eq!((saved.present, saved.checked, saved.differing, saved.difference), (3, 3, 0, 0));
    assert_eq!(scheduler.query(0, 14, 3).value, 3);
    kv.fill(3, 77);
    scheduler.with_blocks(check(15, 0), &[1, 2, 3]);
    let saved = scheduler.saved();
    assert_eq!((saved.present, saved.checked, saved.differing), (3, 3, 1));
    assert!(saved.difference > saved.limit, "{saved:?}");
    let outcome = scheduler.query(0, 16, 3);
    assert_eq!((outcome.status, outcome.value), (Status::Ok, 0), "all blocks of that step are gone");
    scheduler.with_blocks(save_log(17, 0, 9), &[1, 2, 3]);
    assert_eq!(scheduler.saved().dropped, 3, "in doubt");
    // All chains belong to one saver, and eight of them go within an hour.
    for log in 1..9 {
        assert_eq!(scheduler.query(log, 20 + 2 * u64::from(log), 3).status, Status::Ok);
        scheduler.with_blocks(check(21 + 2 * u64::from(log), log), &[1, 2, 3]);
        assert_eq!(scheduler.saved().differing, 1);
    }
    assert_eq!(scheduler.query(8, 50, 3).status, Status::Barred);
}

#[test]
fn an_engine_of_the_release_before_loads_and_is_told_why_nothing_is_kept() {
    let sidecar = Sidecar::start();
    let kv = Kv::new();
    let rank = sidecar.rank(&kv, 0, 1, Copier::Engine);
    let mut scheduler = sidecar.scheduler(1);
    scheduler.open_log(0, &keys(2));
    scheduler.query_ready(0, 1, 2);
    rank.fences(1, 1);
    scheduler.with_blocks(save(2, 0, 1), &[1, 2]);
    assert_eq!(scheduler.saved().committed, 2);

    let old = |hello| handshake::Hello { version: 2, oldest: Some(2), release: "0.2.0".into(), ..hello };
    let run = [8; 16];
    let rank =
        Session::rank(sidecar.socket(), &old(hello("old", 1, kv.worker(0, 1, Copier::Engine))), &kv, run);
    let mut scheduler = Session::open(sidecar.socket(), &old(hello("old", 1, Role::Scheduler { run })), &[]);
    for session in [&rank, &scheduler] {
        let note = session.welcome.note.as_deref().expect("a note for the engine's log");
        assert!(note.starts_with("engine old runs release 0.2.0"), "{note}");
        assert!(
            note.ends_with("Install release 0.3.0 or later of Pillion's wheel in the engine's image"),
            "{note}"
        );
        assert_eq!(session.welcome.version, 2);
    }
    scheduler.open_log(0, &keys(4));
    assert_eq!(scheduler.query_ready(0, 1, 4).value, 2, "it finds the blocks of other engines");
    rank.fences(1, 1);
    scheduler.unaccepted(save(2, 0, 1), &[1, 2, 3, 4]);
    let saved = scheduler.saved();
    assert_eq!((saved.present, saved.dropped, saved.unaccepted), (2, 2, 2));
    scheduler.post(SchedulerRequest::Accept { step: 1 });
    scheduler.closed();
}
