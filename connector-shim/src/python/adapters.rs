//! LoRA adapters for Python.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{GuardedSession, UNDIGESTED, bytes16};
use crate::adapters::{AdapterRequest, EngineAdapters};
use crate::core::policy::Adapter;

/// Its number, name and folder; whether ranks read it in every step, whether its bytes are elsewhere, and whether its experts are fused.
type Words = (u64, String, PathBuf, bool, bool, bool);

#[derive(Debug)]
#[pyclass(frozen, name = "Adapters", module = "pillion._shim")]
pub(super) struct PyAdapters(GuardedSession<EngineAdapters>);

#[pymethods]
impl PyAdapters {
    #[new]
    fn new(run: &[u8], form: String) -> PyResult<Self> {
        Ok(Self(GuardedSession::new(EngineAdapters::new(bytes16("a run id", run)?, form))))
    }

    fn look_at(&self, request: Words) -> PyResult<bool> {
        self.0.with(|adapters| adapters.look_at(&request_of(request)))
    }

    fn loads(&self, request: Words) -> PyResult<bool> {
        self.0.with(|adapters| adapters.loads(&request_of(request)))
    }

    fn forget(&self, number: u64) -> PyResult<bool> {
        self.0.with(|adapters| adapters.forget(number))
    }

    fn may_differ(&self) -> PyResult<()> {
        self.0.with(EngineAdapters::may_differ)
    }

    fn word<'py>(&self, py: Python<'py>, request: Words) -> PyResult<Bound<'py, PyBytes>> {
        let fold = self.0.with(|adapters| adapters.fold(&request_of(request)))?;
        Ok(match fold {
            Adapter::Fold(fold) => PyBytes::new(py, &fold),
            Adapter::Undigested => PyBytes::new(py, UNDIGESTED),
            Adapter::Absent | Adapter::Unknown => PyBytes::new(py, b""),
        })
    }

    fn take_notices(&self) -> PyResult<Vec<String>> {
        self.0.with(EngineAdapters::take_notices)
    }
}

fn request_of((number, name, path, in_place, elsewhere, fused_experts): Words) -> AdapterRequest {
    AdapterRequest { number, name, path, in_place, elsewhere, fused_experts }
}
