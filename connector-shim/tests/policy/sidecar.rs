//! The sidecar's side of one session, in this process: writes down posted requests, and gives the answers set by a test.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use connector_shim::core::endpoint::{Endpoint, Feature};
use connector_shim::core::notices::Notices;
use connector_shim::core::policy::PolicyWait;
use connector_shim::core::scheduler::{AskedQuery, BlockChange, EngineSession, SessionConfig};
use shm_protocol::PROTOCOL_VERSION;
use shm_protocol::announcement::{Announcement, Located};
use shm_protocol::hints::Advice;
use shm_protocol::key::BlockHash;
use shm_protocol::layout::{LOGS, header};
use shm_protocol::message::{Outcome, Saved, Status};
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{Advise, Append, Load, LogKeys, Query, Save, SchedulerRequest};
use shm_protocol::ring::{Consumer, Producer};
use shm_protocol::session::{Bound, RegionRing, Ring, SessionMemory};
use shm_protocol::source::Source;

/// The namespace of a bound session, and another one.
pub(crate) const HERE: u64 = 7;
pub(crate) const ELSEWHERE: u64 = 8;

/// A connection without a socket.
#[derive(Debug)]
pub(crate) struct Wire {
    memory: SessionMemory,
    tails: Cell<bool>,
    hints: Cell<bool>,
}

/// A key log, in the order of opening.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    pub(crate) keys: Vec<BlockHash>,
    /// The key of a tail, not among the keys.
    pub(crate) tail: Option<BlockHash>,
    pub(crate) promised: bool,
}

/// A question.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Question {
    pub(crate) log: usize,
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) awaits: bool,
}

/// A save without an end.
#[derive(Debug)]
struct Saving {
    op: u64,
    count: u32,
    checked: bool,
}

/// A load.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Loading {
    pub(crate) log: usize,
    pub(crate) first: u32,
    pub(crate) blocks: Vec<u32>,
    pub(crate) sync: bool,
}

/// A save: its log, its first key and its blocks.
pub(crate) type Saves = Vec<(usize, u32, Vec<u32>)>;

/// See the module.
#[derive(Debug)]
pub(crate) struct Sidecar {
    wire: Rc<Wire>,
    submission: Consumer<RegionRing>,
    completion: Producer<RegionRing>,
    announcements: Producer<RegionRing>,
    weights: u64,
    /// Hits of every question, as far as it asks for so many; none: it is answered later.
    pub(crate) hits: Option<u32>,
    /// The kept states, by the place of their key: questions are for the last one of them.
    pub(crate) states: BTreeSet<u32>,
    /// No tail is kept.
    pub(crate) lacks_tails: bool,
    /// Blocks of every answer are still on their way.
    pub(crate) arriving: bool,
    pending: Vec<(u64, u32, u32, bool)>,
    numbers: HashMap<u32, usize>,
    pub(crate) logs: Vec<Log>,
    pub(crate) closed: Vec<usize>,
    /// The way an answer ended, for each of them.
    pub(crate) ways: Vec<u32>,
    /// Logs ended with their blocks on the device.
    pub(crate) ended: Vec<usize>,
    /// Keys whose blocks have left the device: the log, the first one and their number.
    pub(crate) left: Vec<(usize, u32, u32)>,
    pub(crate) questions: Vec<Question>,
    /// Steps with a wait for a log's blocks: the log, and the longest permitted wait.
    pub(crate) lingered: Vec<(usize, Duration)>,
    pub(crate) hints: Vec<(usize, u32, u32)>,
    /// Advice on logs: the log, the number of its first keys, and whether the log is of no request.
    pub(crate) advised: Vec<(usize, u32, Advice, bool)>,
    /// The outcome of all advice; none: there is no answer.
    pub(crate) advice: Option<Status>,
    pub(crate) released: Vec<usize>,
    pub(crate) loads: Vec<Loading>,
    pub(crate) saves: Saves,
    /// Saves with blocks to compare.
    pub(crate) checked: Saves,
    /// The key of each save that replaces one, and the replaced key.
    pub(crate) replaced: Vec<(u32, u32)>,
    /// Blocks of saves given up one by one.
    pub(crate) cancelled: u32,
    unfinished: Vec<Saving>,
    pub(crate) accepted: Vec<u64>,
    /// Posted numbers of weights.
    pub(crate) changed: Vec<u64>,
}

