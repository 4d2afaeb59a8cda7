//! The SSD tier behind the DRAM tier: committed blocks are written in the background, and blocks missing in
//! DRAM are read from a device ([`super::arrivals`]).
//!
//! Bytes move between a device and a pool slot alone. The slot of a transfer belongs to it until its end: it
//! is held while it is written to a device, and being filled while it is read from one.

mod writes;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::Duration;

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;
use tiers::dram::{Dram, HolderId, Leaving, Standing};
use tiers::ssd::{self, EndedJob, JobDone, Label, Recovered, SegmentLog, Ticket};

use super::arrivals::{SourceLane, Waiter};
use super::context::Context;
use super::event::{Action, JobEnd, TierJob};
use super::namespaces::{Binding, Space};
use super::sources::Sources;
use super::tier::{NewTier, Notice, ReadEnd, Tier, TierSpan};
use crate::config::SsdAdmission;
use crate::system::clock::count_millis;

/// The core's part in the SSD tier.
#[derive(Debug)]
pub(super) struct Ssd {
    number: usize,
    log: SegmentLog,
    admission: SsdAdmission,
    /// Unended reads, one for each block, with the time of the request.
    reads: BTreeMap<Ticket, (BlockKey, Duration)>,
    /// Blocks DRAM gives up next, in this order.
    leaving: VecDeque<Leaving>,
    /// The generation from which on DRAM is asked for these again.
    look_at: u64,
    /// Saved blocks, to be written while there is room for copies; the first saved first.
    queue: VecDeque<Leaving>,
    queued: HashSet<BlockKey>,
    /// The log takes nothing until a job has ended.
    full: bool,
    /// Number of slots held for writes.
    writing: u64,
    stats: SsdStats,
}

