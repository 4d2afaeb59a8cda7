//! Announcements to an engine: a reader of all of them knows all kept blocks, and their places.

use std::collections::BTreeSet;

use shm_protocol::announcement::Located;

use super::*;

/// A reader of the announcements to the engine of [`SCHEDULER`].
pub(crate) struct Follower {
    asked: u64,
    /// Numbers of known blocks in memory and on disks, as in [`hash`].
    known: [BTreeSet<u32>; 2],
    /// Numbers announced since the last BEGIN.
    since: [BTreeSet<u32>; 2],
    pub(crate) begun: u32,
}

impl Follower {
    pub(crate) fn new() -> Self {
        Self { asked: 1, known: Default::default(), since: Default::default(), begun: 0 }
    }

    /// Reads all announcements, `room` at a time. Returns their number.
    pub(crate) fn read(&mut self, core: &mut Core, room: usize) -> usize {
        let mut read = 0;
        loop {
            let told: Vec<Announcement> = core.announce(SCHEDULER, self.asked, room).collect();
            assert!(told.len() <= room);
            if told.is_empty() && !core.announces(SCHEDULER) {
                return read;
            }
            read += told.len();
            told.into_iter().for_each(|announcement| self.hear(announcement));
        }
    }

    fn hear(&mut self, announcement: Announcement) {
        match announcement {
            Announcement::Begin => (self.since, self.begun) = (Default::default(), self.begun + 1),
            Announcement::End => self.known = self.since.clone(),
            Announcement::Stored(located) => {
                for set in [&mut self.known, &mut self.since] {
                    set[located.medium as usize].insert(number(&located));
                }
            }
            Announcement::Removed(located) => {
                for set in [&mut self.known, &mut self.since] {
                    set[located.medium as usize].remove(&number(&located));
                }
            }
        }
    }

    /// Asserts: the known blocks are the kept ones. Returns the number of these in memory and on disks.
    #[track_caller]
    pub(crate) fn check(&self, core: &Core, numbers: std::ops::Range<u32>) -> [usize; 2] {
        let hashes: Vec<BlockHash> = numbers.clone().map(hash).collect();
        let found = core.locate(NAMESPACE, &hashes);
        let kept = |is: fn(&Location) -> bool| -> BTreeSet<u32> {
            numbers.clone().zip(&found).filter(|(_, at)| is(at)).map(|(number, _)| number).collect()
        };
        assert_eq!(self.known, [kept(|at| at.memory), kept(|at| at.below)]);
        [self.known[0].len(), self.known[1].len()]
    }
}

fn number(located: &Located) -> u32 {
    u32::from_le_bytes(located.hash.0[..4].try_into().unwrap())
}

/// Saves `keys` under a log of this number.
fn save(engine: &mut Harness, log: u32, keys: std::ops::Range<u32>) {
    let count = keys.len() as u32;
    engine.open(log, keys);
    engine.save(log, u64::from(log) + 100, 1, 1..count + 1);
    engine.copied();
}

#[test]
fn all_blocks_are_told_of_and_then_what_changes() {
    let (mut engine, mut follower) = (Harness::keeping(1, 3), Follower::new());
    assert_eq!(follower.read(&mut engine.core, 1), 5, "BEGIN, three blocks, END");
    assert_eq!(follower.check(&engine.core, 0..100), [3, 0]);
    save(&mut engine, 1, 10..15);
    assert_eq!(follower.read(&mut engine.core, 2), 5);
    assert_eq!(follower.check(&engine.core, 0..100), [8, 0]);
    let mut eviction = engine.core.begin_eviction(NAMESPACE).unwrap();
    while engine.core.evict(&mut eviction, &mut engine.out) {}
    engine.event(Event::Tick);
    assert_eq!(follower.read(&mut engine.core, 1000), 8);
    assert_eq!(follower.check(&engine.core, 0..100), [0, 0]);
    assert_eq!(follower.begun, 1);
}

#[test]
fn who_asks_again_is_told_of_all_again() {
    let (mut engine, mut follower) = (Harness::keeping(1, 3), Follower::new());
    follower.read(&mut engine.core, 1000);
    follower.asked += 1;
    assert_eq!(follower.read(&mut engine.core, 1000), 5);
    assert_eq!((follower.check(&engine.core, 0..100), follower.begun), ([3, 0], 2));
}

#[test]
fn more_changes_than_are_kept_for_an_engine_are_found_by_telling_all_anew() {
    let (mut engine, mut follower) = (Harness::keeping(1, 3), Follower::new());
    engine.core.announcer.limit(8);
    follower.read(&mut engine.core, 1000);
    save(&mut engine, 1, 10..18);
    assert_eq!(follower.read(&mut engine.core, 1), 8, "as many as are kept");
    save(&mut engine, 2, 20..29);
    follower.read(&mut engine.core, 1);
    assert_eq!((follower.check(&engine.core, 0..100), follower.begun), ([20, 0], 2));
}

#[test]
fn an_engine_is_told_of_the_blocks_of_its_namespace_alone() {
    let (mut engine, mut follower) = (Harness::keeping(1, 3), Follower::new());
    follower.read(&mut engine.core, 1000);
    engine.ask(SchedulerRequest::Salt { salt: [1; 16] });
    assert_eq!(follower.read(&mut engine.core, 1000), 2);
    assert_eq!(follower.known, <[BTreeSet<u32>; 2]>::default(), "no query finds the old ones");
    save(&mut engine, 1, 10..12);
    follower.read(&mut engine.core, 1000);
    assert_eq!(follower.known[0], BTreeSet::from([10, 11]));
    engine.disconnect([RANKS[0]]);
    assert_eq!(follower.read(&mut engine.core, 1000), 2);
    assert!(follower.known[0].is_empty(), "an engine without its rank is served nothing");
}
