//! A rank's loads for Python, and its waits between layers.

use std::collections::BTreeSet;
use std::time::Duration;

use pyo3::prelude::*;

use super::{GuardedSession, WorkerSession};
use crate::clock;
use crate::core::layer_waits::LayerWaits;
use crate::core::plan::Plan;
use crate::core::rank_loads::RankLoads;
use crate::error::ShimError as Failure;

#[derive(Debug)]
#[pyclass(frozen, name = "RankLoads", module = "pillion._shim")]
pub(super) struct PyRankLoads(GuardedSession<RankLoads>);

#[pymethods]
impl PyRankLoads {
    #[new]
    fn new(whole: bool) -> Self {
        Self(GuardedSession::new(RankLoads::new(whole)))
    }

    fn begin_step(&self, step: u64, passed: Vec<u64>) -> PyResult<()> {
        self.0.with(|loads| loads.begin_step(step, &passed))
    }

    fn begin_load(&self, group: usize, request: String, plan: &[u8]) -> PyResult<()> {
        let plan = Plan::decode(plan).map_err(Failure::from)?;
        self.0.with(|loads| loads.begin_load(group, request, &plan))
    }

    fn lose_load(&self, request: String, blocks: Vec<u32>) -> PyResult<()> {
        self.0.with(|loads| loads.lose_load(request, blocks))
    }

    fn end_group(&self, group: usize) -> PyResult<()> {
        self.0.with(|loads| loads.end_group(group))
    }

    fn fail_blocks(&self, blocks: Vec<u32>) -> PyResult<()> {
        self.0.with(|loads| loads.fail_blocks(blocks))
    }

    /// Notes the ends of a group's loads, and waits at most so long for that of a request.
    fn look_for_ends(
        &self,
        py: Python<'_>,
        group: usize,
        session: &WorkerSession,
        within_us: u64,
    ) -> PyResult<()> {
        let until = clock::read_clock() + Duration::from_micros(within_us);
        while self.0.with(|loads| loads.is_loading(group))? {
            let is_ended = self.0.with(|loads| loads.has_ended())?;
            let left = until.saturating_duration_since(clock::read_clock());
            let left_us = if is_ended { 0 } else { left.as_micros() as u64 };
            let ends = session.finished(py, left_us)?;
            self.0.with(|loads| {
                for (op, failed) in ends {
                    loads.end_load(group, op, failed);
                }
            })?;
            if left_us == 0 {
                break;
            }
        }
        Ok(())
    }

    fn take_ended(&self) -> PyResult<Option<BTreeSet<String>>> {
        let ended = self.0.with(RankLoads::take_ended)?;
        Ok(Some(ended).filter(|ended| !ended.is_empty()))
    }

    fn take_failed(&self) -> PyResult<BTreeSet<String>> {
        self.0.with(RankLoads::take_failed)
    }

    fn take_failed_blocks(&self) -> PyResult<BTreeSet<u32>> {
        self.0.with(RankLoads::take_failed_blocks)
    }
}

#[derive(Debug)]
#[pyclass(frozen, name = "LayerWaits", module = "pillion._shim")]
pub(super) struct PyLayerWaits {
    waits: GuardedSession<LayerWaits>,
    running_mode: Py<PyAny>,
}

#[pymethods]
impl PyLayerWaits {
    #[new]
    fn new(layers: Vec<String>, cut_layers: Vec<usize>, allowed: bool, running_mode: Py<PyAny>) -> Self {
        Self { waits: GuardedSession::new(LayerWaits::new(layers, &cut_layers, allowed)), running_mode }
    }

    fn begin_step(&self) -> PyResult<Vec<usize>> {
        self.waits.with(|waits| waits.begin_step().collect())
    }

    fn permits(&self, mode: Option<&str>) -> PyResult<bool> {
        self.waits.with(|waits| waits.permits(mode))
    }

    fn expect_blocks(&self, blocks: Vec<u32>) -> PyResult<()> {
        self.waits.with(|waits| waits.expect_blocks(blocks))
    }

    #[getter]
    fn waiting(&self) -> PyResult<bool> {
        self.waits.with(|waits| waits.is_waiting())
    }

    /// None: no further hook of the step has an effect, so none is to call again.
    fn reach_layer(&self, py: Python<'_>, layer: &str) -> PyResult<Option<Vec<usize>>> {
        let (due, asks) = self.waits.with(|waits| waits.reach_layer(layer))?;
        if asks {
            let mode = self.running_mode.call0(py)?.extract(py)?;
            self.waits.with(|waits| waits.set_mode(mode))?;
        }
        let minds = !due.is_empty() || self.waits.with(|waits| waits.minds_hooks())?;
        Ok(minds.then(|| due.collect()))
    }

    fn end_step(&self, loading: usize) -> PyResult<Option<(Vec<usize>, Vec<u32>)>> {
        let unawaited = self.waits.with(|waits| waits.end_step(loading))?;
        Ok(unawaited.map(|unawaited| (unawaited.cuts.collect(), unawaited.blocks)))
    }
}