/// A session, and the sidecar behind it.
#[derive(Debug)]
pub(crate) struct Host {
    session: EngineSession<Rc<Wire>>,
    generation: u64,
    pub(crate) sidecar: Sidecar,
}

// === impl Wire ===

impl Wire {
    fn new() -> Self {
        let (_, memory) = SessionMemory::create(PROTOCOL_VERSION, 1, 1).unwrap();
        Self { memory, tails: Cell::new(true), hints: Cell::new(true) }
    }
}

impl Endpoint for Wire {
    fn memory(&self) -> &SessionMemory {
        &self.memory
    }

    fn epoch(&self) -> u64 {
        1
    }

    fn lease_ttl(&self) -> Duration {
        Duration::from_secs(30)
    }

    fn knows(&self, feature: Feature) -> bool {
        match feature {
            Feature::Tails => self.tails.get(),
            Feature::Hints => self.hints.get(),
            _ => true,
        }
    }

    fn ring(&self) {}

    fn is_lost(&self) -> bool {
        false
    }

    fn hang_up(&self) {}
}

// === impl Host ===

impl Host {
    pub(crate) fn new(config: SessionConfig) -> Self {
        let sidecar = Sidecar::new();
        let mut session = EngineSession::new(config, Arc::new(Notices::default()));
        session.attach(Rc::clone(&sidecar.wire));
        Self { session, generation: 1, sidecar }
    }

    /// The sidecar reads and answers every posted request.
    pub(crate) fn serve(&mut self) {
        self.session.flush();
        self.sidecar.serve();
    }

    /// Another connection to the same sidecar.
    pub(crate) fn reconnect(&mut self, namespace: u64) {
        self.sidecar.connect();
        self.session.attach(Rc::clone(&self.sidecar.wire));
        self.generation += 1;
        self.bind(namespace);
    }

    /// The ranks have stated their weights.
    pub(crate) fn bind(&mut self, namespace: u64) {
        self.serve();
        self.sidecar.bind(namespace);
    }

    /// The answer awaited by the policy.
    pub(crate) fn wait(&mut self, wait: PolicyWait, now: Instant) -> i64 {
        let asked = match wait {
            PolicyWait::Answer { op, .. } => AskedQuery::Posted(op),
            PolicyWait::Linger { log, first, count, within, .. } => {
                let number = log as u32 & (LOGS as u32 - 1);
                self.sidecar.lingered.push((self.sidecar.numbers[&number], within));
                self.session.ask_query(log, first, count, now)
            }
        };
        self.serve();
        match asked {
            AskedQuery::Answered(hits) => hits,
            AskedQuery::Posted(op) => {
                self.session.look_for_answer(op, now, now).expect("the sidecar has answered")
            }
        }
    }
}

impl Deref for Host {
    type Target = EngineSession<Rc<Wire>>;

    fn deref(&self) -> &Self::Target {
        &self.session
    }
}

impl DerefMut for Host {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.session
    }
}

impl connector_shim::core::policy::host::SessionHost for Host {
    type Connection = Rc<Wire>;

    fn connection_count(&self) -> u64 {
        self.generation
    }

    fn refresh_session(&mut self) {}

    fn end_step(&mut self) {
        self.session.end_step().expect("the sidecar keeps to the protocol");
    }

    fn take_changes(&mut self) -> Vec<BlockChange> {
        self.session.take_changes().0
    }
}

// === impl Sidecar ===

