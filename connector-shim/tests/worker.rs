//! A worker's session against a peer: fences, loads by either side, and the rescue.

mod peer;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use connector_shim::error::ShimError;
use connector_shim::plan::Plan;
use connector_shim::worker::{Ended, Options, Worker};
use peer::{Peer, Served, eventually};
use rustix::fs::{MemfdFlags, OFlags};
use shm_protocol::handshake::{self, BlockRegion, Copier};
use shm_protocol::layout::header;
use shm_protocol::message::{Kind, LOAD_BY_ENGINE, LOAD_SYNC, Status};
use shm_protocol::pool::SlotRef;

const BLOCKS: u32 = 8;
const LAYER_BYTES: u64 = 300;
const BLOCK_BYTES: u64 = 2 * LAYER_BYTES;
const UNTOUCHED: u8 = 0xee;
const EPOCH: u64 = 9;

/// KV memory of two layers in one descriptor.
struct Kv(OwnedFd);

impl Kv {
    fn new() -> Self {
        let fd = rustix::fs::memfd_create("test-kv", MemfdFlags::CLOEXEC).unwrap();
        let bytes = vec![UNTOUCHED; (BLOCK_BYTES * u64::from(BLOCKS)) as usize];
        assert_eq!(rustix::io::pwrite(&fd, &bytes, 0), Ok(bytes.len()));
        Self(fd)
    }

    fn block(&self, block: u32) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        for (layer, half) in bytes.chunks_exact_mut(LAYER_BYTES as usize).enumerate() {
            let layer_at = layer as u64 * LAYER_BYTES * u64::from(BLOCKS);
            assert_eq!(
                rustix::io::pread(&self.0, &mut *half, layer_at + u64::from(block) * LAYER_BYTES),
                Ok(half.len())
            );
        }
        bytes
    }

    fn is_untouched(&self, block: u32) -> bool {
        self.block(block).iter().all(|byte| *byte == UNTOUCHED)
    }
}

fn options(peer: &Peer, kv: &Kv, copy: Copier) -> Options {
    let layer = |index: u64| BlockRegion {
        fd: 0,
        offset: index * LAYER_BYTES * u64::from(BLOCKS),
        stride: LAYER_BYTES,
        bytes: LAYER_BYTES,
    };
    let worker = handshake::Worker {
        rank: 0,
        shard: 0,
        shards: 1,
        blocks: BLOCKS,
        regions: vec![layer(0), layer(1)],
        copy,
        facts: BTreeMap::from([("model".into(), "m".into())]),
    };
    let descriptors = vec![kv.0.try_clone().unwrap()];
    Options { socket: peer.socket(), engine: "engine".into(), world_size: 1, worker, descriptors }
}

fn connected(peer: &Peer, kv: &Kv, copy: Copier) -> (Worker, Served) {
    let served = peer.serve(BLOCK_BYTES);
    let worker = Worker::new(options(peer, kv, copy)).unwrap();
    assert!(worker.connected(), "{:?}", worker.take_notices());
    (worker, served.join().unwrap())
}

fn content(seed: u8) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn plan(op: u64, flags: u8, blocks: &[(u32, SlotRef)]) -> Plan {
    Plan { op, epoch: EPOCH, flags, blocks: blocks.to_vec() }
}

fn loaded(served: &mut Served) -> Vec<(u64, u8)> {
    served.drain_kind(Kind::Loaded).iter().map(|message| (message.op, message.flags)).collect()
}

#[test]
fn the_handshake_hands_over_what_the_copier_needs() {
    for (copy, mode) in [(Copier::Engine, OFlags::RDONLY), (Copier::Sidecar, OFlags::RDWR)] {
        let (peer, kv) = (Peer::new(EPOCH), Kv::new());
        let (worker, served) = connected(&peer, &kv, copy);
        let flags = rustix::fs::fcntl_getfl(&served.descriptors[0]).unwrap();
        assert_eq!(flags & OFlags::RWMODE, mode, "{copy:?}");
        assert_eq!(worker.namespace(), "00112233445566778899aabbccddeeff");
        assert!(matches!(served.hello.role, handshake::Role::Worker(_)));
    }
}

#[test]
fn fences_follow_the_steps_and_a_run_is_joined_once() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, mut served) = connected(&peer, &kv, Copier::Engine);
    for step in 5..8 {
        worker.join([3; 16]);
        worker.start(step);
        assert_eq!(
            (served.word(header::FENCE_START), served.word(header::FENCE_DONE)),
            (step, if step == 5 { 0 } else { step - 1 })
        );
        worker.done(step, true);
    }
    let joins = served.drain_kind(Kind::Join);
    assert_eq!(joins.iter().map(|join| join.bytes16()).collect::<Vec<_>>(), [[3; 16]]);
    worker.join([4; 16]);
    assert_eq!(served.drain_kind(Kind::Join).len(), 1);
}

