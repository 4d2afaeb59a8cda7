//! The session of one connected engine process. It checks every value written by the engine before use.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use shm_protocol::announcement::Announcement;
use shm_protocol::key::BlockHash;
use shm_protocol::layout::{BLOCK_IDS, CHUNK_KEYS, header};
use shm_protocol::message::{Outcome, Saved, Slot};
use shm_protocol::pool::SlotRef;
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{Advise, Append, Load, RequestError, Save, SchedulerRequest, WorkerRequest};
use shm_protocol::ring::{Consumer, Producer};
use shm_protocol::session::{Bound, RegionRing, Ring, SessionMemory};
use shm_protocol::source::Source;
use shm_protocol::wait;
use thiserror::Error;

use crate::copiers::Rank;
use crate::core::{AdvicePart, RingRequest};

/// A client wrote a value against the protocol; its session ends.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct Violation(String);

/// A session on the data thread.
#[derive(Debug)]
pub struct ClientSession {
    memory: SessionMemory,
    submissions: Consumer<RegionRing>,
    /// Ring of a scheduler's session. A rank's completion ring belongs to its copier, for requests to the
    /// rank.
    completions: Producer<RegionRing>,
    /// Ring of a scheduler's session; a rank's session uses this memory otherwise.
    announcements: Producer<RegionRing>,
    /// Messages seen and not read yet.
    unread: u32,
    /// The rest of an ADVISE.
    advice: Option<Advise>,
    /// Block ids left for the unread messages of this turn.
    block_ids_left: usize,
    rank: Option<Rank>,
    fences: (u64, u64),
    /// True if words or completions were stored since the last wake of the engine.
    dirty: bool,
    /// The engine treats its hang-up as the death of the sidecar, and the sidecar as the death of the engine.
    /// A rank's copies share the socket, so once the engine sees the hang-up, nothing writes into its blocks
    /// any more.
    pub socket: Arc<OwnedFd>,
    /// The engine's process. Its end is the engine's death even if another process holds the socket.
    pub process: Option<OwnedFd>,
    /// Wakes the data thread.
    pub doorbell: OwnedFd,
}

// === impl Violation ===

impl From<RequestError> for Violation {
    fn from(error: RequestError) -> Self {
        Self(error.to_string())
    }
}

// === impl ClientSession ===

impl ClientSession {
    /// A session in fresh memory; a worker's session has a `rank`.
    pub fn new(memory: SessionMemory, socket: Arc<OwnedFd>, doorbell: OwnedFd, rank: Option<Rank>) -> Self {
        Self {
            submissions: Consumer::new(memory.ring(Ring::Submission)),
            completions: Producer::new(memory.ring(Ring::Completion)),
            announcements: Producer::new(memory.ring(Ring::Announcement)),
            memory,
            unread: 0,
            advice: None,
            block_ids_left: 0,
            rank,
            fences: (0, 0),
            dirty: false,
            socket,
            process: None,
            doorbell,
        }
    }

    pub fn rank(&self) -> Option<&Rank> {
        self.rank.as_ref()
    }

    /// Reads the tail of the submission ring, up to which [`ClientSession::read_message`] reads. Returns the number of
    /// unread messages.
    pub fn look_at_ring(&mut self) -> Result<u32, Violation> {
        let ready = self.submissions.ready().map_err(|error| Violation(error.to_string()))?;
        self.unread = ready + u32::from(self.advice.is_some());
        self.block_ids_left = BLOCK_IDS;
        Ok(self.unread)
    }

    /// Messages seen by [`ClientSession::look_at_ring`] and not yet returned whole by [`ClientSession::read_message`].
    pub fn unread(&self) -> u32 {
        self.unread
    }

    /// True if the ring has messages, or its tail is invalid.
    pub fn has_messages(&mut self) -> bool {
        self.advice.is_some() || self.submissions.ready() != Ok(0)
    }

    /// The next message seen by [`ClientSession::look_at_ring`]; of an ADVISE a part of about this cost.
    pub fn read_message(&mut self, cost: usize) -> Result<Option<RingRequest>, Violation> {
        if self.unread == 0 {
            return Ok(None);
        }
        self.unread -= 1;
        if let Some(rest) = self.advice.take() {
            return Ok(Some(self.take_advice(rest, cost)));
        }
        let slot = self.submissions.pop().expect("seen by look");
        let request = match &self.rank {
            None => self.read_scheduler(&slot, cost)?,
            Some(rank) => RingRequest::Worker(read_worker(rank, &slot)?),
        };
        Ok(Some(request))
    }

    /// Takes a part of a hint. The message stays unread until its last part.
    fn take_advice(&mut self, advise: Advise, cost: usize) -> RingRequest {
        let (part, rest) = AdvicePart::cut_hint(advise, cost);
        self.unread += u32::from(rest.is_some());
        self.advice = rest;
        RingRequest::Advice(part)
    }

    /// Frees the slots of the read messages for the engine. Called after their actions, which may write into
    /// the engine's chunks.
    pub fn release_read(&self) {
        self.submissions.release();
    }

    fn read_scheduler(&mut self, slot: &Slot, cost: usize) -> Result<RingRequest, Violation> {
        let request = SchedulerRequest::decode_slot(slot)?;
        if let SchedulerRequest::Advise(advise) = request {
            return Ok(self.take_advice(advise, cost));
        }
        let (mut keys, mut blocks) = (Vec::new(), Vec::new());
        match &request {
            SchedulerRequest::Append(append) => keys = self.read_keys(append),
            SchedulerRequest::Load(Load { keys, position, .. })
            | SchedulerRequest::Save(Save { keys, position, .. }) => {
                blocks = self.read_blocks(*position, keys.count)?;
            }
            _ => {}
        }
        Ok(RingRequest::Scheduler { request, keys, blocks })
    }

