//! Messages never written by an engine of this version: each ends its own session with a reason, or changes
//! nothing.

use shm_protocol::layout::{self, BLOCK_IDS, CHUNKS, LOG_KEYS, LOGS, QUERY_KEYS};
use shm_protocol::message::{Kind, LOAD_BY_ENGINE, Message, Slot, Status};

use crate::client::{BLOCKS, Session, watch};
use crate::scene::{Scene, key};

/// Keys of the villain's log, in chunks 0 and 1.
const KEYS: u32 = 70;
/// Block ids beyond the rank's memory.
const BEYOND: [u32; 3] = [BLOCKS, 1 << 31, u32::MAX];

/// An engine with keys in log 0.
struct Villain {
    scheduler: Session,
    rank: Session,
}

/// The session of a wrong message, the message, and the sidecar's reason.
struct Breach {
    name: &'static str,
    by_rank: bool,
    slots: fn() -> Vec<Slot>,
    reason: &'static str,
    /// `malformed`: wrong by itself; `rejected`: wrong after earlier messages.
    counted: &'static str,
}

impl Villain {
    fn new(scene: &Scene) -> Self {
        let (mut scheduler, rank) = scene.villain();
        let keys: Vec<_> = (0..u64::from(KEYS)).map(|number| key(1_000_000 + number)).collect();
        scheduler.open_log(0, &keys);
        scheduler.memory.write_block_id(7, 5);
        scheduler.query_ready(0, 1, KEYS);
        Self { scheduler, rank }
    }
}

fn one(message: Message) -> Vec<Slot> {
    vec![message.encode_slot()]
}

fn of(kind: Kind) -> Message {
    Message::new(kind)
}

const fn breach(name: &'static str, reason: &'static str, slots: fn() -> Vec<Slot>) -> Breach {
    Breach { name, by_rank: false, slots, reason, counted: "malformed" }
}

const fn at_odds(name: &'static str, reason: &'static str, slots: fn() -> Vec<Slot>) -> Breach {
    Breach { counted: "rejected", ..breach(name, reason, slots) }
}

const fn by_rank(breach: Breach) -> Breach {
    Breach { by_rank: true, ..breach }
}

