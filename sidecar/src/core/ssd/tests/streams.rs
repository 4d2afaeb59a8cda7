//! Prompts larger than the pool: they go on to their engine through a window of slots.

use std::collections::BTreeMap as Found;

use rustix::io::Errno;
use shm_protocol::message::LOAD_STREAMED;

use super::worth::{TICK_MS, judged};
use super::*;

/// A prompt of three pools, and the blocks of one load.
const PROMPT: u32 = 3 * DRAM_BLOCKS;
const PART: u32 = 4;
/// The limit of blocks read ahead for a stream: half of the pool.
const WINDOW: usize = DRAM_BLOCKS as usize / 2;
/// Milliseconds of a block in the engine, and at the disk.
const COMPUTE_MS: u32 = 60;
const READ_MS: u64 = 20;

/// A way to end a stream.
type Leave<'a> = &'a dyn Fn(&mut Scene);

/// The course of a stream.
#[derive(Debug, Default)]
struct Streamed {
    /// The answer's hits; 0: it was not streamed.
    hits: u32,
    /// The answer, if it was another one.
    plain: Option<(Status, u32)>,
    /// Loads by operation, with the first key of each.
    loads: Found<u64, u32>,
    /// Blocks in the engine's memory, in the order of their copies.
    here: Vec<u32>,
    /// First keys of the refused loads.
    refused: Vec<u32>,
    /// When the last load ended.
    ms: u64,
    /// The most blocks read for its loads at once.
    window: usize,
}

impl Streamed {
    fn is_over(&self) -> bool {
        self.plain.is_some()
            || self.hits > 0 && self.here.len() + self.refused.len() * PART as usize >= self.hits as usize
    }
}

fn ask(scene: &mut Scene, log: u32, count: u32, streams: bool) -> u64 {
    // The step of its loads has begun.
    scene.engine.fences(RANKS[0], 5, 4);
    scene.engine.open(log, 0..count);
    let (op, keys) = (scene.next_op(), LogKeys::new(log, 0..count));
    let query = Query { op, keys, arriving: streams, awaits: false, last: false, streams };
    scene.ask(SchedulerRequest::Query(query));
    op
}

/// Handles the actions so far: posts the loads of a streamed answer, and ends copies.
fn follow(scene: &mut Scene, (log, op): (u32, u64), seen: &mut Streamed) {
    for action in std::mem::take(&mut scene.engine.out) {
        match action {
            Action::Answer { op: of, outcome, refs, .. } if of == op => match outcome.status {
                Status::Pending => {}
                Status::Streamed => {
                    seen.hits = outcome.value;
                    assert!(refs.iter().all(|slot| *slot == SlotRef { offset: 0, generation: 0 }));
                    for first in (0..seen.hits).step_by(PART as usize) {
                        let load = scene.next_op();
                        seen.loads.insert(load, first);
                        let part = first..seen.hits.min(first + PART);
                        scene.engine.load(log, load, op, part, LOAD_STREAMED);
                    }
                    scene.ask(SchedulerRequest::Release { log });
                }
                status => seen.plain = Some((status, outcome.value)),
            },
            Action::Outcome { session, op, outcome }
                if session == RANKS[0] && outcome.status.is_refusal() =>
            {
                seen.refused.extend(seen.loads.get(&op));
            }
            Action::Copy { copy, load_op, pieces, .. } => {
                if let Some(first) = seen.loads.get(&load_op) {
                    for (key, piece) in (*first..).zip(&pieces) {
                        assert_eq!(slot_of(scene, key), Some(piece.offset), "the bytes of key {key}");
                        seen.here.push(key);
                    }
                }
                scene.event(CoreEvent::Copied { copy, ok: true });
            }
            _ => {}
        }
    }
    scene.take_jobs();
}

/// The place of a block in the pool.
fn slot_of(scene: &mut Scene, key: u32) -> Option<u64> {
    let base = &mut scene.engine.core.base;
    let key = base.engines[SCHEDULER].binding()?.block_key(&hash(key));
    let cx = &mut base.cx;
    let slot = cx.dram.hold(&key, HolderId::NOBODY)?;
    cx.dram.unhold(slot, HolderId::NOBODY);
    Some(slot.offset)
}

