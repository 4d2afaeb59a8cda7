//! The scheduler's session against a peer with scripted answers.

#[path = "scheduler/last_key.rs"]
mod last_key;
#[path = "scheduler/late_answers.rs"]
mod late_answers;
#[path = "scheduler/load_wait.rs"]
mod load_wait;
mod peer;
#[path = "scheduler/streams.rs"]
mod streams;

use std::time::Duration;

use connector_shim::core::plan::Plan;
use connector_shim::error::ShimError;
use connector_shim::scheduler::{
    AskedQuery, EngineSession, PENDING, SchedulerClient, SchedulerSetup, SessionConfig,
};
use peer::scheduler::{connected, connected_with, options};
use peer::{Peer, Served, eventually};
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::layout::{
    CHUNKS, COMPLETION_SLOTS, LOG_KEYS, SUBMISSION_RESERVED, SUBMISSION_SLOTS, header,
};
use shm_protocol::message::{
    APPEND_CHUNKS, APPEND_PROMISED, APPEND_TAIL, Kind, LOAD_ARRIVING, LOAD_SYNC, Message, QUERY_ARRIVING,
    QUERY_AWAIT, SAVE_HANDOVER, Saved, Status,
};
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;

const BLOCK_BYTES: u64 = 512;

fn hash(index: u32) -> BlockHash {
    BlockHash(std::array::from_fn(|at| (index.rotate_left(at as u32) ^ at as u32) as u8))
}

fn append(scheduler: &mut SchedulerClient, log: i64, count: u32) -> u32 {
    let start = scheduler.length(log).unwrap_or(0);
    scheduler
        .append_keys(log, start, count, |index, key| key.set_bytes(&hash(index).0).map_err(ShimError::from))
        .unwrap()
}

fn log_with(scheduler: &mut SchedulerClient, keys: u32) -> i64 {
    let log = scheduler.open_log(None);
    assert!(log >= 0);
    assert_eq!(append(scheduler, log, keys), keys);
    log
}

/// A scheduler whose log has `keys` keys, and its sidecar.
fn with_log(keys: u32) -> (Peer, SchedulerClient, Served, i64) {
    let peer = Peer::new(1);
    let (mut scheduler, served) = connected(&peer, BLOCK_BYTES);
    let log = log_with(&mut scheduler, keys);
    (peer, scheduler, served, log)
}

/// Opens logs as long as there is room for their messages.
fn open_all(scheduler: &mut SchedulerClient) -> Vec<i64> {
    std::iter::from_fn(|| Some(scheduler.open_log(None)).filter(|log| *log >= 0)).collect()
}

/// A lease of all four keys of a log, and the chunks of these.
fn leased(scheduler: &mut SchedulerClient, served: &mut Served, log: i64) -> [u32; APPEND_CHUNKS] {
    let op = scheduler.post_query(log, 0, 4).unwrap();
    let chunks = served.drain()[1].data;
    grant(served, op, 0, 4, &chunks);
    assert_eq!(scheduler.poll(op), Some(4));
    chunks
}

/// Answers query `op`, the slots of its hits being the key indices.
fn grant(served: &Served, op: u64, from: u32, hits: u32, chunks: &[u32]) {
    for key in from..from + hits {
        let slot = SlotRef { offset: u64::from(key) * 512, generation: u64::from(key) + 1 };
        let found = (slot, Source::ALL[key as usize % 3]);
        let (chunk, index) = (chunks[key as usize / 64], key as usize % 64);
        served.memory.write_refs(chunk, index, 1, &mut std::iter::once(found));
    }
    served.answer(op, Status::Ok, hits);
}

