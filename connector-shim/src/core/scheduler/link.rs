//! The part of a scheduler's session that ends with one connection: rings, arenas, logs and unfinished saves.

use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::time::Instant;

use shm_protocol::announcement::Announcement;
use shm_protocol::key::{BlockHash, HASH_BYTES_MAX};
use shm_protocol::layout::{CHUNK_KEYS, LOG_KEYS, header};
use shm_protocol::message::{APPEND_CHUNKS, LOAD_EARLY, Saved};
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{Append, Load, LogKeys, SchedulerRequest};
use shm_protocol::ring::Consumer;
use shm_protocol::session::{RegionRing, Ring};

use super::SchedulerCounters;
use super::announced::Announced;
use crate::core::arena::{BlockIds, Chunks};
use crate::core::endpoint::{Endpoint, Feature};
use crate::core::log_table::{LogTable, RequestLog};
use crate::core::plan::Plan;
use crate::core::saves::Saves;
use crate::core::submission::Submission;

/// A query without an answer yet.
#[derive(Copy, Clone, Debug)]
pub(super) struct PostedQuery {
    pub(super) log: i64,
    pub(super) from: u32,
    pub(super) count: u32,
    /// Another engine computes the keys of the query.
    pub(super) awaits: bool,
    /// The engine has not asked for its answer yet.
    pub(super) ahead: bool,
    /// The sidecar has read it, and works on it.
    pub(super) is_read: bool,
    pub(super) posted: Instant,
    /// The sidecar's last heartbeat, and the time of its first sighting.
    pub(super) heartbeat: (u64, Instant),
}

/// A closed log.
#[derive(Debug)]
pub(super) struct ClosedLog {
    pub(super) number: u32,
    pub(super) chunks: Vec<u32>,
    /// The code of the end of the request's answer; 0: not known.
    pub(super) way: u32,
}

/// The state of one connection.
#[derive(Debug)]
pub(super) struct SchedulerLink<C> {
    pub(super) connection: C,
    pub(super) submission: Submission,
    pub(super) completions: Consumer<RegionRing>,
    announcements: Consumer<RegionRing>,
    pub(super) chunks: Chunks,
    pub(super) block_ids: BlockIds,
    pub(super) logs: LogTable,
    pub(super) saves: Saves,
    /// Steps of posted saves, until the acceptance of the step, or of a later one, was posted.
    pub(super) unaccepted: BTreeSet<u64>,
    pub(super) questions: HashMap<u64, PostedQuery>,
    /// Number of the last WEIGHTS message to the sidecar.
    pub(super) weights: u64,
    /// Time since which every answer was "the ranks have not joined".
    pub(super) unbound_since: Option<Instant>,
    /// Closed logs whose CLOSE found no room.
    pub(super) unclosed: Vec<ClosedLog>,
}

// === impl SchedulerLink ===

impl<C: Deref<Target: Endpoint>> SchedulerLink<C> {
    pub(super) fn new(connection: C, incarnation: u64) -> Self {
        Self {
            submission: Submission::new(connection.memory()),
            completions: Consumer::new(connection.memory().ring(Ring::Completion)),
            announcements: Consumer::new(connection.memory().ring(Ring::Announcement)),
            connection,
            chunks: Chunks::new(),
            block_ids: BlockIds::default(),
            logs: LogTable::new(incarnation),
            saves: Saves::default(),
            unaccepted: BTreeSet::new(),
            questions: HashMap::new(),
            weights: 0,
            unbound_since: None,
            unclosed: Vec::new(),
        }
    }

    pub(super) fn heartbeat(&self) -> u64 {
        // Relaxed: only a change of the word matters.
        self.connection.memory().region().word64(header::SIDECAR_HEARTBEAT).load(Ordering::Relaxed)
    }

    /// The first 8 bytes of the engine's namespace; 0 without a binding for the current weights.
    pub(super) fn namespace(&self) -> u64 {
        let bound = self.connection.memory().load_bound();
        if bound.weights == self.weights { bound.namespace } else { 0 }
    }

    pub(super) fn flush(&mut self) {
        self.submission.flush(&*self.connection);
    }