/// Figures of the SSD tier.
#[derive(Clone, Debug, Default)]
pub struct SsdStats {
    /// Figures of the log and of each device.
    pub log: ssd::LogStats,
    /// Blocks waiting for their write.
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

/// Returns a tier of the disks of a log, for the blocks of this admission.
pub fn disk_tier(log: SegmentLog, admission: SsdAdmission) -> NewTier {
    NewTier::new(Ssd::new(log, admission))
}

// === impl Sources: disks ===

impl Sources {
    /// Returns the figures of the disks, if there are any.
    pub(super) fn ssd_stats(&self) -> Option<SsdStats> {
        self.tier().map(Ssd::ssd_stats)
    }
}

// === impl Ssd ===

impl Ssd {
    fn new(log: SegmentLog, admission: SsdAdmission) -> Self {
        Self {
            number: 0,
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

    /// Ends a job of a device. Returns the read, if the job was one.
    fn end_job(&mut self, done: JobDone, cx: &mut Context) -> Option<ReadEnd> {
        match self.log.done(cx.now_ms, done)? {
            EndedJob::Written { slot, .. } => {
                self.writing -= 1;
                cx.dram.unhold(slot, HolderId::NOBODY);
                None
            }
            EndedJob::Read { ticket, slot, ok, .. } => {
                let (key, since) = self.reads.remove(&ticket).expect("a read ends once");
                self.stats.promoted_blocks += u64::from(ok);
                // The device has compared the block's checksum, and does not pass it on.
                Some(ReadEnd { key, slot, since, checksum: ok.then_some(0) })
            }
        }
    }

    /// Adopts blocks of earlier lives on a device. Engines find them as soon as one of their namespace
    /// connects.
    fn recovered(&mut self, found: &Recovered, cx: &mut Context) {
        cx.unread |= found.unreadable;
        let Context { namespaces, quotas, .. } = cx;
        let mut last = None;
        for (_, Label { namespace: digest, bytes, .. }) in &found.blocks {
            let space = Space { digest: *digest, block_bytes: u64::from(*bytes) };
            if last.replace(space) != Some(space)
                && let Some(number) = namespaces.adopt(space)
            {
                self.log.learn(number, *digest, quotas.of_namespace(*digest));
            }
        }
        self.log.recovered(found, |digest, bytes| {
            namespaces.adopt(Space { digest, block_bytes: u64::from(bytes) })
        });
    }

    /// Sends jobs to the devices, also those an event may have made room for.
    fn send_jobs(&mut self, cx: &mut Context) {
        self.write_behind(&mut cx.dram);
        let jobs =
            self.log.drain_jobs().map(|job| Action::Transfer { tier: self.number, job: TierJob::Disk(job) });
        cx.actions.extend(jobs);
    }

    fn ssd_stats(&self) -> SsdStats {
        SsdStats {
            log: self.log.log_stats(),
            queued: (self.queue.len() + self.leaving.len()) as u64,
            ..self.stats.clone()
        }
    }

    /// True if a device keeps the block, in the size of this engine.
    fn keeps(&self, binding: &Binding, hash: &BlockHash) -> bool {
        self.log.keeps(&binding.block_key(hash)).map(u64::from) == Some(binding.block_bytes())
    }
}

impl Tier for Ssd {
    fn attach(&mut self, number: usize, dram: &mut Dram) {
        self.number = number;
        self.log.put_below(dram);
    }

    fn source(&self) -> Source {
        Source::Disk
    }

    fn find(&self, binding: &Binding, run: &[BlockHash], _spans: usize, _cx: &Context) -> Option<TierSpan> {
        let reach = run.iter().take_while(|hash| self.keeps(binding, hash)).count();
        (reach > 0).then(|| TierSpan { reach, ..TierSpan::default() })
    }

    fn may_have(&self, binding: &Binding, run: &[BlockHash], _cx: &Context) -> bool {
        run.first().is_some_and(|hash| self.keeps(binding, hash))
    }

    fn lane(&self, binding: &Binding, run: &[BlockHash], _cx: &Context) -> Option<SourceLane> {
        let hash = run.first().filter(|hash| self.keeps(binding, hash))?;
        self.log.device(&binding.block_key(hash)).map(SourceLane::Disk)
    }

    fn has(&self, key: &BlockKey) -> bool {
        self.log.keeps(key).is_some()
    }

    fn walk(&self, from: usize, see: &mut dyn FnMut(&BlockKey)) -> Option<usize> {
        self.log.walk(from, see)
    }

    fn recovers(&self) -> bool {
        self.log.log_stats().devices.iter().any(|device| device.recovering)
    }

    fn begin_read(&mut self, key: BlockKey, slot: SlotRef, _bytes: u64, parts: u64, now: Duration) -> bool {
        let ticket = self.log.read_block(count_millis(now), &key, slot, parts);
        ticket.map(|ticket| self.reads.insert(ticket, (key, now))).is_some()
    }

    fn read_span(&mut self, binding: &Binding, span: &TierSpan, slots: &[SlotRef], cx: &mut Context) {
        for (_, key) in &span.blocks[..slots.len()] {
            if let Some(device) = self.log.device(key) {
                cx.arrivals.send_for(key, SourceLane::Disk(device), binding.block_bytes(), cx.now_ms);
            }
        }
    }

    fn end_job(
        &mut self,
        end: JobEnd,
        _waits: &dyn Fn(&Waiter) -> bool,
        cx: &mut Context,
    ) -> Option<ReadEnd> {
        self.full = false;
        match end {
            JobEnd::Disk(done) => self.end_job(done, cx),
            JobEnd::Recovered(found) => {
                self.recovered(&found, cx);
                None
            }
            other => unreachable!("no disk says {other:?}"),
        }
    }

    fn late(&mut self, now_ms: u64) -> Vec<BlockKey> {
        self.full = false;
        let mut late = Vec::new();
        self.log.tick(now_ms, &mut late);
        late.iter().filter_map(|ticket| self.reads.get(ticket)).map(|(key, _)| *key).collect()
    }

    fn take_notice(&mut self, notice: Notice<'_>, cx: &mut Context) {
        match notice {
            Notice::Offered(key, saved, binding) => self.offer(key, saved, binding, &cx.dram),
            Notice::Left(key, standing) => self.log.leave_dram(key, standing),
            Notice::Came(key) => _ = self.log.came(key),
            Notice::Learned(namespace, digest, quota) => self.log.learn(namespace, digest, quota),
            Notice::Distrusted(binding, begins_anew) => {
                self.log.distrust(binding.namespace, binding.digest, begins_anew);
            }
            Notice::Removed(key) => _ = self.log.remove(key),
            Notice::Watched => self.log.watch(),
            Notice::Over => self.send_jobs(cx),
            Notice::Draining => self.write_no_more(),
            Notice::Ending => {
                self.write_all(&cx.dram);
                self.send_jobs(cx);
            }
            Notice::Changed(_) | Notice::Refuted(_) => {}
        }
    }

    fn standing(&self, key: &BlockKey) -> Option<Standing> {
        self.log.standing(key)
    }

    fn working(&self) -> (usize, u64) {
        self.log.working()
    }

    fn drain_changes(&mut self) -> Vec<(BlockKey, bool)> {
        self.log.drain_changes().collect()
    }

    /// True if a transfer is under way, or blocks or distrusted namespaces are still to be written.
    fn busy(&self) -> bool {
        self.transfers() || !self.queue.is_empty() || !self.leaving.is_empty() || self.log.tells_distrusted()
    }

    fn waits(&self) -> bool {
        self.busy() || self.log.busy()
    }
}

#[cfg(test)]
mod tests;
