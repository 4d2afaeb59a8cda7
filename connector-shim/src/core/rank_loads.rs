//! A rank's loads in all cache groups: those in progress, and the reports of their ends.
//!
//! A request's load ends when its last group's load ends. It has failed if the load of any group has.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::plan::Plan;
use crate::core::reports::{RankReports, Reported};

/// The loads of one rank.
#[derive(Debug)]
pub struct RankLoads {
    /// True if a load fails as a whole: the engine frees blocks behind windows, or cannot tell the groups of
    /// failed blocks apart.
    whole: bool,
    /// Loads in progress beside the steps, by group and operation: the request, and the plan's blocks.
    begun: BTreeMap<(usize, u64), (String, Vec<u32>)>,
    /// Requests of ended loads, with the blocks that were not loaded.
    lacking: BTreeMap<String, BTreeSet<u32>>,
    /// Failures not yet reported: blocks of waiting requests, and whole requests.
    failed: Vec<Reported>,
    /// Blocks that a step reads although they were not loaded.
    failed_now: BTreeSet<u32>,
    reports: RankReports,
}

// === impl RankLoads ===

impl RankLoads {
    /// Begins without loads. `whole`: a load without one of its blocks has failed as a whole.
    pub fn new(whole: bool) -> Self {
        Self {
            whole,
            begun: BTreeMap::new(),
            lacking: BTreeMap::new(),
            failed: Vec::new(),
            failed_now: BTreeSet::new(),
            reports: RankReports::default(),
        }
    }

    /// Begins a step. `passed`: steps passed over by the engine.
    pub fn begin_step(&mut self, step: u64, passed: &[u64]) {
        self.reports.begin_step(step, passed);
    }

    /// Notes the begin of a waiting request's load.
    pub fn begin_load(&mut self, group: usize, request: String, plan: &Plan) {
        self.begun.insert((group, plan.op), (request, plan.block_ids()));
    }

    /// Notes the end of a load, and its failed blocks.
    pub fn end_load(&mut self, group: usize, op: u64, failed: Vec<u32>) {
        if let Some((request, _)) = self.begun.remove(&(group, op)) {
            self.lose_load(request, failed);
        }
    }

    /// Notes that a waiting request's load was over before it began, and its failed blocks.
    pub fn lose_load(&mut self, request: String, blocks: Vec<u32>) {
        self.lacking.entry(request).or_default().extend(blocks);
    }

    /// Ends all loads of a group: all their blocks have failed.
    pub fn end_group(&mut self, group: usize) {
        for (_, (request, blocks)) in self.begun.extract_if((group, 0)..=(group, u64::MAX), |_, _| true) {
            self.lacking.entry(request).or_default().extend(blocks);
        }
    }

    /// Notes blocks that a step reads although they were not loaded.
    pub fn fail_blocks(&mut self, blocks: Vec<u32>) {
        self.failed_now.extend(blocks);
    }

    /// True if loads of a group are in progress.
    pub fn is_loading(&self, group: usize) -> bool {
        self.begun.range((group, 0)..=(group, u64::MAX)).next().is_some()
    }

    /// True if the load of some request has ended in all groups since the last [`RankLoads::take_ended`].
    pub fn has_ended(&self) -> bool {
        self.lacking.keys().any(|request| !self.is_begun(request))
    }

    fn is_begun(&self, request: &str) -> bool {
        self.begun.values().any(|(begun, _)| begun == request)
    }

    /// Returns the requests with an ended load, successful or not, each once.
    pub fn take_ended(&mut self) -> BTreeSet<String> {
        let mut ended = Vec::new();
        for (request, blocks) in std::mem::take(&mut self.lacking) {
            if self.is_begun(&request) {
                self.lacking.insert(request, blocks);
                continue;
            }
            if self.whole && !blocks.is_empty() {
                self.failed.push(Reported::Failed(request.clone()));
            } else {
                self.failed.extend(blocks.into_iter().map(Reported::Block));
            }
            ended.push(Reported::Ended(request));
        }
        let told = self.reports.tell_reports(ended, |report| matches!(report, Reported::Ended(_)));
        told.into_iter().filter_map(Reported::into_request).collect()
    }

    /// Returns the requests with a load failed as a whole; each is among the last [`RankLoads::take_ended`].
    pub fn take_failed(&mut self) -> BTreeSet<String> {
        self.tell_failed(|report| matches!(report, Reported::Failed(_)))
            .into_iter()
            .filter_map(Reported::into_request)
            .collect()
    }

