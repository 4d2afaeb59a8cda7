//! Many peers without a block to give, at once.

use super::*;

const PEERS: u32 = 16;
const KEYS: Range<u32> = 0..4;
const LATE: Result<u64, Fault> = Err(Fault::Timeout(Stage::Whole));

/// Sixteen peers with the same blocks. Every breaker lets each of them pass: none fails twice.
fn scene() -> Scene {
    let mut scene = Scene::new();
    (1..=PEERS).for_each(|peer| scene.join(PeerNumber(peer), KEYS));
    scene
}

impl Scene {
    /// Asks for the blocks under a new log, and returns the fetches.
    fn ask_peers(&mut self, log: u32) -> Vec<Fetch> {
        self.query(log, KEYS);
        self.fetches.drain(..).collect()
    }

    /// A request waits for its whole time; then its fetches end with `result`.
    fn wait_with(&mut self, log: u32, result: Result<u64, Fault>) {
        let fetches = self.ask_peers(log);
        assert!(!fetches.is_empty(), "the request waits");
        self.engine.now_ms += 2000;
        fetches.iter().for_each(|fetch| self.end_all(fetch, result));
        self.ask(SchedulerRequest::Close { log, way: 0 });
    }

    /// Returns the number of warnings since the last look.
    fn warnings(&mut self) -> usize {
        self.engine.take(taken!(Action::Warn(text) => text)).filter(|text| text.contains("wait for")).count()
    }
}

#[test]
fn no_request_waits_once_fetches_bring_nothing_whoever_is_asked() {
    let mut scene = scene();
    (1..=3).for_each(|log| scene.wait_with(log, LATE));
    assert_eq!((scene.stats().fruitless_fetches, scene.stats().paused, scene.warnings()), (3, true, 1));
    for log in 4..100 {
        assert!(scene.ask_peers(log).is_empty(), "a miss at once");
    }
    // One fetch tries after each pause, and each pause takes twice as long.
    for (log, pause_ms) in [(100, 1000), (200, 2000), (300, 4000)] {
        scene.tick(pause_ms - 1);
        assert!(scene.ask_peers(log).is_empty());
        scene.tick(1);
        let fetches = scene.ask_peers(log + 1);
        assert!(!fetches.is_empty() && scene.ask_peers(log + 2).is_empty(), "one tries");
        scene.engine.now_ms += 2000;
        fetches.iter().for_each(|fetch| scene.end_all(fetch, LATE));
    }
    assert_eq!(scene.warnings(), 0, "logged once");
    scene.tick(8000);
    let fetches = scene.ask_peers(400);
    fetches.iter().for_each(|fetch| scene.end_all(fetch, Ok(7)));
    assert_eq!((scene.stats().paused, scene.warnings()), (false, 1));
}

#[test]
fn a_block_of_any_peer_begins_the_count_again() {
    let mut scene = scene();
    for log in (0..20).step_by(2) {
        scene.wait_with(log + 1, LATE);
        // The blocks are here now: the next request asks for others.
        let keys = 10 * (log + 1)..10 * (log + 1) + 1;
        scene.join(PeerNumber(PEERS + 1 + log), keys.clone());
        scene.query(log + 2, keys);
        let fetch = scene.fetch();
        scene.end_all(&fetch, Ok(7));
    }
    assert!(!scene.stats().paused);
}

/// Each peer gives all blocks but the last in time: its strikes are too far apart for its breaker.
#[test]
fn slow_peers_are_no_more_waited_for_than_silent_ones() {
    let mut scene = scene();
    for log in 1..=3 {
        let keys = 4 * log..4 * log + 4;
        (1..=PEERS).for_each(|peer| scene.join(PeerNumber(100 * log + peer), keys.clone()));
        scene.query(log, keys);
        let fetches: Vec<Fetch> = scene.fetches.drain(..).collect();
        assert!(!fetches.is_empty(), "the request waits");
        scene.engine.now_ms += 2000;
        for fetch in &fetches {
            let last = fetch.blocks.len() - 1;
            scene.end(fetch, 0..last, Ok(7));
            scene.end(fetch, last..last + 1, LATE);
        }
    }
    assert_eq!((scene.stats().fruitless_fetches, scene.stats().paused), (3, true));
}

#[test]
fn who_refuses_at_once_costs_no_wait() {
    let mut scene = scene();
    for log in 1..=4 {
        let fetches = scene.ask_peers(log);
        fetches.iter().for_each(|fetch| scene.end_all(fetch, Err(Fault::Refused(Refusal::NotMember))));
        scene.fetches.clear();
    }
    assert_eq!((scene.stats().fruitless_fetches, scene.stats().paused), (0, false));
}