/// The villain's scheduler has log 0 with 70 keys in chunks 0 and 1, and block id 5 at position 7.
const BREACHES: &[Breach] = &[
    breach("kind 0", "kind 0", || vec![[0; 8]]),
    breach("a kind of the future", "kind 100", || vec![[100, 0, 0, 0, 0, 0, 0, 0]]),
    breach("kind 255", "kind 255", || vec![[u64::MAX; 8]]),
    breach("OPEN of a log there is not", "log 65536", || one(Message { log: LOGS as u32, ..of(Kind::Open) })),
    breach("OPEN of a bundle there is not", "OPEN with bundle 1: this release serves one bundle", || {
        one(Message { data: [1, 0, 0, 0, 0, 0], ..of(Kind::Open) })
    }),
    breach("OPEN of a set there is not", "OPEN with set 2: this release serves one bundle", || {
        one(Message { data: [0, 2, 0, 0, 0, 0], ..of(Kind::Open) })
    }),
    breach("QUERY with a flag of the future", "QUERY with flags 16", || {
        one(Message { op: 9, count: 1, flags: 16, ..of(Kind::Query) })
    }),
    breach("LOAD with a flag of the future", "LOAD with flags 32", || {
        one(Message { op: 9, count: 1, flags: 32, ..of(Kind::Load) })
    }),
    at_odds("OPEN of an open log", "opened twice", || one(of(Kind::Open))),
    breach("APPEND of nothing", "APPEND with count 0", || one(Message { from: KEYS, ..of(Kind::Append) })),
    breach("APPEND over seven chunks", "APPEND with count 385", || {
        one(Message { count: 385, ..of(Kind::Append) })
    }),
    breach("APPEND beyond the longest log", "APPEND with end 1048577", || {
        one(Message { from: LOG_KEYS as u32, count: 1, ..of(Kind::Append) })
    }),
    breach("APPEND whose end overflows", "APPEND with end 8589934590", || {
        one(Message { from: u32::MAX, count: u32::MAX, ..of(Kind::Append) })
    }),
    breach("APPEND into a chunk there is not", "chunk 16384", || {
        one(Message { from: KEYS, count: 64, data: [1, CHUNKS as u32, 0, 0, 0, 0], ..of(Kind::Append) })
    }),
    at_odds("APPEND that leaves a gap", "cannot append", || {
        one(Message { from: KEYS + 1, count: 1, data: [1; 6], ..of(Kind::Append) })
    }),
    at_odds("APPEND out of order", "cannot append", || {
        one(Message { from: 0, count: 1, data: [0; 6], ..of(Kind::Append) })
    }),
    at_odds("APPEND that moves a chunk", "moved a chunk", || {
        one(Message { from: KEYS, count: 1, data: [9; 6], ..of(Kind::Append) })
    }),
    at_odds("APPEND to a log that is not open", "not open", || {
        one(Message { log: 1, count: 1, ..of(Kind::Append) })
    }),
    breach("QUERY of too many keys", "QUERY with count 65537", || {
        one(Message { op: 9, count: QUERY_KEYS as u32 + 1, ..of(Kind::Query) })
    }),
    breach("QUERY whose end overflows", "QUERY with count 4294967295", || {
        one(Message { op: 9, from: u32::MAX, count: u32::MAX, ..of(Kind::Query) })
    }),
    at_odds("QUERY of a log that is not open", "not open", || {
        one(Message { op: 9, log: 65_535, count: 1, ..of(Kind::Query) })
    }),
    breach("LOAD of more keys than there can be", "LOAD with end 4294967295", || {
        one(Message { op: 9, count: u32::MAX, ..of(Kind::Load) })
    }),
    breach("LOAD of more blocks than the circle holds", "block ids", || {
        one(Message { op: 9, count: BLOCK_IDS as u32 + 1, ..of(Kind::Load) })
    }),
    at_odds("SAVE of keys that were not appended", "not appended", || {
        one(Message { op: 9, from: KEYS - 1, count: 2, ..of(Kind::Save) })
    }),
    at_odds("SAVE from behind the log", "not appended", || {
        one(Message { op: 9, from: 500_000, count: 2, ..of(Kind::Save) })
    }),
    at_odds("SAVE of a log that is not open", "not open", || {
        one(Message { op: 9, log: 3, count: 1, ..of(Kind::Save) })
    }),
    at_odds("SAVE of an operation that runs", "twice", || {
        let save = Message { op: 9, count: 1, step: u64::MAX, data: [7, 0, 0, 0, 0, 0], ..of(Kind::Save) };
        [one(save), one(Message { from: 1, ..save })].concat()
    }),
    at_odds("LOAD of an operation that runs", "twice", || {
        let save = Message { op: 9, count: 1, step: u64::MAX, data: [7, 0, 0, 0, 0, 0], ..of(Kind::Save) };
        [one(save), one(Message { kind: Kind::Load, ..save })].concat()
    }),
    breach("CANCEL beyond the longest log", "CANCEL with end 4294967296", || {
        one(Message { op: 9, from: u32::MAX, count: 1, ..of(Kind::Cancel) })
    }),
    at_odds("HINT of a log that is not open", "not open", || one(Message { log: 8, ..of(Kind::Hint) })),
    breach("HINT of more keys than one may name", "HINT with count 65537", || {
        one(Message { count: 65_537, ..of(Kind::Hint) })
    }),
    at_odds("ADVISE of a log that is not open", "not open", || {
        one(Message { log: 8, op: 9, data: [3, 0, 0, 0, 0, 0], ..of(Kind::Advise) })
    }),
    breach("ADVISE of more keys than one may name", "ADVISE with count 65537", || {
        one(Message { op: 9, count: 65_537, data: [3, 0, 0, 0, 0, 0], ..of(Kind::Advise) })
    }),
    breach("ADVISE of no action", "ADVISE with action 0", || one(of(Kind::Advise))),
    breach("ADVISE for longer than an hour", "ADVISE with seconds 3601", || {
        one(Message { op: 9, data: [2, 3601, 0, 0, 0, 0], ..of(Kind::Advise) })
    }),
    at_odds("RELEASE of a log that is not open", "not open", || one(Message { log: 8, ..of(Kind::Release) })),
    at_odds("CLOSE of a log that is not open", "not open", || one(Message { log: 8, ..of(Kind::Close) })),
    at_odds("CLOSE twice", "not open", || [one(of(Kind::Close)), one(of(Kind::Close))].concat()),
    breach("APPEND with a flag of the future", "APPEND with flags 4", || {
        one(Message { count: 1, flags: 4, ..of(Kind::Append) })
    }),
    at_odds("APPEND behind a tail", "log 0 has 71 keys; cannot append", || {
        let tail = Message { from: KEYS, count: 1, flags: 2, data: [1; 6], ..of(Kind::Append) };
        [one(tail), one(Message { from: KEYS + 1, flags: 0, ..tail })].concat()
    }),
    breach("SAVE that replaces a later key", "SAVE with replaced 3", || {
        one(Message { op: 9, from: 2, count: 1, data: [0, 3, 0, 0, 0, 0], ..of(Kind::Save) })
    }),
    breach("SAVE with a flag of the future", "SAVE with flags 4", || {
        one(Message { op: 9, count: 1, flags: 4, ..of(Kind::Save) })
    }),
    breach("GOLDEN of no tokens", "GOLDEN with count 0", || one(of(Kind::Golden))),
    breach("GOLDEN of more tokens than a block has", "GOLDEN with count 4097", || {
        one(Message { count: 4097, ..of(Kind::Golden) })
    }),
    breach("WEIGHTS without a number", "WEIGHTS with op 0", || one(of(Kind::Weights))),
    at_odds("WEIGHTS that were said before", "WEIGHTS 7 follows WEIGHTS 7", || {
        let weights = Message { op: 7, ..of(Kind::Weights) };
        [one(weights), one(weights)].concat()
    }),
    by_rank(breach("a rank's WEIGHTS without a number", "WEIGHTS with op 0", || one(of(Kind::Weights)))),
    by_rank(at_odds("a rank's WEIGHTS that go back", "WEIGHTS 6 follows WEIGHTS 7", || {
        // They answer a change of weights unknown to their scheduler, so only the engine is unbound.
        [7, 6].map(|op| Message { op, step: 5, ..of(Kind::Weights) }.encode_slot()).to_vec()
    })),
    by_rank(at_odds(
        "an answer to older WEIGHTS",
        "answered WEIGHTS 2 of its scheduler after WEIGHTS 3",
        || [3, 2].map(|step| Message { op: 10 - step, step, ..of(Kind::Weights) }.encode_slot()).to_vec(),
    )),
    breach("a scheduler that joins", "may not send JOIN", || one(of(Kind::Join))),
    breach("a scheduler that loaded", "may not send LOADED", || {
        one(Message { flags: Status::Ok as u8, ..of(Kind::Loaded) })
    }),
    by_rank(breach("a rank that opens", "may not send OPEN", || one(of(Kind::Open)))),
    by_rank(breach("a rank that appends", "may not send APPEND", || one(of(Kind::Append)))),
    by_rank(breach("a rank that queries", "may not send QUERY", || one(of(Kind::Query)))),
    by_rank(breach("a rank that loads", "may not send LOAD", || one(of(Kind::Load)))),
    by_rank(breach("a rank that saves", "may not send SAVE", || one(of(Kind::Save)))),
    by_rank(breach("a rank that cancels", "may not send CANCEL", || one(of(Kind::Cancel)))),
    by_rank(breach("a rank that releases", "may not send RELEASE", || one(of(Kind::Release)))),
    by_rank(breach("a rank that closes", "may not send CLOSE", || one(of(Kind::Close)))),
    by_rank(breach("a rank that hints", "may not send HINT", || one(of(Kind::Hint)))),
    by_rank(breach("a rank that advises", "may not send ADVISE", || one(of(Kind::Advise)))),
    by_rank(breach("a rank that names tokens", "may not send GOLDEN", || one(of(Kind::Golden)))),
    by_rank(breach("a rank that accepts", "may not send ACCEPT", || one(of(Kind::Accept)))),
    by_rank(breach("a rank that salts", "may not send SALT", || one(of(Kind::Salt)))),
    by_rank(breach("LOADED without a status", "LOADED with status 0", || one(of(Kind::Loaded)))),
    by_rank(breach("STAGED without a status", "STAGED with status 0", || one(of(Kind::Staged)))),
    by_rank(breach("STAGED of a rank that stages nothing", "without a staging segment", || {
        one(Message { flags: Status::Ok as u8, ..of(Kind::Staged) })
    })),
    breach("a scheduler that stages", "may not send STAGED", || one(of(Kind::Staged))),
    by_rank(breach("LOADED, pending", "LOADED with status 1", || {
        one(Message { flags: 1, ..of(Kind::Loaded) })
    })),
    by_rank(breach("LOADED of an unknown status", "LOADED with status 255", || {
        one(Message { flags: 255, ..of(Kind::Loaded) })
    })),
    by_rank(at_odds("a rank that joins a second run", "another run before", || {
        one(of(Kind::Join).with_bytes16([0xee; 16]))
    })),
];

