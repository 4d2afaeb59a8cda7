//! `Policy` for Python: conversions, and the waits for a session's answers.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList};
use shm_protocol::hints::RequestHints;
use shm_protocol::key::{Algorithm, BlockHash};
use shm_protocol::source::Source;

use super::options::config_error;
use super::remarks::{self, Loss, PyHintEnds, PyRecord, PyRemark};
use super::{GuardedSession, SchedulerSession, SessionOwner, UNDIGESTED, bytes16, some16};
use crate::clock;
use crate::core::aside::Aside;
use crate::core::options::EngineSettings;
use crate::core::policy::kinds::{AskedKeys, GroupForm, GroupKind, GroupSet, Points, ServedTokens};
use crate::core::policy::{
    Adapter, Arrival, BegunRequest, Changes, CheckRate, Due, EnginePolicy as Rules, EventChange, FoundTokens,
    LoadMode, Machine, Media, Now, OfferedState, PlannedStep, PolicyOptions, PolicyWait, RequestId,
    ServedState, way_of_end,
};
use crate::core::records::{RecordOptions, RequestRecords, WaitPart};
use crate::error::{ShimError as Failure, refuse_argument};
use crate::scheduler::{self, LoadWait, SchedulerClient, SessionConfig};

/// The number of an unfollowed request.
const STRANGER: i64 = -1;

/// Tokens, computed tokens, preemptions, the adapter's digest or placeholder, and the keys.
type Numbers<'py> = (u32, u32, u32, Option<PyBackedBytes>, Bound<'py, PyList>);
/// A due request: its number, its tokens computed by the step, and its current numbers.
type DueNumbers<'py> = (RequestId, Option<u32>, Numbers<'py>);
/// A beginning request: its number, its blocks, the tokens held by them, and its current numbers.
type BegunNumbers<'py> = (i64, Vec<Vec<u32>>, u32, Option<Numbers<'py>>);
/// Loads, lost ones, and whether the fences are waited for.
type PyPart<'py> = (Vec<(RequestId, Bound<'py, PyBytes>, bool)>, Vec<(RequestId, Vec<u32>, bool)>, bool);
/// The step's number, its parts, whether it fills a tail and asks, open loads, passed-over steps, and the count of weights.
type PyStep<'py> = (u64, Vec<PyPart<'py>>, bool, bool, Vec<u64>, Vec<u64>, u64);
/// On a disk; hashes; whether they are stored; the request, -1 where it is not known, and the first one's place.
type PyEvent<'py> = (bool, Vec<Bound<'py, PyBytes>>, bool, i64, u32);

#[derive(Debug)]
#[pyclass(frozen, name = "Policy", module = "pillion._shim")]
pub(super) struct PyPolicy {
    rules: GuardedSession<Rules<SchedulerClient>>,
    /// In place of the rules once they have met an internal error.
    aside: Mutex<Aside>,
    is_out: AtomicBool,
    algorithm: Option<Algorithm>,
    loss: Loss,
    /// Those of an engine that loads.
    records: Option<GuardedSession<RequestRecords>>,
    /// Warnings of the start, not yet handed over.
    said: Mutex<Vec<String>>,
}

/// The policy's part of an engine's options.
#[derive(Debug, FromPyObject)]
struct ConnectorSettings {
    socket: std::path::PathBuf,
    mode: String,
    load: String,
    sync_ms: Option<u64>,
    checkpoint_tokens: u32,
    keep_copies: String,
    query_timeout_us: u64,
    check_every: u32,
    check_per_mille: u32,
    strict_tokens: Option<u32>,
    miss_wait_ms: u32,
    handover_wait_ms: u32,
    promise_wait_ms: u32,
    wait_max_ms: u32,
    load_preference: f64,
    record_every: u32,
    record_slow_ms: u64,
}

// === impl ConnectorSettings ===

impl ConnectorSettings {
    fn loads(&self) -> bool {
        self.mode != "save_only"
    }

    fn saves(&self) -> bool {
        self.mode != "load_only"
    }

