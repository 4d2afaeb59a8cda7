//! A prompt larger than the pool, from a peer.

use shm_protocol::message::LOAD_STREAMED;

use super::worth::judged;
use super::*;

/// Two pools, and the blocks of one load.
const PROMPT: u32 = 2 * POOL_BLOCKS;
const PART: u32 = 8;

/// The loads of a stream: their first keys, the copied keys, and the number of refused loads.
#[derive(Debug, Default)]
struct Loads {
    parts: BTreeMap<u64, u32>,
    here: Vec<u32>,
    refused: u32,
}

impl Loads {
    /// Posts the loads of a streamed answer, and ends their copies.
    fn follow(&mut self, scene: &mut Scene, op: u64) {
        for action in std::mem::take(&mut scene.engine.out) {
            match action {
                Action::Answer { op: of, outcome, .. } if of == op && outcome.status == Status::Streamed => {
                    assert_eq!(outcome.value, PROMPT);
                    for first in (0..PROMPT).step_by(PART as usize) {
                        let load = scene.next_op();
                        self.parts.insert(load, first);
                        scene.engine.load(1, load, op, first..PROMPT.min(first + PART), LOAD_STREAMED);
                    }
                    scene.ask(SchedulerRequest::Release { log: 1 });
                }
                Action::Outcome { session, outcome, .. } if session == RANKS[0] => {
                    self.refused += u32::from(outcome.status.is_refusal());
                }
                Action::Copy { copy, load_op, pieces, .. } => {
                    let first = self.parts[&load_op];
                    self.here.extend(first..first + pieces.len() as u32);
                    scene.event(CoreEvent::Copied { copy, ok: true });
                }
                _ => {}
            }
        }
        scene.take_actions();
    }
}

/// The peer gives a block each 20 ms, `most` in all. Returns the ended loads, and the number of fetches.
fn play(scene: &mut Scene, most: usize) -> (Loads, usize) {
    scene.engine.fences(RANKS[0], 5, 4);
    let (op, keys) = (scene.next_op(), LogKeys::new(1, 0..PROMPT));
    scene.engine.open(1, 0..PROMPT);
    let query = Query { op, keys, arriving: true, awaits: false, last: false, streams: true };
    scene.ask(SchedulerRequest::Query(query));
    let (mut loads, mut wanted, mut fetches, mut given) = (Loads::default(), VecDeque::new(), 0, 0);
    for now_ms in (0..20_000).step_by(20) {
        scene.engine.now_ms += 20;
        for fetch in std::mem::take(&mut scene.fetches) {
            fetches += 1;
            wanted.extend((0..fetch.blocks.len() as u32).map(|index| (fetch.ticket, index)));
        }
        if given < most
            && let Some((ticket, index)) = wanted.pop_front()
        {
            given += 1;
            let end = JobEnd::Peer(FetchDone { ticket, index, result: Ok(1) });
            scene.event(CoreEvent::Transferred { tier: 0, ends: vec![end] });
        }
        if now_ms % 100 == 0 {
            scene.event(CoreEvent::Tick);
        }
        loads.follow(scene, op);
        if loads.here.len() as u32 + loads.refused * PART >= PROMPT {
            return (loads, fetches);
        }
    }
    panic!("not over within 20 s: {loads:?}");
}

#[test]
fn a_prompt_of_two_pools_comes_from_a_peer_by_few_fetches() {
    let mut scene = judged(0..PROMPT);
    let (loads, fetches) = play(&mut scene, usize::MAX);
    assert_eq!((loads.here, loads.refused), ((0..PROMPT).collect(), 0));
    assert!(fetches as u32 <= 4 * PROMPT / PART, "{fetches}");
    scene.assert_quiet_once_closed();
}

#[test]
fn a_peer_that_stops_half_way_refuses_the_rest() {
    let mut scene = judged(0..PROMPT);
    let (loads, _) = play(&mut scene, POOL_BLOCKS as usize);
    let whole = POOL_BLOCKS / PART * PART;
    assert_eq!((loads.here, loads.refused), ((0..whole).collect(), (PROMPT - whole) / PART));
}
