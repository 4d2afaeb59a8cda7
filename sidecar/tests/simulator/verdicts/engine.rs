//! An engine of whole steps: it queries, loads, computes from the loaded blocks, and saves.

use shm_protocol::key::BlockHash;
use shm_protocol::message::{APPEND_CHUNKS, Status};
use shm_protocol::request::{Append, Load, LoadFlags, LogKeys, Query, Save, SchedulerRequest};
use sidecar::core::{CoreEvent, SessionId};

use super::check::Check;
use super::pod::{Cause, Kv, Pod, RIGHT};
use crate::rng::Rng;

/// Requests of one engine at once.
const REQUESTS: usize = 2;
/// Most blocks of a request.
pub(super) const LENGTH: usize = 8;

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Nature {
    Right,
    /// All its steps have this cause.
    Wrong(Cause),
    /// It saves wrong blocks, and chooses the results of its checks.
    Liar,
}

/// A liar's purpose of a request.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Lie {
    Poison,
    Agree,
    Contradict,
}

#[derive(Debug)]
struct Asked {
    id: u64,
    log: u32,
    keys: Vec<BlockHash>,
    /// Its first block in the engine's memory.
    block: u32,
    /// The load of this step, and its blocks.
    load: Option<(u64, usize)>,
    /// Blocks loaded or computed.
    known: usize,
    saved: usize,
    /// A check differed meanwhile: none of its blocks are saved.
    disowned: bool,
    lie: Option<Lie>,
}

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) name: String,
    pub(super) nature: Nature,
    /// Its scheduler's session and its rank's session; `None` while it is stopped.
    sessions: Option<(SessionId, SessionId)>,
    block_bytes: u64,
    pub(super) check: Check,
    step: u64,
    op: u64,
    requests: Vec<Asked>,
    /// Blocks found and queried since the last reset.
    pub(super) hits: (usize, usize),
    /// True if its keys are an xxhash alone: here the first half of each key.
    pub(super) is_xxhash: bool,
    /// Wrong blocks among the loaded ones, and those of faults found before.
    pub(super) wrong_reads: (u64, u64),
}

// === impl Engine ===

impl Engine {
    pub(super) fn new(number: usize, nature: Nature, block_bytes: u64, check: Check) -> Self {
        let (sessions, step, op, requests, hits, is_xxhash, wrong_reads) = Default::default();
        let name = format!("e{number}");
        Self { name, nature, sessions, block_bytes, check, step, op, requests, hits, is_xxhash, wrong_reads }
    }

    /// The session of its scheduler: one for each run.
    pub(super) fn session(&self) -> SessionId {
        self.sessions.expect("it has started").0
    }

    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Begins a run.
    pub(super) fn start(&mut self, pod: &mut Pod, rng: &mut Rng) {
        self.sessions = Some(pod.connect(&self.name, rng.bytes16(), self.block_bytes));
        self.check = Check::new(self.check.every, self.check.per_mille);
        self.step = 0;
    }

    pub(super) fn stop(&mut self, pod: &mut Pod) {
        self.requests.clear();
        pod.disconnect(self.sessions.take().expect("it has started"));
    }

    /// Takes a request if there is room for one.
    pub(super) fn admit(&mut self, keys: &[BlockHash], pod: &mut Pod, rng: &mut Rng) {
        let free = (0..REQUESTS as u32).find(|log| self.requests.iter().all(|asked| asked.log != *log));
        let Some(log) = free else { return };
        let (id, block) = (self.next_op(), 1 + log * LENGTH as u32);
        let is_liar = self.nature == Nature::Liar;
        let lie = is_liar.then(|| rng.pick(&[Lie::Poison, Lie::Agree, Lie::Contradict]));
        self.ask(pod, SchedulerRequest::Open { log }, &[], &[]);
        let all = LogKeys::new(log, 0..keys.len() as u32);
        let chunks = std::array::from_fn(|at| log * APPEND_CHUNKS as u32 + at as u32);
        let append = Append { keys: all, chunks, promised: false, tail: false };
        let hashes: Vec<BlockHash> = keys.iter().map(|key| self.hash(key)).collect();
        self.ask(pod, SchedulerRequest::Append(append), &hashes, &[]);
        let query = Query::new(id, all);
        self.ask(pod, SchedulerRequest::Query(query), &[], &[]);
        let outcome = pod.outcome(self.session(), id);
        let hits = if outcome.status == Status::Ok { outcome.value as usize } else { 0 };
        pod.note(|| format!("{}: request {id} finds {hits} of {}", self.session(), keys.len()));
        self.hits = (self.hits.0 + hits, self.hits.1 + keys.len());
        let kept = match lie {
            _ if hits == 0 => 0,
            None => self.check.trim(id, hits, self.step),
            Some(Lie::Agree) => hits,
            Some(_) => 0,
        };
        let load = (kept > 0).then(|| {
            let (op, keys) = (self.next_op(), LogKeys::new(log, 0..kept as u32));
            let (step, flags) = (self.step + 1, LoadFlags::default());
            let load = Load { op, keys, position: 0, step, lease: id, flags };
            let blocks: Vec<u32> = (block..block + kept as u32).collect();
            self.ask(pod, SchedulerRequest::Load(load), &[], &blocks);
            self.check.loaded(kept);
            (op, kept)
        });
        if hits > 0 && load.is_none() {
            self.ask(pod, SchedulerRequest::Release { log }, &[], &[]);
        }
        let (keys, known, saved) = (keys.to_vec(), 0, kept);
        self.requests.push(Asked { id, log, keys, block, load, known, saved, disowned: false, lie });
    }