#[test]
fn the_engine_loads_from_the_pool() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, mut served) = connected(&peer, &kv, Copier::Engine);
    let slots = [served.pool.commit(0, 11, &content(1)), served.pool.commit(5, 12, &content(2))];
    let both = plan(21, LOAD_SYNC | LOAD_BY_ENGINE, &[(3, slots[0]), (6, slots[1])]);
    assert!(worker.load_now(both).is_empty());
    assert_eq!((kv.block(3), kv.block(6)), (content(1), content(2)));
    assert!((0..BLOCKS).filter(|block| ![3, 6].contains(block)).all(|block| kv.is_untouched(block)));
    assert_eq!(loaded(&mut served), [(21, Status::Ok as u8)]);
    assert_eq!(worker.stats()["bytes_loaded"], 2 * BLOCK_BYTES);
}

#[test]
fn a_rank_loads_its_own_part_of_a_slot() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let served = peer.serve(2 * BLOCK_BYTES);
    let mut second = options(&peer, &kv, Copier::Engine);
    second.world_size = 2;
    (second.worker.rank, second.worker.shard, second.worker.shards) = (1, 1, 2);
    let mut worker = Worker::new(second).unwrap();
    let served = served.join().unwrap();
    let both = [content(1), content(2)].concat();
    let slot = served.pool.commit(0, 11, &both);
    assert!(worker.load_now(plan(21, LOAD_SYNC | LOAD_BY_ENGINE, &[(3, slot)])).is_empty());
    assert_eq!(kv.block(3), content(2));
}

#[test]
fn a_slot_of_another_filling_is_a_failed_block() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, mut served) = connected(&peer, &kv, Copier::Engine);
    let good = served.pool.commit(0, 11, &content(1));
    let stale = SlotRef { generation: 10, ..good };
    let empty = SlotRef { offset: served.pool.commit(2, 5, &content(9)).offset + 1024, generation: 0 };
    let wild = SlotRef { offset: u64::MAX, generation: 11 };
    let blocks = [(0, stale), (1, good), (2, empty), (3, wild), (BLOCKS, good)];
    assert_eq!(worker.load_now(plan(1, LOAD_BY_ENGINE, &blocks)), [0, 2, 3, BLOCKS]);
    assert_eq!(kv.block(1), content(1));
    assert!(kv.is_untouched(0) && kv.is_untouched(2) && kv.is_untouched(3));
    assert_eq!(loaded(&mut served), [(1, Status::Failed as u8)]);
}

#[test]
fn another_life_of_the_sidecar_is_never_read() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, served) = connected(&peer, &kv, Copier::Engine);
    let slot = served.pool.commit(0, 11, &content(1));
    let other = Plan { epoch: EPOCH + 1, ..plan(1, LOAD_BY_ENGINE, &[(4, slot)]) };
    assert_eq!(worker.load_now(other), [4], "same offset and generation, other pool");
    assert!(kv.is_untouched(4));
}

#[test]
fn an_asynchronous_load_ends_exactly_once() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, mut served) = connected(&peer, &kv, Copier::Engine);
    let slot = served.pool.commit(0, 11, &content(1));
    worker.load_later(plan(1, LOAD_BY_ENGINE, &[(2, slot)]));
    worker.load_later(plan(2, LOAD_BY_ENGINE, &[(3, SlotRef { generation: 10, ..slot })]));
    let mut ended = Vec::new();
    eventually("end of both", || {
        ended.extend(worker.finished());
        ended.len() == 2
    });
    assert_eq!(ended, [Ended { op: 1, failed: vec![] }, Ended { op: 2, failed: vec![3] }]);
    assert!(worker.finished().is_empty());
    assert_eq!(kv.block(2), content(1));
    assert_eq!(loaded(&mut served), [(1, Status::Ok as u8), (2, Status::Failed as u8)]);
}

#[test]
fn the_sidecar_loads_and_the_engine_only_waits() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, mut served) = connected(&peer, &kv, Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    served.answer(1, Status::Ok, 1);
    assert!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])).is_empty());
    worker.load_later(plan(2, 0, &[(3, slot)]));
    assert!(worker.finished().is_empty(), "no word yet");
    served.answer(2, Status::Ok, 1);
    assert_eq!(worker.finished(), [Ended { op: 2, failed: vec![] }]);
    assert!(kv.is_untouched(2) && kv.is_untouched(3), "the copies were the peer's to make");
    assert!(loaded(&mut served).is_empty());
    assert_eq!((served.word(header::FENCE_GATE), worker.stats()["rescues"]), (0, 0));
}

