//! The module `pillion._shim`: argument conversion, the interpreter's lock, and one table of errors. No decisions.
//!
//! A session sits behind a mutex. A waiting thread releases the interpreter first and gives the mutex back before asking for the
//! interpreter again, so the two locks cannot wait for each other.

mod adapters;
mod blocking;
mod facts;
mod keys;
mod options;
mod policy;
mod rank;
mod remarks;
mod shared_memory;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use shm_protocol::announcement::Located;
use shm_protocol::handshake::{self, BlockRegion, Copier};
use shm_protocol::key::BlockHash;
use shm_protocol::namespace;
use shm_protocol::page_form;
use shm_protocol::prefill::PrefillRate;
use shm_protocol::source::Source;

use crate::core::plan::Plan;
use crate::error::{ShimError as Failure, refuse_argument, refuse_forked};
use crate::scheduler::{AskedQuery, BlockChange, LoadWait, SchedulerClient, SessionConfig};
use crate::worker::{Begun, RankClient, RegionMemory};
use crate::{scheduler, worker};

/// The placeholder of an adapter while its digest is being computed; an adapter without the cache has an empty one.
const UNDIGESTED: &[u8] = b"?";

create_exception!(
    pillion._shim,
    ShimError,
    PyException,
    "A wrong call, or a sidecar that refuses; the text names the remedy."
);

impl From<Failure> for PyErr {
    fn from(error: Failure) -> Self {
        ShimError::new_err(error.to_string())
    }
}

/// A session as Python threads share it.
#[derive(Debug)]
struct GuardedSession<S> {
    session: Mutex<S>,
    owner: u32,
}

// === impl GuardedSession ===

impl<S> GuardedSession<S> {
    fn new(session: S) -> Self {
        Self { session: Mutex::new(session), owner: std::process::id() }
    }

    fn refuse_forked(&self) -> PyResult<()> {
        Ok(refuse_forked(self.owner)?)
    }

    /// One call. A forked child is refused before the lock: its parent may have held it. A panic ends the session.
    fn enter_call<T>(&self, call: impl FnOnce(&mut S) -> PyResult<T>) -> PyResult<T> {
        self.refuse_forked()?;
        let entered = catch_unwind(AssertUnwindSafe(|| {
            let mut session = self.session.lock().map_err(|_| internal_error())?;
            call(&mut session)
        }));
        entered.unwrap_or_else(|_| Err(internal_error()))
    }

    /// The last call, also after a panic: promises made to the sidecar end.
    fn last<T>(&self, call: impl FnOnce(&mut S) -> T) -> PyResult<T> {
        refuse_forked(self.owner)?;
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(call(&mut session))
    }

    /// The same of a call without an error of its own.
    fn with<T>(&self, call: impl FnOnce(&mut S) -> T) -> PyResult<T> {
        self.enter_call(|session| Ok(call(session)))
    }
}

fn internal_error() -> PyErr {
    ShimError::new_err(
        "pillion's shim met an internal error, printed above: restart the engine and report it",
    )
}

#[derive(Debug)]
#[pyclass(frozen, module = "pillion._shim")]
struct SchedulerSession(SessionOwner);

/// The owner of the session.
#[derive(Debug)]
enum SessionOwner {
    Itself(Box<GuardedSession<SchedulerClient>>),
    /// A cache group of a policy.
    Group(Py<policy::PyPolicy>, usize),
}

// === impl SessionOwner ===

impl SessionOwner {
    fn enter_session<T>(&self, call: impl FnOnce(&mut SchedulerClient) -> PyResult<T>) -> PyResult<T> {
        match self {
            Self::Itself(session) => session.enter_call(call),
            Self::Group(policy, group) => policy.get().session(*group, call),
        }
    }

    fn with<T>(&self, call: impl FnOnce(&mut SchedulerClient) -> T) -> PyResult<T> {
        self.enter_session(|session| Ok(call(session)))
    }
}