    pub(super) fn reclaim(&mut self) {
        let acknowledged = self.submission.acknowledged();
        self.chunks.reclaim(acknowledged);
        self.block_ids.reclaim(acknowledged);
    }

    /// Posts a request with the position of `blocks`, and lends the blocks to it. Returns false without room.
    pub(super) fn post_with_blocks(
        &mut self,
        blocks: &[u32],
        request: impl FnOnce(u32) -> SchedulerRequest,
    ) -> bool {
        if !self.block_ids.has_room(blocks.len()) {
            self.reclaim();
            if !self.block_ids.has_room(blocks.len()) {
                return false;
            }
        }
        let position = self.block_ids.position();
        let Some(sequence) = self.submission.post(request(position)) else { return false };
        for (index, block) in blocks.iter().enumerate() {
            self.connection.memory().write_block_id(position.wrapping_add(index as u32), *block);
        }
        self.block_ids.lend(blocks.len(), sequence);
        true
    }

    /// Posts a load into `blocks`, one for each of its keys, and returns the plan with the keys' slots.
    pub(super) fn post_load(&mut self, handle: i64, load: Load, blocks: &[u32]) -> Plan {
        let (_, log) = self.logs.get(handle).expect("looked up by the caller");
        let places: Vec<_> = (load.keys.from..load.keys.end()).map(|key| log.key_place(key)).collect();
        let slots = places.into_iter().map(|(chunk, index)| self.connection.memory().read_ref(chunk, index));
        let blocks_and_slots = blocks.iter().copied().zip(slots).collect();
        // vLLM counts on the answer to the query by now. A sidecar that is gone, or has no room, breaks no
        // promise: the ranks have its pool mapped, and the slots stay leased for a time.
        self.post_with_blocks(blocks, |position| SchedulerRequest::Load(Load { position, ..load }));
        let flags = load.flags.bits() & !LOAD_EARLY;
        let (epoch, namespace) = (self.connection.epoch(), self.namespace());
        Plan { op: load.op, epoch, namespace, flags, blocks: blocks_and_slots }
    }

    /// Posts the acceptance of `step`, if saves of this or of an earlier step wait for it. Without room, the
    /// next accepted step is posted instead.
    pub(super) fn accept_step(&mut self, step: u64) {
        if self.unaccepted.first().is_some_and(|first| *first <= step)
            && self.submission.post(SchedulerRequest::Accept { step }).is_some()
        {
            self.unaccepted.retain(|unaccepted| *unaccepted > step);
            self.flush();
        }
    }

    pub(super) fn post_close(&mut self, closed: ClosedLog) {
        match self.submission.post(SchedulerRequest::Close { log: closed.number, way: closed.way }) {
            Some(sequence) => self.chunks.retire(sequence, closed.chunks),
            None => self.unclosed.push(closed),
        }
    }

    pub(super) fn retry_closes(&mut self) {
        std::mem::take(&mut self.unclosed).into_iter().for_each(|closed| self.post_close(closed));
    }

    /// Voids every save below `op` by a word of shared memory, which always has room. Returns the number of
    /// blocks.
    pub(super) fn void_saves_below(&mut self, op: u64) -> usize {
        // Release: a reader of the word also sees every message posted before it.
        self.connection.memory().region().word64(header::VOID_SAVES_BELOW).store(op, Ordering::Release);
        self.saves.void()
    }

    /// Takes the completions. Returns the last one with differing or unproven blocks. Fails if the sidecar
    /// broke the ring.
    pub(super) fn reap_completions(
        &mut self,
        counters: &mut SchedulerCounters,
    ) -> Result<Option<Saved>, String> {
        if self.completions.ready().map_err(|error| error.to_string())? == 0 {
            return Ok(None);
        }
        let mut wrong = None;
        while let Some(slot) = self.completions.pop() {
            let saved = Saved::decode_slot(&slot);
            if !self.saves.end_save(saved.op) {
                return Err(format!("it completed save {}, which was not under way", saved.op));
            }
            counters.blocks_committed += u64::from(saved.committed);
            counters.blocks_present += u64::from(saved.present);
            counters.blocks_cancelled += u64::from(saved.cancelled);
            counters.blocks_dropped += u64::from(saved.dropped);
            counters.blocks_checked += u64::from(saved.checked);
            counters.blocks_differing += u64::from(saved.differing);
            counters.blocks_unproven += u64::from(saved.unproven);
            counters.blocks_unaccepted += u64::from(saved.unaccepted);
            wrong = Some(saved).filter(|saved| saved.differing > 0 || saved.unproven > 0).or(wrong);
        }
        self.completions.release();
        Ok(wrong)
    }

