//! A session's memory used against the sidecar: cursors that jump, slots that change, noise, and overwritten
//! words of the sidecar.

use std::sync::atomic::{AtomicBool, Ordering};

use shm_protocol::layout::{SESSION_BYTES, SUBMISSION_SLOTS, gate_word, header};
use shm_protocol::message::{Kind, Message, Status};
use shm_protocol::random::Random;
use shm_protocol::request::SchedulerRequest;
use shm_protocol::ring::RingMemory;

use crate::client::{Session, query, save, watch};
use crate::scene::{Scene, key};

const CAPACITY: u32 = SUBMISSION_SLOTS as u32;

#[test]
fn a_tail_that_jumps_ends_its_session() {
    let mut scene = Scene::start();
    let jumps: [(&str, u32, u32); 6] = [
        ("one more than the ring holds", 0, CAPACITY + 1),
        ("half of all numbers", 0, 1 << 31),
        ("one back", 1, 0),
        ("far back", 3, u32::MAX),
        ("as far as there is", 0, u32::MAX),
        ("twice the ring", 2, 2 * CAPACITY),
    ];
    for (name, posted, tail) in jumps {
        let (mut scheduler, rank) = scene.villain();
        for session in [&mut scheduler] {
            for log in 0..posted {
                session.post(SchedulerRequest::Open { log });
            }
            watch("messages read", || (session.submission().load_head() == posted).then_some(()));
        }
        scheduler.submission().store_tail(tail);
        scheduler.ring();
        scheduler.closed_after(name);
        scene.assert_said(scheduler.welcome.session, "cursor");
        rank.submission().store_tail(CAPACITY + 7);
        rank.ring();
        rank.closed_after(name);
        drop((scheduler, rank));
        scene.assert_unharmed(name);
    }
    let (scheduler, rank) = scene.villain();
    scheduler.submission().store_tail(CAPACITY);
    scheduler.ring();
    scheduler.closed_after("a tail over slots that were never written");
    scene.assert_said(scheduler.welcome.session, "kind 0");
    drop((scheduler, rank));
    scene.assert_unharmed("a tail over nothing");
}

/// The engine may spoil its own words. The sidecar never reads back its own words beside them.
#[test]
fn words_of_the_sidecar_written_by_the_engine_change_nothing() {
    let mut scene = Scene::start();
    for value in [0, 1, u64::MAX, 0x5555_5555_5555_5555] {
        let (mut scheduler, rank) = scene.villain();
        scheduler.open_log(0, &[key(9_000_000)]);
        scheduler.query_ready(0, 1, 1);
        for session in [&scheduler, &rank] {
            for word in [
                header::MAGIC,
                header::VERSION,
                header::EPOCH,
                header::SESSION,
                header::SIDECAR_HEARTBEAT,
                header::SIDECAR_ASLEEP,
                header::SIGNAL,
                header::SUBMISSION_HEAD,
                header::COMPLETION_TAIL,
            ] {
                session.store(word, value);
            }
            session.ring();
        }
        assert_eq!(ask_once(&scheduler, value, 2), Status::Ok, "still answered");
        drop((scheduler, rank));
        scene.assert_unharmed("spoilt words");
    }
}

/// Posts a query without the client's own ring: the ring's shared head was spoilt.
fn ask_once(session: &Session, spoilt: u64, op: u64) -> Status {
    // Two messages and the first query were read: the sidecar's private head stands at 3, with any value in
    // the shared word.
    let ring = session.submission();
    let tail = ring.load_tail();
    ring.write_slot(tail % CAPACITY, &Message::from(query(op, 1)).encode_slot());
    ring.store_tail(tail + 1);
    session.ring();
    let answer = watch("answer", || session.memory.load_outcome(op)).status;
    assert!(spoilt == 0 || ring.load_head() != 0);
    answer
}

