//! Counters and gauges: how they are registered, and those that are taken out of one set of figures.

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Takes one figure out of a set.
pub(super) type Reading<S> = fn(&S) -> u64;
/// Name, help and reading of a metric.
pub(super) type Figure<S> = (&'static str, &'static str, Reading<S>);

/// Counters and gauges of a set, or with a label of several sets of one kind.
#[derive(Debug)]
pub(super) struct Figures<S> {
    /// Each with the values of its own labels, behind those of the set.
    counters: Vec<(IntCounterVec, Option<&'static str>, Reading<S>)>,
    gauges: Vec<(IntGaugeVec, Reading<S>)>,
}

// === impl Figures ===

impl<S: Default> Figures<S> {
    /// Registers the metrics of one set, each there from the start.
    pub(super) fn new(
        registry: &Registry,
        totals: &[Figure<S>],
        levels: &[Figure<S>],
    ) -> Result<Self, prometheus::Error> {
        let figures = Self::register(registry, "", &[], (totals, levels))?;
        figures.publish(&S::default());
        Ok(figures)
    }

    /// The same with a counter for each reason.
    pub(super) fn with_reasons(
        mut self,
        registry: &Registry,
        name: &str,
        help: &str,
        reasons: &[(&'static str, Reading<S>)],
    ) -> Result<Self, prometheus::Error> {
        let all = counters(registry, name, help, &["reason"])?;
        self.counters.extend(reasons.iter().map(|&(reason, figure)| (all.clone(), Some(reason), figure)));
        self.publish(&S::default());
        Ok(self)
    }
}

impl<S> Figures<S> {
    /// Registers the metrics of sets with a label, with names after a prefix.
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
            counters(registry, &name(of), help, labels).map(|made| (made, None, figure))
        });
        let levels = levels
            .iter()
            .map(|&(of, help, figure)| gauges(registry, &name(of), help, labels).map(|made| (made, figure)));
        Ok(Self { counters: totals.collect::<Result<_, _>>()?, gauges: levels.collect::<Result<_, _>>()? })
    }

    /// Makes the figures of the one set visible.
    pub(super) fn publish(&self, stats: &S) {
        self.show(&[], stats);
    }

    /// Makes the figures of one set visible, under the value of its label.
    pub(super) fn show_set(&self, value: &str, stats: &S) {
        self.show(&[value], stats);
    }

    fn show(&self, set: &[&str], stats: &S) {
        for (all, reason, figure) in &self.counters {
            let labels: Vec<&str> = set.iter().copied().chain(*reason).collect();
            raise(&all.with_label_values(&labels), figure(stats));
        }
        self.gauges.iter().for_each(|(all, figure)| show(&all.with_label_values(set), figure(stats)));
    }

    /// Ends the metrics of a shown set.
    pub(super) fn remove(&self, value: &str) {
        self.counters.iter().for_each(|(all, ..)| _ = all.remove_label_values(&[value]));
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
