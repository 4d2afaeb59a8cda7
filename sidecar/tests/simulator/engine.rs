//! A simulated engine: vLLM's scheduler, its blocks and its ranks, as far as the protocol concerns them. The
//! policy and the sessions of both roles are the product's code.

mod blocks;
mod calls;
mod copying;
mod forward;
mod judge;
mod line;
mod request;
mod results;
mod schedule;
mod scheduler;
mod worker;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use connector_shim::core::endpoint::Endpoint;
use connector_shim::core::policy::{CheckRate, LoadMode, Machine};
use shm_protocol::handshake::{BlockRegion, Copier, Hello, HelloDigest, Role, WorkerHello};
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::layout::LOAD_WAIT_MS;
use shm_protocol::namespace;

use self::judge::Judge;
pub(crate) use self::request::Spec;
use self::request::{Results, Step};
use self::scheduler::Scheduler;
use self::worker::Worker;
use crate::connection::Connection;
use crate::ctx::{Actor, Ctx, Dial, Micros, RETRY};
use crate::ledger::Form;
use crate::origin::{Kv, WORDS};
use crate::rng::Rng;

/// Tokens for each word of KV: a short check computes two blocks, and an answer fills a block in some steps.
const WORD_TOKENS: u32 = 8;
const BLOCK_TOKENS: u32 = WORDS as u32 * WORD_TOKENS;
/// Time that a request waits for an unpromised prompt, and for a promised one.
const PROMISE_WAIT_MS: u32 = 2;
pub(crate) const HANDOVER_WAIT_MS: u32 = 40;

/// The properties of an engine over all its lives.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) form: Form,
    /// Facts of each cache group.
    facts: Vec<BTreeMap<String, String>>,
    /// Its second cache group, if it has one.
    pub(crate) second: Option<Second>,
    pub(crate) world: usize,
    pub(crate) by_engine: bool,
    /// Its weights differ from those stated in its facts.
    pub(crate) other_weights: bool,
    /// Its loads may begin once the step before theirs has ended.
    pub(crate) early: bool,
    pub(crate) blocks: u32,
    /// Most steps in flight.
    pub(crate) depth: usize,
    /// The engine has its own prefix cache. Its steps do not wait for loads: otherwise blocks computed after
    /// a failed load would stay listed.
    pub(crate) caches: bool,
    /// The policy's facts for the pace of loads.
    pub(crate) machine: Machine,
    pub(crate) checks: CheckRate,
    /// Blocks of ended requests are held until their save for another engine has ended.
    pub(crate) holds: bool,
    /// A step may preempt a request scheduled in it.
    pub(crate) priorities: bool,
    /// Copies of blocks in the engine's own cache are kept like any others.
    pub(crate) keep_copies: bool,
    /// The cache is reset in one of so many steps; zero: never.
    pub(crate) resets: u64,
    /// Words of known tokens computed in a step for one request.
    pub(crate) chunk: usize,
    /// Nanoseconds of a token, as stated to the sidecar; zero: not stated.
    pub(crate) token_ns: f32,
}

/// The layers of a second cache group.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Second {
    /// They read so many blocks before a token.
    Window(usize),
    /// They keep a state of all tokens so far.
    States,
}

/// State shared by the processes of one engine.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Steps not begun by each worker.
    pub(crate) queues: Vec<VecDeque<Rc<Step>>>,
    /// Results of steps not taken by the scheduler, for each worker.
    pub(crate) results: Vec<VecDeque<Results>>,
    /// The step whose forward pass each worker has reached: they compute together.
    pub(crate) reached: Vec<u64>,
    /// The last step of each worker with its KV written. A rank's fences follow the KV of all groups.
    pub(crate) written: Vec<u64>,
    pub(crate) judge: Judge,
    /// For each rank.
    pub(crate) kvs: Vec<Rc<Kv>>,
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) model: Rc<Model>,
    pub(crate) shared: Shared,
    pub(crate) scheduler: Option<Scheduler>,
    /// The workers of each rank in the first group, then in the second. A rank's groups share its memory and
    /// have their own sessions.
    pub(crate) workers: Vec<Option<Worker>>,
    /// Requests not finished by any life of this engine.
    pub(crate) pending: VecDeque<Spec>,
    /// Time at which the other processes end after the end of a rank.
    pub(crate) dies_at: Option<Micros>,
}