#[test]
fn a_question_that_was_put_ahead_is_waited_for() {
    let (_peer, mut scheduler, mut served, log) = with_log(4);
    scheduler.ask_ahead(log, 0, 4);
    scheduler.ask_ahead(log, 0, 4);
    let messages = served.drain();
    let kinds: Vec<_> = messages.iter().map(|message| message.kind).collect();
    assert_eq!(kinds, [Kind::Open, Kind::Append, Kind::Query], "put once");
    let AskedQuery::Posted(op) = scheduler.ask_query(log, 0, 4) else { panic!("its answer is waited for") };
    grant(&served, op, 0, 4, &messages[1].data);
    assert_eq!(scheduler.wait_for_answer(op), 4);
    scheduler.ask_ahead(log, 0, 4);
    assert!(served.drain().is_empty(), "the lease answers");
    // The query posted ahead asks for fewer keys than the later query: its answer is not used.
    scheduler.release_lease(log);
    scheduler.ask_ahead(log, 0, 2);
    let AskedQuery::Posted(other) = scheduler.ask_query(log, 0, 3) else { panic!("another question") };
    grant(&served, other - 1, 0, 2, &messages[1].data);
    assert_eq!((scheduler.poll(other - 1), scheduler.poll(other)), (Some(0), None));
    grant(&served, other, 0, 3, &messages[1].data);
    assert_eq!(scheduler.wait_for_answer(other), 3);
    scheduler.ask_ahead(log, 1, 2);
    scheduler.release_lease(log);
    scheduler.end_step();
    let kinds: Vec<_> = served.drain().iter().map(|message| message.kind).collect();
    assert_eq!(
        kinds,
        [Kind::Release, Kind::Query, Kind::Query, Kind::Query, Kind::Release],
        "released unasked"
    );
}

#[test]
fn a_request_from_its_keys_to_its_plan() {
    let peer = Peer::new(42);
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    let log = log_with(&mut scheduler, 100);
    assert_eq!(append(&mut scheduler, log, 400), 500);
    let op = scheduler.post_query(log, 10, 490).unwrap();
    let messages = served.drain();
    let kinds: Vec<_> = messages.iter().map(|m| (m.kind, m.from, m.count)).collect();
    let expected = [
        (Kind::Open, 0, 0),
        (Kind::Append, 0, 100),
        (Kind::Append, 100, 348),
        (Kind::Append, 448, 52),
        (Kind::Query, 10, 490),
    ];
    assert_eq!(kinds, expected);
    // Chunk 1 is named by both of the first two messages, chunk 7 by the last alone.
    let chunks = [&messages[1].data[..2], &messages[2].data[1..6], &messages[3].data[..1]].concat();
    let mut keys = Vec::new();
    for (index, chunk) in chunks.iter().enumerate() {
        served.memory.read_keys(*chunk, 0, 64.min(500 - index * 64), &mut keys);
    }
    assert!(keys.iter().copied().eq((0..500).map(hash)), "every key arrived at its place");

    assert_eq!(scheduler.poll(op), None);
    grant(&served, op, 10, 300, &chunks);
    assert_eq!(scheduler.poll(op), Some(300));
    assert_eq!(
        scheduler.ask_query(log, 10, 490),
        AskedQuery::Answered(300),
        "asked again, the lease answers"
    );
    assert!(scheduler.post_load(log, 9, &[1], 3, true).is_empty(), "before the lease");
    assert!(scheduler.post_load(log, 309, &[1, 2], 3, true).is_empty(), "behind the lease");
    assert_eq!(scheduler.sources(log, 110, 200)[..3], [67, 66, 67], "every third");
    assert_eq!(scheduler.sources(log, 110, 201)[..3], [0; 3], "behind the lease");
    let blocks: Vec<u32> = (1000..1200).collect();
    let plan = scheduler.post_load(log, 110, &blocks, 3, true).pop().unwrap();
    scheduler.end_step();
    let load = served.drain_kind(Kind::Load)[0];
    assert_eq!((load.from, load.count, load.step, load.lease, load.flags), (110, 200, 3, op, LOAD_SYNC));
    assert_eq!((plan.op, plan.epoch), (load.op, 42));
    let mut ids = Vec::new();
    served.memory.read_block_ids(load.data[0], load.count, &mut ids);
    assert_eq!(ids, blocks);
    let slots = (110..310).map(|key| SlotRef { offset: key * 512, generation: key + 1 });
    assert!(plan.blocks.into_iter().eq(blocks.iter().copied().zip(slots)));
    assert!(scheduler.post_load(log, 110, &blocks, 3, true).is_empty(), "a lease is used once");
}

#[test]
fn chunks_return_when_the_head_has_passed_the_close() {
    let peer = Peer::new(1);
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    let full = log_with(&mut scheduler, LOG_KEYS as u32);
    let next = log_with(&mut scheduler, 0);
    assert_eq!(append(&mut scheduler, next, 1), 0, "the arena is full");
    scheduler.close_log(full, 0);
    scheduler.end_step();
    assert_eq!(append(&mut scheduler, next, 1), 0, "the sidecar may still read the chunks");
    served.drain();
    assert_eq!(append(&mut scheduler, next, (CHUNKS * 64) as u32), LOG_KEYS as u32);
}