#[pymethods]
impl SchedulerSession {
    #[new]
    #[pyo3(signature = (socket, engine, world_size, run, budget_us, by_engine, early, miss_wait_ms=None, part_blocks=0, whole_blocks=0, groups=None, handover_wait_ms=None, promise_wait_ms=None, wait_max_ms=None))]
    #[allow(clippy::too_many_arguments, reason = "the facts of an engine, named at the call")]
    fn new(
        py: Python<'_>,
        socket: std::path::PathBuf,
        engine: String,
        world_size: u32,
        run: &[u8],
        budget_us: u64,
        by_engine: bool,
        early: bool,
        miss_wait_ms: Option<u32>,
        part_blocks: u32,
        whole_blocks: u32,
        groups: Option<&[u8]>,
        handover_wait_ms: Option<u32>,
        promise_wait_ms: Option<u32>,
        wait_max_ms: Option<u32>,
    ) -> PyResult<Self> {
        let (run, budget) = (bytes16("a run id", run)?, Duration::from_micros(budget_us));
        let untold = LoadWait::default();
        let load_wait = LoadWait { most_ms: wait_max_ms.unwrap_or(untold.most_ms), ..untold };
        let options = scheduler::SchedulerSetup {
            socket,
            engine,
            world_size,
            run,
            config: SessionConfig {
                budget,
                by_engine,
                early,
                part_blocks,
                streams: part_blocks > 0,
                whole_blocks,
                last: false,
                load_wait,
            },
            miss_wait_ms,
            handover_wait_ms,
            promise_wait_ms,
            groups: some16("groups", groups)?,
        };
        let session = GuardedSession::new(py.detach(|| SchedulerClient::new(options))?);
        Ok(Self(SessionOwner::Itself(Box::new(session))))
    }

    #[getter]
    fn connected(&self) -> PyResult<bool> {
        self.0.with(|session| session.is_connected())
    }

    #[getter]
    fn generation(&self) -> PyResult<u64> {
        self.0.with(|session| session.connection_count())
    }

    #[getter]
    fn saving(&self) -> PyResult<usize> {
        self.0.with(|session| session.saving())
    }

    #[getter]
    fn namespace(&self) -> PyResult<u64> {
        self.0.with(|session| session.namespace())
    }

    #[pyo3(signature = (fold = None))]
    fn open(&self, fold: Option<&[u8]>) -> PyResult<i64> {
        let fold = some16("a fold", fold)?;
        self.0.with(|session| session.open_log(fold))
    }

    fn append(&self, log: i64, hashes: &Bound<'_, PyList>, start: u32) -> PyResult<u32> {
        let end =
            u32::try_from(hashes.len()).or_else(|_| refuse_argument("more than 2^32 hashes: pass fewer"))?;
        let key = |index: u32, key: &mut BlockHash| -> PyResult<()> {
            let item = hashes.get_item(index as usize)?;
            Ok(key.set_bytes(item.cast::<PyBytes>()?.as_bytes()).map_err(Failure::from)?)
        };
        self.0.enter_session(|session| session.append_keys(log, start, end.saturating_sub(start), key))
    }

    fn append_tail(&self, log: i64, tail: &[u8]) -> PyResult<bool> {
        self.0.enter_session(|session| Ok(session.append_tail(log, tail)?))
    }

    fn await_producer(&self, log: i64) -> PyResult<()> {
        self.0.with(|session| session.await_producer(log))
    }

    fn hand_over(&self, log: i64) -> PyResult<()> {
        self.0.with(|session| session.hand_over(log))
    }

    fn promise(&self, log: i64) -> PyResult<()> {
        self.0.enter_session(|session| Ok(session.promise_log(log)?))
    }

    fn hint(&self, log: i64, start: u32, count: u32) -> PyResult<()> {
        self.0.with(|session| session.hint(log, start, count))
    }

    fn query(&self, py: Python<'_>, log: i64, start: u32, count: u32) -> PyResult<i64> {
        let (answer, op) = self.0.with(|session| match session.ask_query(log, start, count) {
            AskedQuery::Answered(hits) => (Some(hits), 0),
            AskedQuery::Posted(op) => (session.hold(op), op),
        })?;
        answer.map_or_else(|| self.sleep(py, op), Ok)
    }

    fn linger(&self, py: Python<'_>, log: i64, start: u32, count: u32, within_us: u64) -> PyResult<i64> {
        let within = Duration::from_micros(within_us);
        py.detach(|| self.0.with(|session| session.linger(log, start, count, within)))
    }

    fn ask_ahead(&self, log: i64, start: u32, count: u32) -> PyResult<()> {
        self.0.with(|session| session.ask_ahead(log, start, count))
    }