    fn load_mode(&self) -> Result<LoadMode, Failure> {
        let load = &self.load;
        let wrong = || refuse_argument(format!("load is '{load}': pass one of auto, sync, async"));
        LoadMode::named(load).map_or_else(wrong, Ok)
    }

    fn load_wait(&self) -> LoadWait {
        // The option's range is checked.
        LoadWait { most_ms: self.wait_max_ms, preference: (self.load_preference * 1000.0).round() as u32 }
    }

    fn records(&self, steps_in_flight: u64) -> RequestRecords {
        let slow = Duration::from_millis(self.record_slow_ms);
        RequestRecords::new(RecordOptions { every: self.record_every, slow, steps_in_flight })
    }
}

/// How a wait goes on if it does not end at once.
enum Sleep {
    Answer(usize, u64),
    Linger(usize, i64, (u32, u32), Duration),
}

#[pymethods]
impl PyPolicy {
    #[new]
    #[pyo3(signature = (
        options, engines, world_size, runs, early, tables, algorithm, groups, waits, on_gpu, by_engine, consumer, recomputes,
        block_bytes, drafts, drops_last_block, tokens_per_step, beside_others, events, steps_in_flight
    ))]
    #[allow(clippy::too_many_arguments, reason = "the facts of an engine, named at the call")]
    fn new(
        py: Python<'_>,
        options: ConnectorSettings,
        engines: Vec<String>,
        world_size: u32,
        runs: Vec<PyBackedBytes>,
        early: Vec<bool>,
        tables: Vec<PyBackedBytes>,
        algorithm: &str,
        groups: Vec<(u32, u32, u32, u32, u32)>,
        waits: bool,
        on_gpu: bool,
        by_engine: bool,
        consumer: bool,
        recomputes: bool,
        block_bytes: Vec<u64>,
        drafts: bool,
        drops_last_block: bool,
        tokens_per_step: u32,
        beside_others: bool,
        events: bool,
        steps_in_flight: u64,
    ) -> PyResult<Self> {
        let ConnectorSettings { sync_ms, strict_tokens, .. } = options;
        let (loads, saves, load) = (options.loads(), options.saves(), options.load_mode()?);
        let settings = EngineSettings {
            loads,
            sync: load == LoadMode::Sync,
            strict: strict_tokens.is_some(),
            several: groups.len() > 1,
            recomputes,
            waits,
            on_gpu,
        };
        let said = Mutex::new(settings.check_options().map_err(config_error)?);
        let algorithm = Algorithm::of_fact(algorithm).ok();
        let forms: Vec<GroupForm> = groups.iter().map(|group| form(*group)).collect();
        let sizes = forms.iter().map(|form| form.block_tokens).collect();
        let set = GroupSet::new(forms, options.checkpoint_tokens);
        let machine = |block_bytes| Machine {
            load,
            waits,
            on_gpu,
            by_engine,
            consumer,
            recomputes,
            sync_ms,
            block_bytes,
        };
        let mut sessions = Vec::new();
        for (group, engine) in engines.into_iter().enumerate() {
            let machine = machine(block_bytes[group]);
            let config = SessionConfig {
                budget: Duration::from_micros(options.query_timeout_us),
                by_engine,
                early: early[group],
                part_blocks: machine.part_blocks(),
                streams: set.may_stream(),
                whole_blocks: if set.several() { 0 } else { machine.whole_blocks() },
                last: set.forms[group].kind == GroupKind::State,
                load_wait: options.load_wait(),
            };
            let session = scheduler::SchedulerSetup {
                socket: options.socket.clone(),
                engine,
                world_size,
                run: bytes16("a run id", &runs[group])?,
                config,
                // A set waits for no producer, and no step for a set.
                miss_wait_ms: Some(options.miss_wait_ms).filter(|_| !set.several()),
                handover_wait_ms: Some(options.handover_wait_ms),
                promise_wait_ms: Some(options.promise_wait_ms),
                groups: some16("groups", Some(&tables[group][..]))?,
            };
            sessions.push(py.detach(|| SchedulerClient::new(session))?);
        }
        // A drafter's KV may differ under one key.
        let every = if loads && saves && !settings.several && !drafts { options.check_every } else { 0 };
        let policy = PolicyOptions {
            loads,
            saves,
            checks: CheckRate { every, per_mille: options.check_per_mille },
            strict_tokens,
            drops_last_block,
            tokens_per_step,
            beside_others,
            keep_copies: options.keep_copies == "yes",
            events: events.then_some(algorithm),
        };
        let rules = Rules::new(policy, machine(block_bytes[0]), set, sessions, clock::read_clock());
        let loss = Loss::named_by(recomputes, settings.strict);
        let records = loads.then(|| GuardedSession::new(options.records(steps_in_flight)));
        let aside = Mutex::new(Aside::new(sizes));
        let (rules, is_out) = (GuardedSession::new(rules), AtomicBool::new(false));
        Ok(Self { rules, aside, is_out, algorithm, loss, records, said })
    }

    // --- requests ---

    fn may_announce(&self, running: usize) -> PyResult<bool> {
        self.with(|rules| rules.may_announce(running))
    }

    fn look_for_verdict(&self) -> PyResult<bool> {
        self.with(|rules| rules.look_for_verdict())
    }

    #[pyo3(signature = (prompt, reads, awaits, hands_over, numbers, tokens = None))]
    fn follow_request(
        &self,
        prompt: u32,
        reads: bool,
        awaits: Option<u32>,
        hands_over: bool,
        numbers: Numbers<'_>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<RequestId> {
        let arrival = Arrival { prompt, reads, awaits, hands_over, tail: None };
        self.enter_or(Aside::number, |rules| {
            let id = rules.follow_request(arrival);
            follow_numbers(rules, id, &numbers)?;
            if let (Some(range), Some(tokens), Some(algorithm)) =
                (rules.tail_tokens(id), tokens, self.algorithm)
            {
                let part =
                    range.map(|at| tokens.get_item(at)?.extract::<u64>()).collect::<PyResult<Vec<_>>>()?;
                let tail = rules.tail(id, algorithm, &part);
                rules.set_tail(id, tail);
            }
            Ok(id)
        })
    }

    /// The hints of a request: the member `pillion` of its `kv_transfer_params`, and its `kv_hints`, both as JSON.
    #[pyo3(signature = (id, params, envelope))]
    fn follow_hints(&self, id: RequestId, params: Option<&str>, envelope: Option<&str>) -> PyResult<()> {
        let (last, own) =
            params.map_or_else(|| (false, Ok(RequestHints::default())), RequestHints::read_params);
        let read = own.and_then(|own| match envelope {
            Some(envelope) => own.join_hints(RequestHints::read_envelope(envelope)?),
            None => Ok(own),
        });
        self.with(|rules| rules.follow_hints(id, last, read, clock::read_clock()))
    }

    fn follow_media(&self, id: RequestId, media: Vec<(String, u32, u32)>) -> PyResult<()> {
        let media =
            media.into_iter().map(|(identifier, offset, length)| Media { identifier, offset, length });
        self.with(|rules| rules.follow_media(id, media.collect()))
    }

    fn progress(&self, computed: Vec<(RequestId, u32)>) -> PyResult<()> {
        self.with(|rules| computed.into_iter().for_each(|(id, tokens)| rules.progress(id, tokens)))
    }

    fn announce(&self, id: RequestId) -> PyResult<()> {
        self.with(|rules| rules.announce_request(id))
    }

    fn matched(
        &self,
        py: Python<'_>,
        id: RequestId,
        numbers: Numbers<'_>,
        computed: u32,
        alone: bool,
    ) -> PyResult<(Option<u32>, bool)> {
        let awaits = self.enter_rules(|rules| {
            follow_numbers(rules, id, &numbers)?;
            Ok(rules.awaits_blocks(id))
        })?;
        if awaits.is_some() {
            self.recorded(|records| records.asks(id, numbers.0, computed, clock::read_clock()));
        }
        let nothing = (FoundTokens::Tokens(0, false), false);
        let (found, put_off) = self.until(py, nothing, |rules, time| {
            let found = rules.matched(id, computed, alone, time)?;
            Ok((found, rules.is_put_off(id)))
        })?;
        let (tokens, beside, pending) = match found {
            FoundTokens::Tokens(tokens, beside) => (Some(tokens), beside, None),
            FoundTokens::Later if put_off => (None, false, None),
            FoundTokens::Later if awaits == Some(true) => (None, false, Some(WaitPart::Producer)),
            FoundTokens::Later => (None, false, Some(WaitPart::Query)),
        };
        self.recorded(|records| records.asked(id, pending, beside, clock::read_clock()));
        self.aside().asked(id, computed, beside);
        Ok((tokens, beside))
    }

    fn junction(&self, id: RequestId) -> PyResult<u32> {
        self.with(|rules| rules.junction(id))
    }

    fn allocated(
        &self,
        id: RequestId,
        numbers: Numbers<'_>,
        external: u32,
    ) -> PyResult<Option<Vec<(usize, usize)>>> {
        if external > 0 {
            self.recorded(|records| records.loads(id, external, clock::read_clock()));
        }
        self.aside().allocated(id, external);
        let wanted = self.enter_or(
            |aside| aside.wanted_blocks(id),
            |rules| {
                follow_numbers(rules, id, &numbers)?;
                Ok(rules.allocated(id, external))
            },
        )?;
        // A slice in Python ends at the end of its list at the latest.
        let range = |range: Range<usize>| (range.start, range.end.min(i64::MAX as usize));
        Ok(wanted.map(|ranges| ranges.into_iter().map(range).collect()))
    }

    fn load_blocks(&self, py: Python<'_>, id: RequestId, blocks: Vec<Vec<u32>>) -> PyResult<()> {
        self.aside().name_blocks(id, &blocks);
        self.until(py, (), |rules, time| rules.load_blocks(id, &blocks, time))?;
        self.with(|rules| self.recorded(|records| records.found(id, |hit| rules.sources(id, hit)))).map(drop)
    }

    fn sources(&self, id: RequestId, tokens: u32) -> PyResult<Option<[u32; Source::ALL.len()]>> {
        self.with(|rules| rules.sources(id, tokens))
    }

    fn take_hit_tokens(&self) -> PyResult<[u64; Source::ALL.len()]> {
        self.with(|rules| rules.take_hit_tokens())
    }

    fn loads_ended(&self, ids: Vec<RequestId>, failed: Vec<u32>) -> PyResult<()> {
        self.recorded(|records| records.received(&ids, clock::read_clock()));
        self.with(|rules| rules.loads_ended(&ids, &failed))
    }

    fn loads_failed(&self, blocks: Vec<u32>) -> PyResult<()> {
        self.with(|rules| {
            rules.loads_failed(&blocks);
            self.recorded(|records| records.note_failed(|id| rules.is_refused(id)));
        })
    }

    fn requests_failed(&self, ids: Vec<RequestId>) -> PyResult<()> {
        self.with(|rules| {
            rules.requests_failed(&ids);
            self.recorded(|records| records.note_failed(|id| rules.is_refused(id)));
        })
    }

    fn end_request(
        &self,
        id: RequestId,
        numbers: Numbers<'_>,
        aborted: bool,
        reason: u32,
        tokens: Vec<u32>,
    ) -> PyResult<(Option<u32>, Vec<u32>)> {
        self.recorded(|records| records.finished(id, aborted, clock::read_clock()));
        let ended = self.enter_rules(|rules| {
            follow_numbers(rules, id, &numbers)?;
            Ok(rules.end_request(id, way_of_end(reason, &tokens)))
        })?;
        Ok((ended.handed_over, ended.hold))
    }

    fn held(&self, blocks: Vec<u32>) -> PyResult<()> {
        self.aside().held(&blocks);
        self.with(|rules| rules.held(&blocks, clock::read_clock()))
    }

    fn release_held(&self) -> PyResult<Vec<u32>> {
        let released = self.enter_or(Aside::release_held, |rules| Ok(rules.release_held()))?;
        self.aside().released(&released);
        Ok(released)
    }

    // --- one step ---

    #[pyo3(signature = (begun, grown, filled, encoded, offered = Vec::new(), copied = Vec::new()))]
    fn begin_step(
        &self,
        begun: Vec<BegunNumbers<'_>>,
        grown: Vec<(i64, Vec<Vec<u32>>)>,
        filled: Vec<u32>,
        encoded: Vec<String>,
        offered: Vec<(RequestId, usize, u32, u32)>,
        copied: Vec<(u32, u32)>,
    ) -> PyResult<(Vec<RequestId>, Vec<u32>, bool, u32)> {
        let ids = || begun.iter().filter_map(|(number, ..)| followed(*number));
        self.recorded(|records| records.begins(ids()));
        let out = |aside: &mut Aside| (Vec::new(), aside.release_held(), false, 0);
        let opened = self.enter_or(out, |rules| {
            let mut changes = Changes { filled, copied, encoded, ..Changes::default() };
            for (number, blocks, computed, numbers) in begun {
                let request = followed(number);
                if let (Some(id), Some(numbers)) = (request, &numbers) {
                    follow_numbers(rules, id, numbers)?;
                }
                changes.begun.push(BegunRequest { request, blocks, computed });
            }
            changes.grown = grown.into_iter().map(|(number, blocks)| (followed(number), blocks)).collect();
            let state = |(request, group, block, boundary)| OfferedState { request, group, block, boundary };
            changes.offered = offered.into_iter().map(state).collect();
            let opened = rules.begin_step(changes, clock::read_clock());
            Ok((opened.due, opened.released, opened.contradicted, opened.named))
        })?;
        self.aside().released(&opened.1);
        Ok(opened)
    }

    fn end_step<'py>(
        &self,
        py: Python<'py>,
        due: Vec<DueNumbers<'py>>,
        computes: usize,
        named: Vec<u32>,
    ) -> PyResult<PyStep<'py>> {
        let step = self.enter_or(Aside::plan_step, |rules| {
            let mut all = Vec::with_capacity(due.len());
            for (request, scheduled, numbers) in due {
                follow_numbers(rules, request, &numbers)?;
                all.push(Due { request, scheduled });
            }
            Ok(rules.end_step(&all, computes, &named))
        })?;
        self.recorded(|records| records.scheduled(step.step, clock::read_clock()));
        self.aside().scheduled(&step);
        Ok(step_of(py, step))
    }

    fn passes_over(&self, step: u64) -> PyResult<bool> {
        self.with(|rules| rules.passes_over(step))
    }

    #[pyo3(signature = (step, scheduled = HashMap::new()))]
    fn accept_step(&self, step: u64, scheduled: HashMap<u64, Vec<RequestId>>) -> PyResult<()> {
        self.with(|rules| rules.accept_step(step, &scheduled, Some(clock::read_clock())))
    }

    // --- weights ---

    #[getter]
    fn updating(&self) -> PyResult<bool> {
        self.with(|rules| rules.updating)
    }

    fn update(&self, updating: bool) -> PyResult<()> {
        self.with(|rules| rules.updating = updating)
    }

    fn disown(&self) -> PyResult<()> {
        self.with(|rules| rules.disown())
    }

    fn weights_may_have_changed(&self) -> PyResult<()> {
        self.with(|rules| rules.weights_may_have_changed())
    }

    fn ranks_copy(&self) -> PyResult<()> {
        self.with(|rules| rules.ranks_copy())
    }

    // --- state and reports ---

    #[getter]
    fn state(&self) -> PyResult<&'static str> {
        let state = self.enter_or(|_| ServedState::Away, |rules| Ok(rules.state()))?;
        Ok(match state {
            ServedState::Away => "away",
            ServedState::Unaccepted => "unaccepted",
            ServedState::Unbound => "unbound",
            ServedState::Serving => "serving",
        })
    }

    fn take_unkept(&self) -> PyResult<(u64, u64)> {
        let unkept = self.with(|rules| rules.take_unkept())?;
        Ok((unkept.unaccepted_steps, unkept.unproven_blocks))
    }

    /// The sessions' notices, the policy's remarks, records, and outcomes of hints.
    #[allow(clippy::type_complexity, reason = "_shim.pyi declares this type")]
    fn take_notices(&self) -> PyResult<(Vec<String>, Vec<PyRemark>, Vec<PyRecord>, Vec<PyHintEnds>)> {
        let (notices, remarks, hints) = self.with(|rules| {
            let groups = 0..rules.groups();
            let notices = groups.flat_map(|group| rules.session(group).take_notices());
            let said = std::mem::take(&mut *self.said.lock().unwrap_or_else(PoisonError::into_inner));
            let notices = said.into_iter().chain(notices).collect();
            (notices, rules.take_remarks(), rules.take_hint_ends())
        })?;
        let error = self.aside().take_error().map(|text| (true, text, None));
        let remarks = remarks.into_iter().filter_map(|remark| remarks::word_remark(remark, self.loss));
        let remarks = remarks.chain(error).collect();
        let kept = self.recorded(RequestRecords::take_kept).unwrap_or_default();
        let records = kept.into_iter().map(|record| {
            let hinted = self.with(|rules| rules.has_hints(record.request))?;
            Ok(remarks::list_record(record, hinted))
        });
        let records = records.collect::<PyResult<_>>()?;
        Ok((notices, remarks, records, hints.into_iter().map(remarks::name_hints).collect()))
    }

    fn take_events<'py>(&self, py: Python<'py>, group: usize) -> PyResult<Vec<PyEvent<'py>>> {
        let events = self.with(|rules| rules.take_events(group, clock::read_clock()))?;
        let event = |event: &crate::core::policy::KvEvent| {
            let hashes = event.hashes.iter().map(|hash| PyBytes::new(py, hash)).collect();
            let (stored, request, first) = match event.change {
                EventChange::Stored { request, first } => (true, request as i64, first),
                EventChange::Located => (true, STRANGER, 0),
                EventChange::Removed => (false, STRANGER, 0),
            };
            (event.on_disk, hashes, stored, request, first)
        };
        Ok(events.iter().map(event).collect())
    }

    fn lingers(&self) -> PyResult<bool> {
        self.with(|rules| rules.lingers(clock::read_clock()))
    }

    fn blocks_cleared(&self) -> PyResult<()> {
        self.with(|rules| rules.blocks_cleared())
    }

    /// The sessions of the cache groups, to look at.
    fn sessions(slf: &Bound<'_, Self>) -> PyResult<Vec<SchedulerSession>> {
        let groups = slf.get().with(|rules| rules.groups())?;
        let session = |group| SchedulerSession(SessionOwner::Group(slf.clone().unbind(), group));
        Ok((0..groups).map(session).collect())
    }

    /// The key log of a request in a cache group.
    fn log(&self, id: RequestId, group: usize) -> PyResult<i64> {
        self.enter_or(|_| -1, |rules| Ok(rules.log(id, group)))
    }

    fn disconnect(&self) -> PyResult<()> {
        self.rules.last(|rules| (0..rules.groups()).for_each(|group| rules.session(group).disconnect()))
    }
}