#[test]
fn requests_one_after_the_other_have_the_same_chunks() {
    let (_peer, mut scheduler, mut served, log) = with_log(300);
    let chunks = |served: &mut Served| served.drain_kind(Kind::Append)[0].data;
    let first = chunks(&mut served);
    scheduler.close_log(log, 0);
    scheduler.end_step();
    served.drain();
    log_with(&mut scheduler, 300);
    scheduler.end_step();
    assert_eq!(chunks(&mut served), first, "the arena's other pages are not touched");
}

#[test]
fn a_full_ring_is_a_miss_and_never_a_wait() {
    let (_peer, mut scheduler, mut served, log) = with_log(4);
    let ordinary = SUBMISSION_SLOTS - SUBMISSION_RESERVED;
    assert_eq!(open_all(&mut scheduler).len(), ordinary - 2);
    assert_eq!(scheduler.query(log, 0, 4), 0);
    assert!(!scheduler.post_save(log, 0, vec![1], 1, false));
    assert_eq!(append(&mut scheduler, log, 1), 4);
    scheduler.close_log(log, 0);
    scheduler.end_step();
    assert_eq!(served.drain_kind(Kind::Close).len(), 1, "giving back has room of its own");
    assert!(scheduler.open_log(None) >= 0);
}

#[test]
fn a_reset_without_room_is_told_to_the_next_connection() {
    let peer = Peer::new(1);
    let (mut scheduler, served) = connected(&peer, BLOCK_BYTES);
    open_all(&mut scheduler);
    assert!(scheduler.salt());
    assert!(!scheduler.is_connected(), "the old generation must not be asked for again");
    drop(served);
    let again = peer.serve(BLOCK_BYTES);
    eventually("reconnect", || scheduler.open_log(None) >= 0);
    let mut served = again.join().unwrap();
    assert_eq!(served.drain().first().map(|message| message.kind), Some(Kind::Salt));
}

#[test]
fn a_close_without_any_room_is_posted_later() {
    let peer = Peer::new(1);
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    let logs = open_all(&mut scheduler);
    for log in &logs {
        scheduler.close_log(*log, 0);
    }
    scheduler.end_step();
    assert_eq!(served.drain_kind(Kind::Close).len(), SUBMISSION_RESERVED);
    assert!(scheduler.open_log(None) >= 0, "a number is not opened before it is closed");
    let kinds: Vec<Kind> = served.drain().iter().map(|message| message.kind).collect();
    assert_eq!(kinds[kinds.len() - 2..], [Kind::Close, Kind::Open]);
    assert_eq!(kinds.len(), logs.len() - SUBMISSION_RESERVED + 1);
}

#[test]
fn a_hint_names_what_is_in_the_log_and_waits_for_nothing() {
    let (_peer, mut scheduler, mut served, log) = with_log(4);
    scheduler.hint(log, 1, 100);
    scheduler.hint(log, 4, 1);
    scheduler.hint(-1, 0, 1);
    let hints = served.drain_kind(Kind::Hint);
    assert_eq!(hints.iter().map(|hint| (hint.from, hint.count, hint.op)).collect::<Vec<_>>(), [(1, 3, 0)]);
}

#[test]
fn an_answer_wakes_a_sleeping_query() {
    let peer = Peer::new(1);
    let patient = |config: &mut SessionConfig| config.budget = Duration::from_secs(10);
    let (mut scheduler, mut served) = connected_with(&peer, BLOCK_BYTES, patient);
    let log = log_with(&mut scheduler, 4);
    let answering = std::thread::spawn(move || {
        let mut queries = Vec::new();
        eventually("query", || {
            queries = served.drain_kind(Kind::Query);
            !queries.is_empty()
        });
        std::thread::sleep(Duration::from_millis(5));
        served.answer(queries[0].op, Status::Ok, 3);
        served
    });
    assert_eq!(scheduler.query(log, 0, 4), 3);
    drop(answering.join().unwrap());
}