    fn tell_prefill(&self, token_ns: f32, slope_ns: f32) -> PyResult<()> {
        let wrong = || {
            refuse_argument(
                "no rate: pass times of 0 to 1e9 ns for a token, and for each token before it, not both 0",
            )
        };
        let rate = PrefillRate::new(token_ns, slope_ns).map_or_else(wrong, Ok)?;
        self.0.with(|session| session.tell_prefill(rate))
    }

    fn arriving(&self, log: i64) -> PyResult<bool> {
        self.0.with(|session| session.arriving(log))
    }

    fn sources(&self, log: i64, start: u32, count: u32) -> PyResult<[u32; Source::ALL.len()]> {
        self.0.with(|session| session.sources(log, start, count))
    }

    fn load<'py>(
        &self,
        py: Python<'py>,
        log: i64,
        start: u32,
        block_ids: &Bound<'py, PyList>,
        step: u64,
        sync: bool,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let blocks = block_list(block_ids)?;
        let load = || self.0.with(|session| session.post_load(log, start, &blocks, step, sync));
        // Other threads run while a lease is renewed.
        let renews = self.0.with(|session| session.must_renew(log))?;
        let plans = if renews { py.detach(load) } else { load() }?;
        Ok(plans.iter().map(|plan| PyBytes::new(py, &plan.encode())).collect())
    }

    #[pyo3(signature = (log, start, block_ids, step, checked = false))]
    fn save(
        &self,
        log: i64,
        start: u32,
        block_ids: &Bound<'_, PyList>,
        step: u64,
        checked: bool,
    ) -> PyResult<bool> {
        let blocks = block_list(block_ids)?;
        self.0.with(|session| session.post_save(log, start, blocks, step, checked))
    }

    fn accept(&self, step: u64) -> PyResult<()> {
        self.0.with(|session| session.accept_step(step))
    }

    fn overwrite(&self, block_ids: &Bound<'_, PyList>) -> PyResult<usize> {
        if self.saving()? == 0 {
            return Ok(0);
        }
        let blocks = block_list(block_ids)?;
        self.0.with(|session| session.overwrite(blocks.into_iter()))
    }

    fn unsaved(&self, block_ids: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
        let blocks = block_list(block_ids)?;
        self.0.with(|session| session.unsaved(blocks))
    }

    fn void_saves(&self) -> PyResult<()> {
        self.0.with(|session| session.void_saves())
    }

    fn release(&self, log: i64) -> PyResult<()> {
        self.0.with(|session| session.release_lease(log))
    }

    fn close(&self, log: i64) -> PyResult<()> {
        self.0.with(|session| session.close_log(log, 0))
    }

    fn salt(&self) -> PyResult<bool> {
        self.0.with(|session| session.salt())
    }

    fn weights(&self, count: u64) -> PyResult<()> {
        self.0.with(|session| session.weights(count))
    }

    fn end_step(&self) -> PyResult<()> {
        self.0.with(|session| session.end_step())
    }

    fn announce(&self) -> PyResult<()> {
        self.0.with(|session| session.ask_announcements())
    }

    #[allow(clippy::type_complexity, reason = "_shim.pyi declares this type")]
    fn take_changes<'py>(&self, py: Python<'py>) -> PyResult<(Vec<(bool, bool, Bound<'py, PyBytes>)>, bool)> {
        let (changes, saving) = self.0.with(|session| (session.take_changes(), session.saving() > 0))?;
        let remarks = |change: &BlockChange| {
            let Located { medium, hash, .. } = &change.located;
            (change.stored, *medium != Source::Memory, PyBytes::new(py, hash.unpadded()))
        };
        Ok((changes.iter().map(remarks).collect(), saving))
    }

    fn stats(&self) -> PyResult<BTreeMap<&'static str, u64>> {
        self.0.with(|session| session.stats())
    }

    fn take_notices(&self) -> PyResult<Vec<String>> {
        self.0.with(|session| session.take_notices())
    }

    fn disconnect(&self) -> PyResult<()> {
        self.0.with(|session| session.disconnect())
    }
}

impl SchedulerSession {
    fn sleep(&self, py: Python<'_>, op: u64) -> PyResult<i64> {
        py.detach(|| self.0.with(|session| session.sleep(op)))
    }
}

#[derive(Debug)]
#[pyclass(frozen, module = "pillion._shim")]
struct WorkerSession(GuardedSession<RankClient>);