    /// Ends its newest request, computed or not.
    pub(super) fn abort(&mut self, pod: &mut Pod) {
        if let Some(asked) = self.requests.pop() {
            self.check.give_up(asked.id);
            self.ask(pod, SchedulerRequest::Close { log: asked.log, way: 0 }, &[], &[]);
        }
    }

    fn hash(&self, key: &BlockHash) -> BlockHash {
        let [first, second, ..] = key.words();
        if self.is_xxhash { BlockHash::from_words([first, second, 0, 0]) } else { *key }
    }

    fn next_op(&mut self) -> u64 {
        self.op += 1;
        self.op
    }

    fn ask(&self, pod: &mut Pod, request: SchedulerRequest, keys: &[BlockHash], blocks: &[u32]) {
        pod.ask(self.session(), request, keys, blocks);
    }

    /// Makes one step with `cause`: computes `chunk` blocks of each request.
    pub(super) fn step(&mut self, chunk: usize, cause: Cause, pod: &mut Pod) {
        let (scheduler, rank) = self.sessions.expect("it has started");
        self.step += 1;
        pod.tell(CoreEvent::Fences { session: rank, start: self.step, done: self.step - 1 });
        let mut requests = std::mem::take(&mut self.requests);
        for asked in &mut requests {
            self.end_load(asked, rank, pod);
            asked.compute(chunk, cause, rank, pod);
            self.save(asked, pod);
            let (id, known, last) = (asked.id, asked.known, asked.block + asked.known as u32 - 1);
            let (step, kv) = (self.step, *pod.block(rank, last));
            pod.note(|| {
                format!("{scheduler}: step {step} of cause {cause}: {id} has {known} blocks, last {kv:?}")
            });
        }
        pod.tell(CoreEvent::Fences { session: rank, start: self.step, done: self.step });
        self.ask(pod, SchedulerRequest::Accept { step: self.step }, &[], &[]);
        pod.tell(CoreEvent::Drained { session: scheduler, void_below: 0 });
        let saved = pod.saved(scheduler);
        let sum = |of: fn(&shm_protocol::message::Saved) -> u32| saved.iter().map(of).map(u64::from).sum();
        if self.check.learn(sum(|saved| saved.checked), sum(|saved| saved.differing), self.step) {
            requests.iter_mut().for_each(|asked| asked.disowned = true);
        }
        for asked in requests.extract_if(.., |asked| asked.known == asked.keys.len()) {
            self.ask(pod, SchedulerRequest::Close { log: asked.log, way: 0 }, &[], &[]);
        }
        self.requests = requests;
    }

    fn end_load(&mut self, asked: &mut Asked, rank: SessionId, pod: &mut Pod) {
        let Some((op, kept)) = asked.load.take() else { return };
        if pod.outcome(rank, op).status != Status::Ok {
            asked.saved = 0;
            return;
        }
        asked.known = kept;
        for block in asked.block..asked.block + kept as u32 {
            let kv = *pod.block(rank, block);
            self.wrong_reads.0 += u64::from(!kv.is_right());
            self.wrong_reads.1 += u64::from(pod.is_left(kv));
            assert!(!pod.is_refuted(kv), "wrong bytes: {} loaded {kv:?}, whose step was found", self.name);
        }
    }

    fn save(&mut self, asked: &mut Asked, pod: &mut Pod) {
        let is_checked = matches!(asked.lie, Some(Lie::Agree | Lie::Contradict));
        let span = match asked.lie {
            None => self.check.span(asked.id),
            Some(_) => is_checked.then_some((0, asked.keys.len())),
        };
        if asked.disowned || asked.known < span.map_or(asked.saved + 1, |(_, end)| end) {
            return;
        }
        if let Some((first, end)) = span {
            self.post_save(asked, first, end, true, pod);
            self.check.saved();
            asked.saved = end;
        }
        if asked.known > asked.saved {
            self.post_save(asked, asked.saved, asked.known, false, pod);
        }
        asked.saved = asked.known;
    }

    fn post_save(&mut self, asked: &Asked, first: usize, end: usize, checked: bool, pod: &mut Pod) {
        let (op, keys) = (self.next_op(), LogKeys::new(asked.log, first as u32..end as u32));
        let save = Save { op, keys, position: 0, step: self.step, checked, handover: false, replaced: 0 };
        let blocks: Vec<u32> = (first..end).map(|at| asked.block + at as u32).collect();
        self.ask(pod, SchedulerRequest::Save(save), &[], &blocks);
    }
}

// === impl Asked ===

impl Asked {
    /// Computes the next blocks from those before.
    fn compute(&mut self, chunk: usize, cause: Cause, rank: SessionId, pod: &mut Pod) {
        let end = (self.known + chunk).min(self.keys.len());
        let cause = if self.lie == Some(Lie::Agree) { RIGHT } else { cause };
        for at in self.known..end {
            let before = match at.checked_sub(1) {
                Some(before) => *pod.block(rank, self.block + before as u32),
                None => Kv::default(),
            };
            *pod.block(rank, self.block + at as u32) = before.then(&self.keys[at], cause);
        }
        self.known = end;
    }
}