#[test]
fn a_pending_query_is_asked_again_without_a_message() {
    let (_peer, mut scheduler, mut served, log) = with_log(4);
    let op = scheduler.post_query(log, 0, 4).unwrap();
    served.answer(op, Status::Pending, 0);
    assert_eq!(scheduler.poll(op), Some(PENDING));
    served.drain();
    assert_eq!(scheduler.ask_query(log, 0, 4), AskedQuery::Answered(PENDING));
    served.answer(op, Status::Ok, 4);
    assert_eq!(scheduler.ask_query(log, 0, 4), AskedQuery::Answered(4));
    assert!(served.drain().is_empty());
}

#[test]
fn a_query_that_stays_pending_longer_than_a_sidecar_waits_is_a_miss() {
    let (_peer, mut scheduler, mut served, log) = with_log(4);
    let op = scheduler.post_query(log, 0, 4).unwrap();
    served.answer(op, Status::Pending, 0);
    served.drain();
    #[expect(clippy::disallowed_methods, reason = "a time after the question's, which the scheduler read")]
    let now = std::time::Instant::now();
    assert_eq!(scheduler.take_answer(op, now), Some(PENDING));
    assert_eq!(scheduler.take_answer(op, now + Duration::from_secs(4)), Some(0));
    assert_eq!(served.drain_kind(Kind::Release).len(), 1, "a late answer holds nothing");
    assert_eq!(scheduler.stats()["queries_timed_out"], 1);
}

#[test]
fn what_a_living_sidecar_never_answers_is_a_miss_after_33_s() {
    let (_peer, mut scheduler, served, log) = with_log(4);
    scheduler.await_producer(log);
    #[expect(clippy::disallowed_methods, reason = "the time of the question")]
    let now = std::time::Instant::now();
    let AskedQuery::Posted(op) = EngineSession::ask_query(&mut scheduler, log, 0, 4, now) else {
        panic!("a question")
    };
    assert_eq!(scheduler.look_for_answer(op, now, now), Some(PENDING));
    let answers = (1..=17).map(|turn| {
        served.beat();
        EngineSession::ask_query(&mut scheduler, log, 0, 4, now + Duration::from_secs(2 * turn))
    });
    let answers: Vec<_> = answers.collect();
    assert_eq!(answers.iter().filter(|answer| **answer == AskedQuery::Answered(PENDING)).count(), 16);
    assert_eq!(answers[16], AskedQuery::Answered(0));
    let [notice] = &scheduler.take_notices()[..] else { panic!("one notice") };
    assert!(notice.contains("not answered within 33000 ms"), "{notice}");
}

#[test]
fn the_answer_to_a_pending_query_ends_a_wait_for_it() {
    let mut peer = Peer::new(1);
    peer.handover = true;
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    let log = log_with(&mut scheduler, 4);
    scheduler.await_producer(log);
    assert_eq!(scheduler.query(log, 0, 4), PENDING);
    assert_eq!(scheduler.linger(log, 0, 4, Duration::from_millis(1)), PENDING, "nothing came");
    let op = served.drain_kind(Kind::Query)[0].op;
    served.answer(op, Status::Pending, 0);
    let answering = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(5));
        served.beat();
        served.answer(op, Status::Ok, 3);
        served
    });
    assert_eq!(scheduler.linger(log, 0, 4, Duration::from_secs(100)), 3);
    drop(answering.join().unwrap());
}

#[test]
fn a_short_prompt_of_another_engine_is_answered_whole() {
    let mut peer = Peer::new(1);
    peer.handover = true;
    let whole = |config: &mut SessionConfig| (config.part_blocks, config.whole_blocks) = (1, 3);
    let (mut scheduler, mut served) = connected_with(&peer, BLOCK_BYTES, whole);
    let [plain, awaiting] = [(); 2].map(|()| log_with(&mut scheduler, 4));
    scheduler.await_producer(awaiting);
    for (log, count) in [(plain, 3), (awaiting, 3), (awaiting, 4)] {
        scheduler.post_query(log, 0, count).unwrap();
    }
    let flags: Vec<_> = served.drain_kind(Kind::Query).iter().map(|message| message.flags).collect();
    assert_eq!(
        flags.iter().map(|flags| flags & QUERY_ARRIVING != 0).collect::<Vec<_>>(),
        [true, false, true]
    );
}

