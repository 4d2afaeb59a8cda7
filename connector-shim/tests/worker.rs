//! A worker's session against a peer: fences, loads by either side, and the rescue.

mod peer;

use connector_shim::core::plan::Plan;
use connector_shim::error::ShimError;
use connector_shim::worker::{Begun, EndedLoad, LOAD_DEADLINE, RankClient, RegionMemory, WorkerSetup};
use peer::rank::{
    BLOCK_BYTES, BLOCKS, EPOCH, Kv, connected, connected_with, content, ended, options, plan, refusal,
};
use peer::{Peer, eventually, session};
use rustix::fs::OFlags;
use shm_protocol::handshake::{self, Copier};
use shm_protocol::layout::{SUBMISSION_SLOTS, header};
use shm_protocol::message::{Kind, LOAD_ARRIVING, LOAD_BY_ENGINE, LOAD_SYNC, Status};
use shm_protocol::pool::SlotRef;

#[test]
fn the_handshake_hands_over_what_the_copier_needs() {
    for (copy, mode) in [(Copier::Engine, OFlags::RDONLY), (Copier::Sidecar, OFlags::RDWR)] {
        let (_peer, _kv, mut worker, served) = connected(copy);
        let flags = rustix::fs::fcntl_getfl(&served.descriptors[0]).unwrap();
        assert_eq!(flags & OFlags::RWMODE, mode, "{copy:?}");
        assert_eq!(worker.namespace(), Some(&(peer::namespace(), peer::facts())));
        assert!(matches!(served.hello.role, handshake::Role::Worker(_)));
    }
}

#[test]
fn fences_follow_the_steps_and_a_run_is_joined_once() {
    let (_peer, _kv, mut worker, mut served) = connected(Copier::Engine);
    for step in 5..8 {
        worker.join([3; 16]);
        worker.start_step(step, 0);
        assert_eq!(
            (served.word(header::FENCE_START), served.word(header::FENCE_DONE)),
            (step, if step == 5 { 0 } else { step - 1 })
        );
        worker.done(step, true, 0);
    }
    let joins = served.drain_kind(Kind::Join);
    assert_eq!(joins.iter().map(|join| join.bytes16()).collect::<Vec<_>>(), [[3; 16]]);
    worker.join([4; 16]);
    assert_eq!(served.drain_kind(Kind::Join).len(), 1);
}

#[test]
fn the_engine_loads_from_the_pool() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Engine);
    let slots = [served.pool.commit(0, 11, &content(1)), served.pool.commit(5, 12, &content(2))];
    let both = plan(21, LOAD_SYNC | LOAD_BY_ENGINE, &[(3, slots[0]), (6, slots[1])]);
    assert!(worker.load_now(both).is_empty());
    assert_eq!((kv.block(3), kv.block(6)), (content(1), content(2)));
    assert!((0..BLOCKS).filter(|block| ![3, 6].contains(block)).all(|block| kv.is_untouched(block)));
    assert_eq!(served.loaded(), [(21, Status::Ok as u8)]);
    assert_eq!(worker.stats()["bytes_loaded"], 2 * BLOCK_BYTES);
}

#[test]
fn a_rank_loads_its_own_part_of_a_slot() {
    let (_peer, kv, mut worker, served) = connected_with(Copier::Engine, |second| {
        second.world_size = 2;
        (second.worker.rank, second.worker.shard, second.worker.shards) = (1, 1, 2);
    });
    let both = [content(1), content(2)].concat();
    let slot = served.pool.commit(0, 11, &both);
    assert!(worker.load_now(plan(21, LOAD_SYNC | LOAD_BY_ENGINE, &[(3, slot)])).is_empty());
    assert_eq!(kv.block(3), content(2));
}