/// A process's connection to the sidecar.
#[derive(Debug)]
pub(crate) struct Port {
    hello: Hello,
    kv: Option<Rc<Kv>>,
    pub(crate) connection: Option<Rc<Connection>>,
    fresh: Rc<RefCell<Option<Rc<Connection>>>>,
    pending: Rc<Cell<bool>>,
    /// `None` if the connection was lost and the time is not chosen yet.
    next_dial: Option<Micros>,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Change {
    Same,
    Lost,
    Connected,
}

// === impl Model ===

impl Model {
    /// A random engine. With `twin` it shares its blocks with that one. `second` becomes its second cache
    /// group.
    pub(crate) fn random(index: usize, twin: Option<&Self>, second: Option<Second>, rng: &mut Rng) -> Self {
        let world = rng.within(1, 2) as usize;
        let shards = if rng.one_in(2) { world as u32 } else { 1 };
        let shard_bytes = rng.pick(&[40 << 10, 100 << 10, 200 << 10]) + index as u64 * 512;
        let (mut world, mut form) = (world, Form { shards, shard_bytes });
        let mut name = format!("model-{index}");
        if let Some(twin) = twin {
            (world, form, name) = (twin.world, twin.form, twin.facts[0]["model"].clone());
        }
        let numbers = form.shard_bytes / 4;
        let page = format!(
            "layers=1 tokens={numbers} kv_heads=1 keys=1 values=0 dtype=float32 order=tokens packing=none"
        );
        let facts = BTreeMap::from([
            ("model".to_owned(), name),
            ("page_form".to_owned(), page),
            ("block_tokens".to_owned(), BLOCK_TOKENS.to_string()),
        ]);
        let mut facts = vec![facts; 1 + usize::from(second.is_some())];
        if let Some(second) = second {
            let kind = match second {
                Second::Window(blocks) => format!("window {blocks}"),
                Second::States => namespace::STATE_KIND.to_owned(),
            };
            for (facts, kind) in facts.iter_mut().zip(["full".to_owned(), kind]) {
                facts.insert("group_kind".to_owned(), kind);
            }
        }
        let caches = rng.one_in(2);
        let machine = Self::machine(caches, rng);
        Self {
            index,
            name: format!("e{index}"),
            form,
            facts,
            second,
            world,
            other_weights: rng.one_in(3),
            by_engine: machine.by_engine,
            early: rng.one_in(2),
            blocks: rng.pick(&[9, 12, 16, 24]) * if second.is_some() { 2 } else { 1 },
            depth: rng.within(1, 2) as usize,
            caches,
            machine,
            checks: CheckRate { every: rng.pick(&[0, 1, 1, 8]), per_mille: rng.pick(&[0, 1000]) },
            holds: rng.one_in(2),
            priorities: rng.one_in(3),
            keep_copies: rng.one_in(2),
            resets: rng.pick(&[0, 0, 60]),
            chunk: rng.within(2, 9) as usize,
            // A block takes no time, as long as a disk, or seconds.
            token_ns: rng.pick(&[0.0, 1.0, 1e5, 1e8]),
        }
    }

    fn machine(caches: bool, rng: &mut Rng) -> Machine {
        Machine {
            load: rng.pick(&[LoadMode::Auto, LoadMode::Auto, LoadMode::Sync, LoadMode::Async]),
            waits: !caches && rng.one_in(2),
            on_gpu: rng.one_in(2),
            by_engine: rng.one_in(2),
            consumer: rng.one_in(4),
            recomputes: true,
            sync_ms: None,
            // A step loads hundreds of blocks or two, and a part of a load has four blocks or one.
            block_bytes: rng.pick(&[1 << 20, 200 << 20]),
        }
    }

    /// The shard of a rank.
    pub(crate) fn shard(&self, rank: usize) -> u32 {
        rank as u32 / (self.world as u32 / self.form.shards)
    }

    pub(crate) fn groups(&self) -> usize {
        self.facts.len()
    }

    /// The number of workers over all ranks and groups.
    pub(crate) fn members(&self) -> usize {
        self.world * self.groups()
    }

