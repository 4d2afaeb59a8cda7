//! Holdings and states of engines.

use std::collections::{BTreeMap, BTreeSet};

use prometheus::{IntGaugeVec, Registry};
use shm_protocol::prefill::PrefillRate;
use tiers::dram::Holdings;

use super::figures::{Reading, register_gauges, show_gauge};
use crate::core::{EngineHolder, EngineState};

/// Characters shown of an engine's name.
const NAME_MAX: usize = 64;

const KINDS: &[(&str, Reading<Holdings>)] = &[
    ("kept", |holdings| holdings.kept),
    ("filling", |holdings| holdings.filling),
    ("leased", |holdings| holdings.leased),
    ("promised", |holdings| holdings.promised),
];

const STATES: [(&str, EngineState); 4] = [
    ("serving", EngineState::Serving),
    ("idle", EngineState::Idle),
    ("unbound", EngineState::Unbound),
    ("barred", EngineState::Barred),
];

/// The positions in a prompt of an engine's shown rate.
const POSITIONS: [(&str, u64); 2] = [("0", 0), ("100000", 100_000)];

/// Gauges of every connected engine: at most ten labels for each session.
#[derive(Debug)]
pub(super) struct HoldersMetrics {
    bytes: IntGaugeVec,
    states: IntGaugeVec,
    prefill: IntGaugeVec,
    shown: BTreeSet<String>,
}

// === impl HoldersMetrics ===

impl HoldersMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let help = "Bytes of an engine's blocks, by kind. kept: saved or fetched by the engine; filling: being written; \
             leased: held for its queries; promised: held for its planned loads.";
        let bytes = register_gauges(registry, "engine_bytes", help, &["engine", "kind"])?;
        let help = "Engines connected, by name and state. serving: loads and saves; idle: its ranks join in its first \
             step; unbound: it sends queries but some of its ranks have not joined, look for PILLION STAYS OUT in its \
             log; barred: its KV differs, see pillion ctl namespaces.";
        let states = register_gauges(registry, "engine_state", help, &["engine", "state"])?;
        let help = "Tokens of a prompt that the engine computes per second, at positions in the prompt, by its last steps; 0 until that \
             is known. Blocks of disks and peers are waited for as long as they come sooner.";
        let prefill =
            register_gauges(registry, "engine_prefill_tokens_per_second", help, &["engine", "position"])?;
        Ok(Self { bytes, states, prefill, shown: BTreeSet::new() })
    }

    /// Publishes the holdings; engines of one name share their metrics. Metrics of disconnected engines are
    /// removed.
    pub(super) fn publish_holders<'a>(&mut self, holders: impl Iterator<Item = EngineHolder<'a>>) {
        let mut here: BTreeMap<String, (Holdings, [u64; STATES.len()], Option<PrefillRate>)> =
            BTreeMap::new();
        for holder in holders {
            let name = holder.engine.chars().take(NAME_MAX).collect();
            let (holdings, engines, prefill) = here.entry(name).or_default();
            *holdings += holder.holdings;
            *prefill = holder.prefill.or(*prefill);
            for ((_, state), engines) in STATES.iter().zip(engines) {
                *engines += u64::from(*state == holder.state);
            }
        }
        for (name, (holdings, engines, prefill)) in &here {
            for (label, position) in POSITIONS {
                let rate = prefill.map_or(0.0, |rate| rate.tokens_per_second(position));
                show_gauge(&self.prefill.with_label_values(&[name.as_str(), label]), rate as u64);
            }
            for ((state, _), engines) in STATES.iter().zip(engines) {
                show_gauge(&self.states.with_label_values(&[name.as_str(), state]), *engines);
            }
            for (kind, reading) in KINDS {
                show_gauge(&self.bytes.with_label_values(&[name.as_str(), kind]), reading(holdings));
            }
        }
        for gone in self.shown.iter().filter(|name| !here.contains_key(*name)) {
            // All of these exist since the engine was first shown.
            for (kind, _) in KINDS {
                let _ = self.bytes.remove_label_values(&[gone.as_str(), kind]);
            }
            for (label, _) in POSITIONS {
                let _ = self.prefill.remove_label_values(&[gone.as_str(), label]);
            }
            for (state, _) in STATES {
                let _ = self.states.remove_label_values(&[gone.as_str(), state]);
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
        let state = EngineState::Serving;
        let holder = |engine, kept| {
            let holdings = Holdings { kept, ..Holdings::default() };
            EngineHolder { engine, state, holdings, prefill: PrefillRate::new(50_000.0, 0.5) }
        };
        metrics.publish_holders([holder("a", 1), holder("b", 2), holder("b", 3)].into_iter());
        let unbound = EngineHolder { state: EngineState::Unbound, ..holder("b", 3) };
        metrics.publish_holders([holder("b", 2), unbound].into_iter());
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let shown: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let line = |kind, bytes| format!("pillion_engine_bytes{{engine=\"b\",kind=\"{kind}\"}} {bytes}");
        let engines =
            |state, engines| format!("pillion_engine_state{{engine=\"b\",state=\"{state}\"}} {engines}");
        let bytes = [line("filling", 0), line("kept", 5), line("leased", 0), line("promised", 0)];
        let states = [engines("barred", 0), engines("idle", 0), engines("serving", 1), engines("unbound", 1)];
        let prefill = [("0", 20_000), ("100000", 10_000)].map(|(position, tokens)| {
            format!(
                "pillion_engine_prefill_tokens_per_second{{engine=\"b\",position=\"{position}\"}} {tokens}"
            )
        });
        assert_eq!(shown, [&bytes[..], &prefill, &states].concat());
    }
}