#[test]
fn a_slot_of_another_filling_is_a_failed_block() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Engine);
    let good = served.pool.commit(0, 11, &content(1));
    let stale = SlotRef { generation: 10, ..good };
    let empty = SlotRef { offset: served.pool.commit(2, 5, &content(9)).offset + 1024, generation: 0 };
    let wild = SlotRef { offset: u64::MAX, generation: 11 };
    let blocks = [(0, stale), (1, good), (2, empty), (3, wild), (BLOCKS, good)];
    assert_eq!(worker.load_now(plan(1, LOAD_BY_ENGINE, &blocks)), [0, 2, 3, BLOCKS]);
    assert_eq!(kv.block(1), content(1));
    assert!(kv.is_untouched(0) && kv.is_untouched(2) && kv.is_untouched(3));
    assert_eq!(served.loaded(), [(1, Status::Failed as u8)]);
}

#[test]
fn another_life_of_the_sidecar_is_never_read() {
    let (_peer, kv, mut worker, served) = connected(Copier::Engine);
    let slot = served.pool.commit(0, 11, &content(1));
    let other = Plan { epoch: EPOCH + 1, ..plan(1, LOAD_BY_ENGINE, &[(4, slot)]) };
    assert_eq!(worker.load_now(other), [4], "same offset and generation, other pool");
    assert!(kv.is_untouched(4));
}

#[test]
fn an_asynchronous_load_ends_exactly_once() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Engine);
    let slot = served.pool.commit(0, 11, &content(1));
    worker.load_later(plan(1, LOAD_BY_ENGINE, &[(2, slot)]), 0).unwrap();
    worker.load_later(plan(2, LOAD_BY_ENGINE, &[(3, SlotRef { generation: 10, ..slot })]), 0).unwrap();
    assert_eq!(
        ended(&mut worker, 2),
        [EndedLoad { op: 1, failed: vec![] }, EndedLoad { op: 2, failed: vec![3] }]
    );
    assert!(worker.finished().is_empty());
    assert_eq!(kv.block(2), content(1));
    assert_eq!(served.loaded(), [(1, Status::Ok as u8), (2, Status::Failed as u8)]);
}

#[test]
fn the_sidecar_loads_and_the_engine_only_waits() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    served.answer(1, Status::Ok, 1);
    assert!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])).is_empty());
    worker.load_later(plan(2, 0, &[(3, slot)]), 0).unwrap();
    assert!(worker.finished().is_empty(), "no word yet");
    served.answer(2, Status::Ok, 1);
    assert_eq!(worker.finished(), [EndedLoad { op: 2, failed: vec![] }]);
    assert!(kv.is_untouched(2) && kv.is_untouched(3), "the copies were the peer's to make");
    assert!(served.loaded().is_empty());
    assert_eq!((served.gate(), worker.stats()["rescues"]), (0, 0));
}

#[test]
fn what_the_sidecar_failed_is_rescued() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    served.answer(1, Status::Failed, 0);
    assert!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])).is_empty());
    worker.load_later(plan(7, 0, &[(3, slot), (4, slot)]), 0).unwrap();
    served.answer(7, Status::Ok, 1);
    assert_eq!(ended(&mut worker, 1), [EndedLoad { op: 7, failed: vec![] }]);
    assert!([2, 3, 4].iter().all(|block| kv.block(*block) == content(1)));
    let reported = [(1, Status::Ok as u8), (7, Status::Ok as u8)];
    assert_eq!(served.loaded(), reported, "the sidecar keeps their slots until then");
    assert_eq!((served.gate(), worker.stats()["rescues"]), (7, 2));
}

#[test]
fn a_silent_sidecar_is_rescued_from_behind_a_closed_gate() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    assert!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])).is_empty());
    assert_eq!(kv.block(2), content(1), "wrong bytes in a rescued block");
    assert_eq!(served.gate(), 1);
    assert_eq!(served.loaded(), [(1, Status::Ok as u8)], "this rank's part has ended");
}

