//! Counters and gauges: how they are registered, and those that are taken out of one set of figures.

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Takes one figure out of a set.
pub(super) type Reading<S> = fn(&S) -> u64;
/// Name, help and reading of a metric.
pub(super) type Figure<S> = (&'static str, &'static str, Reading<S>);

/// Metrics of a set.
#[derive(Debug)]
pub(super) struct Figures<S> {
    counters: Vec<(IntCounter, Reading<S>)>,
    gauges: Vec<(IntGauge, Reading<S>)>,
}

// === impl Figures ===

impl<S> Figures<S> {
    pub(super) fn new(
        registry: &Registry,
        counters: &[Figure<S>],
        gauges: &[Figure<S>],
    ) -> Result<Self, prometheus::Error> {
        let counters =
            counters.iter().map(|&(name, help, figure)| Ok((counter(registry, name, help)?, figure)));
        let gauges = gauges.iter().map(|&(name, help, figure)| Ok((gauge(registry, name, help)?, figure)));
        let counters = counters.collect::<Result<_, prometheus::Error>>()?;
        Ok(Self { counters, gauges: gauges.collect::<Result<_, prometheus::Error>>()? })
    }

    /// Makes the figures visible.
    pub(super) fn publish(&self, stats: &S) {
        self.counters.iter().for_each(|(counter, figure)| raise(counter, figure(stats)));
        self.gauges.iter().for_each(|(gauge, figure)| show(gauge, figure(stats)));
    }
}

/// Metrics of several sets of one kind, with a label for each.
#[derive(Debug)]
pub(super) struct LabelledFigures<S> {
    counters: Vec<(IntCounterVec, Reading<S>)>,
    gauges: Vec<(IntGaugeVec, Reading<S>)>,
}

// === impl LabelledFigures ===

impl<S> LabelledFigures<S> {
    /// Registers the metrics, with names after a prefix.
    pub(super) fn new(
        registry: &Registry,
        (prefix, label): (&str, &str),
        totals: &[Figure<S>],
        levels: &[Figure<S>],
    ) -> Result<Self, prometheus::Error> {
        let name = |name| format!("{prefix}_{name}");
        let totals = totals.iter().map(|&(of, help, figure)| {
            counters(registry, &name(of), help, &[label]).map(|made| (made, figure))
        });
        let levels = levels.iter().map(|&(of, help, figure)| {
            gauges(registry, &name(of), help, &[label]).map(|made| (made, figure))
        });
        Ok(Self { counters: totals.collect::<Result<_, _>>()?, gauges: levels.collect::<Result<_, _>>()? })
    }

    /// Makes the figures of one set visible.
    pub(super) fn show_set(&self, value: &str, stats: &S) {
        self.counters.iter().for_each(|(all, figure)| raise(&all.with_label_values(&[value]), figure(stats)));
        self.gauges.iter().for_each(|(all, figure)| show(&all.with_label_values(&[value]), figure(stats)));
    }

    /// Ends the metrics of a shown set.
    pub(super) fn remove(&self, value: &str) {
        self.counters.iter().for_each(|(all, _)| _ = all.remove_label_values(&[value]));
        self.gauges.iter().for_each(|(all, _)| _ = all.remove_label_values(&[value]));
    }
}

/// Makes a total visible. Called by one thread alone, so read-then-add is exact.
pub fn raise(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

/// Makes a level visible.
pub fn show(gauge: &IntGauge, level: u64) {
    gauge.set(i64::try_from(level).unwrap_or(i64::MAX));
}

pub fn counter(registry: &Registry, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
    register_metric(registry, IntCounter::with_opts(named(name, help))?)
}

pub fn gauge(registry: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    register_metric(registry, IntGauge::with_opts(named(name, help))?)
}

/// Counters of one name, told apart by `labels`.
pub fn counters(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    register_metric(registry, IntCounterVec::new(named(name, help), labels)?)
}

/// Counters of one name, told apart by one label that has these values: each is there from the start.
pub fn counters_of(
    registry: &Registry,
    name: &str,
    help: &str,
    label: &str,
    values: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    let counters = counters(registry, name, help, &[label])?;
    values.iter().for_each(|value| counters.with_label_values(&[value]).inc_by(0));
    Ok(counters)
}

/// Gauges of one name, told apart by `labels`.
pub fn gauges(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntGaugeVec, prometheus::Error> {
    register_metric(registry, IntGaugeVec::new(named(name, help), labels)?)
}

/// Every metric's name begins with the program's.
fn named(name: &str, help: &str) -> Opts {
    Opts::new(format!("pillion_{name}"), help)
}

pub fn register_metric<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: M,
) -> Result<M, prometheus::Error> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