/// The disk ends a read each `every_ms(now)`, 0: none, and the read number `bad` with a fault. Follows a
/// query until all of its blocks were loaded or refused.
fn play(
    scene: &mut Scene,
    query: (u32, u64),
    every_ms: impl Fn(u64) -> u64,
    bad: usize,
    seen: &mut Streamed,
) {
    let begun_ms = scene.engine.now_ms;
    let (mut reads, mut ended, mut given_ms) = (VecDeque::new(), 0, 0);
    for now_ms in 0..40_000 {
        scene.engine.now_ms = begun_ms + now_ms;
        reads.extend(scene.reads());
        if every_ms(now_ms) > 0 && now_ms >= given_ms + every_ms(now_ms) {
            given_ms = now_ms;
            if let Some(job) = reads.pop_front() {
                let fault = Err(JobFault::Io(Errno::IO));
                scene.end(job, if ended == bad { fault } else { Ok(()) });
                ended += 1;
            }
        }
        if now_ms % TICK_MS == 0 {
            scene.event(CoreEvent::Tick);
        }
        scene.end_writes();
        follow(scene, query, seen);
        seen.window = seen.window.max(scene.engine.core.transfers.blocks_read(SCHEDULER));
        if seen.is_over() {
            seen.ms = now_ms;
            scene.jobs.extend(reads);
            return;
        }
    }
    panic!("not over within 40 s: {seen:?}");
}

impl Scene {
    /// Ends the writes among the jobs.
    fn end_writes(&mut self) {
        let reads = self.reads();
        self.end_all();
        self.jobs.extend(reads);
    }

    fn assert_nothing_held(&mut self) {
        self.end_all();
        let tier = self.engine.core.base.cx.dram.stats();
        assert_eq!((tier.bytes_leased, tier.filling, self.leases()), (0, 0, 0));
        assert!(!self.engine.core.transfers.any_load() && !self.engine.core.busy());
        assert!(self.engine.core.queries.streaming().is_empty());
        self.engine.core.audit_ledger();
    }
}

/// A prompt of three pools on the disk, and its engine.
fn large() -> Scene {
    judged(PROMPT, Some(COMPUTE_MS), Some(30_000))
}

fn streamed(scene: &mut Scene, every_ms: impl Fn(u64) -> u64, bad: usize) -> Streamed {
    let op = ask(scene, 1, PROMPT, true);
    let mut seen = Streamed::default();
    play(scene, (1, op), every_ms, bad, &mut seen);
    seen
}

#[test]
fn a_prompt_of_three_pools_comes_through_half_of_one() {
    let mut scene = large();
    let seen = streamed(&mut scene, |_| READ_MS, usize::MAX);
    assert_eq!((seen.hits, seen.refused.len()), (PROMPT, 0));
    assert_eq!(seen.here, (0..PROMPT).collect::<Vec<_>>(), "in their order, each once");
    assert!(seen.window > PART as usize, "it reads ahead: {}", seen.window);
    assert!(seen.ms <= u64::from(PROMPT) * READ_MS + 4 * TICK_MS, "no pause: {} ms", seen.ms);
    let stats = scene.engine.core.stats();
    assert_eq!((stats.streamed_answers, stats.early_answers, stats.load_failures), (1, 0, 0));
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    scene.assert_nothing_held();
}

#[test]
fn an_engine_within_a_long_step_holds_half_of_the_pool_and_no_load_is_refused() {
    let mut scene = large();
    let op = ask(&mut scene, 1, PROMPT, true);
    scene.engine.fences(RANKS[0], 4, 3);
    let (mut seen, begun_ms) = (Streamed::default(), scene.engine.now_ms);
    for now_ms in (0..8_000).step_by(READ_MS as usize) {
        scene.engine.now_ms = begun_ms + now_ms;
        let mut reads = VecDeque::from(scene.reads());
        let job = reads.pop_front();
        scene.jobs.extend(reads);
        job.into_iter().for_each(|job| scene.end(job, Ok(())));
        if now_ms % TICK_MS == 0 {
            scene.event(CoreEvent::Tick);
        }
        scene.end_writes();
        follow(&mut scene, (1, op), &mut seen);
        seen.window = seen.window.max(scene.engine.core.transfers.blocks_read(SCHEDULER));
    }
    assert_eq!((seen.window, seen.here.len(), seen.refused.len()), (WINDOW, 0, 0));
    scene.engine.fences(RANKS[0], 5, 4);
    play(&mut scene, (1, op), |_| READ_MS, usize::MAX, &mut seen);
    assert_eq!((seen.window, seen.here), (WINDOW, (0..PROMPT).collect()));
}

#[test]
fn the_blocks_of_a_stream_leave_the_pool_to_others() {
    let mut scene = large();
    // Others in use, in a quarter of the pool.
    scene.write(9000..9007);
    scene.engine.out.clear();
    streamed(&mut scene, |_| READ_MS, usize::MAX);
    let kept = (9000..9007).filter(|key| slot_of(&mut scene, *key).is_some()).count();
    assert_eq!(kept, 7);
    assert!(slot_of(&mut scene, PROMPT - 1).is_some(), "the parent of the engine's next block");
    let of_stream = (0..PROMPT).filter(|key| slot_of(&mut scene, *key).is_some()).count();
    assert!(of_stream <= WINDOW, "{of_stream}");
}

