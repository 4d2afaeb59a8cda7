//! One connected engine process: its memory, and every value it writes checked before anything follows from it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use shm_protocol::announcement::Announcement;
use shm_protocol::key::BlockHash;
use shm_protocol::layout::{BLOCK_IDS, CHUNK_KEYS, header};
use shm_protocol::message::{Outcome, Saved, Slot};
use shm_protocol::pool::SlotRef;
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{Append, Load, RequestError, Save, SchedulerRequest, WorkerRequest};
use shm_protocol::ring::{Consumer, Producer};
use shm_protocol::session::{Bound, RegionRing, Ring, SessionMemory};
use shm_protocol::source::Source;
use shm_protocol::wait;
use thiserror::Error;

use crate::copiers::Rank;
use crate::core::Request;

/// A peer wrote what no engine of this version writes; its session ends.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct Violation(String);

/// A session as the data thread holds it.
#[derive(Debug)]
pub struct Session {
    memory: SessionMemory,
    submissions: Consumer<RegionRing>,
    /// A scheduler's. A rank's ring is its copier's, which hands it requests there.
    completions: Producer<RegionRing>,
    /// A scheduler's: a rank's session has other things there.
    announcements: Producer<RegionRing>,
    /// Messages seen and not read yet.
    unread: u32,
    /// Block ids that unread messages of this turn may still name.
    block_ids_left: usize,
    rank: Option<Rank>,
    fences: (u64, u64),
    /// Words or completions were stored since the engine was last woken.
    dirty: bool,
    /// Its hang-up is the engine's death. A rank's copies share it: an engine that sees the hang-up knows that nothing
    /// writes into its blocks any more.
    pub socket: Arc<OwnedFd>,
    /// The engine's process: its death, too, whoever holds its socket.
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

// === impl Session ===

impl Session {
    /// A session in fresh memory; `rank` for a worker.
    pub fn new(memory: SessionMemory, socket: Arc<OwnedFd>, doorbell: OwnedFd, rank: Option<Rank>) -> Self {
        Self {
            submissions: Consumer::new(memory.ring(Ring::Submission)),
            completions: Producer::new(memory.ring(Ring::Completion)),
            announcements: Producer::new(memory.ring(Ring::Announcement)),
            memory,
            unread: 0,
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

    /// Looks at the submission ring's tail: what [`Session::read`] will read up to.
    pub fn look(&mut self) -> Result<u32, Violation> {
        self.unread = self.submissions.ready().map_err(|error| Violation(error.to_string()))?;
        self.block_ids_left = BLOCK_IDS;
        Ok(self.unread)
    }

    /// Messages that [`Session::look`] saw and [`Session::read`] has not returned yet.
    pub fn unread(&self) -> u32 {
        self.unread
    }

    /// Whether there is anything to read, or the peer's tail is a wrong one.
    pub fn has_news(&mut self) -> bool {
        self.submissions.ready() != Ok(0)
    }

    /// The next message that [`Session::look`] saw.
    pub fn read(&mut self) -> Result<Option<Request>, Violation> {
        if self.unread == 0 {
            return Ok(None);
        }
        self.unread -= 1;
        let slot = self.submissions.pop().expect("seen by look");
        let request = match &self.rank {
            None => self.read_scheduler(&slot)?,
            Some(rank) => Request::Worker(read_worker(rank, &slot)?),
        };
        Ok(Some(request))
    }

    /// Gives what was read back to the engine; after the actions that followed from it, which may write into its chunks.
    pub fn release(&self) {
        self.submissions.release();
    }

    fn read_scheduler(&mut self, slot: &Slot) -> Result<Request, Violation> {
        let request = SchedulerRequest::decode(slot)?;
        let (mut keys, mut blocks) = (Vec::new(), Vec::new());
        match &request {
            SchedulerRequest::Append(append) => keys = self.read_keys(append),
            SchedulerRequest::Load(Load { keys, position, .. })
            | SchedulerRequest::Save(Save { keys, position, .. }) => {
                blocks = self.read_blocks(*position, keys.count)?;
            }
            _ => {}
        }
        Ok(Request::Scheduler { request, keys, blocks })
    }

    fn read_keys(&self, append: &Append) -> Vec<BlockHash> {
        let mut keys = Vec::with_capacity(append.keys.count as usize);
        for part in append.parts() {
            self.memory.read_keys(part.chunk, part.index, part.count, &mut keys);
        }
        keys
    }

    fn read_blocks(&mut self, position: u32, count: u32) -> Result<Vec<u32>, Violation> {
        // Unacknowledged messages of an honest engine share the circle, so together they name no more than it holds.
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

    /// Saves below this operation are void.
    pub fn void_below(&self) -> u64 {
        // SYNC POINT(void): acquire; read after the ring was drained, so that what the engine stored before it launched
        // an overwriting step is seen.
        self.memory.region().word64(header::VOID_SAVES_BELOW).load(Ordering::Acquire)
    }

    /// Writes the slots that a query found beside its keys; before the outcome.
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

    /// Writes the outcome of an operation.
    pub fn store_outcome(&mut self, op: u64, outcome: Outcome) {
        self.memory.store_outcome(op, outcome);
        self.dirty = true;
    }

    /// Pushes the end of a save.
    pub fn push_saved(&mut self, saved: &Saved) -> Result<(), Violation> {
        if !self.completions.has_room(0).map_err(|error| Violation(error.to_string()))? {
            return Err(Violation(
                "the completion ring is full: more saves in flight than it has slots".into(),
            ));
        }
        self.completions.push(&saved.encode());
        self.dirty = true;
        Ok(())
    }

    /// Makes pushed completions visible and wakes the engine if it waits.
    pub fn flush(&mut self) {
        if self.dirty {
            self.dirty = false;
            self.completions.publish();
            wait::wake_engine(self.memory.region());
        }
    }

    /// How often a scheduler has asked to be told of all blocks, if it has.
    pub fn asked_to_announce(&self) -> Option<u64> {
        // Relaxed: the word stands for nothing but itself.
        let asked = || self.memory.region().word64(header::ANNOUNCE).load(Ordering::Relaxed);
        self.rank.is_none().then(asked).filter(|asked| *asked > 0)
    }

    /// How fast a scheduler's engine computes prompts, if it says so.
    pub fn prefill(&self) -> Option<PrefillRate> {
        // Relaxed: the word stands for nothing but itself.
        let word = || self.memory.region().word64(header::PREFILL).load(Ordering::Relaxed);
        self.rank.is_none().then(word).and_then(PrefillRate::from_word)
    }

    /// Announcements that a scheduler's ring has room for.
    pub fn room_to_announce(&mut self) -> Result<usize, Violation> {
        self.announcements.free().map(|room| room as usize).map_err(|error| Violation(error.to_string()))
    }

    /// Tells a scheduler of blocks, no more than there is room for; whether there were any. It looks by itself.
    pub fn announce(&mut self, announcements: impl Iterator<Item = Announcement>) -> bool {
        announcements.for_each(|announcement| self.announcements.push(&announcement.encode()));
        self.announcements.publish()
    }

    /// Shows what the engine is bound to.
    pub fn show_bound(&self, bound: Bound) {
        self.memory.store_bound(bound);
    }

    /// Shows that the sidecar lives.
    pub fn beat(&self, now_ms: u64) {
        self.memory.region().word64(header::SIDECAR_HEARTBEAT).store(now_ms, Ordering::Relaxed);
    }

    /// Says whether the data thread must be woken through the doorbell.
    pub fn set_asleep(&self, asleep: bool) {
        wait::set_asleep(self.memory.region(), asleep);
    }
}

/// A rank's message, of which its copier is told what is the copier's.
fn read_worker(rank: &Rank, slot: &Slot) -> Result<WorkerRequest, Violation> {
    let request = WorkerRequest::decode(slot)?;
    if let WorkerRequest::Staged { tag, slot, ok } = request {
        rank.staged(tag, slot, ok).map_err(Violation)?;
    }
    Ok(request)
}
