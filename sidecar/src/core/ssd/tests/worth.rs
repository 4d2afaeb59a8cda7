//! Queries waiting for a disk, as long as it brings blocks sooner than their engine computes them.

use std::collections::BTreeMap as Facts;

use shm_protocol::handshake::{Hello, Role};
use shm_protocol::message::LOAD_BY_ENGINE;
use shm_protocol::prefill::PrefillRate;

use super::*;
use crate::core::tests::{RUN, changed, hello, rank_hello_of};

/// Tokens of a block.
const TOKENS: u32 = 100;
/// Milliseconds between two looks.
pub(super) const TICK_MS: u64 = 100;

/// An engine with so many milliseconds for a block, and a limit for the waits of its queries. The blocks 0..`count` are on the disk.
pub(super) fn judged(count: u32, block_ms: Option<u32>, wait_max_ms: Option<u32>) -> Scene {
    let mut engine = Harness::of(core(SsdAdmission::All));
    let facts = Facts::from([("block_tokens".to_owned(), TOKENS.to_string())]);
    let rank = changed(rank_hello_of(1, 0, BLOCK_BYTES), |rank| rank.facts = facts);
    engine.connect(RANKS[0], rank);
    engine.connect(SCHEDULER, Hello { wait_max_ms, ..hello(1, Role::Scheduler { run: RUN }) });
    let mut scene = Scene { engine, jobs: VecDeque::new(), op: 0, refs: BTreeMap::new() };
    let (segment, sequence, blocks) = (3, 0, Vec::new());
    let found =
        Recovered { device: 0, segment, sequence, blocks, unreadable: false, segments_read: 64, last: true };
    scene.event(CoreEvent::Transferred { tier: 0, ends: vec![JobEnd::Recovered(found)] });
    scene.engine.join();
    scene.save(5000..5001);
    scene.save(5000..5001);
    scene.end_all();
    for first in (0..count).step_by(7) {
        scene.write(first..count.min(first + 7));
    }
    scene.flood();
    scene.engine.out.clear();
    let rate = block_ms.map(|ms| PrefillRate::new(ms as f32 * 1e6 / TOKENS as f32, 0.0).unwrap());
    scene.engine.core.note_prefill(SCHEDULER, rate);
    scene
}

/// The disk gives a block each `every_ms(now)`; 0: none. Returns the time of the answer, and its blocks.
fn play(scene: &mut Scene, op: u64, every_ms: impl Fn(u64) -> u64) -> (u64, u32) {
    let begun_ms = scene.engine.now_ms;
    let mut reads = VecDeque::new();
    let mut given_ms = 0;
    for now_ms in 0..40_000 {
        scene.engine.now_ms = begun_ms + now_ms;
        reads.extend(scene.reads());
        if every_ms(now_ms) > 0 && now_ms >= given_ms + every_ms(now_ms) {
            given_ms = now_ms;
            if let Some(job) = reads.pop_front() {
                scene.end(job, Ok(()));
            }
        }
        if now_ms % TICK_MS == 0 {
            scene.event(CoreEvent::Tick);
        }
        let answers = scene.answers();
        if let Some((_, _, hits)) = answers.iter().find(|(of, status, _)| *of == op && *status == Status::Ok)
        {
            scene.jobs.extend(reads);
            return (now_ms, *hits);
        }
    }
    panic!("no answer within 40 s");
}

#[test]
fn a_run_longer_than_comes_at_once_and_than_2_s_is_waited_for_while_it_comes_sooner() {
    let mut scene = judged(20, Some(500), Some(30_000));
    let op = scene.query(1, 0..24);
    let (ms, hits) = play(&mut scene, op, |_| 300);
    assert_eq!(hits, 20, "all that the disk has");
    assert!((6_000..6_400).contains(&ms), "20 blocks take 6 s, not {ms} ms");
    scene.engine.load(1, 900, op, 0..20, LOAD_BY_ENGINE);
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    assert_eq!(scene.leases(), 1, "the load's: nothing else is held");
}

#[test]
fn a_disk_that_is_slower_than_its_engine_is_waited_for_until_that_is_known() {
    let mut scene = judged(20, Some(200), Some(30_000));
    let op = scene.query(1, 0..20);
    let (ms, hits) = play(&mut scene, op, |_| 400);
    assert!(ms <= 800 && hits <= 2, "{hits} after {ms} ms");
    assert_eq!(scene.engine.core.stats().waits_slower, 1);
    // A factor makes loading the better way.
    let mut scene = judged(20, Some(200), Some(30_000));
    let wait = scene.engine.core.base.engines.load_wait_mut(SCHEDULER);
    wait.preference = 3.0;
    let op = scene.query(1, 0..20);
    assert_eq!(play(&mut scene, op, |_| 400).1, 20);
}

#[test]
fn a_disk_that_becomes_slow_and_one_that_stops_end_a_wait() {
    for (after_ms, longest_ms) in [(2_000, 1_200), (0, 2_000)] {
        let mut scene = judged(20, Some(500), Some(30_000));
        let op = scene.query(1, 0..20);
        let (ms, hits) = play(&mut scene, op, |now_ms| if now_ms < 2_000 { 250 } else { after_ms });
        assert!((7..=8).contains(&hits), "{hits}");
        assert!((2_000..=2_000 + longest_ms).contains(&ms), "{ms}");
    }
}

#[test]
fn an_engine_of_unknown_rate_waits_for_2_s_and_no_engine_longer_than_it_says() {
    for (block_ms, wait_max_ms, until_ms) in
        [(None, Some(30_000), 2_000), (Some(60_000), None, 2_000), (Some(60_000), Some(4_000), 4_000)]
    {
        let mut scene = judged(20, block_ms, wait_max_ms);
        let op = scene.query(1, 0..20);
        let (ms, hits) = play(&mut scene, op, |_| 300);
        assert_eq!(ms, until_ms, "{block_ms:?} {wait_max_ms:?}");
        assert!(hits < 20);
    }
}

#[test]
fn what_lies_in_memory_stays_leased_while_the_rest_comes() {
    let mut scene = judged(9, Some(10_000), Some(30_000));
    scene.write(0..2);
    scene.engine.out.clear();
    let op = scene.query(1, 0..9);
    let (ms, hits) = play(&mut scene, op, |_| 1_700);
    assert!(ms > 11_000, "longer than the lease's 10 s: {ms}");
    assert_eq!((hits, scene.refs.len()), (9, 9));
}