impl PyPolicy {
    /// One call of the rules; `instead` of it once they have met an internal error, in this call or before: Pillion stays out then, and
    /// the engine goes on.
    fn enter_or<T>(
        &self,
        instead: impl FnOnce(&mut Aside) -> T,
        call: impl FnOnce(&mut Rules<SchedulerClient>) -> PyResult<T>,
    ) -> PyResult<T> {
        self.rules.refuse_forked()?;
        // Relaxed: the interpreter's lock orders the calls.
        if !self.is_out.load(Ordering::Relaxed) {
            match self.rules.enter_call(call) {
                Ok(done) => return Ok(done),
                Err(error) => self.put_out(&error)?,
            }
        }
        Ok(instead(&mut self.aside()))
    }

    fn enter_rules<T: Default>(
        &self,
        call: impl FnOnce(&mut Rules<SchedulerClient>) -> PyResult<T>,
    ) -> PyResult<T> {
        self.enter_or(|_| T::default(), call)
    }

    fn with<T: Default>(&self, call: impl FnOnce(&mut Rules<SchedulerClient>) -> T) -> PyResult<T> {
        self.enter_rules(|rules| Ok(call(rules)))
    }

    fn put_out(&self, error: &PyErr) -> PyResult<()> {
        self.is_out.store(true, Ordering::Relaxed);
        self.aside().fail(error);
        self.disconnect()
    }

