//! The standing check: the last blocks of some hits are computed despite the hit, and the sidecar compares them with the kept ones.
//!
//! All else gives reasons for kept KV to equal this engine's own. The check tests it: for the first hit of each namespace and adapter after
//! every start and reset, and for one in some hundreds later. At most one check goes on at a time; a check without a verdict, because a
//! block was evicted or a request aborted, is tried again after 1, 2, 4, ... hits.
//!
//! - A short check computes the last blocks of a hit, upon the loaded ones. It sees another model, and no error in earlier blocks.
//! - A long check computes the whole hit, and so sees an error in any block. Its tokens are a small share of all loaded ones.
//! - A difference puts the engine in doubt: its next hits have long checks, or count as misses.

use std::collections::HashMap;
use std::ops::Range;

use super::requests::RequestId;

/// The most found tokens computed by the engine for a check. A block with more tokens is checked whole.
const TOKENS: u32 = 64;
/// Checks of an engine in doubt: more than the sidecar needs, since some are of one chain or bring no verdict.
const WITNESSES: u32 = 4;
/// Steps until a check without a verdict is given up: its save may have been dropped anywhere on its way.
const STEPS_MAX: u64 = 1000;

/// Hits are counted by subject, a namespace and the fold of an adapter: each has a first hit of its own.
pub(super) type Subject = (u64, Option<[u8; 16]>);

/// How often an engine is checked.
#[derive(Copy, Clone, Debug, Default)]
pub struct CheckRate {
    /// Hits from one verdict to the next check; 0: nothing is checked.
    pub every: u32,
    /// Tokens of long checks for 1,000 loaded ones.
    pub per_mille: u32,
}

/// A hit to check.
#[derive(Copy, Clone, Debug)]
pub(super) struct CheckedHit {
    pub(super) owner: RequestId,
    /// Its first block, and how many there are.
    pub(super) first: u32,
    pub(super) hits: u32,
    pub(super) subject: Subject,
    /// It may be computed as a whole.
    pub(super) whole: bool,
}

/// Chooses hits to check, and follows the check of one.
#[derive(Debug)]
pub(super) struct Check {
    block_tokens: u32,
    rate: CheckRate,
    /// Budget of long checks, in thousandths of tokens.
    room: u64,
    /// By subject: hits to pass before the next check, and hits to pass after a check without a verdict.
    waits: HashMap<Subject, (u32, u32)>,
    /// Blocks compared since the session's start, and differing ones.
    compared: u64,
    differing: u64,
    /// Number of further checks of an engine in doubt.
    sought: u32,
    subject: Option<Subject>,
    /// The hit's request and its blocks, until they are saved.
    span: Option<(RequestId, Range<u32>)>,
    ends_at: u64,
}

// === impl Check ===

impl Check {
    pub(super) fn new(block_tokens: u32, rate: CheckRate) -> Self {
        Self {
            block_tokens,
            rate,
            room: 0,
            waits: HashMap::new(),
            compared: 0,
            differing: 0,
            sought: 0,
            subject: None,
            span: None,
            ends_at: 0,
        }
    }

    /// True if a verdict is awaited.
    pub(super) fn goes_on(&self) -> bool {
        self.subject.is_some()
    }

    /// Adds loaded tokens to the budget of long checks.
    pub(super) fn loaded(&mut self, tokens: u32) {
        self.room += u64::from(tokens) * u64::from(self.rate.per_mille);
    }

    /// Returns the number of the hit's blocks to load. The owner may have asked before, without a load.
    pub(super) fn trim(&mut self, hit: CheckedHit, step: u64) -> u32 {
        let doubtful = hit.whole && self.sought > 0;
        if self.span(hit.owner).is_none() && !self.is_due(hit.subject) {
            return if doubtful { 0 } else { hit.hits };
        }
        (self.subject, self.ends_at) = (Some(hit.subject), step + STEPS_MAX);
        let blocks = (TOKENS / self.block_tokens).max(1);
        let cost = u64::from(hit.hits) * u64::from(self.block_tokens) * 1000;
        let mut kept = hit.hits.saturating_sub(blocks);
        if doubtful {
            kept = 0;
        } else if hit.whole && kept > 0 && self.room >= cost {
            self.room -= cost;
            kept = 0;
        }
        self.span = Some((hit.owner, hit.first + kept..hit.first + hit.hits));
        kept
    }

