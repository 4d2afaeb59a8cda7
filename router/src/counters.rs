//! The router's counters, and the values of their labels.

use hyper::StatusCode;
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, IntGauge, Registry, TextEncoder};

use super::figures::merge_families;
use super::forward::ForwardError;
use super::prompt::Whole;
use sidecar::pages::metrics::figures::{counters_of, register_counter, register_counters, register_gauge};

/// Counters of one router, all of them present before the first prompt.
#[derive(Debug)]
pub(super) struct RouteCounters {
    registry: Registry,
    /// Requests by their way: to two engines, or the reason for another way.
    prompts: IntCounterVec,
    /// Prompts not computed by their prefill engines, by reason.
    failures: IntCounterVec,
    /// Prompts sent to engines a second time, after the decode engine gave them up.
    pub(super) retries: IntCounter,
    /// Streams whose first token came from the prefill engine.
    pub(super) first_tokens: IntCounter,
    /// Requests with an unread body, by reason.
    pub(super) refused: IntCounterVec,
    /// Lines missing in the access log.
    pub(super) lines_dropped: IntCounter,
    /// Prompts looked for in the mesh, by result.
    located: IntCounterVec,
    /// Members of the mesh.
    pub(super) members: IntGauge,
}

sidecar::named! {
    /// Reason of a prompt's failure at a prefill engine.
    pub(super) enum PromptFailure {
        Unreachable = "unreachable",
        Broken = "broken",
        Status = "status",
        /// A status of a client's fault, but a decode engine answered the prompt.
        Refused = "refused",
        /// No sign of life, or no sign of work while the decode engine answered.
        Silent = "silent",
        Late = "late",
        /// The engine's answer has no parameters for the decode engine.
        NoParams = "no_params",
    }
}

sidecar::named! {
    /// Result of the look for a prompt's blocks.
    pub(super) enum Located {
        /// An engine's node has some of them.
        Held = "held",
        Nowhere = "nowhere",
        /// No engine gave the tokens in time, or the API has no tokens.
        Untokenized = "untokenized",
    }
}

/// The label of a prompt sent to two engines.
pub(super) const PAIR: &str = "pair";
/// The labels of requests without a prompt: sent to any engine, to all, or to none.
pub(super) const OTHER: &str = "other";
pub(super) const EVERYWHERE: &str = "everywhere";
pub(super) const REFUSED: &str = "refused";
/// The labels of refusals: no room for the body in all, or of its client; no place for the connection; a body
/// that came too slowly.
pub(super) const MEMORY: &str = "memory";
pub(super) const CLIENT: &str = "client";
pub(super) const CONNECTIONS: &str = "connections";
pub(super) const SLOW: &str = "slow";

// === impl RouteCounters ===

impl RouteCounters {
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let prompts = "Requests by where they went. Prompts: pair, or why to one engine alone. Others: stored, everywhere (all engines), other (one engine), refused.";
        let prompts = register_counters(&registry, "route_prompts_total", prompts, &["way"])?;
        let failures = "Prompts that the engine asked to compute them did not, by reason; the one that answers computed them.";
        let failures = register_counters(&registry, "route_prefill_failures_total", failures, &["reason"])?;
        let retries =
            "Prompts that were asked for once more, since the engine that answers had given them up.";
        let retries = register_counter(&registry, "route_retries_total", retries)?;
        let first_tokens = "Streams that began with the token of the engine that computed the prompt.";
        let first_tokens = register_counter(&registry, "route_first_tokens_total", first_tokens)?;
        let refused = "Requests refused; memory, client: bodies took all of --request-memory, or a client's half; slow: the body came too slowly; connections: too many clients.";
        let refused = register_counters(&registry, "route_requests_refused_total", refused, &["reason"])?;
        let lines_dropped =
            "Lines of the access log that were not written, since standard output is read too slowly.";
        let lines_dropped = register_counter(&registry, "route_access_lines_dropped_total", lines_dropped)?;
        let located = "Prompts of unknown conversations looked for in the mesh; untokenized: their tokens or the namespaces were not known.";
        let results = Located::ALL.map(Located::name);
        let located = counters_of(&registry, "route_located_total", located, "result", &results)?;
        let members = "Members of the mesh that the router follows.";
        let members = register_gauge(&registry, "route_mesh_members", members)?;
        for way in Whole::ALL.map(Whole::name).into_iter().chain([PAIR, OTHER, EVERYWHERE, REFUSED]) {
            prompts.with_label_values(&[way]);
        }
        for failure in PromptFailure::ALL {
            failures.with_label_values(&[failure.name()]);
        }
        for reason in [MEMORY, CLIENT, SLOW, CONNECTIONS] {
            refused.with_label_values(&[reason]);
        }
        Ok(Self {
            registry,
            prompts,
            failures,
            retries,
            first_tokens,
            refused,
            lines_dropped,
            located,
            members,
        })
    }

    /// Counts a request by where it goes.
    pub(super) fn request(&self, way: &str) {
        self.prompts.with_label_values(&[way]).inc();
    }

    pub(super) fn located(&self, result: Located) {
        self.located.with_label_values(&[result.name()]).inc();
    }

    pub(super) fn failure(&self, failure: PromptFailure) {
        self.failures.with_label_values(&[failure.name()]).inc();
    }

    /// All counters, and the families of engines, in Prometheus' text format.
    pub(super) fn page(&self, engines: Vec<MetricFamily>) -> String {
        let families = merge_families(self.registry.gather().into_iter().chain(engines));
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }
}

// === impl PromptFailure ===

impl PromptFailure {
    /// Returns true if the failure shows while the decode engine may still wait. That engine ends its own
    /// wait for a late prompt.
    pub(super) fn is_soon(self) -> bool {
        !matches!(self, Self::Silent | Self::Late)
    }
}

impl From<&ForwardError> for PromptFailure {
    fn from(error: &ForwardError) -> Self {
        match error {
            ForwardError::Unreachable(_) => Self::Unreachable,
            ForwardError::Broken(_) => Self::Broken,
            ForwardError::Status(status) if status.is_client_error() => Self::Refused,
            ForwardError::Status(_) => Self::Status,
            ForwardError::Silent(_) => Self::Silent,
            ForwardError::Late(_) => Self::Late,
        }
    }
}

/// The status of an answer, or the label of the failure, as metrics have it.
pub(super) fn code_of(answer: Result<StatusCode, &ForwardError>) -> Result<StatusCode, &'static str> {
    answer.or_else(|error| match error {
        ForwardError::Status(status) => Ok(*status),
        error => Err(PromptFailure::from(error).name()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_has_its_counter_from_the_start() {
        let page = RouteCounters::new().unwrap().page(Vec::new());
        for reason in ["unreachable", "broken", "status", "refused", "silent", "late", "no_params"] {
            let line = format!("pillion_route_prefill_failures_total{{reason=\"{reason}\"}} 0\n");
            assert!(page.contains(&line), "{line}{page}");
        }
    }
}
