//! Counters and gauges: their registration, and their values from a struct of figures.

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Reads one value of the struct.
pub(super) type Reading<S> = fn(&S) -> u64;
/// Name, help and reading of a metric.
pub(super) type Figure<S> = (&'static str, &'static str, Reading<S>);

/// Counters and gauges of one struct, or with a label of several structs of one type.
#[derive(Debug)]
pub(super) struct MetricFigures<S> {
    /// Each counter with its own label's value, after those of the set.
    counters: Vec<(IntCounterVec, Option<&'static str>, Reading<S>)>,
    gauges: Vec<(IntGaugeVec, Reading<S>)>,
}

// === impl MetricFigures ===

impl<S: Default> MetricFigures<S> {
    /// Registers the metrics of one struct, each with a zero.
    pub(super) fn new(
        registry: &Registry,
        totals: &[Figure<S>],
        levels: &[Figure<S>],
    ) -> Result<Self, prometheus::Error> {
        let figures = Self::register(registry, "", &[], (totals, levels))?;
        figures.publish(&S::default());
        Ok(figures)
    }

    /// Adds a counter for each reason. Panics for figures with a label of several structs.
    pub(super) fn with_reasons(
        mut self,
        registry: &Registry,
        name: &str,
        help: &str,
        reasons: &[(&'static str, Reading<S>)],
    ) -> Result<Self, prometheus::Error> {
        let all = register_counters(registry, name, help, &["reason"])?;
        self.counters.extend(reasons.iter().map(|&(reason, figure)| (all.clone(), Some(reason), figure)));
        self.publish(&S::default());
        Ok(self)
    }
}

impl<S> MetricFigures<S> {
    /// Registers the metrics of several structs, with a label and a prefix of their names.
    pub(super) fn labelled(
        registry: &Registry,
        (prefix, label): (&str, &str),
        totals: &[Figure<S>],
        levels: &[Figure<S>],
    ) -> Result<Self, prometheus::Error> {
        Self::register(registry, &format!("{prefix}_"), &[label], (totals, levels))
    }

    fn register(
        registry: &Registry,
        prefix: &str,
        labels: &[&str],
        (totals, levels): (&[Figure<S>], &[Figure<S>]),
    ) -> Result<Self, prometheus::Error> {
        let name = |name| format!("{prefix}{name}");
        let totals = totals.iter().map(|&(of, help, figure)| {
            register_counters(registry, &name(of), help, labels).map(|made| (made, None, figure))
        });
        let levels = levels.iter().map(|&(of, help, figure)| {
            register_gauges(registry, &name(of), help, labels).map(|made| (made, figure))
        });
        Ok(Self { counters: totals.collect::<Result<_, _>>()?, gauges: levels.collect::<Result<_, _>>()? })
    }

    /// Publishes the values of the only struct.
    pub(super) fn publish(&self, stats: &S) {
        self.show(&[], stats);
    }

    /// Publishes the values of one struct under its label's value.
    pub(super) fn show_set(&self, value: &str, stats: &S) {
        self.show(&[value], stats);
    }

    fn show(&self, set: &[&str], stats: &S) {
        for (all, reason, figure) in &self.counters {
            let labels: Vec<&str> = set.iter().copied().chain(*reason).collect();
            raise_counter(&all.with_label_values(&labels), figure(stats));
        }
        self.gauges.iter().for_each(|(all, figure)| show_gauge(&all.with_label_values(set), figure(stats)));
    }

    /// Removes the metrics of one label's value.
    pub(super) fn remove(&self, value: &str) {
        self.counters.iter().for_each(|(all, ..)| _ = all.remove_label_values(&[value]));
        self.gauges.iter().for_each(|(all, _)| _ = all.remove_label_values(&[value]));
    }
}

/// Raises a counter to a total; a smaller total has no effect. Called by one thread alone, so read-then-add is exact.
pub fn raise_counter(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

/// Sets a gauge.
pub fn show_gauge(gauge: &IntGauge, level: u64) {
    gauge.set(i64::try_from(level).unwrap_or(i64::MAX));
}

pub fn register_counter(
    registry: &Registry,
    name: &str,
    help: &str,
) -> Result<IntCounter, prometheus::Error> {
    register_metric(registry, IntCounter::with_opts(metric_opts(name, help))?)
}

pub fn register_gauge(registry: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    register_metric(registry, IntGauge::with_opts(metric_opts(name, help))?)
}

/// Registers counters of one name with labels.
pub fn register_counters(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    register_metric(registry, IntCounterVec::new(metric_opts(name, help), labels)?)
}

/// Registers counters of one name with one label, each of these values with a zero.
pub fn counters_of(
    registry: &Registry,
    name: &str,
    help: &str,
    label: &str,
    values: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    let counters = register_counters(registry, name, help, &[label])?;
    values.iter().for_each(|value| counters.with_label_values(&[value]).inc_by(0));
    Ok(counters)
}

/// Registers gauges of one name with labels.
pub fn register_gauges(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntGaugeVec, prometheus::Error> {
    register_metric(registry, IntGaugeVec::new(metric_opts(name, help), labels)?)
}

/// Adds the prefix `pillion_`, common to all metrics.
fn metric_opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("pillion_{name}"), help)
}

pub fn register_metric<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: M,
) -> Result<M, prometheus::Error> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