#[test]
fn a_load_behind_others_that_move_is_left_to_the_sidecar() {
    let (_peer, _kv, mut worker, served) = connected(Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    worker.load_later(plan(1, 0, &[(2, slot)]), 0).unwrap();
    let turn = LOAD_DEADLINE / 10;
    for ended in 1..=15 {
        served.store(header::FENCE_ENDED, ended);
        assert!(worker.finished().is_empty());
        std::thread::sleep(turn);
    }
    served.answer(1, Status::Ok, 1);
    assert_eq!(worker.finished(), [EndedLoad { op: 1, failed: vec![] }]);
    assert_eq!((worker.stats()["rescues"], served.gate()), (0, 0));
}

#[test]
fn a_rescue_waits_for_the_block_that_the_sidecar_is_writing() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    served.store(header::FENCE_COPYING, 1);
    served.answer(1, Status::Failed, 0);
    worker.load_later(plan(1, 0, &[(2, slot)]), 0).unwrap();
    assert!(worker.finished().is_empty());
    eventually("closed gate", || served.gate() == 1);
    assert!(kv.is_untouched(2) && worker.finished().is_empty(), "a block may still be written");
    served.store(header::FENCE_COPYING, 0);
    assert_eq!(ended(&mut worker, 1), [EndedLoad { op: 1, failed: vec![] }]);
    assert_eq!(kv.block(2), content(1));
    assert_eq!(served.loaded(), [(1, Status::Ok as u8)]);
}

#[test]
fn a_promise_outlives_the_sidecar() {
    let (_peer, kv, mut worker, served) = connected(Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    worker.load_later(plan(1, 0, &[(2, slot)]), 0).unwrap();
    drop(served);
    assert_eq!(ended(&mut worker, 1), [EndedLoad { op: 1, failed: vec![] }]);
    assert_eq!(kv.block(2), content(1));
    assert!(worker.load_now(plan(2, LOAD_SYNC, &[(3, slot)])).is_empty(), "the mapping is still there");
    assert_eq!(kv.block(3), content(1));
    eventually("hang-up", || {
        worker.start_step(1, 0);
        !worker.is_connected()
    });
}

#[test]
fn a_new_sidecar_is_joined_while_the_old_pool_serves_its_plans() {
    let (mut peer, kv, mut worker, served) = connected(Copier::Engine);
    worker.join([3; 16]);
    let old = served.pool.commit(0, 11, &content(1));
    drop(served);
    peer.epoch = EPOCH + 1;
    let again = peer.serve(BLOCK_BYTES);
    eventually("reconnect", || {
        worker.start_step(4, 0);
        worker.connection_count() == 2 && worker.is_connected()
    });
    let mut served = again.join().unwrap();
    assert_eq!(served.drain_kind(Kind::Join).len(), 1);
    assert_eq!(served.word(header::FENCE_START), 4);
    served.pool.commit(0, 11, &content(2));
    assert!(worker.load_now(plan(1, LOAD_BY_ENGINE, &[(2, old)])).is_empty());
    assert_eq!(kv.block(2), content(1), "from the pool that the plan was made for");
    assert!(served.loaded().is_empty(), "the new sidecar knows nothing of it");
}

#[test]
fn a_refusal_is_an_error_with_its_reason() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let error = session(|| {
        let refused = peer.refuse("ranks disagree: set PYTHONHASHSEED on all");
        refusal(options(&peer, &kv, Copier::Engine)).inspect(|_| refused.join().unwrap())
    });
    assert!(matches!(&error, ShimError::Refused(reason) if reason.contains("PYTHONHASHSEED")), "{error}");
}

#[test]
fn impossible_memory_is_an_error_and_an_absent_sidecar_is_not() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let mut wrong = options(&peer, &kv, Copier::Engine);
    wrong.worker.regions[1].fd = 1;
    assert!(matches!(RankClient::new(wrong), Err(ShimError::Hello(_))));
    let mut short = options(&peer, &kv, Copier::Engine);
    short.worker.blocks = BLOCKS + 1;
    assert!(matches!(RankClient::new(short), Err(ShimError::Memory(_))));
    let mut worker = RankClient::new(options(&peer, &kv, Copier::Engine)).unwrap();
    assert!(!worker.is_connected() && worker.take_notices()[0].contains("pillion serve"));
    worker.start_step(1, 0);
    worker.done(1, true, 0);
    assert_eq!(worker.load_now(plan(1, LOAD_BY_ENGINE, &[(0, SlotRef { offset: 0, generation: 1 })])), [0]);
}

