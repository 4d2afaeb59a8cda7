//! The router's counters, and the values of their labels.

use hyper::StatusCode;
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, Registry, TextEncoder};

use super::figures::merge_families;
use super::forward::ForwardError;
use super::prompt::Whole;
use sidecar::pages::metrics::figures::{register_counter, register_counters};

/// Counters of one router, all of them there before the first prompt.
#[derive(Debug)]
pub(super) struct RouteCounters {
    registry: Registry,
    /// Prompts by where they went, and why not to two.
    prompts: IntCounterVec,
    /// Prompts that the engine asked to compute them did not, by reason.
    failures: IntCounterVec,
    /// Prompts that the engine asked to answer them gave up, and which were asked for once more.
    pub(super) retries: IntCounter,
    /// Streams whose first token is that of the engine that computed the prompt.
    pub(super) first_tokens: IntCounter,
    /// Requests whose body was not taken, by reason.
    pub(super) refused: IntCounterVec,
    /// Lines of the access log that were not written.
    pub(super) lines_dropped: IntCounter,
}

sidecar::named! {
    /// Why an engine did not compute a prompt, or computed it for nobody.
    pub(super) enum PromptFailure {
        Unreachable = "unreachable",
        Broken = "broken",
        Status = "status",
        /// Its status is the client's fault, and another engine found none.
        Refused = "refused",
        /// No sign of life, or of work while the other engine answered.
        Silent = "silent",
        Late = "late",
        /// The engine's answer says nothing to the one that answers.
        NoParams = "no_params",
    }
}

/// The label of a prompt that two engines work on.
pub(super) const PAIR: &str = "pair";
/// The labels of requests that are no prompts: by any engine, by all, or by none.
pub(super) const OTHER: &str = "other";
pub(super) const EVERYWHERE: &str = "everywhere";
pub(super) const REFUSED: &str = "refused";
/// The labels of bodies that had no room in all or of their client, of those that came too slowly, and of clients without a place.
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
        for way in Whole::ALL.map(Whole::name).into_iter().chain([PAIR, OTHER, EVERYWHERE, REFUSED]) {
            prompts.with_label_values(&[way]);
        }
        for failure in PromptFailure::ALL {
            failures.with_label_values(&[failure.name()]);
        }
        for reason in [MEMORY, CLIENT, SLOW, CONNECTIONS] {
            refused.with_label_values(&[reason]);
        }
        Ok(Self { registry, prompts, failures, retries, first_tokens, refused, lines_dropped })
    }

    /// Counts a request by where it goes.
    pub(super) fn request(&self, way: &str) {
        self.prompts.with_label_values(&[way]).inc();
    }

    pub(super) fn failure(&self, failure: PromptFailure) {
        self.failures.with_label_values(&[failure.name()]).inc();
    }

    /// All of them, and the families of engines, in Prometheus' text format.
    pub(super) fn page(&self, engines: Vec<MetricFamily>) -> String {
        let families = merge_families(self.registry.gather().into_iter().chain(engines));
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }
}

// === impl PromptFailure ===

impl PromptFailure {
    /// Whether it is known while the engine that answers may still wait. That one ends its own wait for a prompt that is late.
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

/// The status of an answer, or the code of why there was none, as metrics have it.
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
