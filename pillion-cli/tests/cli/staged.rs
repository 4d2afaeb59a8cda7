//! Engines with memory out of the sidecar's reach: saves through the staging segment, loads by the engine.
//! The engine is the real shim over host memory, or for its faults a rank spoken by hand.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::client::in_process::InProcess;
use crate::client::{
    BLOCK_BYTES, BLOCKS, Kv, LAYERS, Session, hello, in_time, keys, now, pattern, save, watch,
};
use connector_shim::error::ShimError;
use connector_shim::scheduler::{self, LoadWait, SchedulerClient, SessionConfig};
use connector_shim::worker::{self, RegionMemory};
use rustix::fs::MemfdFlags;
use shm_protocol::handshake::{BlockRegion, Copier, Role, WorkerHello};
use shm_protocol::key::BlockHash;
use shm_protocol::layout::{STAGING_WORDS_BYTES, staging_word};
use shm_protocol::message::{Kind, Message, Saved, StageRequest, Status};
use shm_protocol::request::{Cancel, SchedulerRequest};
use shm_protocol::ring::RingMemory;
use shm_protocol::session::Ring;
use sidecar::config::ServeOptions;

const RUN: [u8; 16] = [7; 16];
/// Slots of a rank spoken by hand: fewer than the blocks it saves.
const SLOTS: u32 = 4;
/// A rank's time for an answer in these tests: less than the 2 s after which its saves are dropped.
const ANSWERED: Duration = Duration::from_millis(1500);

/// Both roles of a real engine of one rank.
struct Engine {
    worker: worker::RankClient,
    scheduler: SchedulerClient,
    kv: Kv,
}

impl Engine {
    fn start(sidecar: &InProcess) -> Self {
        let kv = Kv::new();
        let (socket, engine) = (&sidecar.socket, "engine");
        // An engine that waits for a core gives up its handshake after a second, and the sidecar may still
        // have its session at the next handshake.
        let answer = |error| assert!(matches!(error, ShimError::Refused(_)), "{error}");
        let mut worker = watch("a worker's handshake", || {
            let options = worker::WorkerSetup {
                socket: socket.clone(),
                engine: engine.to_owned(),
                world_size: 1,
                worker: kv.stated("tiny", 0, 1, Copier::Engine),
                memory: RegionMemory::Host(kv.fds.iter().map(|fd| fd.try_clone().unwrap()).collect()),
                staged: true,
                groups: None,
            };
            worker::RankClient::new(options).map_err(answer).ok().filter(|worker| worker.is_connected())
        });
        worker.join(RUN);
        let budget = Duration::from_secs(5);
        // As in a scheduler without knowledge of ranks that copy for themselves.
        let (by_engine, early) = (false, false);
        let scheduler = watch("a scheduler's handshake", || {
            let options = scheduler::SchedulerSetup {
                socket: socket.clone(),
                engine: engine.to_owned(),
                world_size: 1,
                run: RUN,
                config: SessionConfig {
                    budget,
                    by_engine,
                    early,
                    part_blocks: 0,
                    whole_blocks: 0,
                    last: false,
                    streams: false,
                    load_wait: LoadWait::default(),
                },
                miss_wait_ms: None,
                handover_wait_ms: None,
                promise_wait_ms: None,
                groups: None,
            };
            SchedulerClient::new(options).map_err(answer).ok().filter(|scheduler| scheduler.is_connected())
        });
        assert!(worker.is_connected() && scheduler.is_connected());
        Self { worker, scheduler, kv }
    }

    fn log(&mut self, keys: &[BlockHash]) -> i64 {
        let log = self.scheduler.open_log(None);
        let key =
            |index: u32, key: &mut BlockHash| key.set_bytes(&keys[index as usize].0).map_err(ShimError::from);
        assert_eq!(self.scheduler.append_keys(log, 0, keys.len() as u32, key).unwrap(), keys.len() as u32);
        log
    }

    fn save(&mut self, keys: &[BlockHash], blocks: Vec<u32>, step: u64) {
        let log = self.log(keys);
        watch("joined ranks", || (self.scheduler.query(log, 0, 1) == 0).then_some(()));
        assert!(self.scheduler.post_save(log, 0, blocks, step, false));
        self.worker.start_step(step, 0);
        self.worker.done(step, true, 0);
        self.scheduler.accept_step(step);
        watch("the end of the save", || {
            self.scheduler.end_step();
            (self.scheduler.saving() == 0).then_some(())
        });
    }
}