    /// The first block read by a token after so many words, in a group.
    pub(crate) fn first_read(&self, group: usize, words: usize) -> usize {
        let reads = match self.second {
            Some(Second::Window(blocks)) if group > 0 => blocks,
            Some(Second::States) if group > 0 => 1,
            _ => return 0,
        };
        (words / WORDS).saturating_sub(reads)
    }

    /// True if a group keeps states.
    pub(crate) fn has_states(&self, group: usize) -> bool {
        group > 0 && self.second == Some(Second::States)
    }

    /// The namespace of a group of an engine with these weights, without a salt.
    pub(crate) fn base(&self, group: usize, weights: u8) -> NamespaceDigest {
        let live = namespace::weights_live((0..self.world).map(|_| Some(live(weights))));
        namespace::digest_facts(&namespace::complete_facts(&self.facts[group], live))
    }

    fn hello(&self, group: usize, role: Role) -> Hello {
        let name = if self.groups() > 1 { format!("{} group {group}", self.name) } else { self.name.clone() };
        Hello::new(name, self.world as u32, role)
    }

    fn worker_hello(&self, group: usize, rank: usize) -> Hello {
        let bytes = self.form.shard_bytes;
        let role = Role::Worker(WorkerHello {
            rank: rank as u32,
            shard: self.shard(rank),
            shards: self.form.shards,
            blocks: self.blocks,
            regions: vec![BlockRegion { fd: 0, offset: 0, stride: bytes, bytes }],
            copy: if self.by_engine { Copier::Engine } else { Copier::Sidecar },
            facts: self.facts[group].clone(),
            expects: None,
            live_weights: Some(HelloDigest(live(0))),
            proves: false,
            cuda: None,
            staging: None,
        });
        self.hello(group, role)
    }
}

// === impl Engine ===

impl Engine {
    pub(crate) fn new(model: Model, pending: VecDeque<Spec>) -> Self {
        let shared = Shared {
            queues: Vec::new(),
            results: Vec::new(),
            reached: Vec::new(),
            written: Vec::new(),
            judge: Judge::default(),
            kvs: Vec::new(),
        };
        let workers = (0..model.members()).map(|_| None).collect();
        Self { model: Rc::new(model), shared, scheduler: None, workers, pending, dies_at: None }
    }

    /// Starts a life: ranks first, as in vLLM, one of them perhaps much later.
    pub(crate) fn start(&mut self, ctx: &mut Ctx) {
        let (model, world) = (&self.model, self.model.world);
        self.shared = Shared {
            queues: vec![VecDeque::new(); model.members()],
            results: (0..model.members()).map(|_| VecDeque::new()).collect(),
            reached: vec![0; model.members()],
            written: vec![0; model.members()],
            judge: Judge::default(),
            kvs: (0..world).map(|_| Rc::new(Kv::new(model.blocks))).collect(),
        };
        let runs: Vec<[u8; 16]> = (0..model.groups()).map(|_| ctx.rng.bytes16()).collect();
        for number in 0..model.members() {
            let (group, rank) = (number / world, number % world);
            let kv = &self.shared.kvs[rank];
            let late = if ctx.rng.one_in(4) { ctx.rng.below(10_000) } else { 0 };
            if late > 1_000 {
                ctx.hit("fault worker joins late");
            }
            let port = Port::new(model.worker_hello(group, rank), Some(Rc::clone(kv)), ctx.now + late);
            self.workers[number] = Some(Worker::new(number, Rc::clone(model), port));
            ctx.wakes.push((Actor::Worker(model.index, number), ctx.now + 1));
        }
        // Some engines wait for a producer, half as long as a query, so that either wait may end first.
        let miss_wait_ms = model.by_engine.then_some(1);
        let (promise_wait_ms, handover_wait_ms) = (Some(PROMISE_WAIT_MS), Some(HANDOVER_WAIT_MS));
        let wait_max_ms = Some(LOAD_WAIT_MS);
        let ports = (0..model.groups()).map(|group| {
            let hello = model.hello(group, Role::Scheduler { run: runs[group] });
            let hello = Hello { miss_wait_ms, promise_wait_ms, handover_wait_ms, wait_max_ms, ..hello };
            Port::new(hello, None, ctx.now)
        });
        let ports = ports.collect();
        self.scheduler = Some(Scheduler::new(Rc::clone(model), runs, ports, ctx));
        ctx.wakes.push((Actor::Scheduler(model.index), ctx.now + 10));
        self.dies_at = None;
    }

