//! An engine of one process that waits for its cache: the policy's host for the crate `pillion`,
//! `pillion.engine` and the C library.
//!
//! An engine hands over tokens, and writes and reads KV in blocks of its memory. Keys, plans, steps and waits stay in here. Between two
//! calls no step is open and no save is unfinished: blocks of no request are free to be written.

mod blocks;

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use shm_protocol::handshake::{BlockRegion, Copier, WorkerHello};
use shm_protocol::hints::{Hint, HintEnd};
use shm_protocol::key::{Algorithm, BlockHash, Chain, read_block_tokens};
use shm_protocol::layout::{PROMISED_WAIT_MS_MAX, QUERY_WAIT_MS_MAX};
use shm_protocol::namespace::Facts;

use self::blocks::FreeBlocks;
use crate::clock;
use crate::core::policy::kinds::{GroupForm, GroupKind, GroupSet};
use crate::core::policy::{
    Adapter, Arrival, BegunRequest, Changes, Due, EnginePolicy, FoundTokens, LoadMode, Machine, Now,
    OpenedStep, PlannedStep, PolicyOptions, PolicyWait, Remark, ServedState,
};
pub use crate::core::policy::{CheckRate, RequestId};
use crate::core::scheduler::{LoadWait, PENDING, SessionConfig, UNBOUND_WAIT};
use crate::error::{ShimError, refuse_argument};
use crate::scheduler::{self, SchedulerClient, draw_random16};
use crate::worker::{self, RankClient, RegionMemory};

/// Time for the ranks to join. A handshake takes milliseconds; on a busy machine one may exceed its limit, 1
/// s, and is repeated a second later.
const JOIN_PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for a hit's blocks from a disk or another pod; after it they count as a miss.
const HIT_PATIENCE: Duration = Duration::from_millis(QUERY_WAIT_MS_MAX as u64 + 500);
/// Longest wait for the outcome of a hint: a sidecar answers within milliseconds.
const HINT_PATIENCE: Duration = Duration::from_secs(1);
/// Longest wait for another engine's promise, even if the sidecar is frozen.
const AWAITED_PATIENCE: Duration = Duration::from_millis(PROMISED_WAIT_MS_MAX as u64 + 4000);
/// Longest wait for a save. Blocks are copied at some GB/s: a sidecar slower than this will not finish the
/// save.
const SAVE_PATIENCE: Duration = Duration::from_secs(20);
/// Time between two looks for an answer.
const TURN: Duration = Duration::from_micros(500);

/// The KV memory of an engine: a file of `blocks` blocks of `block_bytes`, in pieces of `piece_bytes`: first all blocks' first pieces,
/// then their second ones. Block 0 is never used.
#[derive(Copy, Clone, Debug)]
pub struct BlockMemory {
    /// A memfd, open for reading and writing.
    pub descriptor: RawFd,
    /// Blocks, block 0 among them.
    pub blocks: u32,
    /// Bytes of a block, all shards.
    pub block_bytes: u64,
    /// Bytes of a piece, a divisor of a block's; a block of several shards is one piece.
    pub piece_bytes: u64,
}

/// An engine and its namespace.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    /// The path of the sidecar's socket.
    pub socket: PathBuf,
    /// The engine's name, different from every other engine of the sidecar.
    pub name: String,
    /// The facts of its KV.
    pub facts: Facts,
    /// The digest of a namespace of other engines, which this engine joins with their facts; `None`: its
    /// facts are its own.
    pub expects: Option<String>,
    /// Parts of a block, each with some of the heads.
    pub shards: u32,
    /// The blocks of the sequence.
    pub memory: BlockMemory,
    /// How often hits are checked.
    pub checks: CheckRate,
    /// How long a load waits for blocks still computed on another node, in ms.
    pub miss_wait_ms: Option<u32>,
}

/// The result of [`BlockingEngine::begin_proof`].
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum ProofStart {
    /// The engine has proven itself to this sidecar.
    Proven,
    /// The first block is not kept, so it proves nothing.
    NotKept,
    /// The caller must compute the tokens of the first block for this request, and then call
    /// [`BlockingEngine::end_proof`].
    Compute(RequestId),
}

/// The blocks and tokens of a request's next KV, to be written before [`BlockingEngine::save`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ReservedTokens {
    /// All blocks of the request.
    pub blocks: Vec<u32>,
    /// The first token without KV.
    pub first: u32,
    /// Tokens with KV, once these are written.
    pub end: u32,
}

