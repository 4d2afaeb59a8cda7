//! Evictions, admission to a full log, and the segments of new, reused and moved blocks.

use super::*;
use crate::dram::{BlockAccount, Ending, HolderId};

impl World {
    /// Returns the numbers of the blocks with room.
    fn kept(&self, numbers: std::ops::Range<u64>) -> Vec<u64> {
        let has_room = |id: u32| self.log.table.get(id).state.is_listed();
        numbers.filter(|number| self.log.find_key(&key(number * 6)).is_some_and(has_room)).collect()
    }
}

#[test]
fn what_dram_gave_up_first_goes_first_and_other_sorts_stay() {
    let mut world = World::new(1, 1);
    let (dram, _) = below(&mut world);
    for number in 0..40 {
        world.write_with_room(number * 6, dram.judge());
        let sort = if number % 10 == 0 { Sort::of_turn(0, 3) } else { Sort::OPEN };
        world.log.leave_dram(&key(number * 6), Standing::new(sort, 0));
    }
    let kept = world.kept(0..40);
    let low: Vec<u64> = kept.iter().copied().filter(|number| number % 10 != 0).collect();
    assert_eq!(kept.iter().filter(|number| *number % 10 == 0).count(), 4, "{kept:?}");
    let first = low[0];
    let youngest: Vec<u64> = (first..40).filter(|number| number % 10 != 0).collect();
    assert!(first > 10 && low == youngest, "{kept:?}");
}

#[test]
fn the_oldest_copies_go_before_what_dram_lacks_and_copies_that_fit_go_for_nothing() {
    let mut world = World::new(2, 1);
    let (dram, _) = below(&mut world);
    world.log.copies_max = Some(4);
    (0..4).for_each(|number| world.write_with_room(number * 6, dram.judge()));
    let more = (4..100).take_while(|number| {
        let fits = world.log.has_room_for_copy(0, UNIT);
        if fits {
            world.write_with_room(number * 6, dram.judge());
        }
        fits
    });
    let copies = 4 + more.count() as u64;
    assert!(!world.log.has_room_for_copy(0, UNIT) && world.kept(0..100).len() as u64 == copies);
    world.write_with_room(600, dram.judge());
    assert_eq!(world.kept(0..100), (1..copies).collect::<Vec<_>>(), "the oldest copy made room");
    assert!(world.log.came(&key(6)));
    world.log.copies_max = None;
    assert!(world.log.has_room_for_copy(0, UNIT), "all copies have a place");
}

#[test]
fn an_evicted_block_is_found_until_its_segment_is_reclaimed_and_gets_room_without_a_write() {
    let mut world = World::new(3, 1);
    let (dram, _) = below(&mut world);
    let written = |world: &World| world.log.log_stats().devices[0].written_blocks_total;
    let mut number = 0;
    while world.kept(0..number).len() as u64 == number {
        world.write_with_room(number * 6, dram.judge());
        world.log.leave_dram(&key(number * 6), Standing::new(Sort::OPEN, 0));
        number += 1;
    }
    assert_eq!(world.log.probe(0, 0, &[key(0).hash]), 1, "evicted, and still there");
    assert!(!world.log.came(&key(0)), "it has no room");
    let (before, slot) = (written(&world), world.slot());
    assert!(world.log.make_room(&Leaving::copy(key(0), UNIT), dram.judge()));
    let again = world.log.write_block(&Leaving::copy(key(0), UNIT), digest(0), slot);
    assert_eq!((again, written(&world)), (Err(LogRefusal::Present), before));
    assert_eq!(world.kept(0..number), std::iter::once(0).chain(2..number).collect::<Vec<_>>());
    while world.log.keeps(&key(6)).is_some() {
        world.write_with_room(number * 6, dram.judge());
        number += 1;
        assert!(number < 200, "its segment is never reclaimed");
    }
    assert!(world.log.log_stats().devices[0].dropped_blocks_total > 0);
}

#[test]
fn a_block_worth_less_than_those_on_the_disk_is_not_written() {
    let mut world = World::new(4, 1);
    let (mut dram, _) = below(&mut world);
    // DRAM learns from requests once it has a block.
    let slot = dram.begin_fill(key(0), UNIT, BlockAccount::default()).unwrap();
    assert!(dram.commit(slot));
    for chain in 0..64 {
        let hashes: Vec<_> = (0..512).map(|number| BlockHash::from_words([chain, number, 1, 1])).collect();
        dram.end_chain(HolderId::NOBODY, 0, &hashes, Ending::default());
    }
    let judge = dram.judge();
    let at = |tick| Standing::new(Sort::OPEN, tick);
    let worse = |one, other| if judge.is_worth_less(at(one), at(other)) { one } else { other };
    let least = at((0..4096).reduce(worse).unwrap());
    let most = at((0..4096).reduce(|one, other| if worse(one, other) == one { other } else { one }).unwrap());
    for number in 0..100 {
        world.write_with_room(number * 6, judge);
        world.log.leave_dram(&key(number * 6), most);
    }
    let kept = world.kept(0..100);
    let worthless = Leaving { standing: least, ..Leaving::copy(key(6_000), UNIT) };
    assert!(!world.log.make_room(&worthless, judge) && world.kept(0..100) == kept);
    assert!(world.log.make_room(&Leaving { standing: most, ..worthless }, judge));
}