#[test]
fn what_lies_in_memory_is_loaded_from_there_even_if_it_fills_the_pool() {
    let mut scene = large();
    for from in (0..DRAM_BLOCKS).step_by(7) {
        scene.write(from..from + 7);
    }
    scene.engine.out.clear();
    let resident = (0..PROMPT).filter(|key| slot_of(&mut scene, *key).is_some()).count();
    assert!(resident >= DRAM_BLOCKS as usize - 1, "{resident}");
    let seen = streamed(&mut scene, |_| READ_MS, usize::MAX);
    assert_eq!(seen.here, (0..PROMPT).collect::<Vec<_>>());
    assert!(seen.ms <= (u64::from(PROMPT) - resident as u64) * READ_MS + 4 * TICK_MS, "{} ms", seen.ms);
}

#[test]
fn one_bad_read_half_way_refuses_all_loads_behind_it() {
    let mut scene = large();
    let seen = streamed(&mut scene, |_| READ_MS, 40);
    assert_eq!(seen.here, (0..40).collect::<Vec<_>>());
    assert_eq!(seen.refused, (40..PROMPT).step_by(PART as usize).collect::<Vec<_>>(), "all behind it");
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    scene.assert_nothing_held();
}

#[test]
fn a_disk_that_becomes_slower_than_its_engine_or_stops_ends_a_stream() {
    for (late_ms, longest_ms) in [(200, 1_500), (0, 2_200)] {
        let mut scene = large();
        let seen = streamed(&mut scene, |now_ms| if now_ms < 1_000 { READ_MS } else { late_ms }, usize::MAX);
        assert!((40..60).contains(&seen.here.len()), "{}", seen.here.len());
        assert!((1_000..1_000 + longest_ms).contains(&seen.ms), "{} ms", seen.ms);
        let stats = scene.engine.core.stats();
        assert_eq!(stats.waits_slower + stats.waits_timed_out, 1);
        scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
        scene.assert_nothing_held();
    }
}

#[test]
fn no_stream_lasts_longer_than_its_engine_says() {
    let mut scene = large();
    scene.engine.core.base.engines.load_wait_mut(SCHEDULER).most_ms = 1_000;
    let seen = streamed(&mut scene, |_| READ_MS, usize::MAX);
    assert!((1_000..1_200).contains(&seen.ms), "{} ms", seen.ms);
    assert!((45..60).contains(&seen.here.len()), "{}", seen.here.len());
}

#[test]
fn nothing_beyond_the_pool_is_promised_to_an_engine_whose_loads_must_not_fail() {
    let mut scene = large();
    let op = ask(&mut scene, 1, PROMPT, false);
    let mut seen = Streamed::default();
    play(&mut scene, (1, op), |_| READ_MS, usize::MAX, &mut seen);
    let (status, hits) = seen.plain.unwrap();
    assert_eq!(status, Status::Ok);
    assert!((DRAM_BLOCKS / 2..=DRAM_BLOCKS).contains(&hits), "{hits}");
    assert_eq!(scene.engine.core.stats().streamed_answers, 0);
}

#[test]
fn a_prompt_that_the_pool_holds_and_one_of_an_engine_of_unknown_rate_are_not_streamed() {
    let mut scene = judged(20, Some(COMPUTE_MS), Some(30_000));
    let op = ask(&mut scene, 1, 20, true);
    let mut seen = Streamed::default();
    play(&mut scene, (1, op), |_| READ_MS, usize::MAX, &mut seen);
    assert_eq!(seen.plain.map(|(_, hits)| hits), Some(20));
    let mut scene = judged(PROMPT, None, Some(30_000));
    let op = ask(&mut scene, 1, PROMPT, true);
    let mut seen = Streamed::default();
    play(&mut scene, (1, op), |_| READ_MS, usize::MAX, &mut seen);
    assert_eq!((seen.hits, scene.engine.core.stats().streamed_answers), (0, 0));
}

/// A stream with a third of its blocks loaded.
fn midway() -> (Scene, Streamed) {
    let mut scene = large();
    let op = ask(&mut scene, 1, PROMPT, true);
    let (mut seen, mut given) = (Streamed::default(), 0);
    while seen.here.len() < DRAM_BLOCKS as usize {
        scene.engine.now_ms += READ_MS;
        let mut reads = VecDeque::from(scene.reads());
        let job = reads.pop_front().expect("it reads ahead");
        scene.jobs.extend(reads);
        scene.end(job, Ok(()));
        given += 1;
        assert!(given < PROMPT);
        scene.end_writes();
        follow(&mut scene, (1, op), &mut seen);
    }
    assert!(seen.refused.is_empty());
    (scene, seen)
}