/// A request and its blocks.
#[derive(Debug)]
struct Sequence {
    tokens: Vec<u32>,
    chain: Chain,
    blocks: Vec<u32>,
    /// Number of tokens with their KV in the blocks.
    computed: u32,
    /// Number of tokens with their KV in the blocks, once the reserved ones are written.
    reserved: u32,
    /// Number of blocks known to the policy.
    offered: usize,
    begun: bool,
}

/// An engine and its cache. See the module.
#[derive(Debug)]
pub struct BlockingEngine {
    policy: EnginePolicy<SchedulerClient>,
    ranks: Vec<RankClient>,
    run: [u8; 16],
    name_space: String,
    algorithm: Algorithm,
    /// The chain of a request without tokens.
    chain: Chain,
    block_tokens: u32,
    free: FreeBlocks,
    sequences: HashMap<RequestId, Sequence>,
    /// The last connection in which the engine has proven itself.
    proven_in: u64,
    bound_in: u64,
}

// === impl EngineSetup ===

impl EngineSetup {
    /// The regions of a rank's shard.
    fn regions(&self, rank: u32) -> Vec<BlockRegion> {
        let BlockMemory { blocks, block_bytes, piece_bytes, .. } = self.memory;
        let shard = block_bytes / u64::from(self.shards);
        let region = |piece: u64| BlockRegion {
            fd: 0,
            offset: piece * u64::from(blocks) * piece_bytes + u64::from(rank) * shard,
            stride: piece_bytes,
            bytes: piece_bytes.min(shard),
        };
        (0..block_bytes / piece_bytes).map(region).collect()
    }

    fn join_rank(&self, rank: u32) -> Result<RankClient, ShimError> {
        let worker = WorkerHello {
            rank,
            shard: rank,
            shards: self.shards,
            blocks: self.memory.blocks,
            regions: self.regions(rank),
            copy: Copier::Engine,
            facts: self.facts.clone(),
            expects: self.expects.clone(),
            // Facts of its own are vouched for by the engine itself.
            proves: self.expects.is_some(),
            ..WorkerHello::default()
        };
        RankClient::new(worker::WorkerSetup {
            socket: self.socket.clone(),
            engine: self.name.clone(),
            world_size: self.shards,
            worker,
            memory: RegionMemory::new(&[self.memory.descriptor], Vec::new(), Vec::new(), 0)?,
            staged: false,
            groups: None,
        })
    }

    fn scheduler(&self, run: [u8; 16]) -> Result<SchedulerClient, ShimError> {
        let config = SessionConfig {
            budget: HIT_PATIENCE,
            by_engine: true,
            early: false,
            part_blocks: 0,
            streams: false,
            whole_blocks: 0,
            last: false,
            load_wait: LoadWait::default(),
        };
        SchedulerClient::new(scheduler::SchedulerSetup {
            socket: self.socket.clone(),
            engine: self.name.clone(),
            world_size: self.shards,
            run,
            config,
            miss_wait_ms: self.miss_wait_ms,
            handover_wait_ms: None,
            promise_wait_ms: None,
            groups: None,
        })
    }

    /// A request begins on its loaded blocks once they are there, so a failed load is a shorter hit.
    fn policy(&self, session: SchedulerClient, block_tokens: u32) -> EnginePolicy<SchedulerClient> {
        let form = GroupForm {
            kind: GroupKind::Full,
            block_tokens,
            hashes_each: 1,
            key_tokens: block_tokens,
            window: 0,
        };
        let machine = Machine {
            load: LoadMode::Async,
            by_engine: true,
            recomputes: true,
            block_bytes: self.memory.block_bytes,
            ..Machine::default()
        };
        let options = PolicyOptions {
            loads: true,
            saves: true,
            checks: self.checks,
            // Every request is looked at in every step: there is one step for each save.
            tokens_per_step: u32::MAX,
            ..PolicyOptions::default()
        };
        EnginePolicy::new(options, machine, GroupSet::new(vec![form], 0), vec![session], clock::read_clock())
    }
}

// === impl BlockingEngine ===