    fn is_due(&mut self, subject: Subject) -> bool {
        if self.rate.every == 0 {
            return false;
        }
        let (passing, wait) = self.waits.get(&subject).copied().unwrap_or((0, 1));
        let passes = passing > 0 && self.sought == 0 || self.goes_on();
        let next = match passes {
            true => (passing.saturating_sub(1), wait),
            false => (wait, (2 * wait).min(self.rate.every)),
        };
        self.waits.insert(subject, next);
        if !passes {
            self.sought = self.sought.saturating_sub(1);
        }
        !passes
    }

    /// Has the owner's hit checked in any case, in place of the check in progress.
    pub(super) fn demand(&mut self, owner: RequestId) {
        self.give_up();
        self.span = Some((owner, 0..0));
    }

    /// The owner's blocks to save with a comparison.
    pub(super) fn span(&self, owner: RequestId) -> Option<Range<u32>> {
        self.span.as_ref().filter(|(whose, _)| *whose == owner).map(|(_, blocks)| blocks.clone())
    }

    /// Notes that the blocks of the span were posted with a checked save.
    pub(super) fn saved(&mut self) {
        self.span = None;
    }

    /// Ends the check without a verdict.
    pub(super) fn give_up(&mut self) {
        (self.span, self.subject) = (None, None);
    }

    /// Ends the check without a verdict if this owner was to save its blocks.
    pub(super) fn forsake(&mut self, owner: RequestId) {
        if self.span(owner).is_some() {
            self.give_up();
        }
    }

    /// Looks for the verdict in the session's counts of compared and differing blocks. Returns true if blocks
    /// differ.
    pub(super) fn learn(&mut self, (compared, differing): (u64, u64), step: u64) -> bool {
        let differs = differing > self.differing;
        if compared > self.compared {
            if differs {
                self.sought = WITNESSES;
            }
            (self.compared, self.differing) = (compared, differing);
            if self.span.is_none()
                && let Some(subject) = self.subject.take()
            {
                self.waits.insert(subject, (self.rate.every, 1));
            }
        }
        if step >= self.ends_at {
            self.give_up();
        }
        differs
    }