/// A rank spoken by hand.
struct Rank {
    session: Session,
    segment: OwnedFd,
}

impl Rank {
    fn open(sidecar: &InProcess, engine: &str, run: [u8; 16]) -> Self {
        let (session, segment) = Session::staged_rank(&sidecar.socket, engine, SLOTS, run);
        Self { session, segment }
    }

    fn put_tag(&self, stage: StageRequest, tag: u64) {
        let at = staging_word(stage.slot) as u64;
        assert_eq!(rustix::io::pwrite(&self.segment, &tag.to_le_bytes(), at), Ok(8));
    }

    /// Fills a slot with the bytes of `block` of an honest rank.
    fn fill(&self, stage: StageRequest) {
        assert!(stage.slot < SLOTS && stage.block < BLOCKS, "{stage:?}");
        self.put_tag(stage, stage.tag);
        let stride = BLOCK_BYTES.next_multiple_of(4096);
        let at = STAGING_WORDS_BYTES as u64 + u64::from(stage.slot) * stride;
        assert_eq!(
            rustix::io::pwrite(&self.segment, &content(stage.block.into()), at),
            Ok(BLOCK_BYTES as usize)
        );
    }

    fn answer(&mut self, stage: StageRequest, status: Status) {
        let answer =
            Message { op: stage.tag, from: stage.slot, flags: status as u8, ..Message::new(Kind::Staged) };
        self.session.post(answer);
    }

    /// Hands over so many blocks. Returns the end of their save if that comes before.
    fn serve(&mut self, scheduler: &mut Session, blocks: usize) -> Option<Saved> {
        for _ in 0..blocks {
            let asked = watch("a block asked for, or the end", || {
                let stage = self.session.next_completion().map(|slot| Ok(StageRequest::decode_slot(&slot)));
                stage.or_else(|| scheduler.try_saved().map(Err))
            });
            let stage = match asked {
                Ok(stage) => stage,
                Err(saved) => return Some(saved),
            };
            self.fill(stage);
            self.answer(stage, Status::Ok);
        }
        None
    }

    /// Hands over all blocks of a save begun at `began` or later. Returns the save's end; `None` if the rank
    /// was too slow.
    fn serve_all(&mut self, began: Instant, scheduler: &mut Session, blocks: usize) -> Option<Saved> {
        let early = self.serve(scheduler, blocks);
        answered(began, early.unwrap_or_else(|| scheduler.saved()))
    }
}

/// A save begun at `began` or later; `None` if it was dropped and the rank may have been too slow.
fn answered(began: Instant, saved: Saved) -> Option<Saved> {
    (saved.dropped == 0 || began.elapsed() < ANSWERED).then_some(saved)
}

fn content(seed: u64) -> Vec<u8> {
    (0..LAYERS).flat_map(|layer| pattern(seed, layer)).collect()
}

/// A scheduler and a rank spoken by hand, before a save of `count` blocks from block 1 on.
fn saving(sidecar: &InProcess, engine: &str, run: [u8; 16], count: usize) -> (Session, Rank) {
    let rank = Rank::open(sidecar, engine, run);
    let mut scheduler = Session::scheduler(&sidecar.socket, engine, 1, run);
    scheduler.open_log(0, &keys(count));
    scheduler.query_ready(0, 1, 1);
    let blocks: Vec<u32> = (1..=count as u32).collect();
    scheduler.with_blocks(save(1000, 0, 5), &blocks);
    rank.session.fences(5, 5);
    rank.session.ring();
    (scheduler, rank)
}