#[test]
fn what_is_promised_is_told_with_its_keys_to_a_sidecar_that_knows_of_it() {
    for knows in [true, false] {
        let mut peer = Peer::new(1);
        peer.handover = knows;
        let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
        for (awaits, promises) in [(false, false), (false, true), (true, true)] {
            let log = scheduler.open_log(None);
            awaits.then(|| scheduler.await_producer(log));
            promises.then(|| scheduler.promise_log(log).expect("no keys yet"));
            append(&mut scheduler, log, 4);
            let late = scheduler.promise_log(log).expect_err("they were told without it");
            assert!(late.to_string().contains("promise before the first append"), "{late}");
        }
        scheduler.end_step();
        let appends = served.drain_kind(Kind::Append);
        let flags: Vec<_> = appends.iter().map(|message| message.flags).collect();
        assert_eq!(
            flags,
            [0, APPEND_PROMISED * u8::from(knows), 0],
            "two that await what they promise would wait"
        );
    }
}

#[test]
fn a_log_ends_with_the_tail_of_a_prompt_where_the_sidecar_knows_it() {
    for knows in [true, false] {
        let mut peer = Peer::new(1);
        (peer.handover, peer.tails) = (true, knows);
        let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
        let log = log_with(&mut scheduler, 4);
        assert_eq!(scheduler.append_tail(log, &[7; 32]).expect("a key"), knows);
        scheduler.append_tail(-1, &[7; 32]).expect("a void handle has none");
        scheduler.append_tail(log, &[7; 33]).expect_err("no key is so long");
        scheduler.end_step();
        let appends = served.drain_kind(Kind::Append);
        let told: Vec<_> =
            appends.iter().map(|message| (message.from, message.count, message.flags)).collect();
        assert_eq!(told, [&[(0, 4, 0)], &[(4, 1, APPEND_TAIL)][..usize::from(knows)]].concat());
        if knows {
            let late = scheduler.append_tail(log, &[8; 32]).expect_err("it has ended");
            assert!(late.to_string().contains("close it, and open another one"), "{late}");
        }
    }
}

#[test]
fn who_awaits_and_who_hands_over_says_so_to_a_sidecar_that_knows_of_it() {
    for knows in [true, false] {
        let mut peer = Peer::new(1);
        peer.handover = knows;
        let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
        let (plain, marked) = (log_with(&mut scheduler, 4), log_with(&mut scheduler, 4));
        scheduler.await_producer(marked);
        scheduler.hand_over(marked);
        for log in [plain, marked] {
            scheduler.post_query(log, 0, 4).unwrap();
            assert!(scheduler.post_save(log, 0, vec![1, 2], 1, false));
        }
        scheduler.end_step();
        let flags = |messages: Vec<Message>| messages.iter().map(|message| message.flags).collect::<Vec<_>>();
        let messages = served.drain();
        let of = |kind| messages.iter().copied().filter(|message| message.kind == kind).collect();
        let known = u8::from(knows);
        assert_eq!(flags(of(Kind::Query)), [0, QUERY_AWAIT * known]);
        assert_eq!(flags(of(Kind::Save)), [0, SAVE_HANDOVER * known]);
    }
}

#[test]
fn an_old_lease_is_renewed_before_it_is_used() {
    let mut peer = Peer::new(1);
    peer.lease_ttl_ms = 0;
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    let log = log_with(&mut scheduler, 4);
    let chunks = leased(&mut scheduler, &mut served, log);
    assert!(scheduler.must_renew(log));
    assert_eq!(scheduler.post_load(log, 0, &[5, 6], 1, true).len(), 1, "its step goes on at once");
    assert!(served.drain_kind(Kind::Query).is_empty());
    let op = scheduler.post_query(log, 0, 4).unwrap();
    grant(&served, op, 0, 4, &chunks);
    assert_eq!(scheduler.poll(op), Some(4));
    served.drain();
    assert!(scheduler.post_load(log, 0, &[5, 6], 1, false).is_empty(), "the renewal was not answered");
    assert_eq!(served.drain_kind(Kind::Query).len(), 1);
}

#[test]
fn a_new_generation_ends_every_lease() {
    let (_peer, mut scheduler, mut served, log) = with_log(4);
    leased(&mut scheduler, &mut served, log);
    assert!(scheduler.salt());
    assert!(scheduler.post_load(log, 0, &[1], 1, true).is_empty());
    assert_eq!(served.drain_kind(Kind::Salt).len(), 1);
}

