//! Sessions at odds with each other: runs claimed twice, ranks that come twice or change their form.

use shm_protocol::handshake::{BlockRegion, Copier, Hello, Reply, Role, WorkerHello};
use shm_protocol::message::{Kind, Message, Status};
use shm_protocol::request::{LoadEnd, SchedulerRequest, WorkerRequest};

use crate::client::{BLOCKS, Kv, Session, greet, hello, query, save, watch};
use crate::scene::{Scene, key, run_id};

/// Bytes of a region far larger than the slots of the earlier blocks.
const LARGE_BYTES: u64 = 1 << 20;

fn rank_of(scene: &Scene, kv: &Kv, hello: &Hello, run: [u8; 16]) -> Session {
    Session::rank(&scene.pillion.socket, hello, kv, run)
}

fn one_rank(kv: &Kv) -> Hello {
    hello("twins", 1, kv.worker_of("twins", 0, 1, Copier::Sidecar))
}

/// A rank of this model, with blocks seventy times as large.
fn large(kv: &Kv, model: &str) -> Hello {
    let regions = vec![BlockRegion { fd: 0, offset: 0, stride: LARGE_BYTES, bytes: LARGE_BYTES }];
    let worker = WorkerHello { blocks: 4, regions, ..kv.stated(model, 0, 1, Copier::Sidecar) };
    hello("twins", 1, Role::Worker(worker))
}

fn large_kv() -> Kv {
    let kv = Kv::new();
    rustix::fs::ftruncate(&kv.fds[0], 4 * LARGE_BYTES).unwrap();
    rustix::io::pwrite(&kv.fds[0], &vec![0xbd; 4 * LARGE_BYTES as usize], 0).unwrap();
    kv
}

/// Two schedulers claim one run; its rank leaves; the first scheduler goes on posting.
#[test]
fn a_run_claimed_twice_harms_nobody_else() {
    let mut scene = Scene::start();
    for order in 0..2 {
        let (kv, run) = (Kv::new(), run_id(100 + order));
        let claim = hello("twins", 1, Role::Scheduler { run });
        let mut first = Session::open(&scene.pillion.socket, &claim, &[]);
        first.open_log(0, &(0..11).map(|n| key(9_800_000 + 100 * order + n)).collect::<Vec<_>>());
        let rank = rank_of(&scene, &kv, &one_rank(&kv), run);
        first.query_ready(0, 1, 1);
        first.unaccepted(save(900, 0, 8), &[1]);
        let second = greet(&scene.pillion.socket, &claim, &[]);
        let other = (order == 1).then(|| rank_of(&scene, &kv, &one_rank(&kv), run));
        drop(rank);
        watch("rank gone", || (scene.pillion.metrics()["sessions"] <= 4 + order).then_some(()));
        for from in 1..11 {
            let late = save(1000 + u64::from(from), from, 0);
            first.with_blocks(late, &[2]);
        }
        scene.assert_served();
        drop((second, other, first));
        scene.assert_unharmed("a run claimed twice");
    }
}

/// A save waits for its step; meanwhile a rank of far larger blocks comes in place of the first. With the
/// same facts it is refused; with others it does not take part. No copy may go beyond the slots of the save.
#[test]
fn a_rank_of_another_form_never_copies_into_slots_taken_before() {
    let mut scene = Scene::start();
    let (kv, run) = (Kv::new(), run_id(200));
    let mut scheduler = Session::scheduler(&scene.pillion.socket, "twins", 1, run);
    scheduler.open_log(0, &(0..40).map(|n| key(9_810_000 + n)).collect::<Vec<_>>());
    let rank = rank_of(&scene, &kv, &one_rank(&kv), run);
    scheduler.query_ready(0, 1, 1);
    for (op, from) in (0..40).map(|n| (1000 + n, n as u32)) {
        scheduler.with_blocks(save(op, from, 8), &[1]);
    }
    // The form of the engine's blocks is checked again from here on.
    scheduler.post(SchedulerRequest::Salt { salt: [9; 16] });
    let larger_kv = large_kv();
    let hello = large(&larger_kv, "twins");
    let (_, refused, _) = greet(&scene.pillion.socket, &hello, &larger_kv.fds.each_ref());
    assert!(
        matches!(&refused, Reply::Refused { reason, .. } if reason.contains("with blocks of 1048576 bytes in 1")),
        "{refused:?}"
    );
    let larger = rank_of(&scene, &larger_kv, &large(&larger_kv, "large twins"), run);
    larger.fences(8, 8);
    larger.ring();
    rank.fences(8, 8);
    rank.ring();
    // The good engine compares every byte of its blocks, the oldest among them.
    for _ in 0..10 {
        scene.assert_served();
    }
    drop((scheduler, rank, larger));
    scene.assert_unharmed("a rank of another form");
}

