//! Blocks with non-finite numbers: no later request finds one.

use super::*;

/// An engine of one rank, its pages one layer of bfloat16.
fn of_numbers() -> Harness {
    of_heads(1)
}

/// The same with so many heads, each of 4 KiB in a block.
fn of_heads(heads: u64) -> Harness {
    let form = format!("layers=1 tokens=16 kv_heads={heads} keys=64 values=64 dtype=bfloat16");
    let mut engine = Harness::of(core_of(64 << 20));
    engine.connect(SCHEDULER, hello(1, Role::Scheduler { run: RUN }));
    let facts = Facts::from([("page_form".to_owned(), form)]);
    let rank = changed(rank_hello_of(1, 0, heads << 12), |worker| worker.facts = facts);
    engine.connect(RANKS[0], rank);
    engine.join();
    engine
}

fn slots(scan: &Inspection) -> &[SlotRef] {
    let InspectedBlocks::Alone(slots) = &scan.blocks else { panic!("a comparison") };
    slots
}

impl Harness {
    /// The search asked for since the last look.
    fn scan(&mut self) -> Option<Inspection> {
        self.take(taken!(Action::Inspect(search) => search)).next()
    }

    /// Ends the copies asked for since the last look.
    fn end_copies(&mut self) {
        self.copies().iter().for_each(|(copy, ..)| self.end_copy(*copy, true));
    }

    /// Keys `0..count` of log 0, copied by operation 1 in step 2.
    fn copy_keys(&mut self, count: u32) {
        self.open(0, 0..count);
        self.save(0, 1, 2, 1..count + 1);
        self.fences(RANKS[0], 2, 2);
        self.end_copies();
    }

    fn scanned(&mut self, scan: &Inspection, broken: &[usize]) {
        let search = |(at, slot): (usize, &SlotRef)| {
            let is_finite = !broken.contains(&at);
            SearchedBlock { slot: *slot, is_finite, checksum: None }
        };
        let searched = slots(scan).iter().enumerate().map(search).collect();
        self.event(CoreEvent::Inspected { save: scan.save, findings: Findings::Searched(searched) });
    }
}

#[test]
fn a_save_is_found_once_its_search_has_ended() {
    let mut engine = of_numbers();
    engine.copy_keys(4);
    let scan = engine.scan().expect("the pages are numbers");
    assert_eq!((scan.save, slots(&scan).len(), scan.shards), ((SCHEDULER, 1), 4, 1));
    engine.drained();
    assert!(engine.saved().is_none() && engine.core.busy());
    assert_eq!(engine.query(0, 7, 0, 4).value, 0);
    engine.scanned(&scan, &[2]);
    engine.drained();
    let end = engine.saved().expect("the search has ended");
    assert_eq!((end.committed, end.dropped), (3, 1));
    assert_eq!(engine.query(0, 8, 0, 4).value, 2);
    let stats = engine.core.stats();
    assert_eq!((stats.saves_not_finite, stats.not_finite_blocks, stats.saves_dropped), (1, 1, 1));
}

#[test]
fn a_large_save_is_searched_in_parts_and_found_after_the_last() {
    // Blocks of 512 KiB.
    let (mut engine, part) = (of_heads(128), 64);
    engine.copy_keys(part as u32 + 2);
    let parts: Vec<_> = engine.take(taken!(Action::Inspect(search) => search)).collect();
    assert_eq!(parts.iter().map(|part| slots(part).len()).collect::<Vec<_>>(), [part, 2]);
    engine.scanned(&parts[1], &[1]);
    engine.drained();
    assert!(engine.saved().is_none() && engine.core.busy());
    engine.scanned(&parts[0], &[]);
    engine.drained();
    let end = engine.saved().expect("both searches have ended");
    assert_eq!((end.committed, end.dropped), (part as u32 + 1, 1));
}

#[test]
fn a_block_that_is_reused_during_the_search_is_kept() {
    let mut engine = of_numbers();
    engine.copy_keys(2);
    let scan = engine.scan().expect("the pages are numbers");
    engine.drained();
    engine.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 0, count: 2 }));
    engine.scanned(&scan, &[]);
    engine.drained();
    assert_eq!(engine.saved().map(|end| (end.committed, end.cancelled)), Some((2, 0)));
}

#[test]
fn what_was_handed_over_is_removed_behind_its_search() {
    let mut engine = of_numbers();
    engine.open(0, 0..3);
    let keys = LogKeys::new(0, 0..3);
    let save =
        request::Save { op: 1, keys, position: 0, step: 2, checked: false, handover: true, replaced: 0 };
    engine.post(SchedulerRequest::Save(save), Vec::new(), vec![1, 2, 3]);
    engine.fences(RANKS[0], 2, 2);
    engine.end_copies();
    engine.drained();
    let scan = engine.scan().expect("the pages are numbers");
    assert_eq!(slots(&scan).len(), 3);
    assert_eq!(engine.query(0, 7, 0, 3).value, 3, "another engine may await them");
    engine.ask(SchedulerRequest::Release { log: 0 });
    engine.scanned(&scan, &[1]);
    assert_eq!(engine.query(0, 8, 0, 3).value, 1);
    let stats = engine.core.stats();
    assert_eq!((stats.saves_not_finite, stats.not_finite_blocks), (0, 1));
    assert!(!engine.core.busy());
}

#[test]
fn an_engine_that_goes_takes_its_search_along() {
    let mut engine = of_numbers();
    engine.copy_keys(2);
    let scan = engine.scan().expect("the pages are numbers");
    engine.drained();
    engine.event(CoreEvent::Disconnected { session: SCHEDULER });
    engine.scanned(&scan, &[0]);
    assert_eq!(engine.core.stats().pool_used_bytes, 0);
    assert!(!engine.core.busy());
}

#[test]
fn pages_of_bytes_are_not_searched() {
    let mut engine = Harness::engine(1);
    engine.copy_keys(2);
    assert!(engine.scan().is_none());
    engine.drained();
    assert_eq!(engine.saved().map(|end| end.committed), Some(2));
}

#[test]
fn a_save_of_nothing_has_no_tail() {
    let mut engine = of_numbers();
    engine.open(0, 0..2);
    let save = request::Save {
        op: 1,
        keys: LogKeys::new(0, 0..0),
        position: 0,
        step: 2,
        checked: false,
        handover: true,
        replaced: 0,
    };
    engine.post(SchedulerRequest::Save(save), Vec::new(), Vec::new());
    assert!(engine.saved().is_some(), "it ends at once");
}
