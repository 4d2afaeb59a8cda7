//! The thread for loads, with host memory in a GPU's place and a flag in the place of its stream.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use copy_engine::HostMemory;
use shm_protocol::gate;
use shm_protocol::handshake::{Copier, Hello, Role};
use shm_protocol::layout::{header, load_word, load_word_value};
use shm_protocol::message::{Kind, LOAD_SYNC, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::region::Access;

use super::*;
use crate::connection::SidecarAddress;
use crate::core::worker::patience::CopyPatience;
use crate::peer::rank::{BLOCK_BYTES, EPOCH, Kv, content, options, plan};
use crate::peer::{Peer, Served, eventually, session};
use crate::worker::WorkerSetup;
use crate::worker::link::RankConnection;
use crate::worker::memory::RegionMemory;

const CUTS: usize = 3;
/// Longer than a test waits: no load of these is taken back for its time.
const LONG: Duration = Duration::from_secs(60);
/// Bytes with a copy time of as long.
const MANY: u64 = LONG.as_nanos() as u64;

#[derive(Clone, Debug, Default)]
struct Flag(Arc<AtomicBool>);

impl StreamMark for Flag {
    fn passed(&self) -> Result<bool, CudaError> {
        Ok(self.0.load(Ordering::Acquire))
    }
}

/// A rank, its thread and its sidecar.
struct Rank {
    kv: Kv,
    served: Option<Served>,
    link: Arc<Link>,
    copies: Arc<RankCopies>,
    orders: Sender<CopierOrder>,
    /// Whether the stream has reached the loads.
    reached: Flag,
    _peer: Peer,
}

impl Rank {
    fn new() -> Self {
        let (peer, kv) = (Peer::new(EPOCH), Kv::new());
        let WorkerSetup { socket, engine, world_size, worker, memory, .. } =
            options(&peer, &kv, Copier::Sidecar);
        let RegionMemory::Host(descriptors) = memory else { unreachable!("a rank of the tests") };
        let sent = descriptors.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let memory = HostMemory::new(descriptors, &worker.regions, worker.blocks, Access::ReadWrite).unwrap();
        let hello = Hello::new(engine, world_size, Role::Worker(worker));
        let address = SidecarAddress::new(socket, &hello, sent).unwrap();
        let (connection, served) = session(|| {
            let served = peer.serve(BLOCK_BYTES);
            let connection = address.connect_sidecar().map_err(|error| format!("{error:?}"))?;
            Ok((Arc::new(connection), served.join().unwrap()))
        });
        let part = SlotPart { offset: 0, slot_bytes: BLOCK_BYTES };
        let cuts = (1..=CUTS as u64).map(|cut| cut * BLOCK_BYTES / CUTS as u64).collect();
        let copies = RankCopies::new(EngineMemory::Host(memory), None, cuts, part, Arc::default());
        let copies = Arc::new(copies);
        let (orders, _) = copies.spawn().unwrap();
        let link = Arc::new(Link::new(RankConnection::new(connection, None).unwrap()));
        let served = Some(served);
        Self { kv, served, link, copies, orders, reached: Flag::default(), _peer: peer }
    }

    /// The same beside a pool with one block.
    fn with_slot() -> (Self, SlotRef) {
        let mut rank = Self::new();
        let slot = rank.served().pool.commit(0, 11, &content(1));
        (rank, slot)
    }

    fn served(&mut self) -> &mut Served {
        self.served.as_mut().expect("it has not left")
    }

    fn ends(&self) {
        eventually("end", || self.copies.is_unwatched());
    }

    fn reach(&self) {
        self.reached.0.store(true, Ordering::Release);
    }

    fn follow(&self, op: u64, blocks: &[(u32, SlotRef)], sync: bool) {
        self.give(op, blocks, sync, LoadWatch::promised(CopyPatience::new(LONG, MANY)));
    }

    fn follow_own(&self, op: u64, blocks: &[(u32, SlotRef)]) {
        self.give(op, blocks, false, LoadWatch::ours());
    }

    fn give(&self, op: u64, blocks: &[(u32, SlotRef)], sync: bool, watch: LoadWatch) {
        let plan = plan(op, if sync { LOAD_SYNC } else { 0 }, blocks);
        let (link, pool) = (Some(Arc::clone(&self.link)), self.link.connection.pool.clone());
        let job = Job { plan, pool, link, rescue: false, refused: false };
        self.copies.count_watched(&job, sync);
        let reached = Box::new(self.reached.clone());
        let load = WatchedLoad { job, reached, sync, watch, fetch: None };
        self.orders.send(CopierOrder::Watch(Box::new(load))).unwrap();
    }

    fn word(&self, op: u64) -> u64 {
        self.link.connection.region().word64(load_word(op)).load(Ordering::Acquire)
    }

    fn is_delivered(&self, op: u64) -> bool {
        self.word(op) == load_word_value(op, CUTS)
    }

    fn loaded(&mut self) -> Vec<(u64, u8)> {
        let messages = self.served().drain_kind(Kind::Loaded);
        messages.iter().map(|message| (message.op, message.flags)).collect()
    }

    fn rescues(&self) -> u64 {
        self.copies.counters.rescues.load(Ordering::Relaxed)
    }
}

#[test]
fn the_sidecars_word_is_taken_for_a_load() {
    let (mut rank, slot) = Rank::with_slot();
    rank.follow(5, &[(2, slot)], true);
    rank.served().store(load_word(5), load_word_value(5, CUTS - 1));
    rank.reach();
    std::thread::sleep(10 * LOOK);
    assert!(!rank.copies.is_unwatched(), "a cut is missing");
    rank.served().store(load_word(5), load_word_value(5, CUTS));
    rank.ends();
    rank.follow(6, &[(2, slot)], true);
    rank.served().answer(6, Status::Ok, 1);
    rank.ends();
    assert!(rank.is_delivered(6), "what it said in one word, the stream sees in the other");
    rank.follow(7, &[(2, slot)], false);
    rank.served().answer(7, Status::Ok, 1);
    rank.ends();
    assert_eq!(rank.copies.take_ended(), [EndedLoad { op: 7, failed: vec![] }]);
    assert!(rank.kv.is_untouched(2), "the copies were the sidecar's to make");
    assert!(rank.loaded().is_empty() && rank.rescues() == 0 && rank.served().gate() == 0);
}

#[test]
fn a_load_is_taken_back_awaited_copied_and_only_then_released() {
    let (mut rank, slot) = Rank::with_slot();
    rank.served().store(header::FENCE_STARTED, 4);
    rank.served().store(header::FENCE_ENDED, 3);
    rank.reach();
    rank.follow(4, &[(1, slot)], true);
    rank.follow(5, &[(2, slot)], true);
    rank.served().answer(5, Status::Failed, 0);
    eventually("closed gate", || rank.served().gate() == 5);
    std::thread::sleep(3 * shm_protocol::gate::DEVICE_LATENCY);
    assert!(rank.kv.is_untouched(2) && rank.word(5) == 0, "a batch may still be written");
    rank.served().store(header::FENCE_ENDED, 4);
    eventually("delivery", || rank.is_delivered(5));
    assert_eq!(rank.kv.block(2), content(1));
    assert!(gate::is_open(rank.link.connection.region(), 4), "the one before it is left to the sidecar");
    rank.served().store(load_word(4), load_word_value(4, CUTS));
    rank.ends();
    assert!(rank.is_delivered(5) && rank.kv.is_untouched(1));
    assert_eq!((rank.loaded(), rank.rescues()), (vec![(5, Status::Ok as u8)], 1));
}

#[test]
fn nothing_is_copied_into_blocks_that_the_engine_still_uses() {
    let (mut rank, slot) = Rank::with_slot();
    rank.follow(5, &[(2, slot)], true);
    let stale = SlotRef { generation: 10, ..slot };
    rank.follow(6, &[(3, slot), (4, stale)], false);
    drop(rank.served.take());
    eventually("both taken back", || rank.rescues() == 2);
    std::thread::sleep(3 * shm_protocol::gate::DEVICE_LATENCY);
    assert!(rank.kv.is_untouched(2) && rank.word(5) == 0);
    rank.reach();
    rank.ends();
    assert!(rank.is_delivered(5));
    assert_eq!((rank.kv.block(2), rank.kv.block(3)), (content(1), content(1)));
    assert_eq!(rank.copies.take_ended(), [EndedLoad { op: 6, failed: vec![4] }]);
    assert_eq!(rank.word(6), 0, "nobody waits for it on a stream");
}

#[test]
fn a_load_is_seen_through_after_the_session() {
    let (rank, slot) = Rank::with_slot();
    rank.follow(5, &[(2, slot)], true);
    let Rank { kv, served, link, orders, reached, .. } = rank;
    drop((orders, served));
    reached.0.store(true, Ordering::Release);
    eventually("delivery", || link.delivered(5) == CUTS as u64);
    assert_eq!(kv.block(2), content(1));
}

#[test]
fn a_load_that_is_this_process_own_waits_for_its_blocks_and_for_nothing_else() {
    let mut rank = Rank::new();
    let slots = [1, 2].map(|seed| rank.served().pool.commit(seed, 11, &content(seed.into())));
    rank.follow_own(5, &[(2, slots[0]), (3, slots[1])]);
    rank.follow_own(6, &[(4, slots[0]), (6, SlotRef { generation: 10, ..slots[1] })]);
    std::thread::sleep(10 * LOOK);
    assert!(rank.kv.is_untouched(2), "the engine still uses its blocks");
    rank.reach();
    rank.ends();
    assert_eq!((rank.kv.block(2), rank.kv.block(3), rank.kv.block(4)), (content(1), content(2), content(1)));
    assert_eq!(
        rank.copies.take_ended(),
        [EndedLoad { op: 5, failed: vec![] }, EndedLoad { op: 6, failed: vec![6] }]
    );
    assert_eq!(rank.loaded(), [(5, Status::Ok as u8), (6, Status::Failed as u8)]);
    assert_eq!((rank.rescues(), rank.served().gate()), (0, 0));
}

#[test]
fn the_stream_is_told_of_each_cut_while_all_slots_are_whole() {
    let mut rank = Rank::new();
    let slots = [1, 2].map(|seed| rank.served().pool.commit(seed, 11, &content(seed.into())));
    let plan = plan(5, LOAD_SYNC, &[(2, slots[0]), (3, slots[1])]);
    let pool = rank.link.connection.pool.clone();
    let job = Job { plan, pool, link: None, rescue: false, refused: false };
    for refilled in [false, true] {
        let (mut fetch, mut told, mut steps) = (rank.copies.begin_fetch(&job), Vec::new(), 0);
        while rank.copies.step_fetch(&mut fetch, &job, |cuts| told.push(cuts)) != FetchStep::Done {
            steps += 1;
            if refilled && steps == 3 {
                rank.served().pool.refill(2, 12, &content(7));
            }
        }
        assert_eq!(told, if refilled { vec![1] } else { vec![1, 2] }, "the last one is the result's");
        assert_eq!(fetch.failed_blocks(), if refilled { vec![3] } else { vec![] });
    }
}

/// Runs one of the tests below in a process of its own, which must end itself.
fn dies(test: &str, words: &str) {
    let test = format!("worker::copies::tests::{test}");
    let mut run = Command::new(std::env::current_exe().unwrap());
    let output = run.args(["--ignored", "--exact", &test, "--nocapture"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(rustix::process::Signal::ABORT.as_raw()), "{said}");
    assert!(said.contains("FATAL") && said.contains(words), "{said}");
}

#[test]
fn a_promised_block_that_is_nowhere_ends_the_process() {
    dies("loses_a_block", "1 of 2 blocks");
}

#[test]
fn a_batch_that_neither_ends_nor_dies_ends_the_process() {
    dies("never_settles", "revoked");
}

#[test]
#[ignore = "ends its process; run by a test above"]
fn loses_a_block() {
    let (mut rank, slot) = Rank::with_slot();
    rank.reach();
    rank.follow(5, &[(2, slot), (3, SlotRef { generation: 10, ..slot })], true);
    rank.served().answer(5, Status::Failed, 0);
    eventually("the end", || rank.is_delivered(5));
}

#[test]
#[ignore = "ends its process; run by a test above"]
fn never_settles() {
    let (mut rank, slot) = Rank::with_slot();
    rank.served().store(header::FENCE_STARTED, 1);
    rank.reach();
    rank.follow(5, &[(2, slot)], false);
    rank.served().answer(5, Status::Failed, 0);
    std::thread::sleep(LONG);
}