/// Two ranks state that they are rank 0, and take turns at joining while operations run.
#[test]
fn a_rank_that_comes_twice_harms_nobody_else() {
    let mut scene = Scene::start();
    let (kv, run) = (Kv::new(), run_id(300));
    let mut scheduler = Session::scheduler(&scene.pillion.socket, "twins", 1, run);
    scheduler.open_log(0, &[key(9_820_000)]);
    let mut ranks: Vec<Session> = (0..3).map(|_| rank_of(&scene, &kv, &one_rank(&kv), run)).collect();
    scheduler.query_ready(0, 1, 1);
    for turn in 0..200_u64 {
        let rank = &mut ranks[turn as usize % 3];
        rank.post(WorkerRequest::Join { run, step: 0 });
        rank.fences(turn, turn);
        let (asked, load) = (1000 + 3 * turn, 1001 + 3 * turn);
        scheduler.post(query(asked, 1));
        scheduler
            .with_blocks(Message { op: load, lease: asked, step: turn, ..Message::new(Kind::Load) }, &[3]);
        scheduler.with_blocks(save(load + 1, 0, 0), &[2]);
        rank.post(WorkerRequest::Loaded { op: load, end: LoadEnd::Failed });
        rank.ring();
        if turn % 50 == 49 {
            ranks.remove(0);
            ranks.push(rank_of(&scene, &kv, &one_rank(&kv), run));
        }
        let _ = scheduler.saved();
    }
    drop((scheduler, ranks));
    scene.assert_unharmed("a rank that comes twice");
}

/// No rank joins another engine's run.
#[test]
fn a_rank_joins_no_run_of_another_engine() {
    let mut scene = Scene::start();
    let kv = Kv::new();
    // The good engine's run id, as if leaked.
    let stranger = rank_of(&scene, &kv, &one_rank(&kv), run_id(7));
    stranger.closed_after("a foreign run");
    scene.assert_said(stranger.welcome.session, "name different engines");
    let mut impostor = hello("good", 1, kv.worker_of("other facts", 0, 1, Copier::Sidecar));
    let rank = rank_of(&scene, &kv, &impostor, run_id(7));
    rank.closed_after("other facts");
    scene.assert_said(rank.welcome.session, "the other ranks of its run have");
    impostor.world_size = 2;
    let rank = rank_of(&scene, &kv, &impostor, run_id(7));
    rank.closed_after("another world");
    drop((stranger, rank));
    scene.assert_unharmed("foreign ranks");
}

/// A query for fewer keys than the one before, and then for more: every block gets its own key's bytes.
#[test]
fn a_lease_that_shrinks_and_grows_names_the_right_slots() {
    let mut scene = Scene::start();
    let (kv, run) = (Kv::new(), run_id(400));
    let mut scheduler = Session::scheduler(&scene.pillion.socket, "twins", 1, run);
    let keys: Vec<_> = (0..12).map(|n| key(9_830_000 + n)).collect();
    scheduler.open_log(0, &keys);
    let rank = rank_of(&scene, &kv, &one_rank(&kv), run);
    scheduler.query_ready(0, 1, 1);
    let sources: Vec<u32> = (1..13).collect();
    sources.iter().for_each(|block| kv.fill(*block, u64::from(*block)));
    scheduler.with_blocks(save(900, 0, 0), &sources);
    rank.ring();
    assert_eq!(scheduler.saved().committed, 12);
    for (op, count) in [(901, 10), (902, 5), (903, 12)] {
        assert_eq!(scheduler.query(0, op, count).value, count);
    }
    let targets: Vec<u32> = (BLOCKS - 12..BLOCKS).collect();
    scheduler.with_blocks(Message { op: 904, lease: 903, step: 1, ..Message::new(Kind::Load) }, &targets);
    rank.fences(1, 0);
    rank.ring();
    assert_eq!(rank.outcome(904).status, Status::Ok);
    for (source, target) in sources.iter().zip(&targets) {
        assert!(kv.holds(*target, u64::from(*source)), "block {target} holds another key's bytes");
    }
    drop((scheduler, rank));
    scene.assert_unharmed("a lease that shrinks and grows");
}