    fn aside(&self) -> MutexGuard<'_, Aside> {
        // Nothing under this lock can panic half-way.
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A word for the records, if there are any.
    fn recorded<T>(&self, call: impl FnOnce(&mut RequestRecords) -> T) -> Option<T> {
        self.records.as_ref().and_then(|records| records.with(call).ok())
    }

    /// One call of a cache group's session.
    pub(super) fn session<T>(
        &self,
        group: usize,
        call: impl FnOnce(&mut SchedulerClient) -> PyResult<T>,
    ) -> PyResult<T> {
        self.rules.enter_call(|rules| call(rules.session(group)))
    }

    /// [`PyPolicy::wait_for`]; `instead` of it once the rules have met an internal error.
    fn until<T>(
        &self,
        py: Python<'_>,
        instead: T,
        call: impl FnMut(&mut Rules<SchedulerClient>, Instant) -> Result<T, PolicyWait>,
    ) -> PyResult<T> {
        self.rules.refuse_forked()?;
        if self.is_out.load(Ordering::Relaxed) {
            return Ok(instead);
        }
        self.wait_for(py, call).or_else(|error| self.put_out(&error).map(|()| instead))
    }

    /// Calls until no answer is waited for any more. A short wait keeps the interpreter ([`scheduler::HOLD`]).
    fn wait_for<T>(
        &self,
        py: Python<'_>,
        mut call: impl FnMut(&mut Rules<SchedulerClient>, Instant) -> Result<T, PolicyWait>,
    ) -> PyResult<T> {
        loop {
            let step = self.rules.with(|rules| {
                let wait = match call(rules, clock::read_clock()) {
                    Ok(done) => return Ok(done),
                    Err(wait) => wait,
                };
                match wait {
                    PolicyWait::Answer { group, op } => match rules.session(group).hold(op) {
                        Some(hits) => {
                            rules.answered(hits);
                            Err(None)
                        }
                        None => Err(Some(Sleep::Answer(group, op))),
                    },
                    PolicyWait::Linger { group, log, first, count, within } => {
                        Err(Some(Sleep::Linger(group, log, (first, count), within)))
                    }
                }
            })?;
            let sleep = match step {
                Ok(done) => return Ok(done),
                Err(None) => continue,
                Err(Some(sleep)) => sleep,
            };
            py.detach(|| {
                self.rules.with(|rules| {
                    let hits = match sleep {
                        Sleep::Answer(group, op) => rules.session(group).sleep(op),
                        Sleep::Linger(group, log, (first, count), within) => {
                            rules.session(group).linger(log, first, count, within)
                        }
                    };
                    rules.answered(hits);
                })
            })?;
        }
    }
}