#[pymethods]
impl WorkerSession {
    #[new]
    #[pyo3(signature = (
        socket, engine, world_size, rank, shard, shards, blocks, regions, fds, copy, facts,
        pointers = Vec::new(), cuts = Vec::new(), stream = 0, expects = None, live_weights = None,
        groups = None, proves = false
    ))]
    #[allow(clippy::too_many_arguments, reason = "the facts of a rank, named at the call")]
    fn new(
        py: Python<'_>,
        socket: std::path::PathBuf,
        engine: String,
        world_size: u32,
        rank: u32,
        shard: u32,
        shards: u32,
        blocks: u32,
        regions: Vec<(u32, u64, u64, u64)>,
        fds: Vec<i32>,
        copy: &str,
        facts: BTreeMap<String, String>,
        pointers: Vec<u64>,
        cuts: Vec<u64>,
        stream: u64,
        expects: Option<String>,
        live_weights: Option<&[u8]>,
        groups: Option<&[u8]>,
        proves: bool,
    ) -> PyResult<Self> {
        let region = |(fd, offset, stride, bytes)| BlockRegion { fd, offset, stride, bytes };
        let regions = regions.into_iter().map(region).collect();
        let wrong = || refuse_argument(format!("copy is '{copy}': pass one of engine, sidecar"));
        let copy = Copier::named(copy).map_or_else(wrong, Ok)?;
        let live_weights = some16("live_weights", live_weights)?.map(handshake::HelloDigest);
        let worker = handshake::WorkerHello {
            rank,
            shard,
            shards,
            blocks,
            regions,
            copy,
            facts,
            expects,
            live_weights,
            proves,
            ..handshake::WorkerHello::default()
        };
        let memory = RegionMemory::new(&fds, pointers, cuts, stream)?;
        let groups = some16("groups", groups)?;
        let options =
            worker::WorkerSetup { socket, engine, world_size, worker, memory, staged: false, groups };
        Ok(Self(GuardedSession::new(py.detach(|| RankClient::new(options))?)))
    }

    #[getter]
    fn connected(&self) -> PyResult<bool> {
        self.0.with(|session| session.is_connected())
    }

    #[getter]
    fn generation(&self) -> PyResult<u64> {
        self.0.with(|session| session.connection_count())
    }

    #[getter]
    fn namespace(&self) -> PyResult<String> {
        self.0.with(|session| session.namespace().map_or_else(String::new, |(digest, _)| digest.to_string()))
    }

    #[getter]
    fn namespace_line(&self) -> PyResult<String> {
        self.0.with(|session| {
            session.namespace().map_or_else(String::new, |(_, facts)| namespace::format_facts(facts))
        })
    }

    fn set_weights(&self, count: u64, digest: Option<&[u8]>) -> PyResult<()> {
        let live = some16("a digest", digest)?;
        self.0.enter_call(|session| Ok(session.set_weights(count, live)?))
    }

    fn join(&self, run: &[u8]) -> PyResult<()> {
        let run = bytes16("a run id", run)?;
        self.0.with(|session| session.join(run))
    }

    #[pyo3(signature = (step, stream = 0))]
    fn start(&self, step: u64, stream: u64) -> PyResult<()> {
        self.0.with(|session| session.start_step(step, stream))
    }

    #[pyo3(signature = (step, wake, stream = 0))]
    fn done(&self, step: u64, wake: bool, stream: u64) -> PyResult<()> {
        self.0.with(|session| session.done(step, wake, stream))
    }

    #[pyo3(signature = (plan, stream = 0, by_cuts = false))]
    fn load(&self, py: Python<'_>, plan: &[u8], stream: u64, by_cuts: bool) -> PyResult<Option<Vec<u32>>> {
        let plan = Plan::decode(plan).map_err(Failure::from)?;
        let plan = match self.0.enter_call(|session| Ok(session.begin_load(plan, stream, by_cuts)?))? {
            Begun::Later => return Ok(None),
            Begun::OnStream(failed) => return Ok(Some(failed)),
            Begun::No(plan) => plan,
        };
        py.detach(|| self.0.enter_call(|session| Ok(Some(session.load_behind(plan, stream)?))))
    }

    fn wait_cut(&self, cut: usize, stream: u64) -> PyResult<()> {
        self.0.enter_call(|session| Ok(session.wait_cut(cut, stream)?))
    }

    #[getter]
    fn loading(&self) -> PyResult<usize> {
        self.0.with(|session| session.loading())
    }

    #[pyo3(signature = (within_us = 0))]
    fn finished(&self, py: Python<'_>, within_us: u64) -> PyResult<Vec<(u64, Vec<u32>)>> {
        let ended = match Duration::from_micros(within_us) {
            Duration::ZERO => self.0.with(|session| session.finished()),
            within => py.detach(|| self.0.with(|session| session.finished_within(within))),
        }?;
        Ok(ended.into_iter().map(|ended| (ended.op, ended.failed)).collect())
    }

    fn stats(&self) -> PyResult<BTreeMap<&'static str, u64>> {
        self.0.with(|session| session.stats())
    }

    fn take_notices(&self) -> PyResult<Vec<String>> {
        self.0.with(|session| session.take_notices())
    }

    fn end_session(&self, py: Python<'_>, within_us: u64) -> PyResult<bool> {
        py.detach(|| self.0.with(|session| session.end_session(Duration::from_micros(within_us))))
    }

    fn disconnect(&self) -> PyResult<()> {
        self.0.with(|session| session.disconnect())
    }
}