#[test]
fn every_breach_closes_its_session_with_a_reason() {
    let mut scene = Scene::start();
    for breach in BREACHES {
        let closed = scene.pillion.closed(breach.counted);
        let mut villain = Villain::new(&scene);
        let session = if breach.by_rank { &mut villain.rank } else { &mut villain.scheduler };
        session.post_all(&(breach.slots)());
        session.closed_after(breach.name);
        scene.assert_said(session.welcome.session, breach.reason);
        watch(breach.name, || (scene.pillion.closed(breach.counted) == closed + 1).then_some(()));
        drop(villain);
        scene.assert_unharmed(breach.name);
    }
}

/// An odd message that breaks no rule, or is answered by a status, leaves its session open.
#[test]
fn odd_messages_are_answered_and_change_nothing() {
    let mut scene = Scene::start();
    let mut villain = Villain::new(&scene);
    let scheduler = &mut villain.scheduler;
    let rank = villain.rank.welcome.session;
    let mut op = 10;
    let mut next = || {
        op += 1;
        op
    };
    for lease in [0, 1, 10, u64::MAX] {
        let op = next();
        scheduler.with_blocks(Message { op, lease, ..of(Kind::Load) }, &[1, 2]);
        assert_eq!(villain.rank.outcome(op).status, Status::LeaseUnknown, "a lease that was never granted");
    }
    let op = next();
    scheduler.with_blocks(Message { op, log: 77, ..of(Kind::Load) }, &[1]);
    assert_eq!(villain.rank.outcome(op).status, Status::LeaseUnknown, "a log that is not open");
    scheduler.with_blocks(Message { op: next(), flags: LOAD_BY_ENGINE, ..of(Kind::Load) }, &[1]);
    for block in BEYOND.into_iter().chain([0]) {
        let op = next();
        scheduler.with_blocks(Message { op, ..of(Kind::Save) }, &[block]);
        villain.rank.ring();
        let saved = scheduler.saved();
        assert_eq!((saved.op, saved.committed, saved.dropped), (op, 0, 1), "block {block}");
    }
    for (from, count) in [(KEYS, 1), (KEYS - 1, 1000), (0, 0), (LOG_KEYS as u32 - 1, 1)] {
        let op = next();
        scheduler.post(Message { op, from, count, ..of(Kind::Query) });
        assert_eq!((scheduler.outcome(op).status, scheduler.outcome(op).value), (Status::Ok, 0));
    }
    scheduler.post(Message { op: u64::MAX, count: 1000, ..of(Kind::Cancel) });
    scheduler.post(Message { flags: 255, from: u32::MAX, count: u32::MAX, ..of(Kind::Release) });
    scheduler.post(Message { log: u32::MAX, ..of(Kind::Cancel) });
    let padded = Message { op: next(), count: 1, step: u64::MAX, lease: 7, data: [3; 6], ..of(Kind::Query) };
    let mut slot = padded.encode_slot();
    slot[0] |= 0xffff_0000;
    scheduler.post_raw(slot);
    assert_eq!(
        scheduler.outcome(padded.op).status,
        Status::Ok,
        "fields that QUERY does not name are ignored"
    );
    for op in [0, 1, 999_999, u64::MAX] {
        villain.rank.post(Message { op, flags: Status::Failed as u8, ..of(Kind::Loaded) });
    }
    assert_eq!(scheduler.query(0, next(), KEYS).status, Status::Ok, "still served");
    assert!(!scene.pillion.log().contains(&format!("session={rank} reason")), "{}", scene.pillion.log());
    drop(villain);
    scene.assert_unharmed("odd messages");
}

