//! Metrics of each engine of a router. A request changes atomics alone. A scrape reads the engines of its moment: figures go with their
//! engine.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use hyper::StatusCode;
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Registry};

use super::handed_over::HandedOver;
use sidecar::pages::metrics::figures::{
    counters_of, register_counter, register_gauge, register_metric, show_gauge,
};

/// Seconds: from the first token of a short prompt to the longest answer.
const BUCKETS: [f64; 14] = [5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];
/// The values of the label `code`.
const CODES: [&str; 9] = ["2xx", "3xx", "4xx", "5xx", "unreachable", "broken", "silent", "late", DROPPED];
/// The code of a request without an answer, since the router hung up.
pub(super) const DROPPED: &str = "dropped";

/// The figures of one engine in one role.
#[derive(Debug)]
pub(super) struct EngineFigures {
    /// Adds the labels of the engine.
    registry: Registry,
    up: IntGauge,
    load: IntGauge,
    /// Requests under way.
    pub(super) open: IntGauge,
    answers: IntCounterVec,
    first: Histogram,
    whole: Histogram,
    /// Prompts of the engine, put to engines once more.
    pub(super) retries: IntCounter,
    hand_overs: IntCounterVec,
    speed: IntGauge,
    hand_over: Gauge,
    /// Tokens of prompts that it computed alone by the placement.
    pub(super) alone_tokens: IntCounter,
}

// === impl EngineFigures ===

impl EngineFigures {
    pub(super) fn new(role: &str, engine: String) -> Self {
        Self::try_new(role, engine).expect("valid names, each of them once")
    }

    fn try_new(role: &str, engine: String) -> Result<Self, prometheus::Error> {
        let labels = [("role", role.to_owned()), ("engine", engine)];
        let labels = labels.map(|(name, value)| (name.to_owned(), value)).into();
        let registry = Registry::new_custom(None, Some(labels))?;
        let up = "State of the engine: 1 while it is asked, 0 while it is left alone after a failure.";
        let up = register_gauge(&registry, "route_engine_up", up)?;
        let load =
            "Work under way: tokens that a prefill engine has still to compute, requests of a decode engine.";
        let load = register_gauge(&registry, "route_engine_load", load)?;
        let open = "Requests under way at the engine.";
        let open = register_gauge(&registry, "route_engine_open_requests", open)?;
        let answers = "Answers of the engine by status class, or by the reason why there was none; dropped: the router hung up first.";
        let answers = counters_of(&registry, "route_engine_answers_total", answers, "code", &CODES)?;
        let duration = |part| {
            let text = "Time of answers with status 2xx; first: until bytes of it could be passed on; whole: until its end.";
            let options = HistogramOpts::new("pillion_route_engine_duration_seconds", text);
            Histogram::with_opts(options.const_label("part", part).buckets(BUCKETS.to_vec()))
                .and_then(|histogram| register_metric(&registry, histogram))
        };
        let (first, whole) = (duration("first")?, duration("whole")?);
        let retries = "Prompts of the engine that were put to engines once more, since the decode engine had given them up.";
        let retries = register_counter(&registry, "route_engine_retries_total", retries)?;
        let hand_overs = "Computed prompts at the decode engine, counted at both; taken: it had most of one; recomputed: it computed one again; unstated: it does not say.";
        let results = HandedOver::ALL.map(HandedOver::name);
        let hand_overs =
            counters_of(&registry, "route_engine_handovers_total", hand_overs, "result", &results)?;
        let speed = "Prompt tokens a second of the engine's fastest answers; 0: unknown.";
        let speed = register_gauge(&registry, "route_engine_prefill_tokens_per_second", speed)?;
        let text = "Mean time from a prefill engine's answer to the first token of a hand-over; 0: unknown.";
        let hand_over = Gauge::new("pillion_route_engine_handover_seconds", text)?;
        let hand_over = register_metric(&registry, hand_over)?;
        let alone_tokens =
            "Tokens of prompts that the engine computed alone, as sooner or for --ttft-target.";
        let alone_tokens = register_counter(&registry, "route_engine_alone_tokens_total", alone_tokens)?;
        Ok(Self {
            registry,
            up,
            load,
            open,
            answers,
            first,
            whole,
            retries,
            hand_overs,
            speed,
            hand_over,
            alone_tokens,
        })
    }

    /// Counts an answer by its status, or by the code of its absence.
    pub(super) fn count_answer(&self, answer: Result<StatusCode, &str>) {
        let code = match answer {
            Ok(status) => class(status),
            Err(code) => code,
        };
        self.answers.with_label_values(&[code]).inc();
    }

    /// Notes the time from a request to the first bytes of its answer.
    pub(super) fn note_first(&self, after: Duration) {
        self.first.observe(after.as_secs_f64());
    }

    /// Notes the time from a request to the end of its answer.
    pub(super) fn note_whole(&self, after: Duration) {
        self.whole.observe(after.as_secs_f64());
    }

    pub(super) fn count_result(&self, result: HandedOver) {
        self.hand_overs.with_label_values(&[result.name()]).inc();
    }

    /// Sets the learned times.
    pub(super) fn show_times(&self, speed: Option<f64>, hand_over: Option<f64>) {
        show_gauge(&self.speed, speed.unwrap_or(0.0) as u64);
        self.hand_over.set(hand_over.unwrap_or(0.0));
    }

    /// The families of this engine, with its state as it is now.
    pub(super) fn gather(&self, is_up: bool, load: u64) -> Vec<MetricFamily> {
        self.up.set(is_up.into());
        show_gauge(&self.load, load);
        self.registry.gather()
    }
}

/// The class of a status.
fn class(status: StatusCode) -> &'static str {
    CODES[usize::from(status.as_u16() / 100).clamp(2, 5) - 2]
}

/// Families in the order of their names, those of one name as one.
pub(super) fn merge_families(families: impl IntoIterator<Item = MetricFamily>) -> Vec<MetricFamily> {
    let mut all: BTreeMap<String, MetricFamily> = BTreeMap::new();
    for mut family in families {
        match all.entry(family.name().to_owned()) {
            Entry::Vacant(place) => _ = place.insert(family),
            Entry::Occupied(mut place) => place.get_mut().mut_metric().append(family.mut_metric()),
        }
    }
    all.into_values().collect()
}