/// The parts of the blocks `first..end` saved by a cache group.
#[pyfunction]
pub(super) fn needed_blocks(
    reads: u32,
    every: u32,
    first: u32,
    end: u32,
    prompt: u32,
    own: [u32; 2],
) -> Vec<(u32, u32)> {
    let GroupForm { kind, .. } = form((1, 1, 0, reads, 0));
    let needed = Points { every, boundary: 1, dropped: 0 }.needed(kind, (first, end), prompt, own);
    needed.into_iter().map(|range| (range.start, range.end)).collect()
}

/// The end of the tokens served beyond `first` of a prompt with `limit` of them, by groups with these blocks, and the boundary at which
/// a state is missing; 0: none. Each group is as a policy takes it. `drops`: the engine takes a block from its own hits, for a drafter.
#[pyfunction]
#[pyo3(signature = (groups, limit, kept, first = 0, drops = false))]
pub(super) fn served_tokens(
    groups: Vec<(u32, u32, u32, u32, u32)>,
    limit: u32,
    kept: Vec<Vec<bool>>,
    first: u32,
    drops: bool,
) -> (u32, u32) {
    let set = GroupSet::new(groups.into_iter().map(form).collect(), 0).dropping(drops);
    let present = |group: usize, keys: AskedKeys| {
        // Groups here have whole blocks alone.
        let AskedKeys::Of(blocks) = keys else { return Ok::<_, Infallible>(Some(0)) };
        let (first, is_kept) = (blocks.start, |block: &u32| kept[group][*block as usize]);
        Ok(Some(match set.forms[group].kind {
            GroupKind::State => blocks.rev().find(is_kept).map_or(0, |last| last + 1 - first),
            _ => blocks.take_while(is_kept).count() as u32,
        }))
    };
    let (limit, mut run) = (set.floor(limit), 0);
    let Ok(served) = set.serve_request((first, limit), None, present, |end| run = end);
    let ServedTokens::To(end) = served else { unreachable!("all groups know") };
    let junction = set.junction(run);
    let served = if set.is_dropped((first, end), run) { first } else { end };
    (served, if end < junction { junction } else { 0 })
}

