//! A rank with staged saves, against a peer with requests for blocks.

mod peer;

use connector_shim::worker::RankClient;
use peer::rank::{BLOCK_BYTES, BLOCKS, EPOCH, Kv, connected_with, content, ended, plan};
use peer::{Peer, Served, eventually};
use shm_protocol::handshake::{self, Copier, Role};
use shm_protocol::layout::{STAGING_SLOTS_MAX, staging_word};
use shm_protocol::message::{Kind, LOAD_SYNC, Message, StageRequest, Status};
use shm_protocol::ring::RingMemory;
use shm_protocol::session::Ring;

/// A rank with block 3 filled, and its sidecar.
fn staged() -> (Peer, Kv, RankClient, Served) {
    let (peer, kv, worker, served) = connected_with(Copier::Engine, |options| options.staged = true);
    kv.fill(3, &content(3));
    (peer, kv, worker, served)
}

fn segment(served: &Served) -> (&handshake::WorkerHello, u32) {
    let Role::Worker(worker) = &served.hello.role else { panic!("{:?}", served.hello) };
    (worker, worker.staging.expect("a staging segment"))
}

/// The bytes in a slot, and its tag.
fn slot(served: &Served, slot: u32) -> (Vec<u8>, u64) {
    let place = segment(served).0.regions[0];
    let (mut bytes, mut tag) = (vec![0; BLOCK_BYTES as usize], [0; 8]);
    let at = place.offset + u64::from(slot) * place.stride;
    assert_eq!(rustix::io::pread(&served.descriptors[0], &mut bytes, at), Ok(bytes.len()));
    assert_eq!(rustix::io::pread(&served.descriptors[0], &mut tag, staging_word(slot) as u64), Ok(8));
    (bytes, u64::from_le_bytes(tag))
}

fn answers(served: &mut Served, count: usize) -> Vec<(u64, u32, u8)> {
    let mut answers: Vec<Message> = Vec::new();
    eventually("answers", || {
        answers.extend(served.drain_kind(Kind::Staged));
        answers.len() >= count
    });
    answers.iter().map(|answer| (answer.op, answer.from, answer.flags)).collect()
}

const OK: u8 = Status::Ok as u8;

#[test]
fn blocks_that_are_asked_for_come_with_their_tags() {
    let (_peer, _kv, mut worker, mut served) = staged();
    let (said, slots) = segment(&served);
    assert_eq!((said.copy, said.blocks, said.block_bytes()), (Copier::Engine, BLOCKS, Some(BLOCK_BYTES)));
    assert_eq!((slots as usize, served.descriptors.len()), (STAGING_SLOTS_MAX, 1));
    let mode = rustix::fs::fcntl_getfl(&served.descriptors[0]).unwrap();
    assert_eq!(
        mode & rustix::fs::OFlags::RWMODE,
        rustix::fs::OFlags::RDONLY,
        "the segment is the rank's to write"
    );
    served.ask(&[
        StageRequest { tag: 77, block: 3, slot: 5 },
        StageRequest { tag: 78, block: 4, slot: slots - 1 },
    ]);
    assert_eq!(answers(&mut served, 2), [(77, 5, OK), (78, slots - 1, OK)]);
    assert_eq!(slot(&served, 5), (content(3), 77));
    assert_eq!(slot(&served, slots - 1).1, 78);
    served.ask(&[StageRequest { tag: u64::MAX, block: 3, slot: 5 }]);
    assert_eq!(answers(&mut served, 1), [(u64::MAX, 5, OK)]);
    worker.start_step(1, 0);
    assert!(worker.is_connected());
}

#[test]
fn it_loads_itself_whatever_the_plan_says() {
    let (_peer, kv, mut worker, mut served) = staged();
    let slot = served.pool.commit(0, 11, &content(9));
    assert!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])).is_empty(), "without a word of the sidecar");
    worker.load_later(plan(2, 0, &[(4, slot)]), 0).unwrap();
    ended(&mut worker, 1);
    assert_eq!((kv.block(2), kv.block(4)), (content(9), content(9)));
    assert_eq!(served.loaded(), [(1, OK), (2, OK)]);
    assert_eq!((worker.stats()["rescues"], worker.stats()["blocks_by_engine"]), (0, 2));
}

#[test]
fn requests_of_no_honest_sidecar_end_the_connection() {
    let stage = |block, slot| StageRequest { tag: 5, block, slot };
    type Lie<'a> = (&'a str, &'a dyn Fn(&mut Served));
    let lies: [Lie<'_>; 5] = [
        ("a block there is not", &|served| served.ask(&[stage(BLOCKS, 0)])),
        ("no block at all", &|served| served.ask(&[stage(u32::MAX, 0)])),
        ("a slot there is not", &|served| served.ask(&[stage(3, STAGING_SLOTS_MAX as u32)])),
        ("one slot twice", &|served| served.ask(&[stage(3, 1), stage(4, 1)])),
        ("a cursor there is not", &|served| {
            served.memory.ring(Ring::Completion).store_tail(1 << 30);
            shm_protocol::wait::wake_engine(served.memory.region());
        }),
    ];
    for (name, lie) in lies {
        let (_peer, _kv, mut worker, mut served) = staged();
        lie(&mut served);
        eventually(name, || {
            worker.start_step(1, 0);
            !worker.is_connected()
        });
        assert!(served.drain_kind(Kind::Staged).is_empty(), "{name}");
        assert!(worker.take_notices().iter().any(|said| said.contains("broke the protocol")), "{name}");
    }
}

#[test]
fn a_sidecar_that_leaves_in_the_middle_is_followed_by_the_next_one() {
    let (mut peer, _kv, mut worker, mut served) = staged();
    served.ask(&[StageRequest { tag: 1, block: 3, slot: 0 }]);
    drop(served);
    peer.epoch = EPOCH + 1;
    let again = peer.serve(BLOCK_BYTES);
    eventually("the next one", || {
        worker.start_step(4, 0);
        worker.connection_count() == 2 && worker.is_connected()
    });
    let mut served = again.join().unwrap();
    served.ask(&[StageRequest { tag: 900, block: 3, slot: 0 }]);
    assert_eq!(answers(&mut served, 1), [(900, 0, OK)], "nothing of what the first one asked");
    assert_eq!(slot(&served, 0), (content(3), 900));
}
