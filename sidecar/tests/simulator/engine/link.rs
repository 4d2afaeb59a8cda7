//! All of a scheduler's session that lives and dies with one connection, over the shim's own arenas and ring.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use shm_protocol::key::BlockHash;
use shm_protocol::layout::{CHUNK_KEYS, header};
use shm_protocol::message::{APPEND_CHUNKS, Saved};
use shm_protocol::request::{Append, Keys, SchedulerRequest};
use shm_protocol::ring::Consumer;
use shm_protocol::session::{RegionRing, Ring};

use super::request::Lease;
use crate::arena::{BlockIds, Chunks};
use crate::connection::Connection;
use crate::ctx::Micros;
use crate::saves::Saves;
use crate::submission::Submission;

/// A log as the shim knows it.
#[derive(Debug, Default)]
pub(super) struct Log {
    pub(super) chunks: Vec<u32>,
    pub(super) length: u32,
    pub(super) lease: Option<Lease>,
}

/// A query without an answer yet.
#[derive(Copy, Clone, Debug)]
pub(super) struct Question {
    pub(super) log: u32,
    pub(super) from: u32,
    pub(super) count: u32,
    pub(super) posted: Micros,
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) connection: Rc<Connection>,
    pub(super) submission: Submission,
    completions: Consumer<RegionRing>,
    chunks: Chunks,
    block_ids: BlockIds,
    pub(super) logs: BTreeMap<u32, Log>,
    pub(super) saves: Saves,
    pub(super) questions: BTreeMap<u64, Question>,
    /// Since when every answer was that the ranks have not joined.
    pub(super) unbound_since: Option<Micros>,
    pub(super) unclosed: Vec<(u32, Vec<u32>)>,
}

// === impl Link ===

impl Link {
    pub(super) fn new(connection: &Rc<Connection>) -> Self {
        Self {
            submission: Submission::new(connection),
            completions: Consumer::new(connection.memory.ring(Ring::Completion)),
            connection: Rc::clone(connection),
            chunks: Chunks::new(),
            block_ids: BlockIds::default(),
            logs: BTreeMap::new(),
            saves: Saves::default(),
            questions: BTreeMap::new(),
            unbound_since: None,
            unclosed: Vec::new(),
        }
    }

    pub(super) fn heartbeat(&self) -> u64 {
        self.connection.word(header::SIDECAR_HEARTBEAT).load(Ordering::Relaxed)
    }

    pub(super) fn flush(&mut self) {
        self.submission.flush(&self.connection);
    }

    pub(super) fn post(&mut self, request: SchedulerRequest) -> bool {
        self.submission.post(request).is_some()
    }

    pub(super) fn open(&mut self) -> Option<u32> {
        let unclosed = |number: &u32| self.unclosed.iter().any(|(other, _)| other == number);
        let number = (0..).find(|number| !self.logs.contains_key(number) && !unclosed(number))?;
        if !self.post(SchedulerRequest::Open { log: number }) {
            return None;
        }
        self.flush();
        self.logs.insert(number, Log::default());
        Some(number)
    }

    /// Appends keys, all or none; whether there was room.
    pub(super) fn append(&mut self, number: u32, keys: &[BlockHash]) -> bool {
        self.reclaim();
        let touched = keys.len().div_ceil(CHUNK_KEYS) + 1;
        if self.chunks.free() < touched || !self.submission.has_room(touched.div_ceil(APPEND_CHUNKS) as u32) {
            return false;
        }
        let log = self.logs.get_mut(&number).expect("the caller's log");
        let from = log.length;
        let end = from as usize + keys.len();
        let first = from as usize / CHUNK_KEYS;
        let mut append = Append { keys: Keys::new(number, from..end as u32), chunks: [0; APPEND_CHUNKS] };
        for (index, chunk) in (first..end.div_ceil(CHUNK_KEYS)).enumerate() {
            if chunk == log.chunks.len() {
                log.chunks.push(self.chunks.take().expect("counted above"));
            }
            append.chunks[index] = log.chunks[chunk];
        }
        for (at, key) in (from as usize..).zip(keys) {
            self.connection.memory.write_key(log.chunks[at / CHUNK_KEYS], at % CHUNK_KEYS, key);
        }
        log.length = end as u32;
        let append = SchedulerRequest::Append(append);
        assert!(self.submission.post(append).is_some(), "room was counted above");
        self.submission.publish();
        true
    }

    /// Posts the request that names the position of `blocks`, and lends them to it.
    pub(super) fn post_with_blocks(
        &mut self,
        blocks: &[u32],
        request: impl FnOnce(u32) -> SchedulerRequest,
    ) -> bool {
        if !self.block_ids.has_room(blocks.len()) {
            return false;
        }
        let position = self.block_ids.position();
        let Some(sequence) = self.submission.post(request(position)) else { return false };
        for (index, block) in blocks.iter().enumerate() {
            self.connection.memory.write_block_id(position.wrapping_add(index as u32), *block);
        }
        self.block_ids.lend(blocks.len(), sequence);
        true
    }

    /// Closes a log; false without room: it is tried again.
    pub(super) fn close(&mut self, number: u32) -> bool {
        let log = self.logs.remove(&number).expect("the caller's log");
        self.post_close(number, log.chunks)
    }

    fn post_close(&mut self, number: u32, chunks: Vec<u32>) -> bool {
        let posted = self.submission.post(SchedulerRequest::Close { log: number });
        match posted {
            Some(sequence) => self.chunks.retire(sequence, chunks),
            None => self.unclosed.push((number, chunks)),
        }
        posted.is_some()
    }

    pub(super) fn retry_closes(&mut self) {
        for (number, chunks) in std::mem::take(&mut self.unclosed) {
            self.post_close(number, chunks);
        }
    }

    /// Voids every save so far by the one word that always has room.
    pub(super) fn void_saves_below(&mut self, op: u64) {
        self.connection.word(header::VOID_SAVES_BELOW).store(op, Ordering::Release);
        self.saves.void();
    }

    pub(super) fn reap(&mut self) {
        if self.completions.ready().expect("an honest sidecar") == 0 {
            return;
        }
        while let Some(slot) = self.completions.pop() {
            let saved = Saved::decode(&slot);
            assert!(self.saves.end(saved.op), "save {} was completed and is not in flight", saved.op);
        }
        self.completions.release();
    }

    pub(super) fn reclaim(&mut self) {
        let acknowledged = self.submission.acknowledged();
        self.chunks.reclaim(acknowledged);
        self.block_ids.reclaim(acknowledged);
        assert!(self.submission.broken().is_none(), "an honest sidecar");
    }
}
