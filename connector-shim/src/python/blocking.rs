//! `BlockingEngine` for Python.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;
use shm_protocol::hints::WrittenHint;

use super::GuardedSession;
use crate::blocking::{BlockMemory, BlockingEngine, CheckRate, EngineSetup, ProofStart, RequestId};
use crate::error::ShimError as Failure;

#[derive(Debug)]
#[pyclass(frozen, name = "BlockingEngine", module = "pillion._shim")]
pub(super) struct PyBlockingEngine(GuardedSession<BlockingEngine>);

#[pymethods]
impl PyBlockingEngine {
    #[new]
    #[allow(clippy::too_many_arguments, reason = "the facts of an engine, in the order of _shim.pyi")]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        name: String,
        facts: BTreeMap<String, String>,
        expects: Option<String>,
        shards: u32,
        descriptor: i32,
        blocks: u32,
        block_bytes: u64,
        piece_bytes: u64,
        check_every: u32,
        check_per_mille: u32,
        miss_wait_ms: u32,
    ) -> PyResult<Self> {
        let setup = EngineSetup {
            socket,
            name,
            facts,
            expects,
            shards,
            memory: BlockMemory { descriptor, blocks, block_bytes, piece_bytes },
            checks: CheckRate { every: check_every, per_mille: check_per_mille },
            miss_wait_ms: Some(miss_wait_ms),
        };
        Ok(Self(GuardedSession::new(py.detach(|| BlockingEngine::new(&setup))?)))
    }

    #[getter]
    fn connected(&self) -> PyResult<bool> {
        self.0.with(|engine| engine.is_connected())
    }

    fn begin_load(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<RequestId> {
        self.run_waiting(py, |engine| Ok(engine.begin_load(&tokens)))
    }

    fn begin_awaited(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<RequestId> {
        self.run_waiting(py, |engine| Ok(engine.begin_awaited(&tokens)))
    }

    fn begin_promised(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<RequestId> {
        self.run_waiting(py, |engine| Ok(engine.begin_promised(&tokens)))
    }

    fn held_tokens(&self, request: RequestId) -> PyResult<u32> {
        self.0.with(|engine| engine.held_tokens(request))
    }

    fn blocks_of(&self, request: RequestId) -> PyResult<Vec<u32>> {
        self.0.with(|engine| engine.blocks_of(request).to_vec())
    }

    fn reserve(&self, request: RequestId, tokens: Vec<u32>) -> PyResult<Vec<u32>> {
        self.0.enter_call(|engine| {
            engine.reserve(request, &tokens)?;
            Ok(engine.blocks_of(request).to_vec())
        })
    }

    fn save(&self, py: Python<'_>, request: RequestId) -> PyResult<u64> {
        self.run_waiting(py, |engine| engine.save(request))
    }

    fn end_request(&self, request: RequestId) -> PyResult<()> {
        self.0.with(|engine| engine.end_request(request))
    }

    fn kept_blocks(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<u32> {
        self.run_waiting(py, |engine| Ok(engine.kept_blocks(&tokens)))
    }

    /// Returns the outcome's name. Fails if the hint breaks the schema.
    fn hint_tokens(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        action: String,
        seconds: Option<u32>,
    ) -> PyResult<&'static str> {
        self.run_waiting(py, |engine| {
            let hint = WrittenHint { action, seconds, tokens: None }.read_hint();
            let hint = hint.map_err(|error| Failure::Argument(error.to_string()))?;
            Ok(engine.hint_tokens(&tokens, hint).name())
        })
    }

    /// Whether the engine has proven itself, and the request whose tokens are to be computed.
    fn begin_proof(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<(bool, Option<RequestId>)> {
        self.run_waiting(py, |engine| {
            Ok(match engine.begin_proof(&tokens) {
                ProofStart::Proven => (true, None),
                ProofStart::NotKept => (false, None),
                ProofStart::Compute(request) => (false, Some(request)),
            })
        })
    }

    fn end_proof(&self, py: Python<'_>, request: RequestId) -> PyResult<bool> {
        self.run_waiting(py, |engine| engine.end_proof(request))
    }

    fn counts(&self) -> PyResult<BTreeMap<&'static str, u64>> {
        self.0.with(|engine| engine.counts())
    }

    fn take_notices(&self) -> PyResult<Vec<String>> {
        self.0.with(BlockingEngine::take_notices)
    }

    fn disconnect(&self) -> PyResult<()> {
        self.0.last(BlockingEngine::disconnect_all)
    }
}

impl PyBlockingEngine {
    /// A call that may wait: other threads run meanwhile.
    fn run_waiting<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut BlockingEngine) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.0.enter_call(|engine| Ok(call(engine)?)))
    }
}