    fn read_keys(&self, append: &Append) -> Vec<BlockHash> {
        let mut keys = Vec::with_capacity(append.keys.count as usize);
        for part in append.parts() {
            self.memory.read_keys(part.chunk, part.index, part.count, &mut keys);
        }
        keys
    }

    fn read_blocks(&mut self, position: u32, count: u32) -> Result<Vec<u32>, Violation> {
        // Unacknowledged messages of a correct engine share the ring of block ids, so together they name at
        // most its size.
        let left = self.block_ids_left.checked_sub(count as usize);
        self.block_ids_left = left.ok_or_else(|| {
            Violation(format!(
                "messages in flight name more than the {BLOCK_IDS} block ids there is room for"
            ))
        })?;
        let mut blocks = Vec::with_capacity(count as usize);
        self.memory.read_block_ids(position, count, &mut blocks);
        Ok(blocks)
    }

    /// A worker's fence words, if they moved since the last call.
    pub fn moved_fences(&mut self) -> Option<(u64, u64)> {
        self.rank.as_ref()?;
        // SYNC POINT(fence): acquire pairs with the engine's release; the KV written before `done` is visible with it.
        let word = |at: usize| self.memory.region().word64(at).load(Ordering::Acquire);
        let fences = (word(header::FENCE_START), word(header::FENCE_DONE));
        let moved = fences != self.fences;
        self.fences = fences;
        moved.then_some(fences)
    }

    /// The engine voided its saves below this operation.
    pub fn void_below(&self) -> u64 {
        // SYNC POINT(void): acquire; read after the ring was drained, so it includes every store before the
        // launch of an overwriting step.
        self.memory.region().word64(header::VOID_SAVES_BELOW).load(Ordering::Acquire)
    }

    /// Writes a query's found slots beside its keys. Called before its outcome is stored.
    pub fn write_refs(&mut self, chunks: &[u32], from: u32, refs: &[SlotRef], sources: &[Source]) {
        let sources = sources.iter().copied().chain(std::iter::repeat(Source::Memory));
        let mut found = refs.iter().copied().zip(sources);
        let (mut at, end) = (from as usize, from as usize + refs.len());
        while at < end {
            let (chunk, index) = (chunks[at / CHUNK_KEYS], at % CHUNK_KEYS);
            let count = (CHUNK_KEYS - index).min(end - at);
            self.memory.write_refs(chunk, index, count, &mut found);
            at += count;
        }
    }

    /// Stores the outcome of an operation.
    pub fn store_outcome(&mut self, op: u64, outcome: Outcome) {
        self.memory.store_outcome(op, outcome);
        self.dirty = true;
    }

    /// Queues the end of a save; fails if the ring is full.
    pub fn push_saved(&mut self, saved: &Saved) -> Result<(), Violation> {
        if !self.completions.has_room(0).map_err(|error| Violation(error.to_string()))? {
            return Err(Violation(
                "the completion ring is full: more saves in flight than it has slots".into(),
            ));
        }
        self.completions.push(&saved.encode_slot());
        self.dirty = true;
        Ok(())
    }

    /// Publishes queued completions and wakes a waiting engine.
    pub fn flush(&mut self) {
        if self.dirty {
            self.dirty = false;
            self.completions.publish();
            wait::wake_engine(self.memory.region());
        }
    }

    /// Number of times a scheduler has requested announcements of all blocks; `None` if never.
    pub fn asked_to_announce(&self) -> Option<u64> {
        // Relaxed: no other memory depends on this word.
        let asked = || self.memory.region().word64(header::ANNOUNCE).load(Ordering::Relaxed);
        self.rank.is_none().then(asked).filter(|asked| *asked > 0)
    }

    /// The prefill rate of a scheduler's engine, if the engine stated it.
    pub fn prefill(&self) -> Option<PrefillRate> {
        // Relaxed: no other memory depends on this word.
        let word = || self.memory.region().word64(header::PREFILL).load(Ordering::Relaxed);
        self.rank.is_none().then(word).and_then(PrefillRate::from_word)
    }

    /// Free slots of a scheduler's announcement ring.
    pub fn room_to_announce(&mut self) -> Result<usize, Violation> {
        self.announcements.free().map(|room| room as usize).map_err(|error| Violation(error.to_string()))
    }

    /// Announces blocks to a scheduler, at most [`ClientSession::room_to_announce`] of them. Returns true if there
    /// were any. The scheduler is not woken: it polls this ring.
    pub fn push_announcements(&mut self, announcements: impl Iterator<Item = Announcement>) -> bool {
        announcements.for_each(|announcement| self.announcements.push(&announcement.encode_slot()));
        self.announcements.publish()
    }

    /// Writes the namespace and the weights of the engine's binding.
    pub fn show_bound(&self, bound: Bound) {
        self.memory.store_bound(bound);
    }

    /// Writes the sidecar's heartbeat.
    pub fn beat(&self, now_ms: u64) {
        self.memory.region().word64(header::SIDECAR_HEARTBEAT).store(now_ms, Ordering::Relaxed);
    }

    /// Tells the engine whether the doorbell is needed to wake the data thread.
    pub fn set_asleep(&self, asleep: bool) {
        wait::set_asleep(self.memory.region(), asleep);
    }
}

/// Decodes a rank's message, and hands an answer about staged blocks to the rank's copier.
fn read_worker(rank: &Rank, slot: &Slot) -> Result<WorkerRequest, Violation> {
    let request = WorkerRequest::decode_slot(slot)?;
    if let WorkerRequest::Staged { tag, slot, ok } = request {
        rank.staged(tag, slot, ok).map_err(Violation)?;
    }
    Ok(request)
}