    /// Ends a rank; the others run on for a while.
    pub(crate) fn crash_rank(&mut self, rank: usize) {
        self.workers.iter_mut().skip(rank).step_by(self.model.world).for_each(|worker| *worker = None);
    }

    /// Ends all processes at once; the next life gets the unfinished requests.
    pub(crate) fn crash(&mut self) {
        if let Some(scheduler) = self.scheduler.take() {
            self.pending.extend(scheduler.unfinished());
        }
        self.workers.iter_mut().for_each(|worker| *worker = None);
    }

    /// True if a load is unfinished.
    pub(crate) fn loading(&self) -> bool {
        let waiting = self.scheduler.as_ref().is_some_and(Scheduler::loading);
        waiting || self.workers.iter().flatten().any(Worker::loading)
    }

    pub(crate) fn alive(&self) -> bool {
        self.scheduler.is_some() && self.workers.iter().all(Option::is_some)
    }

    /// True if every request was answered.
    pub(crate) fn done(&self) -> bool {
        self.alive() && self.pending.is_empty() && self.scheduler.as_ref().is_some_and(Scheduler::idle)
    }

    /// True if nothing is left to exchange with the sidecar.
    pub(crate) fn at_rest(&self) -> bool {
        let settled = self.scheduler.as_ref().is_some_and(Scheduler::settled);
        self.done() && settled && self.workers.iter().flatten().all(Worker::settled)
    }

    /// The unfinished work, for the message of a run without rest.
    pub(crate) fn unrest(&self) -> String {
        let scheduler = self.scheduler.as_ref().map(Scheduler::unrest);
        let workers: Vec<bool> = self.workers.iter().flatten().map(Worker::settled).collect();
        format!(
            "{}: {} pending, {scheduler:?}, workers settled {workers:?}",
            self.model.name,
            self.pending.len()
        )
    }

    /// Checks that the engine holds no block.
    pub(crate) fn audit(&self) {
        self.scheduler.as_ref().expect("the caller looked").audit();
    }
}

/// A rank's digest of its weights.
fn live(weights: u8) -> [u8; 16] {
    [weights + 1; 16]
}

/// The keys of a request: a path through a tree of prompts, so that requests share prefixes.
pub(crate) fn keys(path: &[u64]) -> Vec<BlockHash> {
    let mut state = 0x51ed;
    let chain = path.iter().map(|choice| {
        state = crate::rng::mix_bits(state ^ choice.wrapping_add(1));
        BlockHash::from_words([state, crate::rng::mix_bits(state), 0, 0])
    });
    chain.collect()
}

// === impl Port ===

impl Port {
    fn new(hello: Hello, kv: Option<Rc<Kv>>, next_dial: Micros) -> Self {
        let (fresh, pending) = Default::default();
        Self { hello, kv, connection: None, fresh, pending, next_dial: Some(next_dial) }
    }

    /// Notices a hang-up, and takes a new connection.
    pub(crate) fn look(&mut self) -> Change {
        let gone = self.connection.as_ref().is_some_and(|connection| connection.is_lost());
        if gone {
            (self.connection, self.next_dial) = (None, None);
        }
        if self.connection.is_none() {
            self.connection = self.fresh.borrow_mut().take().filter(|connection| !connection.is_lost());
            if self.connection.is_some() {
                return Change::Connected;
            }
        }
        if gone { Change::Lost } else { Change::Same }
    }

    /// Dials if there is no connection and the last attempt is long enough ago.
    pub(crate) fn dial(&mut self, ctx: &mut Ctx) {
        if self.connection.is_some() || self.pending.get() {
            return;
        }
        let soon = || if ctx.rng.one_in(2) { ctx.now } else { ctx.now + ctx.rng.below(RETRY) };
        if ctx.now < *self.next_dial.get_or_insert_with(soon) {
            return;
        }
        self.next_dial = Some(ctx.now + RETRY);
        self.pending.set(true);
        let (fresh, pending) = (Rc::clone(&self.fresh), Rc::clone(&self.pending));
        ctx.dials.push(Dial { hello: self.hello.clone(), kv: self.kv.clone(), fresh, pending });
        ctx.bell.set(true);
    }
}