#[test]
fn whoever_goes_leaves_nothing_of_a_stream() {
    let close = |scene: &mut Scene| scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    let hang_up = |scene: &mut Scene| scene.event(CoreEvent::Disconnected { session: SCHEDULER });
    let lose_rank = |scene: &mut Scene| scene.event(CoreEvent::Disconnected { session: RANKS[0] });
    let salt = |scene: &mut Scene| scene.ask(SchedulerRequest::Salt { salt: [9; 16] });
    let drain = |scene: &mut Scene| scene.event(CoreEvent::Drain);
    // As when the engine is barred.
    let bar = |scene: &mut Scene| {
        let core = &mut scene.engine.core;
        core.queries.end_leases(SCHEDULER, &mut core.base.cx);
        scene.event(CoreEvent::Tick);
    };
    let leave: [(&str, Leave<'_>, bool); 6] = [
        ("bar", &bar, true),
        ("close", &close, true),
        ("hang-up", &hang_up, false),
        ("rank", &lose_rank, false),
        ("salt", &salt, true),
        ("drain", &drain, true),
    ];
    for (what, leave, tells) in leave {
        let (mut scene, mut seen) = midway();
        leave(&mut scene);
        follow(&mut scene, (1, 0), &mut seen);
        let refused = seen.refused.len();
        scene.end_all();
        follow(&mut scene, (1, 0), &mut seen);
        let ended = seen.refused.len() + seen.here.len() / PART as usize;
        // A load with all of its blocks sent for goes on.
        let (all, part) = (seen.loads.len(), usize::from(what == "bar"));
        assert_eq!((refused + part, ended), if tells { (all - 7, all) } else { (part, 7) }, "{what}");
        if scene.engine.core.base.engines.has_scheduler(SCHEDULER) && what != "close" {
            scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
        }
        scene.assert_nothing_held();
    }
}

#[test]
fn a_second_large_prompt_waits_for_the_end_of_the_first() {
    let mut scene = large();
    let [first, second] = [1, 2].map(|log| ask(&mut scene, log, PROMPT, true));
    let mut seen = Streamed::default();
    while seen.hits == 0 {
        let mut reads = VecDeque::from(scene.reads());
        let job = reads.pop_front().unwrap();
        scene.jobs.extend(reads);
        scene.end(job, Ok(()));
        follow(&mut scene, (1, first), &mut seen);
    }
    play(&mut scene, (1, first), |_| READ_MS, usize::MAX, &mut seen);
    assert_eq!((seen.here.len(), seen.refused.len()), (PROMPT as usize, 0), "it is not disturbed");
    assert_eq!(scene.engine.core.stats().streamed_answers, 1);
    let mut seen = Streamed::default();
    play(&mut scene, (2, second), |_| READ_MS, usize::MAX, &mut seen);
    assert_eq!((seen.hits, seen.here.len()), (PROMPT, PROMPT as usize));
    (1..3).for_each(|log| scene.ask(SchedulerRequest::Close { log, way: 0 }));
    scene.assert_nothing_held();
}

#[test]
fn what_came_in_a_stream_is_not_saved_again() {
    let mut scene = large();
    assert_eq!(streamed(&mut scene, |_| READ_MS, usize::MAX).hits, PROMPT);
    scene.engine.open(2, 0..PROMPT);
    scene.engine.out.clear();
    // Each in its own step.
    for (log, copied) in [(1, false), (2, true)] {
        let op = scene.next_op();
        scene.engine.post_save(log, op, 0..PROMPT, false);
        scene.engine.fences(RANKS[0], op, op);
        assert_eq!(!scene.engine.copies().is_empty(), copied, "log {log}");
    }
}

#[test]
fn a_load_that_a_step_waits_for_gets_no_part_of_a_stream() {
    let mut scene = large();
    let op = ask(&mut scene, 1, PROMPT, true);
    let reads = scene.reads();
    scene.end(reads[0], Ok(()));
    assert_eq!(scene.answers().last(), Some(&(op, Status::Streamed, PROMPT)));
    for (load, range, flags) in [(900, 0..4, LOAD_BY_ENGINE), (901, PROMPT - 2..PROMPT + 1, 0)] {
        scene.engine.load(1, load, op, range, flags);
        assert_eq!(scene.answers(), [(load, Status::LeaseUnknown, 0)]);
    }
}