/// `states`: tokens between two states at least; 0: the group keeps none. `hashes`: of each key.
fn form((block_tokens, hashes, window, reads, states): (u32, u32, u32, u32, u32)) -> GroupForm {
    let kind = match reads {
        _ if states > 0 => GroupKind::State,
        0 => GroupKind::Full,
        reads => GroupKind::Window { reads },
    };
    let key_tokens = if states > 0 { states } else { block_tokens };
    GroupForm { kind, block_tokens, hashes_each: hashes * block_tokens / key_tokens, key_tokens, window }
}

fn followed(number: i64) -> Option<RequestId> {
    RequestId::try_from(number).ok()
}

/// Takes a request's current numbers.
fn follow_numbers(rules: &mut Rules<SchedulerClient>, id: RequestId, numbers: &Numbers<'_>) -> PyResult<()> {
    let (tokens, computed, preemptions, adapter, keys) = numbers;
    let adapter = match adapter.as_deref() {
        None => Adapter::Absent,
        Some([]) => Adapter::Unknown,
        Some(UNDIGESTED) => Adapter::Undigested,
        Some(fold) => Adapter::Fold(bytes16("a fold", fold)?),
    };
    rules.set_now(id, Now { tokens: *tokens, computed: *computed, preemptions: *preemptions, adapter });
    rules.follow_keys(id, keys.len(), |index, key: &mut BlockHash| -> PyResult<()> {
        let item = keys.get_item(index)?;
        Ok(key.set_bytes(item.cast::<PyBytes>()?.as_bytes()).map_err(Failure::from)?)
    })
}

fn step_of(py: Python<'_>, step: PlannedStep) -> PyStep<'_> {
    let parts = step.parts.into_iter().map(|part| {
        let loads =
            part.loads.iter().map(|load| (load.request, PyBytes::new(py, &load.plan.encode()), load.sync));
        let lost = part.lost.into_iter().map(|lost| (lost.request, lost.blocks, lost.sync));
        (loads.collect(), lost.collect(), part.urgent)
    });
    (step.step, parts.collect(), step.fills_tail, step.asks, step.open_loads, step.passed, step.weights)
}