impl Sidecar {
    fn new() -> Self {
        let wire = Rc::new(Wire::new());
        let sidecar = Self {
            submission: Consumer::new(wire.memory.ring(Ring::Submission)),
            completion: Producer::new(wire.memory.ring(Ring::Completion)),
            announcements: Producer::new(wire.memory.ring(Ring::Announcement)),
            wire,
            weights: 0,
            hits: Some(0),
            states: BTreeSet::new(),
            lacks_tails: false,
            arriving: false,
            pending: Vec::new(),
            numbers: HashMap::new(),
            logs: Vec::new(),
            closed: Vec::new(),
            ways: Vec::new(),
            ended: Vec::new(),
            left: Vec::new(),
            questions: Vec::new(),
            lingered: Vec::new(),
            advised: Vec::new(),
            advice: Some(Status::Ok),
            hints: Vec::new(),
            released: Vec::new(),
            loads: Vec::new(),
            saves: Vec::new(),
            checked: Vec::new(),
            replaced: Vec::new(),
            cancelled: 0,
            unfinished: Vec::new(),
            accepted: Vec::new(),
            changed: Vec::new(),
        };
        sidecar.bind(HERE);
        sidecar
    }

    fn connect(&mut self) {
        let tails = self.wire.tails.get();
        self.wire = Rc::new(Wire::new());
        self.wire.tails.set(tails);
        self.submission = Consumer::new(self.wire.memory.ring(Ring::Submission));
        self.completion = Producer::new(self.wire.memory.ring(Ring::Completion));
        self.announcements = Producer::new(self.wire.memory.ring(Ring::Announcement));
        self.pending.clear();
        self.unfinished.clear();
    }

    fn bind(&self, namespace: u64) {
        self.wire.memory.store_bound(Bound { weights: self.weights, live: None, namespace });
    }

    /// The sidecar is of a release without tails.
    pub(crate) fn know_no_tails(&self) {
        self.wire.tails.set(false);
    }

    /// How often all blocks were asked for.
    pub(crate) fn asked_for_all(&self) -> u64 {
        self.wire.memory.region().word64(header::ANNOUNCE).load(Ordering::Relaxed)
    }

    /// How fast the engine says that it computes prompts.
    pub(crate) fn prefill(&self) -> Option<PrefillRate> {
        PrefillRate::from_word(self.wire.memory.region().word64(header::PREFILL).load(Ordering::Relaxed))
    }

    /// The sidecar's release knows hints, or not.
    pub(crate) fn knows_hints(&self, knows: bool) {
        self.wire.hints.set(knows);
    }

    /// Announces a block in memory.
    pub(crate) fn announce(&mut self, hash: BlockHash) {
        let located = Located { medium: Source::Memory, group: 0, hash };
        assert!(self.announcements.has_room(0).unwrap());
        self.announcements.push(&Announcement::Stored(located).encode_slot());
        self.announcements.publish();
    }

    /// Every save ends; `differing` blocks of the checked ones differ.
    pub(crate) fn finish(&mut self, differing: u32) {
        while !self.unfinished.is_empty() {
            self.finish_next(differing);
        }
    }

    /// The oldest save ends.
    pub(crate) fn finish_next(&mut self, differing: u32) {
        let Saving { op, count, checked } = self.unfinished.remove(0);
        let saved = Saved { op, ..Saved::default() };
        let saved = match checked {
            true => Saved { present: count, checked: count, differing, ..saved },
            false => Saved { committed: count, ..saved },
        };
        assert!(self.completion.has_room(0).unwrap());
        self.completion.push(&saved.encode_slot());
        self.completion.publish();
    }

    pub(crate) fn take_saves(&mut self) -> Saves {
        std::mem::take(&mut self.saves)
    }

    fn serve(&mut self) {
        self.submission.ready().unwrap();
        while let Some(slot) = self.submission.pop() {
            self.read(SchedulerRequest::decode_slot(&slot).unwrap());
        }
        self.submission.release();
        self.answer();
    }

