//! A rank's reports for Python.

use pyo3::prelude::*;
use pyo3::types::PySet;

use super::Guarded;
use crate::core::reports::{RankReports, Reported};

#[derive(Debug)]
#[pyclass(frozen, name = "Reports", module = "pillion._shim")]
pub(super) struct PyReports(Guarded<RankReports>);

#[pymethods]
impl PyReports {
    #[new]
    fn new() -> Self {
        Self(Guarded::new(RankReports::default()))
    }

    fn begin_step(&self, step: u64, passed: Vec<u64>) -> PyResult<()> {
        self.0.with(|reports| reports.begin_step(step, &passed))
    }

    fn tell_ended<'py>(
        &self,
        py: Python<'py>,
        req_ids: Option<Bound<'py, PySet>>,
    ) -> PyResult<Option<Bound<'py, PySet>>> {
        let fresh = req_ids.map_or_else(|| PySet::empty(py), Ok)?;
        let told = self.tell_kind(
            fresh,
            |name| Ok(Reported::Ended(name.extract()?)),
            |it| matches!(it, Reported::Ended(_)),
        )?;
        Ok(Some(told).filter(|told| !told.is_empty()))
    }

    fn tell_failed<'py>(&self, req_ids: Bound<'py, PySet>) -> PyResult<Bound<'py, PySet>> {
        self.tell_kind(
            req_ids,
            |name| Ok(Reported::Failed(name.extract()?)),
            |it| matches!(it, Reported::Failed(_)),
        )
    }

    fn tell_blocks<'py>(&self, block_ids: Bound<'py, PySet>) -> PyResult<Bound<'py, PySet>> {
        self.tell_kind(
            block_ids,
            |block| Ok(Reported::Block(block.extract()?)),
            |it| matches!(it, Reported::Block(_)),
        )
    }
}

impl PyReports {
    /// Tells fresh reports of one kind, and the untold ones of the kind. A step without any makes no object.
    fn tell_kind<'py>(
        &self,
        fresh: Bound<'py, PySet>,
        read: impl Fn(&Bound<'py, PyAny>) -> PyResult<Reported>,
        is_kind: impl Fn(&Reported) -> bool,
    ) -> PyResult<Bound<'py, PySet>> {
        let read = fresh.iter().map(|each| read(&each)).collect::<PyResult<Vec<_>>>()?;
        let count = read.len();
        let told = self.0.with(|reports| reports.tell_reports(read, is_kind))?;
        if told.len() == count {
            return Ok(fresh);
        }
        let told_again = PySet::empty(fresh.py())?;
        for report in told {
            match report {
                Reported::Ended(name) | Reported::Failed(name) => told_again.add(name)?,
                Reported::Block(block) => told_again.add(block)?,
            }
        }
        Ok(told_again)
    }
}