#[test]
fn saves_end_are_counted_and_given_up_in_ranges() {
    let (_peer, mut scheduler, mut served, log) = with_log(8);
    assert!(scheduler.post_save(log, 0, vec![10, 11, 12, 13], 5, false));
    assert!(scheduler.post_save(log, 4, vec![14, 15], 5, false));
    assert!(!scheduler.post_save(log, 7, vec![16, 17], 5, false), "no such keys");
    assert_eq!(scheduler.saving(), 6);
    assert_eq!(scheduler.overwrite([15, 12, 11, 99].into_iter()), 3);
    // Before the step ends: a load into these blocks may come by another session.
    let messages = served.drain();
    let saves: Vec<_> = messages.iter().filter(|m| m.kind == Kind::Save).collect();
    assert_eq!((saves[0].from, saves[0].count, saves[0].step), (0, 4, 5));
    let mut ids = Vec::new();
    served.memory.read_block_ids(saves[1].data[0], saves[1].count, &mut ids);
    assert_eq!(ids, [14, 15]);
    let cancels: Vec<_> =
        messages.iter().filter(|m| m.kind == Kind::Cancel).map(|m| (m.op, m.from, m.count)).collect();
    assert_eq!(cancels, [(saves[0].op, 1, 2), (saves[1].op, 1, 1)]);
    served.complete(Saved { op: saves[0].op, committed: 2, cancelled: 2, ..Saved::default() });
    scheduler.end_step();
    assert_eq!(scheduler.saving(), 1);
    assert_eq!((scheduler.stats()["blocks_committed"], scheduler.stats()["blocks_cancelled"]), (2, 2));
}

/// The steps accepted at the sidecar since the last call.
fn accepted(served: &mut Served) -> Vec<u64> {
    served.drain_kind(Kind::Accept).iter().map(|message| message.step).collect()
}

#[test]
fn a_step_is_accepted_at_once_where_saves_wait_for_it() {
    let (_peer, mut scheduler, mut served, log) = with_log(8);
    scheduler.accept_step(1);
    assert!(accepted(&mut served).is_empty(), "an engine that saves nothing says nothing");
    assert!(scheduler.post_save(log, 0, vec![1], 2, false) && scheduler.post_save(log, 1, vec![2], 3, false));
    scheduler.accept_step(1);
    assert!(accepted(&mut served).is_empty(), "no save of step 1");
    scheduler.accept_step(3);
    assert_eq!(accepted(&mut served), [3], "before the step ends");
    scheduler.accept_step(3);
    scheduler.accept_step(4);
    assert!(accepted(&mut served).is_empty(), "steps 2 and 3 are settled");
    assert!(scheduler.post_save(log, 2, vec![3], 6, false));
    scheduler.accept_step(7);
    assert_eq!(accepted(&mut served), [7], "step 6 is void");
}

#[test]
fn a_save_behind_its_acceptance_is_accepted_as_it_is_posted() {
    let (_peer, mut scheduler, mut served, log) = with_log(8);
    scheduler.accept_step(5);
    assert!(scheduler.post_save(log, 0, vec![1], 5, false) && scheduler.post_save(log, 1, vec![2], 6, false));
    assert_eq!(accepted(&mut served), [5]);
}

#[test]
fn an_acceptance_without_room_is_told_with_the_next() {
    let (_peer, mut scheduler, mut served, log) = with_log(8);
    assert!(scheduler.post_save(log, 0, vec![1], 1, false));
    let logs = open_all(&mut scheduler);
    logs.iter().take(SUBMISSION_RESERVED).for_each(|log| scheduler.close_log(*log, 0));
    scheduler.accept_step(1);
    assert!(accepted(&mut served).is_empty());
    scheduler.accept_step(2);
    assert_eq!(accepted(&mut served), [2], "and step 1 is void");
}

#[test]
fn blocks_of_refused_steps_are_counted() {
    let (_peer, mut scheduler, mut served, log) = with_log(8);
    assert!(scheduler.post_save(log, 0, vec![1, 2], 1, false));
    scheduler.accept_step(2);
    let op = served.drain_kind(Kind::Save)[0].op;
    served.complete(Saved { op, dropped: 2, unaccepted: 2, ..Saved::default() });
    scheduler.end_step();
    assert_eq!((scheduler.stats()["blocks_dropped"], scheduler.stats()["blocks_unaccepted"]), (2, 2));
}