/// Fence words belong to the engine, and may have any value.
#[test]
fn fences_that_fall_or_leap_serve_nobody_else() {
    let mut scene = Scene::start();
    let (mut scheduler, rank) = scene.villain();
    scheduler.open_log(0, &[key(9_100_000), key(9_100_001)]);
    scheduler.query_ready(0, 1, 2);
    for (op, step) in [(10, 5), (11, 1 << 40), (12, u64::MAX)] {
        scheduler.with_blocks(save(op, 0, step), &[3, 4]);
    }
    for value in [7, 3, u64::MAX, 0, 1 << 41] {
        let words = [
            header::FENCE_START,
            header::FENCE_DONE,
            gate_word(10),
            header::FENCE_COPYING,
            header::FENCE_STARTED,
            header::FENCE_ENDED,
        ];
        for word in words {
            rank.store(word, value);
        }
        rank.ring();
    }
    // The last value covers the first two; the third depends on the values read in between.
    let mut open = vec![10, 11];
    while !open.is_empty() {
        let op = scheduler.saved().op;
        open.retain(|waiting| *waiting != op);
    }
    scheduler.store(header::VOID_SAVES_BELOW, u64::MAX);
    drop((scheduler, rank));
    // The engine's first save was whole and stays kept.
    scene.assert_unharmed("leaping fences");
}

#[test]
fn a_completion_head_that_lies_ends_its_session() {
    let mut scene = Scene::start();
    for lie in [1, 5, 1 << 31, u32::MAX] {
        let (mut scheduler, rank) = scene.villain();
        let closed = scene.pillion.closed("malformed");
        scheduler.open_log(0, &[key(9_200_000)]);
        scheduler.memory.ring(shm_protocol::session::Ring::Completion).store_head(lie);
        // The sidecar reads the head again after the known room is used up.
        let save = Message { count: 0, ..Message::new(Kind::Save) };
        let slots: Vec<_> =
            (1..=CAPACITY as u64 / 2).map(|op| Message { op, ..save }.encode_slot()).collect();
        let mut posted = 0;
        watch("end of a session that lies about its head", || {
            posted += scheduler.post_all(&slots);
            (scene.pillion.closed("malformed") > closed && posted > 0).then_some(())
        });
        scheduler.closed_after("a head that lies");
        drop((scheduler, rank));
        scene.assert_unharmed("a head that lies");
    }
}

/// All words of a session's memory are noise, with many seeds.
#[test]
fn noise_ends_its_session_and_nothing_else() {
    let mut scene = Scene::start();
    for seed in 1..40_u64 {
        let (scheduler, rank) = scene.villain();
        for session in [&scheduler, &rank] {
            let mut random = Random(seed);
            // The rings, table and block ids as a whole; only the beginning of the key arena, where noise is
            // valid.
            for at in (0..1_700_000.min(SESSION_BYTES)).step_by(8) {
                let noise = random.next();
                // Every other seed writes messages of known kinds, with noise in every other field.
                let slot = at >= 4096 && at % 64 == 0;
                let word = if slot && seed % 2 == 0 { noise & !0xff | (1 + noise % 11) } else { noise };
                if at != header::SUBMISSION_TAIL {
                    session.store(at, word);
                }
            }
            session.submission().store_tail(if seed % 4 < 2 { CAPACITY } else { random.next() as u32 });
            session.ring();
        }
        rank.closed_after("noise");
        scheduler.closed_after("noise");
        drop((scheduler, rank));
        if seed % 8 == 0 {
            scene.assert_unharmed("noise");
        }
    }
    scene.assert_unharmed("noise");
}

/// Slots, keys and block ids that change while the sidecar reads them: it copies each out once.
#[test]
fn messages_torn_while_they_are_read_harm_nobody_else() {
    let mut scene = Scene::start();
    for turn in 0..10_u64 {
        let (mut scheduler, rank) = scene.villain();
        scheduler.open_log(0, &(0..64).map(|n| key(9_300_000 + n)).collect::<Vec<_>>());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let memory = scheduler.memory.clone();
            let stop = &stop;
            scope.spawn(move || {
                let ring = memory.ring(shm_protocol::session::Ring::Submission);
                let query = Message::from(query(turn, 64));
                let wild = Message { count: u32::MAX, log: u32::MAX, ..query };
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    let torn = if number % 64 == 0 && turn % 2 == 0 { wild } else { query };
                    ring.write_slot(number % CAPACITY, &torn.encode_slot());
                    memory.write_key(number % 2, number as usize % 64, &key(number.into()));
                    memory.write_block_id(number, u32::MAX - number);
                }
            });
            let save = Message { count: 3, from: 1, ..Message::new(Kind::Save) };
            let slots: Vec<_> =
                (100..1100).map(|op| Message { op: op + turn, ..save }.encode_slot()).collect();
            scheduler.post_all(&slots);
            scene.assert_served();
            stop.store(true, Ordering::Relaxed);
        });
        drop((scheduler, rank));
        scene.assert_unharmed("torn messages");
    }
}
