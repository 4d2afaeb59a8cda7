//! What each engine holds.

use std::collections::{BTreeMap, BTreeSet};

use prometheus::{IntGaugeVec, Opts, Registry};
use tiers::dram::Holdings;

use super::figures::{Reading, show};
use crate::engine::Holder;

/// Characters of an engine's name that are shown.
const NAME_MAX: usize = 64;

const KINDS: &[(&str, Reading<Holdings>)] = &[
    ("kept", |holdings| holdings.kept),
    ("filling", |holdings| holdings.filling),
    ("leased", |holdings| holdings.leased),
    ("promised", |holdings| holdings.promised),
];

/// Gauges of every engine that is connected: no more labels than four for each session.
#[derive(Debug)]
pub(super) struct HoldersMetrics {
    bytes: IntGaugeVec,
    shown: BTreeSet<String>,
}

// === impl HoldersMetrics ===

impl HoldersMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let help =
            "Bytes of blocks that an engine keeps, fills, has leased for queries, or promised to loads.";
        let bytes = IntGaugeVec::new(Opts::new("pillion_engine_bytes", help), &["engine", "kind"])?;
        registry.register(Box::new(bytes.clone()))?;
        Ok(Self { bytes, shown: BTreeSet::new() })
    }

    /// Makes figures visible; those of engines of one name together. Who is gone is shown no more.
    pub(super) fn publish<'a>(&mut self, holders: impl Iterator<Item = Holder<'a>>) {
        let mut here: BTreeMap<String, Holdings> = BTreeMap::new();
        for holder in holders {
            let name = holder.engine.chars().take(NAME_MAX).collect();
            *here.entry(name).or_default() += holder.holdings;
        }
        for (name, holdings) in &here {
            for (kind, reading) in KINDS {
                show(&self.bytes.with_label_values(&[name.as_str(), kind]), reading(holdings));
            }
        }
        for gone in self.shown.iter().filter(|name| !here.contains_key(*name)) {
            for (kind, _) in KINDS {
                // There since it was shown.
                let _ = self.bytes.remove_label_values(&[gone.as_str(), kind]);
            }
        }
        self.shown = here.into_keys().collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_of_one_name_are_one_and_those_that_are_gone_none() {
        let registry = Registry::new();
        let mut metrics = HoldersMetrics::new(&registry).unwrap();
        let holder = |engine, kept| Holder { engine, holdings: Holdings { kept, ..Holdings::default() } };
        metrics.publish([holder("a", 1), holder("b", 2), holder("b", 3)].into_iter());
        metrics.publish([holder("b", 2), holder("b", 3)].into_iter());
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let shown: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let line = |kind, bytes| format!("pillion_engine_bytes{{engine=\"b\",kind=\"{kind}\"}} {bytes}");
        assert_eq!(shown, [line("filling", 0), line("kept", 5), line("leased", 0), line("promised", 0)]);
    }
}
