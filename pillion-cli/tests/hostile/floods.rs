//! Engines with too many posts: other engines are answered meanwhile, and each flood has an end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use shm_protocol::handshake::{Reply, Role};
use shm_protocol::hints::Advice;
use shm_protocol::layout::{QUERY_KEYS, SUBMISSION_SLOTS};
use shm_protocol::message::{APPEND_PROMISED, Kind, Message, Slot, Status};
use shm_protocol::request::{Advise, LogKeys, SchedulerRequest};
use shm_protocol::transport;

use crate::client::{BLOCK_BYTES, Kv, Session, WATCHDOG, greet, hello, query, save, watch};
use crate::scene::{POOL_BYTES, Scene, key, run_id, villain};

/// Most sessions of `pillion` at once, and most greetings read at once.
const SESSIONS_MAX: usize = 256;
const GREETINGS_MAX: usize = 64;
/// Rounds of the good engine under each flood.
const ROUNDS: usize = 5;

/// Posts `slots` without end, and asserts that the good engine is served in the meantime and the flood goes
/// on.
fn flood(scene: &Scene, session: &mut Session, slots: &[Slot]) {
    let (stop, posted) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (stop, posted) = (&stop, &posted);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                posted.fetch_add(session.post_all(slots) as u64, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        for _ in 0..ROUNDS {
            let before = posted.load(Ordering::Relaxed);
            scene.assert_served();
            watch("flood that goes on", || (posted.load(Ordering::Relaxed) > before).then_some(()));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

fn many(message: Message) -> Vec<Slot> {
    vec![message.encode_slot(); SUBMISSION_SLOTS]
}

/// An engine with the longest log of one QUERY.
fn engine_with_keys(scene: &Scene) -> (Session, Session) {
    let (mut scheduler, rank) = scene.villain();
    scheduler.open_log(0, &(0..QUERY_KEYS as u64).map(|n| key(50_000_000 + n)).collect::<Vec<_>>());
    scheduler.query_ready(0, 1, 1);
    (scheduler, rank)
}

#[test]
fn the_largest_queries_without_end_leave_a_neighbour_its_answers() {
    let mut scene = Scene::start();
    let (mut scheduler, rank) = engine_with_keys(&scene);
    let largest = query(9, QUERY_KEYS as u32);
    flood(&scene, &mut scheduler, &many(largest.into()));
    assert_eq!(watch("answer", || scheduler.memory.load_outcome(9)).status, Status::Ok);
    drop((scheduler, rank));
    scene.assert_unharmed("a flood of queries");
}

/// Each hint has many turns, and the ring is full of them.
#[test]
fn the_longest_hints_without_end_leave_a_neighbour_its_answers() {
    let mut scene = Scene::start();
    for advice in [Advice::Pin { seconds: 3600 }, Advice::Prefetch] {
        let (mut scheduler, rank) = engine_with_keys(&scene);
        let keys = LogKeys { log: 0, from: 0, count: QUERY_KEYS as u32 };
        let advise = SchedulerRequest::Advise(Advise { op: 9, keys, advice, alone: false });
        flood(&scene, &mut scheduler, &many(advise.into()));
        assert_eq!(watch("answer", || scheduler.memory.load_outcome(9)).status, Status::Absent);
        drop((scheduler, rank));
        scene.assert_unharmed("a flood of hints");
    }
}

#[test]
fn messages_of_every_kind_without_end_leave_a_neighbour_its_answers() {
    let mut scene = Scene::start();
    let message = Message::new;
    let turns: [(&str, Vec<Slot>); 7] = [
        ("queries of one key", many(Message { op: 9, count: 1, ..message(Kind::Query) })),
        ("hints", many(Message { count: 1000, ..message(Kind::Hint) })),
        ("releases", many(message(Kind::Release))),
        ("cancels of nothing", many(Message { op: 3, count: 1000, ..message(Kind::Cancel) })),
        ("salts", many(message(Kind::Salt).with_bytes16([1; 16]))),
        ("logs opened and closed", {
            let pair =
                [Message { log: 5, ..message(Kind::Open) }, Message { log: 5, ..message(Kind::Close) }];
            (0..SUBMISSION_SLOTS).map(|index| pair[index % 2].encode_slot()).collect()
        }),
        ("logs whose keys are promised", {
            let promise = |log| {
                let append = Message {
                    log,
                    flags: APPEND_PROMISED,
                    count: 1,
                    data: [log; 6],
                    ..message(Kind::Append)
                };
                [message(Kind::Open), append, message(Kind::Close)]
                    .map(|one| Message { log, ..one }.encode_slot())
            };
            (1..=SUBMISSION_SLOTS as u32 / 3).flat_map(promise).collect()
        }),
    ];
    for (name, slots) in turns {
        let (mut scheduler, rank) = engine_with_keys(&scene);
        if name.starts_with("logs") {
            // Whole logs only: no log is opened twice.
            for _ in 0..ROUNDS {
                scheduler.post_whole(&slots);
                scheduler.wait_read();
                scene.assert_served();
            }
        } else {
            flood(&scene, &mut scheduler, &slots);
        }
        drop((scheduler, rank));
        scene.assert_unharmed(name);
    }
}

/// Every log open, and every message a SALT to end the leases of all of them.
#[test]
fn salts_over_all_logs_leave_a_neighbour_its_answers() {
    let mut scene = Scene::start();
    let (mut scheduler, rank) = scene.villain();
    let opens: Vec<Slot> =
        (0..65_536).map(|log| Message { log, ..Message::new(Kind::Open) }.encode_slot()).collect();
    scheduler.post_whole(&opens);
    flood(&scene, &mut scheduler, &many(Message::new(Kind::Salt)));
    drop((scheduler, rank));
    scene.assert_unharmed("salts over all logs");
}

/// Namespaces are shared: one engine's resets must not use them up.
#[test]
fn resets_without_end_leave_a_new_engine_its_namespace() {
    let mut scene = Scene::start();
    let (mut scheduler, rank) = scene.villain();
    scheduler.open_log(0, &[key(9_400_000)]);
    scheduler.query_ready(0, 1, 1);
    let pairs: Vec<Slot> = (0..70_000_u64)
        .flat_map(|number| {
            let salt = Message::new(Kind::Salt).with_bytes16(run_id(number));
            [salt.encode_slot(), Message::from(query(9, 1)).encode_slot()]
        })
        .collect();
    scheduler.post_whole(&pairs);
    let (mut newcomer, newcomer_rank) = villain(&scene.pillion.socket, &Kv::new(), "newcomer");
    newcomer.open_log(0, &[key(9_400_001)]);
    newcomer.query_ready(0, 1, 1);
    drop((scheduler, rank, newcomer, newcomer_rank));
    scene.assert_unharmed("resets without end");
}

/// LOADED of operations without a scheduler's post: kept for a while, always bounded.
#[test]
fn loads_reported_that_nobody_posted_end_their_session() {
    let mut scene = Scene::start();
    let (scheduler, mut rank) = scene.villain();
    let mut op = 1_000_000;
    watch("end of a rank that reports without end", || {
        let slots: Vec<Slot> = (0..SUBMISSION_SLOTS as u64)
            .map(|n| {
                Message { op: op + n, flags: Status::Ok as u8, ..Message::new(Kind::Loaded) }.encode_slot()
            })
            .collect();
        op += rank.post_all(&slots) as u64;
        (scene.pillion.closed("rejected") > 0).then_some(())
    });
    rank.closed_after("reports without end");
    scene.assert_said(rank.welcome.session, "no scheduler posted");
    drop((scheduler, rank));
    scene.assert_unharmed("reports without end");
}

/// Saves and loads without a start are bounded by the protocol: 4,096 of each.
#[test]
fn operations_that_never_start_are_bounded() {
    let mut scene = Scene::start();
    let kv = Kv::new();
    (1..60).for_each(|block| kv.fill(block, 1));
    let (mut scheduler, rank) = villain(&scene.pillion.socket, &kv, "villain");
    scheduler.open_log(0, &(0..40).map(|n| key(9_500_000 + n)).collect::<Vec<_>>());
    scheduler.query_ready(0, 1, 1);
    scheduler.with_blocks(save(2, 0, 0), &(1..41).collect::<Vec<_>>());
    rank.ring();
    assert_eq!(scheduler.saved().committed, 40);
    let mut op = 10;
    watch("end of an engine that promises without end", || {
        let pair = |op| {
            let load =
                Message { op: op + 1, lease: op, step: u64::MAX, count: 1, ..Message::new(Kind::Load) };
            [Message::from(query(op, 1)).encode_slot(), load.encode_slot()]
        };
        let slots: Vec<Slot> = (0..512).flat_map(|n| pair(op + 2 * n)).collect();
        op += scheduler.post_all(&slots) as u64 & !1;
        let ended = scene.pillion.closed("rejected") + scene.pillion.closed("malformed") > 0;
        assert!(ended || op < 1_000_000, "{} loads wait at once", op / 2);
        ended.then_some(())
    });
    scheduler.closed_after("promises without end");
    drop((scheduler, rank));
    scene.assert_unharmed("promises without end");
}

/// Saves of more blocks than the pool has room for, waiting for a step without end: they take no room.
#[test]
fn saves_that_never_start_leave_a_neighbour_the_pool() {
    let mut scene = Scene::start();
    let (mut scheduler, rank) = engine_with_keys(&scene);
    let used = scene.pillion.metrics()["pool_used_bytes"];
    let blocks: Vec<u32> = (1..101).collect();
    let saves = (POOL_BYTES / BLOCK_BYTES) as u32 / 100 + 1;
    for number in 0..saves {
        scheduler.with_blocks(save(10 + u64::from(number), 100 * number, 1 << 40), &blocks);
    }
    scheduler.wait_read();
    scene.assert_served_sets();
    let now = scene.pillion.metrics()["pool_used_bytes"];
    let more = now.saturating_sub(used);
    assert!(more <= 200 * BLOCK_BYTES, "{more} bytes are held by saves that have not begun");
    drop((scheduler, rank));
    scene.assert_unharmed("saves that never start");
}

#[test]
fn an_engine_that_never_reads_its_completions_is_closed() {
    let mut scene = Scene::start();
    let (mut scheduler, rank) = scene.villain();
    scheduler.open_log(0, &[key(9_600_000)]);
    let slots: Vec<Slot> =
        (10..2010).map(|op| Message { op, count: 0, ..Message::new(Kind::Save) }.encode_slot()).collect();
    watch("end of an engine that does not read", || {
        scheduler.post_all(&slots);
        (scene.pillion.closed("malformed") > 0).then_some(())
    });
    scheduler.closed_after("a full completion ring");
    scene.assert_said(scheduler.welcome.session, "completion ring is full");
    drop((scheduler, rank));
    scene.assert_unharmed("a full completion ring");
}

#[test]
fn silent_callers_keep_nobody_out() {
    let mut scene = Scene::start();
    let call = || transport::connect_socket(&scene.pillion.socket, WATCHDOG).unwrap();
    // As many callers as the sidecar reads at once, and as the backlog has room for.
    let silent: Vec<_> = (0..GREETINGS_MAX + 32).map(|_| call()).collect();
    drop(villain(&scene.pillion.socket, &Kv::new(), "villain"));
    for socket in &silent {
        let (record, _) = transport::receive_record(socket).unwrap();
        assert!(!record.is_empty(), "told why");
    }
    drop(silent);
    scene.assert_unharmed("silent callers");
}

#[test]
fn more_sessions_than_there_may_be_are_refused_with_the_number() {
    let mut scene = Scene::start();
    let mut sessions = Vec::new();
    let refused = loop {
        assert!(sessions.len() < SESSIONS_MAX, "more than the limit");
        let role = Role::Scheduler { run: run_id(1000 + sessions.len() as u64) };
        match greet(&scene.pillion.socket, &hello("crowd", 1, role), &[]) {
            (socket, Reply::Welcome(_), fds) => sessions.push((socket, fds)),
            (_, Reply::Refused { reason, .. }, _) => break reason,
        }
    };
    assert!(refused.contains(&SESSIONS_MAX.to_string()), "{refused}");
    assert_eq!(sessions.len(), SESSIONS_MAX - 2, "the good engine has two");
    scene.assert_served();
    drop(sessions);
    scene.assert_unharmed("a crowd");
}