    /// Returns the blocks not loaded. Blocks read by a step are reported only once: after a dropped report
    /// other requests may have them.
    pub fn take_failed_blocks(&mut self) -> BTreeSet<u32> {
        let waiting = self.tell_failed(|report| matches!(report, Reported::Block(_)));
        let mut failed = std::mem::take(&mut self.failed_now);
        failed.extend(waiting.into_iter().filter_map(Reported::into_block));
        failed
    }

    fn tell_failed(&mut self, is_kind: impl Fn(&Reported) -> bool + Copy) -> Vec<Reported> {
        let fresh = self.failed.extract_if(.., |report| is_kind(report)).collect();
        self.reports.tell_reports(fresh, is_kind)
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::pool::SlotRef;

    use super::*;

    fn plan(op: u64, blocks: &[u32]) -> Plan {
        let slot = SlotRef { offset: 0, generation: 1 };
        Plan {
            op,
            epoch: 1,
            namespace: 1,
            flags: 0,
            blocks: blocks.iter().map(|block| (*block, slot)).collect(),
        }
    }

    fn set<T: Ord + Clone, const N: usize>(of: [T; N]) -> BTreeSet<T> {
        BTreeSet::from(of)
    }

    fn names<const N: usize>(of: [&str; N]) -> BTreeSet<String> {
        BTreeSet::from(of.map(str::to_owned))
    }

    #[test]
    fn a_request_has_ended_with_the_last_of_its_loads() {
        let mut loads = RankLoads::new(false);
        loads.begin_load(0, "a".to_owned(), &plan(1, &[5]));
        loads.begin_load(0, "a".to_owned(), &plan(2, &[6]));
        loads.end_load(0, 1, vec![5]);
        assert!(!loads.has_ended() && loads.is_loading(0));
        assert_eq!((loads.take_ended(), loads.take_failed_blocks()), (names([]), set([])));
        loads.end_load(0, 2, Vec::new());
        assert!(loads.has_ended() && !loads.is_loading(0));
        assert_eq!((loads.take_ended(), loads.take_failed_blocks()), (names(["a"]), set([5])));
        assert_eq!((loads.take_ended(), loads.take_failed_blocks()), (names([]), set([])));
        // An end without a waiting request, such as one of an earlier connection.
        loads.end_load(0, 2, vec![6]);
        assert_eq!((loads.take_ended(), loads.take_failed_blocks()), (names([]), set([])));
    }

    #[test]
    fn a_load_of_several_groups_ends_with_the_last_and_fails_with_any() {
        let mut loads = RankLoads::new(true);
        for group in 0..2 {
            loads.begin_load(group, "a".to_owned(), &plan(1, &[5]));
            loads.begin_load(group, "b".to_owned(), &plan(2, &[6]));
        }
        loads.end_load(0, 1, vec![5]);
        loads.end_load(1, 2, Vec::new());
        assert_eq!((loads.take_ended(), loads.take_failed()), (names([]), names([])));
        loads.end_load(1, 1, Vec::new());
        loads.end_load(0, 2, Vec::new());
        assert_eq!((loads.take_ended(), loads.take_failed()), (names(["a", "b"]), names(["a"])));
        assert_eq!(loads.take_failed_blocks(), set([]));
    }

    #[test]
    fn a_lost_load_ends_with_the_loads_of_the_other_groups() {
        let mut loads = RankLoads::new(true);
        loads.lose_load("a".to_owned(), vec![5]);
        loads.begin_load(1, "a".to_owned(), &plan(1, &[7]));
        assert_eq!(loads.take_ended(), names([]));
        loads.end_group(0);
        assert!(loads.is_loading(1));
        loads.end_group(1);
        assert_eq!((loads.take_ended(), loads.take_failed()), (names(["a"]), names(["a"])));
    }

    #[test]
    fn an_end_is_told_until_the_engine_has_learned_of_it() {
        let mut loads = RankLoads::new(false);
        loads.begin_step(1, &[]);
        loads.lose_load("a".to_owned(), vec![7]);
        loads.fail_blocks(vec![8]);
        assert_eq!((loads.take_ended(), loads.take_failed_blocks()), (names(["a"]), set([7, 8])));
        loads.begin_step(2, &[1]);
        // Step 2 reports nothing: it raises.
        loads.begin_step(3, &[1]);
        assert_eq!((loads.take_ended(), loads.take_failed_blocks()), (names(["a"]), set([7])));
        loads.begin_step(4, &[1]);
        assert_eq!((loads.take_ended(), loads.take_failed_blocks()), (names([]), set([])));
        loads.begin_step(5, &[3, 4]);
        loads.lose_load("b".to_owned(), Vec::new());
        assert_eq!((loads.take_ended(), loads.take_failed_blocks()), (names(["a", "b"]), set([7])));
    }
}