impl BlockingEngine {
    /// Joins the namespace of the setup's facts. Fails for wrong facts and memory, and if the sidecar refuses the engine. It waits
    /// for a sidecar for 5 s, and connects later by itself: see [`BlockingEngine::is_connected`].
    pub fn new(setup: &EngineSetup) -> Result<Self, ShimError> {
        let (algorithm, chain) = Chain::of_facts(&setup.facts)?;
        let block_tokens = read_block_tokens(&setup.facts)?;
        let BlockMemory { block_bytes, piece_bytes, .. } = setup.memory;
        let divides = |part: u64, whole: u64| part > 0 && whole.is_multiple_of(part);
        if !divides(setup.shards.into(), block_bytes) || !divides(piece_bytes, block_bytes) {
            let text = format!(
                "{} shards or pieces of {piece_bytes} bytes divide no block of {block_bytes}",
                setup.shards
            );
            return refuse_argument(text);
        }
        let run = draw_random16().map_or_else(|| refuse_argument("the system gives no random bytes"), Ok)?;
        let ranks = (0..setup.shards).map(|rank| setup.join_rank(rank)).collect::<Result<Vec<_>, _>>()?;
        let policy = setup.policy(setup.scheduler(run)?, block_tokens);
        let mut engine = Self {
            policy,
            ranks,
            run,
            name_space: setup.expects.clone().unwrap_or_default(),
            algorithm,
            chain,
            block_tokens,
            free: FreeBlocks::new(1..setup.memory.blocks),
            sequences: HashMap::new(),
            proven_in: 0,
            bound_in: 0,
        };
        let until = clock::read_clock() + JOIN_PATIENCE;
        while !engine.is_connected() && clock::read_clock() < until {
            engine.wait_a_turn();
        }
        engine.follow_binding();
        Ok(engine)
    }