#[test]
fn an_engine_saves_and_loads_every_byte_itself() {
    let sidecar = InProcess::start(ServeOptions::default());
    let (keys, blocks) = (keys(100), (1..=100).collect::<Vec<u32>>());
    let mut first = Engine::start(&sidecar);
    blocks.iter().for_each(|block| first.kv.fill(*block, u64::from(*block) * 3));
    first.save(&keys, blocks, 4);
    assert_eq!(first.scheduler.stats()["blocks_committed"], 100);
    let (mut worker, mut scheduler) = (first.worker, first.scheduler);
    worker.disconnect();
    scheduler.disconnect();
    let mut second = Engine::start(&sidecar);
    let log = second.log(&keys);
    watch("hits", || (second.scheduler.query(log, 0, 100) == 100).then_some(()));
    let targets: Vec<u32> = (0..100).map(|index| 127 - index).collect();
    let plan = second.scheduler.post_load(log, 0, &targets, 1, true).pop().unwrap();
    assert!(!plan.by_engine());
    second.worker.start_step(1, 0);
    assert!(second.worker.load_now(plan).is_empty());
    for (target, block) in targets.into_iter().zip(1..) {
        assert!(second.kv.holds(target, block * 3), "block {target}");
    }
    assert_eq!(second.worker.stats()["blocks_by_engine"], 100);
    // Its part and its lease have ended: the same blocks are loaded again, later.
    watch("hits", || (second.scheduler.query(log, 0, 2) == 2).then_some(()));
    let plan = second.scheduler.post_load(log, 0, &[1, 2], 2, false).pop().unwrap();
    let op = plan.op;
    second.worker.load_later(plan, 0).unwrap();
    let ended = watch("the load", || second.worker.finished().pop());
    assert_eq!((ended.op, ended.failed.len()), (op, 0));
    assert!(second.kv.holds(1, 3) && second.kv.holds(2, 6));
}

#[test]
fn few_slots_go_round() {
    in_time("70 blocks", slots_that_go_round);
}

fn slots_that_go_round() -> Option<()> {
    let sidecar = InProcess::start(ServeOptions::default());
    let began = now();
    let (mut scheduler, mut rank) = saving(&sidecar, "engine", RUN, 70);
    let saved = rank.serve_all(began, &mut scheduler, 70)?;
    assert_eq!((saved.op, saved.committed), (1000, 70));
    assert_eq!(scheduler.query(0, 1001, 70).value, 70);
    for index in 0..70_u32 {
        let slot = scheduler.memory.read_ref(index / 64, index as usize % 64);
        let bytes = scheduler.pool.words64(slot.offset as usize, BLOCK_BYTES as usize / 8);
        let bytes: Vec<u8> = bytes
            .iter()
            .flat_map(|word| word.load(std::sync::atomic::Ordering::Relaxed).to_le_bytes())
            .collect();
        assert_eq!(bytes, content(u64::from(index) + 1), "key {index}");
    }
    Some(())
}

#[test]
fn a_block_that_is_not_what_was_asked_for_is_not_kept() {
    in_time("three blocks", another_block);
}

fn another_block() -> Option<()> {
    let sidecar = InProcess::start(ServeOptions::default());
    let (mut scheduler, mut rank) = saving(&sidecar, "engine", RUN, 3);
    for turn in 0..3 {
        let stage = rank.session.stage();
        rank.fill(stage);
        if turn == 1 {
            // As if the slot was given to another request meanwhile.
            rank.put_tag(stage, stage.tag + 1);
        }
        rank.answer(stage, Status::Ok);
    }
    let saved = scheduler.saved();
    assert_eq!((saved.committed, saved.dropped), (0, 3));
    scheduler.with_blocks(save(1001, 0, 5), &[1, 2, 3]);
    for status in [Status::Ok, Status::Failed, Status::Ok] {
        let stage = rank.session.stage();
        rank.fill(stage);
        rank.answer(stage, status);
    }
    assert_eq!(scheduler.saved().dropped, 3, "the rank could not read one of them");
    let began = now();
    scheduler.with_blocks(save(1002, 0, 5), &[1, 2, 3]);
    assert_eq!(rank.serve_all(began, &mut scheduler, 3)?.committed, 3);
    Some(())
}

#[test]
fn a_block_that_is_reused_while_it_is_staged_is_not_kept() {
    in_time("three blocks", reused_block);
}

fn reused_block() -> Option<()> {
    let sidecar = InProcess::start(ServeOptions::default());
    let began = now();
    let (mut scheduler, mut rank) = saving(&sidecar, "engine", RUN, 3);
    let asked: Vec<StageRequest> = (0..3).map(|_| rank.session.stage()).collect();
    scheduler.post(SchedulerRequest::Cancel(Cancel { op: 1000, from: 1, count: 1 }));
    for stage in asked {
        rank.fill(stage);
        rank.answer(stage, Status::Ok);
    }
    let saved = answered(began, scheduler.saved())?;
    assert_eq!((saved.committed, saved.cancelled), (2, 1));
    assert_eq!(scheduler.query(0, 1001, 3).value, 1, "the second is missing");
    Some(())
}

