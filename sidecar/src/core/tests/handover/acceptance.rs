//! Handovers of steps accepted late or never.

use super::*;

impl Harness {
    /// P's step of this number hands over keys of its log 0 and copies them whole. No step is accepted.
    fn hand_over_whole(&mut self, step: u64, part: std::ops::Range<u32>) {
        self.hand_over(step, Keys::new(0, part));
        self.fences(RANKS[0], step, step);
        let copies = self.out.iter().filter_map(taken!(Action::Copy { copy, .. } => *copy));
        copies.collect::<Vec<_>>().into_iter().for_each(|copy| self.end_copy(copy, true));
        self.drained_below(0);
    }
}

#[test]
fn a_part_is_loaded_once_its_step_is_accepted() {
    let mut engines = two_engines();
    engines.open(0, 0..2);
    engines.await_keys(0, 1, 0..2, true);
    engines.now_ms = 10;
    engines.hand_over_whole(1, 0..2);
    assert_eq!(engines.answers()[&1], (Status::Arriving, 2));
    engines.out.clear();
    engines.speaker = D;
    engines.load(0, 2, 1, 0..2, shm_protocol::message::LOAD_ARRIVING);
    engines.fences(D_RANK, 5, 4);
    engines.speaker = SCHEDULER;
    assert!(engines.copies().is_empty(), "the load waits");
    engines.now_ms = 30;
    engines.accept_step(1);
    engines.drained_below(0);
    assert!(engines.took().contains(&(Timed::Acceptance, 10)));
    assert_eq!(engines.copies().len(), 1, "D loads");
    assert_eq!(engines.core.stats().load_refusals, 0);
}

#[test]
fn nobody_waits_for_what_was_refused() {
    let mut engines = two_engines();
    engines.promise(0, 0..2);
    engines.await_keys(0, 1, 0..2, true);
    engines.hand_over_whole(1, 0..2);
    assert_eq!(engines.answers()[&1], (Status::Arriving, 2));
    engines.speaker = D;
    engines.load(0, 2, 1, 0..2, shm_protocol::message::LOAD_ARRIVING);
    engines.speaker = SCHEDULER;
    engines.ask(SchedulerRequest::Close { log: 0, way: 0 });
    engines.out.clear();
    engines.accept_step(2);
    engines.drained_below(0);
    assert_eq!(engines.core.stats().load_refusals, 1, "the waiting load at once");
    engines.await_keys(1, 3, 0..2, false);
    assert_eq!(engines.answers()[&3], (Status::Ok, 0), "and later queries");
    assert_eq!(engines.core.stats().handover_dropped, 2);
}