#[test]
fn what_the_sidecar_failed_is_rescued() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, mut served) = connected(&peer, &kv, Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    served.answer(1, Status::Failed, 0);
    assert!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])).is_empty());
    worker.load_later(plan(7, 0, &[(3, slot), (4, slot)]));
    served.answer(7, Status::Ok, 1);
    let mut ended = Vec::new();
    eventually("end", || {
        ended.extend(worker.finished());
        !ended.is_empty()
    });
    assert_eq!(ended, [Ended { op: 7, failed: vec![] }]);
    assert!([2, 3, 4].iter().all(|block| kv.block(*block) == content(1)));
    let reported = [(1, Status::Ok as u8), (7, Status::Ok as u8)];
    assert_eq!(loaded(&mut served), reported, "the sidecar keeps their slots until then");
    assert_eq!((served.word(header::FENCE_GATE), worker.stats()["rescues"]), (7, 2));
}

#[test]
fn a_silent_sidecar_is_rescued_from_behind_a_closed_gate() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, mut served) = connected(&peer, &kv, Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    assert!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])).is_empty());
    assert_eq!(kv.block(2), content(1));
    assert_eq!(served.word(header::FENCE_GATE), 1);
    assert_eq!(loaded(&mut served), [(1, Status::Ok as u8)], "this rank's part has ended");
}

#[test]
fn a_rescue_waits_for_the_block_that_the_sidecar_is_writing() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, mut served) = connected(&peer, &kv, Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    served.store(header::FENCE_COPYING, 1);
    served.answer(1, Status::Failed, 0);
    worker.load_later(plan(1, 0, &[(2, slot)]));
    assert!(worker.finished().is_empty());
    eventually("closed gate", || served.word(header::FENCE_GATE) == 1);
    assert!(kv.is_untouched(2) && worker.finished().is_empty(), "a block may still be written");
    served.store(header::FENCE_COPYING, 0);
    let mut ended = Vec::new();
    eventually("end", || {
        ended.extend(worker.finished());
        !ended.is_empty()
    });
    assert_eq!(ended, [Ended { op: 1, failed: vec![] }]);
    assert_eq!(kv.block(2), content(1));
    assert_eq!(loaded(&mut served), [(1, Status::Ok as u8)]);
}

#[test]
fn a_promise_outlives_the_sidecar() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, served) = connected(&peer, &kv, Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    worker.load_later(plan(1, 0, &[(2, slot)]));
    drop(served);
    let mut ended = Vec::new();
    eventually("rescue", || {
        ended.extend(worker.finished());
        !ended.is_empty()
    });
    assert_eq!(ended, [Ended { op: 1, failed: vec![] }]);
    assert_eq!(kv.block(2), content(1));
    assert!(worker.load_now(plan(2, LOAD_SYNC, &[(3, slot)])).is_empty(), "the mapping is still there");
    assert_eq!(kv.block(3), content(1));
    eventually("hang-up", || {
        worker.start(1);
        !worker.connected()
    });
}

#[test]
fn a_new_sidecar_is_joined_while_the_old_pool_serves_its_plans() {
    let (mut peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (mut worker, served) = connected(&peer, &kv, Copier::Engine);
    worker.join([3; 16]);
    let old = served.pool.commit(0, 11, &content(1));
    drop(served);
    peer.epoch = EPOCH + 1;
    let again = peer.serve(BLOCK_BYTES);
    eventually("reconnect", || {
        worker.start(4);
        worker.generation() == 2 && worker.connected()
    });
    let mut served = again.join().unwrap();
    assert_eq!(served.drain_kind(Kind::Join).len(), 1);
    assert_eq!(served.word(header::FENCE_START), 4);
    served.pool.commit(0, 11, &content(2));
    assert!(worker.load_now(plan(1, LOAD_BY_ENGINE, &[(2, old)])).is_empty());
    assert_eq!(kv.block(2), content(1), "from the pool that the plan was made for");
    assert!(loaded(&mut served).is_empty(), "the new sidecar knows nothing of it");
}

#[test]
fn a_refusal_is_an_error_with_its_reason() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let refused = peer.refuse("ranks disagree: set PYTHONHASHSEED on all");
    let error = Worker::new(options(&peer, &kv, Copier::Engine)).unwrap_err();
    assert!(matches!(&error, ShimError::Refused(reason) if reason.contains("PYTHONHASHSEED")), "{error}");
    refused.join().unwrap();
}

#[test]
fn impossible_memory_is_an_error_and_an_absent_sidecar_is_not() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let mut wrong = options(&peer, &kv, Copier::Engine);
    wrong.worker.regions[1].fd = 1;
    assert!(matches!(Worker::new(wrong), Err(ShimError::Argument(_))));
    let mut short = options(&peer, &kv, Copier::Engine);
    short.worker.blocks = BLOCKS + 1;
    assert!(matches!(Worker::new(short), Err(ShimError::Memory(_))));
    let mut worker = Worker::new(options(&peer, &kv, Copier::Engine)).unwrap();
    assert!(!worker.connected() && worker.take_notices()[0].contains("pillion serve"));
    worker.start(1);
    worker.done(1, true);
    assert_eq!(worker.load_now(plan(1, LOAD_BY_ENGINE, &[(0, SlotRef { offset: 0, generation: 1 })])), [0]);
}
