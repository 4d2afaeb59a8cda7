//! The SSD tier behind the DRAM tier: committed blocks are written behind the saves' backs, and what a query misses in DRAM
//! and a device keeps arrives there again ([`super::arrivals`]).
//!
//! Bytes move between a device and a pool slot alone. A slot given to a transfer stays that transfer's until its end,
//! whoever asked for it: held while it is written from, being filled while it is read into.

mod writes;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::Duration;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::dram::{Dram, HolderId, Leaving};
use tiers::ssd::{self, Done, Ended, Job, Label, Log, Recovered, Ticket};

use self::writes::Unwritten;
use super::namespaces::{Namespaces, Space};
use super::quotas::Quotas;
use crate::config::SsdAdmission;
use crate::system::clock::millis;

/// The core's part in the SSD tier.
#[derive(Debug)]
pub(super) struct Ssd {
    pub(super) log: Log,
    admission: SsdAdmission,
    /// Reads that have not ended, one for each block, and when each was asked for.
    reads: BTreeMap<Ticket, (BlockKey, Duration)>,
    /// Blocks that DRAM gives up next, in that order.
    leaving: VecDeque<Leaving>,
    /// The generation from which on DRAM is asked for these again.
    look_at: u64,
    /// Saved blocks to be written where there is room for copies, the first saved first.
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

/// A read that has ended.
#[derive(Debug)]
pub(super) struct ReadEnd {
    pub(super) key: BlockKey,
    pub(super) slot: SlotRef,
    pub(super) since: Duration,
    /// Its block is in the slot, or is not to be had.
    pub(super) ok: bool,
}

// === impl Ssd ===

impl Ssd {
    /// A tier over this log.
    pub(super) fn new(mut log: Log, admission: SsdAdmission, dram: &mut Dram) -> Self {
        log.put_below(dram);
        Self {
            log,
            admission,
            reads: BTreeMap::new(),
            leaving: VecDeque::new(),
            look_at: 0,
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

    /// A device has ended a job; the read that this was.
    pub(super) fn ended(&mut self, now_ms: u64, done: Done, dram: &mut Dram) -> Option<ReadEnd> {
        self.full = false;
        match self.log.done(now_ms, done)? {
            Ended::Written { slot, .. } => {
                self.writing -= 1;
                dram.unhold(slot, HolderId::NOBODY);
                None
            }
            Ended::Read { ticket, slot, ok, .. } => {
                let (key, since) = self.reads.remove(&ticket).expect("a read ends once");
                self.stats.promoted_blocks += u64::from(ok);
                Some(ReadEnd { key, slot, since, ok })
            }
        }
    }

    /// Blocks that earlier lives left on a device. Engines of their namespace find them as soon as one connects.
    pub(super) fn recovered(&mut self, found: &Recovered, namespaces: &mut Namespaces, quotas: &Quotas) {
        self.full = false;
        let mut last = None;
        for (_, Label { namespace: digest, bytes, .. }) in &found.blocks {
            let space = Space { digest: *digest, block_bytes: u64::from(*bytes) };
            if last.replace(space) != Some(space)
                && let Some(number) = namespaces.adopt(space)
            {
                self.log.learn(number, *digest, quotas.of(*digest));
            }
        }
        self.log.recovered(found, |digest, bytes| {
            namespaces.adopt(Space { digest, block_bytes: u64::from(bytes) })
        });
    }

    /// Whether a device keeps the block, of whatever size.
    pub(super) fn has(&self, key: &BlockKey) -> bool {
        self.log.keeps(key).is_some()
    }

    /// Whether blocks of earlier lives are still being found.
    pub(super) fn recovers(&self) -> bool {
        self.log.stats().devices.iter().any(|device| device.recovering)
    }

    /// Time passed; blocks whose reads are late, and their devices taken for broken.
    pub(super) fn tick(&mut self, now_ms: u64) -> Vec<BlockKey> {
        self.full = false;
        let mut late = Vec::new();
        self.log.tick(now_ms, &mut late);
        late.iter().filter_map(|ticket| self.reads.get(ticket)).map(|(key, _)| *key).collect()
    }

    /// Jobs for the devices, also what every event may have made room for.
    pub(super) fn drain_jobs(&mut self, dram: &mut Dram) -> impl Iterator<Item = Job> + '_ {
        self.write_behind(dram);
        self.log.drain_jobs()
    }

    /// Whether a transfer is under way, or blocks or what is distrusted are still to be written.
    pub(super) fn busy(&self) -> bool {
        self.transfers() || !self.queue.is_empty() || !self.leaving.is_empty() || self.log.tells_distrusted()
    }

    /// Whether time must pass for it to go on.
    pub(super) fn waits(&self) -> bool {
        self.busy() || self.log.busy()
    }

    pub(super) fn stats(&self) -> SsdStats {
        SsdStats {
            log: self.log.stats(),
            queued: (self.queue.len() + self.leaving.len()) as u64,
            ..self.stats.clone()
        }
    }

    /// Whether a device keeps the block, in this size.
    pub(super) fn keeps(&self, key: &BlockKey, block_bytes: u64) -> bool {
        self.log.keeps(key).map(u64::from) == Some(block_bytes)
    }

    /// Begins to read a block into a slot, if its device can in time; with 1 of `parts` of what may wait for it.
    pub(super) fn read(&mut self, now: Duration, key: BlockKey, slot: SlotRef, parts: u64) -> bool {
        let ticket = self.log.read(millis(now), &key, slot, parts);
        ticket.map(|ticket| self.reads.insert(ticket, (key, now))).is_some()
    }
}

#[cfg(test)]
mod tests;