#[test]
fn answers_that_nobody_asked_for_end_the_session_and_its_save() {
    type Lie = fn(&Rank, StageRequest) -> StageRequest;
    let lies: [(&str, Lie); 4] = [
        ("another tag", |_, stage| StageRequest { tag: stage.tag.wrapping_add(1 << 40), ..stage }),
        ("another slot", |_, stage| StageRequest { slot: (stage.slot + 1) % SLOTS, ..stage }),
        ("a slot there is not", |_, stage| StageRequest { slot: SLOTS, ..stage }),
        ("a cursor there is not", |rank, stage| {
            rank.session.memory.ring(Ring::Completion).store_head(1 << 30);
            stage
        }),
    ];
    for (name, lie) in lies {
        let sidecar = InProcess::start(ServeOptions::default());
        let (mut scheduler, mut rank) = saving(&sidecar, "engine", RUN, 20);
        let stage = rank.session.stage();
        let told = lie(&rank, stage);
        rank.fill(stage);
        rank.answer(told, Status::Ok);
        rank.session.closed_after(name);
        let saved = scheduler.saved();
        assert_eq!((saved.committed, saved.dropped), (0, 20), "{name}");
    }
}

#[test]
fn a_rank_that_is_gone_ends_its_saves_and_a_new_one_takes_its_place() {
    in_time("blocks of two ranks", rank_that_is_gone);
}

fn rank_that_is_gone() -> Option<()> {
    let sidecar = InProcess::start(ServeOptions::default());
    let began = now();
    let (mut scheduler, mut rank) = saving(&sidecar, "engine", RUN, 20);
    if let Some(early) = rank.serve(&mut scheduler, 5) {
        let late = answered(began, early)?;
        panic!("{late:?} before all blocks were asked for");
    }
    drop(rank);
    let saved = scheduler.saved();
    assert_eq!((saved.committed, saved.dropped), (0, 20));
    let mut again = Rank::open(&sidecar, "engine", RUN);
    again.session.fences(6, 6);
    scheduler.query_ready(0, 1001, 1);
    let began = now();
    scheduler.with_blocks(save(1002, 0, 6), &[1, 2]);
    assert_eq!(again.serve_all(began, &mut scheduler, 2)?.committed, 2);
    Some(())
}

#[test]
fn a_silent_rank_holds_up_nobody_and_its_saves_end() {
    in_time("blocks beside a silent rank", silent_rank);
}

fn silent_rank() -> Option<()> {
    let sidecar = InProcess::start(ServeOptions::default());
    let (mut scheduler, mut silent) = saving(&sidecar, "silent", [1; 16], 20);
    let first = silent.session.stage();
    let began = now();
    let (mut other, mut rank) = saving(&sidecar, "other", [2; 16], 20);
    assert_eq!(rank.serve_all(began, &mut other, 20)?.committed, 20);
    let saved = scheduler.saved();
    assert_eq!((saved.op, saved.dropped), (1000, 20));
    // The rank comes back: one slot is its own again.
    silent.fill(first);
    silent.answer(first, Status::Ok);
    let began = now();
    scheduler.with_blocks(save(1001, 0, 5), &[7]);
    let mut stage = silent.session.stage();
    while stage.block != 7 {
        // Requests of before, without a waiting save.
        stage = silent.session.stage();
    }
    silent.fill(stage);
    silent.answer(stage, Status::Ok);
    assert_eq!(answered(began, scheduler.saved())?.committed, 1);
    Some(())
}

#[test]
fn a_segment_that_is_too_small_or_shrinks_harms_nobody_else() {
    let sidecar = InProcess::start(ServeOptions::default());
    let worker = Kv::new().stated("tiny", 0, 1, Copier::Engine);
    let regions = vec![BlockRegion { fd: 0, offset: 4096, stride: 16_384, bytes: BLOCK_BYTES }];
    let role = Role::Worker(WorkerHello { regions, staging: Some(SLOTS), ..worker });
    let small = rustix::fs::memfd_create("staging", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&small, 4096).unwrap();
    let (_, reply, _) = crate::client::greet(&sidecar.socket, &hello("engine", 1, role), &[&small]);
    assert!(format!("{reply:?}").contains("smaller than its regions"), "{reply:?}");
    let (mut scheduler, mut rank) = saving(&sidecar, "engine", RUN, 3);
    rustix::fs::ftruncate(rank.segment.as_fd(), 100).unwrap();
    for _ in 0..3 {
        let stage = rank.session.stage();
        rank.answer(stage, Status::Ok);
    }
    assert_eq!(scheduler.saved().dropped, 3);
}