#[test]
fn at_a_sidecar_of_the_release_before_nothing_is_saved_or_promised() {
    let mut peer = Peer::new(1);
    peer.version = 2;
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    let log = scheduler.open_log(None);
    scheduler.promise_log(log).unwrap();
    assert_eq!(append(&mut scheduler, log, 4), 4);
    assert!(!scheduler.post_save(log, 0, vec![1], 1, false));
    scheduler.accept_step(1);
    scheduler.end_step();
    let messages = served.drain();
    let kinds: Vec<Kind> = messages.iter().map(|message| message.kind).collect();
    assert_eq!(kinds, [Kind::Open, Kind::Append]);
    assert_eq!(messages[1].flags, 0, "nobody is to wait for what is not saved");
    let notices = scheduler.take_notices();
    let told = notices.iter().filter(|notice| notice.contains("upgrade the sidecar to 0.3.0 or later"));
    assert_eq!(told.count(), 1, "{notices:?}");
    let op = scheduler.post_query(log, 0, 4).unwrap();
    grant(&served, op, 0, 4, &messages[1].data);
    assert_eq!(scheduler.poll(op), Some(4));
    assert_eq!(scheduler.post_load(log, 0, &[1], 1, true).len(), 1, "it loads");
}

#[test]
fn a_check_that_finds_other_kv_is_said_once_with_its_figures() {
    let peer = Peer::new(1);
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    served.bind(0, NamespaceDigest([0xab; 16]));
    let log = log_with(&mut scheduler, 8);
    scheduler.take_notices();
    for differing in [0, 1, 1] {
        assert!(scheduler.post_save(log, 0, vec![10, 11], 1, true));
        scheduler.end_step();
        let op = served.drain().iter().find(|message| message.kind == Kind::Save).unwrap().op;
        let end = Saved { op, present: 2, checked: 2, differing, ..Saved::default() };
        served.complete(Saved { difference: 400_000, limit: 20_000, ..end });
        scheduler.end_step();
    }
    assert_eq!((scheduler.stats()["blocks_checked"], scheduler.stats()["blocks_differing"]), (6, 2));
    let notices = scheduler.take_notices();
    assert_eq!(notices.len(), 1, "{notices:?}");
    for part in ["namespace abababababababab...", "by 0.4 (limit 0.02)", "two other prompts"] {
        assert!(notices[0].contains(part), "{notices:?}");
    }
}

#[test]
fn without_room_for_a_cancel_every_save_is_void() {
    let (_peer, mut scheduler, served, log) = with_log(8);
    assert!(scheduler.post_save(log, 0, vec![10, 11], 1, false));
    assert!(scheduler.post_save(log, 2, vec![12, 13], 1, false));
    let logs = open_all(&mut scheduler);
    logs.iter().take(SUBMISSION_RESERVED).for_each(|log| scheduler.close_log(*log, 0));
    assert_eq!(served.word(header::VOID_SAVES_BELOW), 0);
    assert_eq!(scheduler.overwrite([12].into_iter()), 4, "all of them");
    assert_eq!(served.word(header::VOID_SAVES_BELOW), 3, "operations 1 and 2 are void");
    assert_eq!(scheduler.saving(), 0);
}

#[test]
fn no_more_saves_than_completions_have_room() {
    let (_peer, mut scheduler, mut served, log) = with_log(1);
    let mut posted = 0;
    for _ in 0..2 {
        while scheduler.post_save(log, 0, vec![1], 1, false) {
            posted += 1;
        }
        scheduler.end_step();
        served.drain();
    }
    assert_eq!(posted, COMPLETION_SLOTS);
}

#[test]
fn a_hang_up_is_a_miss_and_a_new_sidecar_a_new_generation() {
    let (peer, mut scheduler, served, log) = with_log(4);
    assert!(scheduler.salt());
    assert!(scheduler.post_save(log, 0, vec![1], 1, false));
    drop(served);
    assert_eq!(scheduler.query(log, 0, 4), 0);
    scheduler.end_step();
    assert!(!scheduler.is_connected());
    assert_eq!((scheduler.open_log(None), scheduler.saving(), scheduler.salt()), (-1, 0, true));
    let again = peer.serve(BLOCK_BYTES);
    eventually("reconnect", || {
        scheduler.end_step();
        scheduler.is_connected()
    });
    let mut served = again.join().unwrap();
    assert_eq!(scheduler.connection_count(), 2);
    assert_eq!(served.drain_kind(Kind::Salt).len(), 2, "the new sidecar learns the generation first");
    assert_eq!(scheduler.query(log, 0, 4), 0, "a handle of the old connection");
    assert_eq!(append(&mut scheduler, log, 4), 0);
    assert!(served.drain().is_empty());
    log_with(&mut scheduler, 4);
    let mut notices = Vec::new();
    for word in ["closed the connection", "connected to"] {
        eventually(word, || {
            notices.extend(scheduler.take_notices());
            notices.iter().any(|notice: &String| notice.contains(word))
        });
    }
}

