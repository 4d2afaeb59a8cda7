//! Peers that announce blocks and have none.

use super::*;

const LIARS: u32 = 8;

/// Eight peers announce the blocks of peer B and more; only B has them.
fn scene() -> Scene {
    let mut scene = Scene::new();
    scene.join(B, 0..100);
    (0..LIARS).for_each(|liar| scene.join(PeerNumber(10 + liar), 0..200));
    scene
}

impl Scene {
    /// Asks for blocks. Returns true if all came, and the number of fetches from the eight peers.
    fn ask_for(&mut self, keys: Range<u32>) -> (bool, u64) {
        let op = self.query(keys.start, keys.clone());
        let mut liars_asked = 0;
        while let Some(fetch) = self.fetches.pop_front() {
            let result = if fetch.peer == B { Ok(1) } else { Err(Fault::Absent) };
            liars_asked += u64::from(result.is_err());
            self.end_all(&fetch, result);
        }
        self.ask(SchedulerRequest::Close { log: keys.start, way: 0 });
        let answer = self.answers().into_iter().rfind(|answer| answer.0 == op);
        (answer == Some((op, Status::Ok, keys.len() as u32)), liars_asked)
    }
}

#[test]
fn eight_liars_do_not_hide_the_peer_that_has_the_blocks() {
    let mut scene = scene();
    let found = (0..20).filter(|key| scene.ask_for(*key..key + 1).0).count();
    assert!(found >= 18, "{found} of 20: three peers are asked for a block");
    // Long runs are not spread over the eight peers, and cost no second round.
    assert_eq!(scene.ask_for(20..44), (true, 0));
}

#[test]
fn a_liar_is_asked_again_later() {
    let mut scene = scene();
    (0..20).for_each(|key| _ = scene.ask_for(key..key + 1));
    assert_eq!(scene.ask_for(20..21).1, 0);
    scene.tick(60_000);
    let liars_asked: u64 = (30..40).map(|key| scene.ask_for(key..key + 1).1).sum();
    assert!((1..=u64::from(LIARS)).contains(&liars_asked), "{liars_asked} times");
}