/// Every field of every kind at its ends: the consequences stay in that session.
#[test]
fn every_field_of_every_kind_at_its_ends_harms_nobody_else() {
    let mut scene = Scene::start();
    let small = [0, 1, u32::MAX, 1 << 31, layout::LOGS as u32, LOG_KEYS as u32, BLOCK_IDS as u32];
    let large = [0, 1, u64::MAX, 1 << 63, 1 << 32];
    let mut slots = Vec::new();
    for kind in 1..=13_u8 {
        let kind = Kind::try_from(kind).unwrap();
        let base = Message { op: 5, count: 1, flags: Status::Ok as u8, ..of(kind) };
        let mut add = |message: Message| slots.push(message.encode_slot());
        for value in small {
            add(Message { log: value, ..base });
            add(Message { from: value, ..base });
            add(Message { count: value, ..base });
            add(Message { data: [value; 6], ..base });
        }
        for value in large {
            add(Message { op: value, ..base });
            add(Message { step: value, ..base });
            add(Message { lease: value, ..base });
        }
        (0..=255).step_by(51).for_each(|flags| add(Message { flags, ..base }));
    }
    for slots in slots.chunks(40) {
        for slot in slots {
            let mut villain = Villain::new(&scene);
            villain.scheduler.post_raw(*slot);
            villain.rank.post_raw(*slot);
        }
        scene.assert_unharmed(&format!("one of {slots:x?}"));
    }
}