#[test]
fn an_absent_sidecar_is_said_once_and_found_later() {
    let peer = Peer::new(1);
    let mut scheduler = SchedulerClient::new(options(&peer)).unwrap();
    assert_eq!(
        (scheduler.is_connected(), scheduler.open_log(None), scheduler.connection_count()),
        (false, -1, 0)
    );
    let notices = scheduler.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("pillion serve"), "{notices:?}");
    let served = peer.serve(BLOCK_BYTES);
    eventually("connection", || scheduler.open_log(None) >= 0);
    drop(served.join().unwrap());
}

#[test]
fn a_sidecar_that_breaks_the_protocol_is_left() {
    let peer = Peer::new(1);
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    served.complete(Saved { op: 77, committed: 1, ..Saved::default() });
    scheduler.end_step();
    assert!(!scheduler.is_connected());
    assert_eq!(served.word(header::VOID_SAVES_BELOW), u64::MAX, "it must commit nothing more");
    assert!(scheduler.take_notices().iter().any(|text| text.contains("save 77")));
}

#[test]
fn impossible_arguments_are_errors() {
    let peer = Peer::new(1);
    let wrong = |change: fn(&mut SchedulerSetup)| {
        let mut options = options(&peer);
        change(&mut options);
        assert!(matches!(SchedulerClient::new(options), Err(ShimError::Argument(_) | ShimError::Hello(_))));
    };
    wrong(|options| options.world_size = 65);
    wrong(|options| options.engine.clear());
    wrong(|options| options.config.budget = Duration::from_secs(11));
    wrong(|options| options.miss_wait_ms = Some(2001));
    let (mut scheduler, _served) = connected(&peer, BLOCK_BYTES);
    let log = log_with(&mut scheduler, 4);
    assert!(
        scheduler
            .append_keys(log, 3, 1, |index, key| key.set_bytes(&hash(index).0).map_err(ShimError::from))
            .is_err()
    );
}

#[test]
fn what_is_on_its_way_is_loaded_in_parts_and_never_synchronously() {
    let peer = Peer::new(1);
    let in_parts = |config: &mut SessionConfig| config.part_blocks = 4;
    let (mut scheduler, mut served) = connected_with(&peer, BLOCK_BYTES, in_parts);
    let log = log_with(&mut scheduler, 10);
    let op = scheduler.post_query(log, 0, 10).unwrap();
    let messages = served.drain();
    assert_eq!(messages[2].flags, QUERY_ARRIVING);
    grant(&served, op, 0, 10, &messages[1].data);
    served.answer(op, Status::Arriving, 10);
    assert_eq!(scheduler.poll(op), Some(10));
    assert!(scheduler.arriving(log));
    assert!(scheduler.post_load(log, 0, &[1, 2], 3, true).is_empty(), "a step would wait for the wire");
    let blocks: Vec<u32> = (100..109).collect();
    let plans = scheduler.post_load(log, 1, &blocks, 3, false);
    scheduler.end_step();
    let posted = served.drain();
    let loads: Vec<_> = posted[..3].iter().map(|m| (m.kind, m.op, m.from, m.count, m.flags)).collect();
    let expected = plans.iter().zip([(1, 4), (5, 4), (9, 1)]);
    let expected = expected.map(|(plan, (from, count))| (Kind::Load, plan.op, from, count, LOAD_ARRIVING));
    assert_eq!(loads, expected.collect::<Vec<_>>());
    assert_eq!(posted[3].kind, Kind::Release, "no load has ended the answer");
    assert_eq!((posted.len(), plans.iter().all(Plan::arriving)), (4, true));
    let named: Vec<u32> = plans.iter().flat_map(|plan| plan.blocks.iter().map(|block| block.0)).collect();
    assert_eq!(named, blocks);
    assert!(!scheduler.arriving(log) && scheduler.post_load(log, 0, &[1], 3, false).is_empty());
}