#[test]
fn ends_of_loads_that_find_no_room_are_told_later_in_their_order() {
    let (_peer, _kv, mut worker, mut served) = connected(Copier::Engine);
    let slot = served.pool.commit(0, 11, &content(1));
    let more = SUBMISSION_SLOTS as u64 + 100;
    for op in 1..=more {
        assert!(worker.load_now(plan(op, LOAD_BY_ENGINE, &[(3, slot)])).is_empty());
    }
    let mut told = Vec::new();
    eventually("all ends", || {
        told.extend(served.loaded().into_iter().map(|(op, _)| op));
        worker.start_step(1, 0);
        told.len() as u64 >= more
    });
    assert_eq!(told, (1..=more).collect::<Vec<_>>());
}

#[test]
fn a_sidecar_that_never_reads_is_left() {
    let (_peer, _kv, mut worker, served) = connected(Copier::Engine);
    let slot = served.pool.commit(0, 11, &content(1));
    let mut op = 0;
    eventually("the end of patience", || {
        for _ in 0..100 {
            op += 1;
            assert!(worker.load_now(plan(op, LOAD_BY_ENGINE, &[(3, slot)])).is_empty());
        }
        worker.start_step(op, 0);
        !worker.is_connected()
    });
    assert!(op > 2 * SUBMISSION_SLOTS as u64, "not before there is nothing else to do");
}

#[test]
fn on_host_memory_nothing_is_enqueued() {
    let (_peer, _kv, mut worker, served) = connected(Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    let asked = plan(1, LOAD_SYNC, &[(2, slot)]);
    assert_eq!(worker.begin_load(asked.clone(), 0, true).unwrap(), Begun::No(asked));
    worker.wait_cut(0, 0).unwrap();
    assert_eq!(worker.begin_load(plan(2, 0, &[(3, slot)]), 0, true).unwrap(), Begun::Later);
    worker.synchronize(0).unwrap();
    assert_eq!((worker.loading(), worker.stats()["waits"]), (0, 0));
}

#[test]
fn gpu_memory_that_is_none_is_an_error() {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let on_gpu = |cuts: &[u64], copy: Copier, pointers: &[u64]| {
        let memory = RegionMemory::Gpu { pointers: pointers.to_vec(), cuts: cuts.to_vec(), stream: 0 };
        RankClient::new(WorkerSetup { memory, ..options(&peer, &kv, copy) }).unwrap_err().to_string()
    };
    let half = BLOCK_BYTES / 2;
    let bad: [&[u64]; 7] = [
        &[],
        &[0, BLOCK_BYTES],
        &[half],
        &[half, half, BLOCK_BYTES],
        &[BLOCK_BYTES, half],
        &[half, BLOCK_BYTES + 1],
        &(BLOCK_BYTES - 255..=BLOCK_BYTES).collect::<Vec<_>>(),
    ];
    for cuts in bad {
        assert!(on_gpu(cuts, Copier::Sidecar, &[4096]).contains("cuts"), "{cuts:?}");
    }
    assert!(on_gpu(&[half, BLOCK_BYTES], Copier::Sidecar, &[]).contains("region 0"));
    if !copy_engine::cuda::is_present() {
        for copy in [Copier::Sidecar, Copier::Engine] {
            assert!(on_gpu(&[half, BLOCK_BYTES], copy, &[4096]).contains("libcuda"));
        }
    }
}

#[test]
fn what_the_sidecar_refused_is_not_taken_back() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Sidecar);
    let here = served.pool.commit(0, 11, &content(1));
    let lost = SlotRef { generation: 12, ..here };
    worker.load_later(plan(6, LOAD_ARRIVING, &[(2, here)]), 0).unwrap();
    worker.load_later(plan(7, LOAD_ARRIVING, &[(3, here), (4, lost)]), 0).unwrap();
    served.answer(7, Status::Absent, 0);
    assert_eq!(ended(&mut worker, 1), [EndedLoad { op: 7, failed: vec![4] }]);
    assert_eq!(kv.block(3), content(1), "what is there is taken");
    assert_eq!((served.gate(), worker.stats()["rescues"]), (0, 0), "the load before it goes on");
    served.answer(6, Status::Ok, 1);
    assert_eq!(worker.finished(), [EndedLoad { op: 6, failed: vec![] }]);
    assert_eq!(served.loaded(), [(7, Status::Failed as u8)]);
}
