//! The SSD tier behind the DRAM tier: committed blocks are written behind the saves' backs, and what a query misses in DRAM
//! and a device keeps arrives there again ([`super::arrivals`]).
//!
//! Bytes move between a device and a pool slot alone. A slot given to a transfer stays that transfer's until its end,
//! whoever asked for it: held while it is written from, being filled while it is read into.

mod reads;
mod writes;

use std::collections::{BTreeMap, HashSet, VecDeque};

use shm_protocol::key::BlockKey;
use tiers::dram::HolderId;
use tiers::ssd::{self, Done, Ended, Log, Recovered, Ticket};

use self::writes::Unwritten;
use super::namespaces::Space;
use super::{Action, Core};
use crate::config::SsdAdmission;

/// The core's part in the SSD tier.
#[derive(Debug)]
pub(super) struct Ssd {
    log: Log,
    admission: SsdAdmission,
    /// Reads that have not ended; one for each block.
    reads: BTreeMap<Ticket, BlockKey>,
    /// Blocks to be written, the first saved first.
    queue: VecDeque<Unwritten>,
    queued: HashSet<BlockKey>,
    /// The log takes nothing until something has ended.
    full: bool,
    /// Slots that are held for writes.
    writing: u64,
    stats: SsdStats,
}

/// What the core counts of the SSD tier, and what the tier itself does.
#[derive(Clone, Debug, Default)]
pub struct SsdStats {
    /// The log and each device.
    pub log: ssd::Stats,
    /// Blocks that wait to be written.
    pub queued: u64,
    /// Blocks not written: the queue was full.
    pub dropped_queue_full: u64,
    /// Blocks not written: they were evicted before a device had room.
    pub dropped_evicted: u64,
    /// Blocks not written: no device works.
    pub dropped_down: u64,
    /// Blocks not written: they are larger than a segment.
    pub dropped_too_large: u64,
    /// Blocks brought back into DRAM.
    pub promoted_blocks: u64,
}

// === impl Ssd ===

impl Ssd {
    fn new(log: Log, admission: SsdAdmission) -> Self {
        Self {
            log,
            admission,
            reads: BTreeMap::new(),
            queue: VecDeque::new(),
            queued: HashSet::new(),
            full: false,
            writing: 0,
            stats: SsdStats::default(),
        }
    }

    fn transfers(&self) -> bool {
        self.writing > 0 || !self.reads.is_empty()
    }
}

// === impl Core ===

impl Core {
    /// The same core with an SSD tier behind the DRAM tier.
    pub fn with_ssd(mut self, log: Log, admission: SsdAdmission) -> Self {
        self.ssd = Some(Ssd::new(log, admission));
        self
    }

    /// A device has ended a job.
    pub(super) fn transferred(&mut self, now_ms: u64, done: Done, out: &mut Vec<Action>) {
        let Some(ssd) = &mut self.ssd else { return };
        ssd.full = false;
        match ssd.log.done(now_ms, done) {
            Some(Ended::Written { slot, .. }) => {
                ssd.writing -= 1;
                self.dram.unhold(slot, HolderId::NOBODY);
            }
            Some(Ended::Read { ticket, slot, ok, .. }) => self.read_ended(now_ms, ticket, slot, ok, out),
            None => {}
        }
    }

    /// Blocks that earlier lives left on a device. Engines of their namespace find them as soon as one connects.
    pub(super) fn recovered(&mut self, found: &Recovered) {
        let Some(ssd) = &mut self.ssd else { return };
        ssd.full = false;
        ssd.log.recovered(found, |digest, bytes| {
            self.namespaces.adopt(Space { digest, block_bytes: u64::from(bytes) })
        });
    }

    /// No disk of this life keeps the block any more.
    pub(super) fn forget_on_disk(&mut self, key: &BlockKey) {
        if let Some(ssd) = &mut self.ssd {
            ssd.log.remove(key);
        }
    }

    /// Time passed: what is late is waited for no longer.
    pub(super) fn tick_ssd(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let Some(ssd) = &mut self.ssd else { return };
        ssd.full = false;
        let mut late = Vec::new();
        ssd.log.tick(now_ms, &mut late);
        late.into_iter().for_each(|ticket| self.give_up_read(now_ms, ticket, out));
    }

    /// What every event may have made room for.
    pub(super) fn run_ssd(&mut self, out: &mut Vec<Action>) {
        self.write_behind();
        if let Some(ssd) = &mut self.ssd {
            out.extend(ssd.log.drain_jobs().map(Action::Transfer));
        }
    }

    /// Whether a transfer is under way or blocks are still to be written.
    pub(super) fn ssd_busy(&self) -> bool {
        self.ssd.as_ref().is_some_and(|ssd| ssd.transfers() || !ssd.queue.is_empty())
    }

    /// Whether time must pass for the SSD tier to go on.
    pub fn waits_for_disks(&self) -> bool {
        self.ssd_busy() || self.ssd.as_ref().is_some_and(|ssd| ssd.log.busy())
    }

    /// Figures of the SSD tier, if there is one.
    pub fn ssd_stats(&self) -> Option<SsdStats> {
        let ssd = self.ssd.as_ref()?;
        Some(SsdStats { log: ssd.log.stats(), queued: ssd.queue.len() as u64, ..ssd.stats.clone() })
    }
}

#[cfg(test)]
mod tests;
