//! A rank's reports to its engine, each with a step's output. Reports with an output that the engine did not
//! take are repeated.
//!
//! An engine such as vLLM frees the blocks of a request with a running load only once it learns of the load's end.

use std::collections::{BTreeMap, BTreeSet};

/// The most steps whose reports are kept. An engine passes over fewer steps before it takes an output again,
/// or it takes none at all.
const REPORTS_MAX: usize = 64;

/// The subject of a report.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Reported {
    /// A request with an ended load.
    Ended(String),
    /// A request with a load failed as a whole.
    Failed(String),
    /// A block of a waiting request, not loaded.
    Block(u32),
}

// === impl Reported ===

impl Reported {
    /// Returns the report's request; `None` for a block.
    pub fn into_request(self) -> Option<String> {
        match self {
            Self::Ended(request) | Self::Failed(request) => Some(request),
            Self::Block(_) => None,
        }
    }

    /// Returns the report's block; `None` for a request.
    pub fn into_block(self) -> Option<u32> {
        match self {
            Self::Block(block) => Some(block),
            Self::Ended(_) | Self::Failed(_) => None,
        }
    }
}

/// The reports of one rank. A step without reports costs nothing.
#[derive(Debug, Default)]
pub struct RankReports {
    step: u64,
    /// The reports of each step. They are lost if the step raises.
    reported: BTreeMap<u64, BTreeSet<Reported>>,
    /// Reports to repeat.
    again: BTreeSet<Reported>,
}

// === impl RankReports ===

impl RankReports {
    /// Begins a step. `passed`: steps passed over by the engine, whose reports are repeated.
    pub fn begin_step(&mut self, step: u64, passed: &[u64]) {
        self.step = step;
        for each in passed {
            self.again.extend(self.reported.remove(each).unwrap_or_default());
        }
    }

    /// Returns the `fresh` reports of one kind, and those of this kind to repeat.
    pub fn tell_reports(
        &mut self,
        fresh: Vec<Reported>,
        is_kind: impl Fn(&Reported) -> bool,
    ) -> Vec<Reported> {
        let mut reported: BTreeSet<Reported> = self.again.extract_if(.., |report| is_kind(report)).collect();
        reported.extend(fresh);
        if !reported.is_empty() {
            self.reported.entry(self.step).or_default().extend(reported.iter().cloned());
            if self.reported.len() > REPORTS_MAX {
                self.reported.pop_first();
            }
        }
        reported.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(names: &[&str]) -> Vec<Reported> {
        names.iter().map(|name| Reported::Ended((*name).to_owned())).collect()
    }

    fn tell_ended(reports: &mut RankReports, names: &[&str]) -> Vec<Reported> {
        reports.tell_reports(ended(names), |report| matches!(report, Reported::Ended(_)))
    }

    #[test]
    fn a_report_of_a_step_that_was_passed_over_is_told_again() {
        let mut reports = RankReports::default();
        reports.begin_step(1, &[]);
        assert_eq!(tell_ended(&mut reports, &["a"]), ended(&["a"]));
        let blocks = vec![Reported::Block(7)];
        let is_block = |report: &Reported| matches!(report, Reported::Block(_));
        assert_eq!(reports.tell_reports(blocks.clone(), is_block), blocks);
        reports.begin_step(2, &[1]);
        assert_eq!(tell_ended(&mut reports, &["b"]), ended(&["a", "b"]));
        assert_eq!(reports.tell_reports(Vec::new(), is_block), blocks);
        // Step 1 is passed over a second time, and step 2 has both reports, too.
        reports.begin_step(3, &[1, 2]);
        assert_eq!(tell_ended(&mut reports, &[]), ended(&["a", "b"]));
        reports.begin_step(4, &[]);
        assert_eq!(tell_ended(&mut reports, &[]), ended(&[]));
    }

    #[test]
    fn reports_are_not_kept_for_ever() {
        let mut reports = RankReports::default();
        for step in 0..=REPORTS_MAX as u64 {
            reports.begin_step(step, &[]);
            tell_ended(&mut reports, &["a"]);
        }
        assert_eq!((reports.reported.len(), reports.reported.contains_key(&0)), (REPORTS_MAX, false));
    }
}
