//! Writes: first the blocks DRAM gives up next, in its own order, before their slots are needed; then saved
//! blocks, while there is room for copies. A block is held in DRAM while it is written; a block DRAM gives up
//! before is lost. No save ever waits.

use std::collections::VecDeque;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::dram::{Dram, HolderId, Leaving};
use tiers::ssd::LogRefusal;

use super::super::namespaces::Binding;
use super::Ssd;
use crate::config::SsdAdmission;

/// Limit of blocks waiting for their write: as many as saves may have waiting for their copies.
const QUEUE_MAX: usize = 65_536;
/// Blocks of a queue for one event to look at, 0.1 ms.
const LOOKS_MAX: usize = 1024;
/// The part of DRAM written ahead: bursts of saves take as much before a disk has written anything.
const AHEAD_PART: u64 = 32;
/// Limit of blocks of one size written ahead: looking for them takes 0.3 ms.
const AHEAD_MAX: usize = 4096;

/// The result of a try to write the next block of a queue.
enum NextWrite {
    /// It was begun, or is not to be written.
    Over,
    /// The disks take nothing until a job has ended.
    Later,
}

// === impl Ssd ===

impl Ssd {
    /// Offers a block in DRAM for a write. A block saved just now is subject to the admission rule. A block
    /// asked for or offered again is worth a place, even if it lost one meanwhile.
    pub(super) fn offer(&mut self, key: BlockKey, saved: Option<SlotRef>, binding: &Binding, dram: &Dram) {
        if saved.is_some_and(|slot| self.admission != SsdAdmission::All && !dram.has_returned(slot)) {
            return;
        }
        let Binding { namespace, digest, whose, .. } = *binding;
        self.log.learn(namespace, digest, whose.quota);
        let bytes = binding.block_bytes();
        if self.log.came(&key)
            || self.queued.contains(&key)
            || self.writes_no_more()
            || !self.log.has_room_for_copy(namespace, bytes)
        {
            return;
        }
        if self.queue.len() >= QUEUE_MAX {
            self.stats.dropped_queue_full += 1;
            return;
        }
        self.queued.insert(key);
        self.queue.push_back(Leaving::copy(key, bytes));
    }

    /// Hands the log as many blocks as it has room for.
    pub(super) fn write_behind(&mut self, dram: &mut Dram) {
        self.look_ahead(dram);
        for _ in 0..LOOKS_MAX {
            if self.full {
                return;
            }
            if let Some(block) = self.leaving.front().copied() {
                match self.write_block(&block, dram) {
                    NextWrite::Over => drop(self.leaving.pop_front()),
                    NextWrite::Later => self.full = true,
                }
                continue;
            }
            let Some(block) = self.queue.front().copied() else { return };
            let fits = self.log.has_room_for_copy(block.key.namespace, block.bytes);
            match if fits { self.write_block(&block, dram) } else { NextWrite::Over } {
                NextWrite::Over => {
                    self.queue.pop_front();
                    self.queued.remove(&block.key);
                }
                NextWrite::Later => self.full = true,
            }
        }
    }

    /// Asks DRAM for its next evictions, once half of its last answer may be gone.
    fn look_ahead(&mut self, dram: &Dram) {
        if dram.next_generation() < self.look_at {
            return;
        }
        let mut leaving = Vec::new();
        dram.next_out(dram.config().pool_bytes / AHEAD_PART, AHEAD_MAX, &mut leaving);
        self.look_at = dram.next_generation() + (leaving.len() as u64 / 2).max(1);
        let admitted =
            |block: &Leaving| self.admission == SsdAdmission::All || block.standing.was_used_again();
        self.leaving = leaving.into_iter().filter(admitted).collect();
    }

    /// Begins to write a block, unless a disk has room for it already or for more useful blocks alone.
    fn write_block(&mut self, block: &Leaving, dram: &mut Dram) -> NextWrite {
        let key = &block.key;
        // A namespace beyond the limit has no number.
        let Some(digest) = self.log.namespace_digest(key.namespace) else { return NextWrite::Over };
        if self.log.came(key) {
            return NextWrite::Over;
        }
        let Some(slot) = dram.hold(key, HolderId::NOBODY) else {
            self.stats.dropped_evicted += 1;
            return NextWrite::Over;
        };
        let written = match self.log.make_room(block, dram.judge()) {
            true => self.log.write_block(block, digest, slot),
            false => Err(LogRefusal::Present),
        };
        match written {
            Ok(_) => {
                self.writing += 1;
                return NextWrite::Over;
            }
            Err(LogRefusal::Busy) => {}
            Err(LogRefusal::Down) => self.stats.dropped_down += 1,
            Err(LogRefusal::TooLarge) => self.stats.dropped_too_large += 1,
            Err(LogRefusal::Present) => {}
        }
        dram.unhold(slot, HolderId::NOBODY);
        if written == Err(LogRefusal::Busy) { NextWrite::Later } else { NextWrite::Over }
    }

    /// Has all blocks of DRAM written, the best first.
    pub(super) fn write_all(&mut self, dram: &Dram) {
        let mut all = Vec::new();
        dram.best(&mut all);
        self.log.keep_copies();
        self.write_no_more();
        let log = &mut self.log;
        self.leaving = all.into_iter().filter(|block| !log.came(&block.key)).collect();
    }

    /// Drops the blocks waiting for their write, and takes no more.
    pub(super) fn write_no_more(&mut self) {
        (self.leaving, self.queue) = (VecDeque::new(), VecDeque::new());
        self.queued.clear();
        self.look_at = u64::MAX;
    }

    fn writes_no_more(&self) -> bool {
        self.look_at == u64::MAX
    }
}