    /// Drops every verdict: the weights may have changed, so each subject's next hit is checked.
    pub(super) fn forget_verdicts(&mut self) {
        self.waits.clear();
        self.give_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_TOKENS: u32 = 16;
    const EVERY: u32 = 100;
    const HITS: u32 = 10;
    const BLOCKS: u32 = TOKENS / BLOCK_TOKENS;
    const SUBJECT: Subject = (1, None);
    const OTHER: Subject = (1, Some([7; 16]));
    const OWNER: RequestId = 1;
    /// The owner of another hit meanwhile.
    const RIVAL: RequestId = 2;

    fn check(every: u32) -> Check {
        Check::new(BLOCK_TOKENS, CheckRate { every, per_mille: 0 })
    }

    fn hit(subject: Subject) -> CheckedHit {
        CheckedHit { owner: OWNER, first: 0, hits: HITS, subject, whole: false }
    }

    /// A hit from block 3 on, allowed to be computed as a whole.
    fn whole(subject: Subject) -> CheckedHit {
        CheckedHit { first: 3, whole: true, ..hit(subject) }
    }

    /// Whether the next hit is checked; its owner is then gone.
    fn is_checked(check: &mut Check, subject: Subject) -> bool {
        let checked = check.trim(hit(subject), 0) < HITS;
        assert_eq!(checked, check.span(OWNER).is_some());
        check.forsake(OWNER);
        checked
    }

    /// The next hit is checked, and found right.
    fn approve(check: &mut Check, compared: u64) {
        assert_eq!(check.trim(hit(SUBJECT), 0), HITS - BLOCKS);
        check.saved();
        check.learn((compared, 0), 0);
        assert!(!check.goes_on());
    }

    /// 64 tokens at most, but a block at least; of a short hit all.
    #[test]
    fn how_much_is_computed() {
        for (block_tokens, blocks) in [(1, 64), (16, 4), (48, 1), (64, 1), (256, 1)] {
            let mut check = Check::new(block_tokens, CheckRate { every: EVERY, per_mille: 0 });
            let long = CheckedHit { first: 7, hits: 100, ..hit(SUBJECT) };
            assert_eq!(check.trim(long, 0), 100 - blocks);
            assert_eq!(check.span(OWNER), Some(107 - blocks..107));
            assert_eq!(check.trim(CheckedHit { hits: 1, ..long }, 0), 0);
            assert_eq!(check.span(OWNER), Some(7..8));
        }
    }

    /// Each subject is counted by itself.
    #[test]
    fn the_first_hit_and_one_in_many() {
        let mut check = check(EVERY);
        approve(&mut check, 4);
        assert!((0..EVERY).all(|_| !is_checked(&mut check, SUBJECT)));
        assert!(is_checked(&mut check, SUBJECT));
        assert!(is_checked(&mut check, OTHER));
    }

    /// A check without a chance of a verdict costs little.
    #[test]
    fn without_a_verdict_it_is_tried_ever_more_rarely() {
        let mut check = check(EVERY);
        let checked: Vec<u32> = (0..1000).filter(|_| is_checked(&mut check, SUBJECT)).collect();
        let expected = [0, 2, 5, 10, 19, 36, 69, 134, 235, 336, 437, 538, 639, 740, 841, 942];
        assert_eq!(checked, expected);
    }

    /// A later verdict belongs to no check.
    #[test]
    fn a_lost_verdict_is_not_waited_for_for_ever() {
        let mut check = check(EVERY);
        check.trim(hit(SUBJECT), 5);
        check.saved();
        check.learn((0, 0), 4 + STEPS_MAX);
        assert!(check.goes_on());
        assert_eq!(check.trim(CheckedHit { owner: RIVAL, ..hit(OTHER) }, 0), HITS, "one at a time");
        check.learn((0, 0), 5 + STEPS_MAX);
        assert!(!check.goes_on());
        check.learn((4, 0), 6 + STEPS_MAX);
        assert_eq!([(); 2].map(|()| is_checked(&mut check, SUBJECT)), [false, true]);
    }

    /// It is the verdict of an abandoned check.
    #[test]
    fn a_verdict_that_comes_before_the_save_is_another_ones() {
        let mut check = check(EVERY);
        check.trim(hit(SUBJECT), 0);
        check.learn((4, 0), 1);
        assert!(check.goes_on());
        check.saved();
        check.learn((4, 0), 2);
        assert!(check.goes_on());
    }

    /// Hits of any subject: the sidecar wants witnesses. Checks without a verdict are not repeated for ever.
    #[test]
    fn after_a_difference_the_next_hits_are_checked() {
        let mut check = check(EVERY);
        check.trim(hit(SUBJECT), 0);
        check.saved();
        assert!(check.learn((4, 1), 0));
        assert_eq!(check.trim(whole(OTHER), 0), 0);
        assert_eq!(check.span(OWNER), Some(3..3 + HITS));
        let rival = CheckedHit { owner: RIVAL, ..whole(OTHER) };
        assert_eq!(check.trim(rival, 0), 0, "one at a time, and none is believed");
        assert_eq!(check.span(RIVAL), None);
        check.give_up();
        assert!((1..WITNESSES).all(|_| is_checked(&mut check, OTHER)));
        assert_eq!([(); 2].map(|()| is_checked(&mut check, SUBJECT)), [false, false]);
    }

    /// Two tokens for 1,000 loaded ones.
    #[test]
    fn a_long_check_loads_nothing_and_is_paid_by_what_was_loaded() {
        let mut check = Check::new(BLOCK_TOKENS, CheckRate { every: EVERY, per_mille: 2 });
        check.loaded(HITS * BLOCK_TOKENS * 500 - 1);
        assert_eq!(check.trim(whole(SUBJECT), 0), HITS - BLOCKS);
        check.give_up();
        check.loaded(1);
        assert_eq!(check.trim(CheckedHit { whole: false, ..whole(OTHER) }, 0), HITS - BLOCKS);
        check.give_up();
        assert_eq!(check.trim(whole((3, None)), 0), 0);
        assert_eq!(check.span(OWNER), Some(3..3 + HITS));
        check.give_up();
        assert_eq!(check.trim(whole((4, None)), 0), HITS - BLOCKS);
    }

    /// The first hit afterwards is checked again.
    #[test]
    fn what_was_right_is_forgotten() {
        let mut check = check(EVERY);
        approve(&mut check, 4);
        check.forget_verdicts();
        approve(&mut check, 8);
    }

    /// Then no hit is, but one to prove the engine by.
    #[test]
    fn it_can_be_turned_off() {
        let mut check = check(0);
        assert!((0..10).all(|_| !is_checked(&mut check, SUBJECT)));
        check.demand(OWNER);
        assert!(is_checked(&mut check, SUBJECT) && !is_checked(&mut check, SUBJECT));
    }
}