    /// True while a sidecar is connected, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.policy.view(0).is_connected() && self.ranks.iter().all(RankClient::is_connected)
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Blocks of no request.
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// Counters since the start, by name.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.policy.view(0).stats()
    }

    /// Messages for the engine's log, each handed over once.
    pub fn take_notices(&mut self) -> Vec<String> {
        let mut notices = self.policy.session(0).take_notices();
        notices.extend(self.ranks.iter().flat_map(RankClient::take_notices));
        notices.extend(self.policy.take_remarks().into_iter().filter_map(word_remark));
        notices
    }

    // --- requests ---

    /// Begins a request of these tokens, on the KV kept for them: of all but the last token at most, as much as there is room for. Waits for
    /// blocks of disks and other pods. A check may leave the last blocks to be computed, and compares them once they are saved.
    pub fn begin_load(&mut self, tokens: &[u32]) -> RequestId {
        self.begin_loaded(tokens, Arrival::default(), HIT_PATIENCE)
    }

    /// The same of tokens that another engine computes, or is about to: waits for that, 2 s at most, and 30 s while the other engine
    /// promises them.
    pub fn begin_awaited(&mut self, tokens: &[u32]) -> RequestId {
        let awaits = Some(tokens.len() as u32);
        self.begin_loaded(tokens, Arrival { awaits, ..Arrival::default() }, AWAITED_PATIENCE)
    }

    /// [`BlockingEngine::begin_load`], and a promise: this engine computes and saves the rest for another one, which may await it by now. The
    /// promise lasts until the request ends, 30 s at most, while this engine makes a call at least every 5 s.
    pub fn begin_promised(&mut self, tokens: &[u32]) -> RequestId {
        self.begin_loaded(tokens, Arrival { hands_over: true, ..Arrival::default() }, HIT_PATIENCE)
    }

    /// Carries a hint out for the kept blocks of these tokens: it is no use of them. Waits for the outcome; without a
    /// sidecar that knows hints all blocks are missing.
    pub fn hint_tokens(&mut self, tokens: &[u32], hint: Hint) -> HintEnd {
        self.follow_binding();
        let id = self.begin_request(tokens, Arrival::default());
        let until = clock::read_clock() + HINT_PATIENCE;
        let end = self.policy.hint_chain(id, hint, |policy| {
            std::thread::sleep(TURN);
            policy.session(0).end_step();
            clock::read_clock() < until
        });
        self.end_request(id);
        end
    }

    fn begin_loaded(&mut self, tokens: &[u32], arrival: Arrival, patience: Duration) -> RequestId {
        self.follow_binding();
        let promises = arrival.hands_over;
        let id = self.begin_request(tokens, arrival);
        let tail = self.policy.tail_tokens(id).and_then(|range| {
            let part: Vec<u64> = tokens[range.start as usize..range.end as usize]
                .iter()
                .map(|token| u64::from(*token))
                .collect();
            self.policy.tail(id, self.algorithm, &part)
        });
        self.policy.set_tail(id, tail);
        if promises {
            self.policy.announce_request(id);
            self.follow_sidecar();
        }
        let found = self.ask_for_hits(id, patience);
        if found > 0 {
            self.fill_blocks(id, found);
        }
        id
    }

    fn begin_request(&mut self, tokens: &[u32], arrival: Arrival) -> RequestId {
        let arrival = Arrival { prompt: tokens.len() as u32, reads: true, ..arrival };
        let id = self.policy.follow_request(arrival);
        let mut chain = self.chain.clone();
        chain.append(tokens);
        let tokens = tokens.to_vec();
        let blocks = Vec::new();
        self.sequences.insert(
            id,
            Sequence { tokens, chain, blocks, computed: 0, reserved: 0, offered: 0, begun: false },
        );
        self.tell_policy(id, 0);
        id
    }

    /// Tells the policy a request's numbers and keys. `more`: further tokens, without keys.
    fn tell_policy(&mut self, id: RequestId, more: u32) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        let tokens = sequence.tokens.len() as u32 + more;
        self.policy.set_now(
            id,
            Now { tokens, computed: sequence.computed, preemptions: 0, adapter: Adapter::Absent },
        );
        let hashes = sequence.chain.hashes();
        let known = self.policy.follow_keys(id, hashes.len(), |index, key: &mut BlockHash| {
            *key = hashes[index];
            Ok::<(), Infallible>(())
        });
        let Ok(()) = known;
    }

    /// Returns the number of tokens found; 0 if the answer is not known after `patience`.
    fn ask_for_hits(&mut self, id: RequestId, patience: Duration) -> u32 {
        let until = clock::read_clock() + patience;
        loop {
            match self.wait_for(|policy, time| policy.matched(id, 0, true, time)) {
                FoundTokens::Tokens(tokens, _) => return tokens,
                FoundTokens::Later if clock::read_clock() >= until => return 0,
                FoundTokens::Later => self.wait_a_turn(),
            }
        }
    }

    /// Loads the KV found into new blocks of the request.
    fn fill_blocks(&mut self, id: RequestId, found: u32) {
        let room = u32::try_from(self.free.len()).unwrap_or(u32::MAX).saturating_mul(self.block_tokens);
        let taken = found.min(room);
        let Some(wanted) = self.policy.allocated(id, taken) else { return };
        let blocks = self.free.take_blocks(wanted[0].len()).expect("there is room");
        self.wait_for(|policy, time| policy.load_blocks(id, std::slice::from_ref(&blocks), time));
        let failed = self.run_step(Changes::default(), |_| Vec::new());
        let good = blocks.iter().position(|block| failed.contains(block)).unwrap_or(blocks.len());
        self.policy.loads_ended(&[id], &failed);
        self.free.give_back(&blocks[good..]);
        let sequence = self.sequences.get_mut(&id).expect("it has begun");
        sequence.blocks = blocks[..good].to_vec();
        sequence.computed = taken.min(good as u32 * self.block_tokens);
    }

    /// Runs one step of every rank, accepted by the engine. Returns the blocks not loaded. `due` gives the
    /// numbers of the due requests.
    fn run_step(&mut self, changes: Changes, due: impl FnOnce(OpenedStep) -> Vec<Due>) -> Vec<u32> {
        let opened = self.policy.begin_step(changes, clock::read_clock());
        let due = due(opened);
        let computes = due.iter().filter(|due| due.scheduled.is_some()).count();
        let PlannedStep { step, parts, .. } = self.policy.end_step(&due, computes, &[]);
        let part = parts.into_iter().next().expect("there is one group");
        let mut failed: Vec<u32> = part.lost.into_iter().flat_map(|lost| lost.blocks).collect();
        for rank in &mut self.ranks {
            rank.start_step(step, 0);
            failed.extend(part.loads.iter().flat_map(|load| rank.load_now(load.plan.clone())));
            rank.done(step, true, 0);
        }
        self.policy.accept_step(step, &HashMap::new(), None);
        failed
    }

    /// Tokens of the request with their KV in its blocks.
    pub fn held_tokens(&self, id: RequestId) -> u32 {
        self.sequences.get(&id).map_or(0, |sequence| sequence.computed)
    }

    /// The request's blocks, in the order of its tokens.
    pub fn blocks_of(&self, id: RequestId) -> &[u32] {
        self.sequences.get(&id).map_or(&[], |sequence| &sequence.blocks)
    }

    /// Gives the request blocks for the KV of `tokens`, all of the request's from its first one on. The KV of those not held yet is then
    /// to be written. Fails without room, and if these are other tokens than before.
    pub fn reserve(&mut self, id: RequestId, tokens: &[u32]) -> Result<ReservedTokens, ShimError> {
        let Some(sequence) = self.sequences.get_mut(&id) else {
            return refuse_argument("the request has ended: begin another one");
        };
        let known = sequence.tokens.len().min(tokens.len());
        if sequence.tokens[..known] != tokens[..known] {
            return refuse_argument(
                "the tokens are not those that the request began with: pass them all, from the first one on",
            );
        }
        if (tokens.len() as u32) < sequence.computed {
            let text = format!(
                "{} tokens are saved of {} held: pass all tokens of the request",
                tokens.len(),
                sequence.computed
            );
            return refuse_argument(text);
        }
        let needed = tokens.len().div_ceil(self.block_tokens as usize).saturating_sub(sequence.blocks.len());
        let Some(blocks) = self.free.take_blocks(needed) else {
            let text = format!(
                "{needed} blocks are needed and {} are free: end other requests, or make the engine with more blocks",
                self.free.len()
            );
            return refuse_argument(text);
        };
        sequence.blocks.extend(blocks);
        sequence.chain.append(&tokens[known..]);
        sequence.tokens.extend(&tokens[known..]);
        sequence.reserved = tokens.len() as u32;
        Ok(ReservedTokens {
            blocks: sequence.blocks.clone(),
            first: sequence.computed,
            end: sequence.reserved,
        })
    }

    /// Takes the reserved tokens' KV as written, and keeps the blocks that are full now. Returns once that is done: how many blocks the
    /// sidecar keeps of these.
    pub fn save(&mut self, id: RequestId) -> Result<u64, ShimError> {
        self.follow_binding();
        let Some(sequence) = self.sequences.get_mut(&id) else {
            return refuse_argument("the request has ended: begin another one");
        };
        let (first, end) = (sequence.computed, sequence.reserved.max(sequence.computed));
        let fresh = sequence.blocks[sequence.offered..].to_vec();
        sequence.offered = sequence.blocks.len();
        let changes = match std::mem::replace(&mut sequence.begun, true) {
            false => {
                let begun = BegunRequest {
                    request: Some(id),
                    blocks: vec![sequence.blocks.clone()],
                    computed: first,
                };
                Changes { begun: vec![begun], ..Changes::default() }
            }
            true => Changes { grown: vec![(Some(id), vec![fresh])], ..Changes::default() },
        };
        self.tell_policy(id, 0);
        let before = self.kept_count();
        self.run_step(changes, |opened| {
            let scheduled = |request| (request == id).then_some(end - first);
            opened.due.into_iter().map(|request| Due { request, scheduled: scheduled(request) }).collect()
        });
        self.sequences.get_mut(&id).expect("looked up above").computed = end;
        self.finish_saves(id);
        // The policy also offers the blocks that the request began on, as used ones.
        let full = u64::from(end / self.block_tokens - first / self.block_tokens);
        Ok(full.min(self.kept_count() - before))
    }

    /// Waits until the sidecar has read all blocks. After a time limit, saves of unread blocks are given up.
    fn finish_saves(&mut self, id: RequestId) {
        let until = clock::read_clock() + SAVE_PATIENCE;
        while self.policy.view(0).saving() > 0 && clock::read_clock() < until {
            self.wait_a_turn();
        }
        let blocks = self.sequences[&id].blocks.clone();
        self.policy.session(0).overwrite(blocks.into_iter());
        self.policy.look_for_verdict();
    }

    /// The request is over: its blocks are free, and its promise ends.
    pub fn end_request(&mut self, id: RequestId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            self.policy.end_request(id, 0);
            self.free.give_back(&sequence.blocks);
            self.follow_sidecar();
        }
    }

    /// How many leading blocks of these tokens are kept, here or where the sidecar gets them from.
    pub fn kept_blocks(&mut self, tokens: &[u32]) -> u32 {
        self.follow_binding();
        let mut chain = self.chain.clone();
        chain.append(tokens);
        let (hashes, until) = (chain.hashes(), clock::read_clock() + HIT_PATIENCE);
        let session = self.policy.session(0);
        let log = session.open_log(None);
        let appended = session.append_keys(log, 0, hashes.len() as u32, |index, key: &mut BlockHash| {
            *key = hashes[index as usize];
            Ok::<(), ShimError>(())
        });
        let count = appended.unwrap_or(0);
        let mut hits = self.policy.session(0).query(log, 0, count);
        while hits == PENDING && clock::read_clock() < until {
            self.wait_a_turn();
            hits = self.policy.session(0).query(log, 0, count);
        }
        self.policy.session(0).close_log(log, 0);
        self.follow_sidecar();
        u32::try_from(hits).unwrap_or(0)
    }

    // --- the proof ---

    /// Begins a proof by the first block of these tokens.
    pub fn begin_proof(&mut self, tokens: &[u32]) -> ProofStart {
        self.follow_binding();
        if self.proven_in == self.policy.view(0).connection_count() && self.proven_in > 0 {
            return ProofStart::Proven;
        }
        let Some(root) = tokens.get(..self.block_tokens as usize) else { return ProofStart::NotKept };
        let id = self.begin_request(root, Arrival::default());
        // One token must be left to compute, so a hit of the whole block needs one more.
        self.tell_policy(id, 1);
        self.policy.check_request(id);
        let found = self.ask_for_hits(id, HIT_PATIENCE);
        if found == 0 && self.policy.is_checked(id) {
            return ProofStart::Compute(id);
        }
        self.end_request(id);
        ProofStart::NotKept
    }

    /// Compares the computed block, reserved and written, with the kept one: whether the engine has proven itself. Fails if they differ:
    /// the namespace is closed to the engine then.
    pub fn end_proof(&mut self, id: RequestId) -> Result<bool, ShimError> {
        let (checked, differing) = self.policy.view(0).checked();
        let saved = self.save(id);
        self.end_request(id);
        saved?;
        let (now_checked, now_differing) = self.policy.view(0).checked();
        if now_differing > differing {
            return Err(ShimError::Differs(self.name_space.clone()));
        }
        if now_checked > checked {
            self.proven_in = self.policy.view(0).connection_count();
        }
        Ok(now_checked > checked)
    }

    // --- waits ---

    /// Calls until no answer is waited for any more.
    fn wait_for<T>(
        &mut self,
        mut call: impl FnMut(&mut EnginePolicy<SchedulerClient>, Instant) -> Result<T, PolicyWait>,
    ) -> T {
        loop {
            let hits = match call(&mut self.policy, clock::read_clock()) {
                Ok(done) => return done,
                Err(PolicyWait::Answer { group, op }) => self.policy.session(group).wait_for_answer(op),
                Err(PolicyWait::Linger { group, log, first, count, within }) => {
                    self.policy.session(group).linger(log, first, count, within)
                }
            };
            self.policy.answered(hits);
        }
    }

    /// Follows a sidecar that was started again, and waits once for each until the ranks are bound to their namespace.
    fn follow_binding(&mut self) {
        self.follow_sidecar();
        let generation = self.policy.view(0).connection_count();
        if self.bound_in == generation {
            return;
        }
        self.bound_in = generation;
        let until = clock::read_clock() + UNBOUND_WAIT;
        while self.policy.state() == ServedState::Unbound && clock::read_clock() < until {
            self.wait_a_turn();
        }
    }

    fn wait_a_turn(&mut self) {
        std::thread::sleep(TURN);
        self.follow_sidecar();
    }

    fn follow_sidecar(&mut self) {
        self.policy.session(0).end_step();
        let run = self.run;
        self.ranks.iter_mut().for_each(|rank| rank.join(run));
    }

    fn kept_count(&self) -> u64 {
        let stats = self.counts();
        stats["blocks_committed"] + stats["blocks_present"]
    }

    /// Leaves the sidecar.
    pub fn disconnect_all(&mut self) {
        self.policy.session(0).disconnect();
        self.ranks.iter_mut().for_each(RankClient::disconnect);
    }
}

/// Returns a remark in words. Steps of this engine are never passed over.
fn word_remark(remark: Remark) -> Option<String> {
    match remark {
        Remark::NotLoaded { blocks } => {
            Some(format!("{blocks} blocks could not be loaded, and are computed"))
        }
        Remark::Changed => Some("the engine is bound to another namespace: no KV of before is kept".into()),
        Remark::Stalled { .. }
        | Remark::PassedOver { .. }
        | Remark::Unproven { .. }
        | Remark::HintsRefused { .. } => None,
    }
}