/// The operation id of a plan.
#[pyfunction]
fn plan_op(plan: &[u8]) -> PyResult<u64> {
    Ok(Plan::decode(plan).map_err(Failure::from)?.op)
}

/// The blocks written by a plan.
#[pyfunction]
fn plan_blocks(plan: &[u8]) -> PyResult<Vec<u32>> {
    Ok(Plan::decode(plan).map_err(Failure::from)?.block_ids())
}

fn bytes16(what: &str, bytes: &[u8]) -> Result<[u8; 16], Failure> {
    bytes.try_into().or_else(|_| refuse_argument(format!("{what} has {} bytes: pass 16", bytes.len())))
}

fn some16(what: &str, bytes: Option<&[u8]>) -> Result<Option<[u8; 16]>, Failure> {
    bytes.map(|bytes| bytes16(what, bytes)).transpose()
}

fn block_list(ids: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
    ids.iter().map(|id| id.extract()).collect()
}

/// Rust core of the package `pillion`; its interface is in `_shim.pyi`.
#[pymodule]
fn _shim(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("ShimError", module.py().get_type::<ShimError>())?;
    module.add("ConfigError", module.py().get_type::<options::ConfigError>())?;
    module.add_function(wrap_pyfunction!(options::engine_options, module)?)?;
    module.add_function(wrap_pyfunction!(options::read_options, module)?)?;
    module.add_class::<adapters::PyAdapters>()?;
    module.add_class::<rank::PyRankLoads>()?;
    module.add_class::<rank::PyLayerWaits>()?;
    module.add_class::<SchedulerSession>()?;
    module.add_class::<WorkerSession>()?;
    module.add_class::<policy::PyPolicy>()?;
    module.add_class::<blocking::PyBlockingEngine>()?;
    module.add_function(wrap_pyfunction!(policy::needed_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(policy::served_tokens, module)?)?;
    module.add_class::<keys::PyChain>()?;
    module.add_function(wrap_pyfunction!(keys::none_hash, module)?)?;
    module.add_function(wrap_pyfunction!(keys::derive_keys, module)?)?;
    module.add_function(wrap_pyfunction!(keys::fold_hash, module)?)?;
    module.add_function(wrap_pyfunction!(keys::extend_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(shared_memory::check_shared_memory, module)?)?;
    module.add_function(wrap_pyfunction!(plan_op, module)?)?;
    module.add_function(wrap_pyfunction!(plan_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(facts::weight_files, module)?)?;
    module.add_function(wrap_pyfunction!(facts::list_differences, module)?)?;
    module.add_function(wrap_pyfunction!(facts::hash_fact, module)?)?;
    module.add_function(wrap_pyfunction!(facts::read_page_form, module)?)?;
    module.add_function(wrap_pyfunction!(facts::lay_out_block, module)?)?;
    module.add("KEY_THEN_VALUE", page_form::KEY_THEN_VALUE)?;
    module.add("KEYS_THEN_VALUES", page_form::KEYS_THEN_VALUES)?;
    module.add("ITEM_BYTES", facts::item_bytes())
}