    fn read(&mut self, request: SchedulerRequest) {
        match request {
            SchedulerRequest::Open { log } => {
                self.numbers.insert(log, self.logs.len());
                self.logs.push(Log::default());
            }
            SchedulerRequest::Append(append) => self.append(append),
            SchedulerRequest::Close { log, way } => {
                self.closed.push(self.numbers[&log]);
                self.ways.push(way);
            }
            SchedulerRequest::Ended { log, .. } => self.ended.push(self.numbers[&log]),
            SchedulerRequest::Left { keys } => self.left.push((self.log(keys), keys.from, keys.count)),
            SchedulerRequest::Query(Query { op, keys, awaits, last, .. }) => {
                let LogKeys { from, count, .. } = keys;
                let log = self.log(keys);
                self.questions.push(Question { log, first: from, count, awaits });
                let logged = &self.logs[log];
                let is_tail = logged.tail.is_some() && from as usize == logged.keys.len();
                let count = if is_tail && self.lacks_tails { 0 } else { count };
                self.pending.push((op, from, count, last));
            }
            SchedulerRequest::Hint { keys } => self.hints.push((self.log(keys), keys.from, keys.count)),
            SchedulerRequest::Advise(Advise { op, keys, advice, alone }) => {
                assert_eq!(keys.from, 0);
                self.advised.push((self.log(keys), keys.count, advice, alone));
                if let Some(status) = self.advice {
                    let outcome = Outcome { op: op as u32, value: keys.count, status };
                    self.wire.memory.store_outcome(op, outcome);
                }
            }
            SchedulerRequest::Release { log } => self.released.push(self.numbers[&log]),
            SchedulerRequest::Load(Load { keys, position, flags, .. }) => {
                let (log, blocks) = (self.log(keys), self.blocks(position, keys.count));
                self.loads.push(Loading { log, first: keys.from, blocks, sync: flags.sync() });
            }
            SchedulerRequest::Save(Save { op, keys, position, checked, replaced, .. }) => {
                self.replaced.extend(replaced.checked_sub(1).map(|replaced| (keys.from, replaced)));
                let save = (self.log(keys), keys.from, self.blocks(position, keys.count));
                if checked { &mut self.checked } else { &mut self.saves }.push(save);
                self.unfinished.push(Saving { op, count: keys.count, checked });
            }
            SchedulerRequest::Cancel(cancel) => self.cancelled += cancel.count,
            SchedulerRequest::Accept { step } => self.accepted.push(step),
            SchedulerRequest::Weights { number } => {
                self.weights = number;
                self.changed.push(number);
            }
            SchedulerRequest::Salt { .. } | SchedulerRequest::Golden(_) => {
                panic!("the policy posts no {request:?}")
            }
        }
    }

    fn append(&mut self, append: Append) {
        let log = self.log(append.keys);
        let mut keys = Vec::new();
        for part in append.parts() {
            self.wire.memory.read_keys(part.chunk, part.index, part.count, &mut keys);
        }
        let log = &mut self.logs[log];
        assert!(log.tail.is_none(), "no key follows a tail");
        log.tail = if append.tail { keys.pop() } else { None };
        log.keys.extend(keys);
        log.promised |= append.promised;
    }

    /// The index of an open log.
    fn log(&self, keys: LogKeys) -> usize {
        let log = self.numbers[&keys.log];
        assert!(!self.closed.contains(&log), "log {log} is closed");
        log
    }

    fn blocks(&self, position: u32, count: u32) -> Vec<u32> {
        let mut blocks = Vec::new();
        self.wire.memory.read_block_ids(position, count, &mut blocks);
        blocks
    }

    /// Answers the pending questions; later if the test says so.
    fn answer(&mut self) {
        for (op, first, count, last) in &self.pending {
            let state = self.states.range(first..&(first + count)).next_back();
            let (status, value) = match self.hits {
                None => (Status::Pending, 0),
                Some(_) if *last => (Status::Ok, state.map_or(0, |place| place + 1 - first)),
                Some(hits) if self.arriving => (Status::Arriving, hits.min(*count)),
                Some(hits) => (Status::Ok, hits.min(*count)),
            };
            self.wire.memory.store_outcome(*op, Outcome { op: *op as u32, value, status });
        }
        if self.hits.is_some() {
            self.pending.clear();
        }
    }
}