#[test]
fn new_and_reused_and_moved_blocks_lie_in_segments_of_their_own() {
    let mut world = World::with_segments(7, 1, STREAMED_MIN);
    let (dram, _) = below(&mut world);
    let reused = Standing::new(Sort::of_turn(0, 2), 0);
    // The sequences of the segments of each stream.
    let mut sequences: [HashSet<u64>; 3] = Default::default();
    for number in 0..600 {
        let is_reused = number % 2 == 1;
        let standing = if is_reused { reused } else { Standing::ABOVE };
        let (block, slot) = (Leaving { standing, ..Leaving::copy(key(number * 6), UNIT) }, world.slot());
        assert!(world.log.make_room(&block, dram.judge()));
        while world.log.write_block(&block, digest(0), slot) == Err(LogRefusal::Busy) {
            world.end_jobs();
            world.tick();
        }
        world.slots.insert(slot.offset, block.key);
        world.take_jobs();
        while !world.jobs.is_empty() {
            for job in &world.jobs {
                match job.work {
                    DeviceWork::Write { sequence, .. } => sequences[usize::from(is_reused)].insert(sequence),
                    DeviceWork::Move { to_sequence, .. } => sequences[2].insert(to_sequence),
                    _ => false,
                };
            }
            world.carry_out();
        }
        world.log.leave_dram(&block.key, reused);
        // Half of the blocks go early, so segments have few blocks to move.
        if number % 4 < 2 {
            world.log.remove(&block.key);
        }
    }
    let [new, reused, moved] = sequences;
    assert!(new.len() > 10 && reused.len() > 10 && !moved.is_empty());
    assert!(new.is_disjoint(&reused) && new.is_disjoint(&moved) && reused.is_disjoint(&moved));
}

#[test]
fn blocks_of_a_quota_make_room_for_its_next_ones() {
    let mut world = World::new(5, 1);
    let (dram, quota) = below(&mut world);
    world.log.learn(0, digest(0), Some(quota));
    let other = |number: u64| number * 6 + 1;
    for number in 0..4 {
        world.write_with_room(other(number), dram.judge());
        world.log.leave_dram(&key(other(number)), Standing::new(Sort::OPEN, 0));
    }
    for number in 0..20 {
        world.write_with_room(number * 6, dram.judge());
        world.log.leave_dram(&key(number * 6), Standing::new(Sort::of_turn(0, 3), 0));
    }
    let kept = world.kept(0..20);
    assert!((1..=6).contains(&kept.len()) && kept.contains(&19), "{kept:?}");
    let evicted = |number: u64| {
        world.log.find_key(&key(other(number))).is_none_or(|id| !world.log.table.get(id).state.is_listed())
    };
    assert!(!(0..4).any(evicted), "none of the others went");
}

#[test]
fn a_segment_is_used_again_once_all_its_evicted_blocks_are_forgotten() {
    let mut config = config(1, SEGMENTS, 1);
    // More blocks than one call of reclamation forgets.
    config.devices[0].segment_bytes = 256 * UNIT;
    let mut world = World::new(8, 1);
    world.log = SegmentLog::new(LogConfig { write_bytes_max: u64::MAX, ..config });
    world.recover();
    let (dram, _) = below(&mut world);
    let mut begun = 0;
    for number in 0..2_000 {
        let (block, slot) = (Leaving::copy(key(number * 6), UNIT), world.slot());
        assert!(world.log.make_room(&block, dram.judge()));
        let mut is_taken = false;
        while !is_taken {
            is_taken = world.log.write_block(&block, digest(0), slot).is_ok();
            world.log.tick(0, &mut Vec::new());
            let jobs: Vec<_> = world.log.drain_jobs().collect();
            for DeviceJob { device, ticket, work } in jobs {
                if let DeviceWork::Begin { segment, .. } = work {
                    let entries = (0..number).filter_map(|number| world.log.find_key(&key(number * 6)));
                    let there = entries.filter(|id| world.log.table.get(*id).segment == segment).count();
                    assert_eq!(there, 0, "found in a segment that is written again");
                    begun += 1;
                }
                world.log.done(0, JobDone { device, ticket, micros: 1, result: Ok(()) });
            }
        }
        world.log.leave_dram(&block.key, Standing::new(Sort::OPEN, 0));
    }
    assert!(begun > 2 * SEGMENTS);
}