    /// Asks for all blocks, for the `number`th time.
    pub(super) fn ask_for_all(&self, number: u64) {
        // Relaxed: no other data depends on the word.
        self.connection.memory().region().word64(header::ANNOUNCE).store(number, Ordering::Relaxed);
    }

    /// Publishes the engine's rate of computing prompts.
    pub(super) fn tell_prefill(&self, rate: PrefillRate) {
        // Relaxed: no other data depends on the word.
        self.connection.memory().region().word64(header::PREFILL).store(rate.to_word(), Ordering::Relaxed);
    }

    /// Takes the announcements. Fails if the sidecar broke the ring.
    pub(super) fn read_announcements(&mut self, announced: &mut Announced) -> Result<(), String> {
        if self.announcements.ready().map_err(|error| error.to_string())? == 0 {
            return Ok(());
        }
        while let Some(slot) = self.announcements.pop() {
            announced
                .apply_announcement(Announcement::decode_slot(&slot).map_err(|error| error.to_string())?);
        }
        self.announcements.release();
        Ok(())
    }

    pub(super) fn write_keys<E>(
        &mut self,
        handle: i64,
        count: u32,
        tail: bool,
        mut key: impl FnMut(u32, &mut BlockHash) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some((number, log)) = self.logs.get(handle) else { return Ok(()) };
        let (end, fold) = (log.length + count, log.fold);
        // Two engines that both await and promise the same keys would wait for each other.
        let promised = log.promised
            && !log.awaits
            && self.connection.knows(Feature::Handover)
            && self.connection.knows(Feature::Acceptance);
        let mut hash = BlockHash([0; HASH_BYTES_MAX]);
        while log.length < end {
            let from = log.length;
            let first_chunk = from as usize / CHUNK_KEYS;
            let upto = end.min(((first_chunk + APPEND_CHUNKS) * CHUNK_KEYS) as u32);
            let (keys, tail) = (LogKeys::new(number, from..upto), tail && upto == end);
            let mut append = Append { keys, chunks: [0; APPEND_CHUNKS], promised, tail };
            for (index, chunk) in (first_chunk..(upto as usize).div_ceil(CHUNK_KEYS)).enumerate() {
                if chunk == log.chunks.len() {
                    log.chunks.push(self.chunks.take_chunk().expect("counted by the caller"));
                }
                append.chunks[index] = log.chunks[chunk];
            }
            for index in from..upto {
                let (chunk, place) = log.key_place(index);
                key(index, &mut hash)?;
                if let Some(fold) = &fold {
                    hash = hash.folded(fold);
                }
                self.connection.memory().write_key(chunk, place, &hash);
            }
            self.submission.post(SchedulerRequest::Append(append)).expect("room was counted by the caller");
            // An awake sidecar reads these keys while the next ones are written.
            self.submission.publish();
            log.length = upto;
        }
        log.tail = tail;
        Ok(())
    }

    /// True if `count` more keys fit into the arena and the ring.
    pub(super) fn has_room_for_keys(&mut self, length: u32, count: u32) -> bool {
        let (length, end) = (length as usize, length as usize + count as usize);
        if end > LOG_KEYS {
            return false;
        }
        // Reclaims at each append: freed chunks are written again before others, so that few pages of the
        // arena are touched.
        self.reclaim();
        let chunks = end.div_ceil(CHUNK_KEYS) - length.div_ceil(CHUNK_KEYS);
        let touched = end.div_ceil(CHUNK_KEYS) - length / CHUNK_KEYS;
        chunks <= self.chunks.free() && self.submission.has_room(touched.div_ceil(APPEND_CHUNKS) as u32)
    }

    /// The log of a handle that the caller has just looked up.
    pub(super) fn log(&mut self, handle: i64) -> &mut RequestLog {
        self.logs.get(handle).expect("looked up by the caller").1
    }
}
