//! Blocks of ended requests in the engine's own cache: the sidecar's copies of them go first, so each block is offered again before the
//! engine reuses it.
//!
//! An ended request's log stays open while the policy knows of such a block of it. A block belongs to its request with the latest end. The
//! engine names the blocks to be reused next, some steps ahead ([`EnginePolicy::end_step`]). A block reused without a name has left the
//! device, and its copy is judged like any other from then on.

use std::collections::BTreeMap;
use std::ops::Range;

use shm_protocol::layout::{LOG_KEYS, LOGS};

use super::EnginePolicy;
use super::host::SessionHost;
use super::kinds::GroupKind;
use super::requests::RequestId;

/// The most keys, and the most logs, of ended requests: the other half is for requests at work.
const ENDED_KEYS_MAX: usize = LOG_KEYS / 2;
const ENDED_LOGS_MAX: usize = LOGS / 2;
/// The engine names one of so many of its blocks at a time, and at least so many blocks.
const NAMED_PART: u32 = 8;
const NAMED_MIN: u32 = 16;

/// The place of a block in its ended request.
#[derive(Copy, Clone, Debug)]
struct EndedPlace {
    /// The number of the ended request, by the order of ends.
    ended: u64,
    place: u32,
}

#[derive(Debug)]
struct EndedLog {
    log: i64,
    /// The connection of the log.
    generation: u64,
    keys: usize,
    /// Number of its blocks.
    blocks: u32,
}

/// Blocks of ended requests in the engine's own cache.
#[derive(Debug, Default)]
pub(super) struct CachedBlocks {
    by_block: Vec<Option<EndedPlace>>,
    /// The oldest first.
    logs: BTreeMap<u64, EndedLog>,
    last: u64,
    keys: usize,
    /// Blocks allocated since the engine named blocks last.
    allocated: u32,
}

// === impl CachedBlocks ===

impl CachedBlocks {
    /// Adds an ended request with these blocks of its places.
    fn add_log(&mut self, log: EndedLog, blocks: impl Iterator<Item = (u32, u32)>) -> Vec<EndedLog> {
        self.last += 1;
        self.keys += log.keys;
        self.logs.insert(self.last, log);
        let mut emptied = Vec::new();
        for (place, block) in blocks {
            emptied.extend(self.take(block).and_then(|before| self.lose_block(before)));
            let at = block as usize;
            if at >= self.by_block.len() {
                self.by_block.resize(at + 1, None);
            }
            self.by_block[at] = Some(EndedPlace { ended: self.last, place });
            self.logs.get_mut(&self.last).expect("added above").blocks += 1;
        }
        while self.keys > ENDED_KEYS_MAX || self.logs.len() > ENDED_LOGS_MAX {
            let (_, oldest) = self.logs.pop_first().expect("more than none");
            self.keys -= oldest.keys;
            emptied.push(oldest);
        }
        emptied
    }

    /// Takes a block out of its ended request, if the request is known still.
    fn take(&mut self, block: u32) -> Option<EndedPlace> {
        let place = self.by_block.get_mut(block as usize)?.take()?;
        self.logs.contains_key(&place.ended).then_some(place)
    }

    /// Counts a block less of an ended request; returns its log after the last one.
    fn lose_block(&mut self, EndedPlace { ended, .. }: EndedPlace) -> Option<EndedLog> {
        let log = self.logs.get_mut(&ended)?;
        log.blocks -= 1;
        if log.blocks > 0 {
            return None;
        }
        let log = self.logs.remove(&ended)?;
        self.keys -= log.keys;
        Some(log)
    }

    /// Number of blocks to be named after a step with so many reused ones.
    fn count_named(&mut self, reused: u32) -> u32 {
        let part = (self.by_block.len() as u32 / NAMED_PART).max(NAMED_MIN);
        self.allocated = self.allocated.saturating_add(reused);
        if self.allocated < part / 2 {
            return 0;
        }
        self.allocated = 0;
        part.max(reused * 2)
    }

    /// Takes blocks out of their ended requests. Returns, by ended request, the runs of their places, each with its blocks.
    fn take_runs(&mut self, blocks: impl Iterator<Item = u32>) -> Vec<(EndedPlace, Vec<u32>)> {
        let mut taken: Vec<(EndedPlace, u32)> =
            blocks.filter_map(|block| Some((self.take(block)?, block))).collect();
        taken.sort_unstable_by_key(|(place, _)| (place.ended, place.place));
        let mut runs: Vec<(EndedPlace, Vec<u32>)> = Vec::new();
        for (place, block) in taken {
            match runs.last_mut() {
                Some((first, run))
                    if first.ended == place.ended && first.place + run.len() as u32 == place.place =>
                {
                    run.push(block);
                }
                _ => runs.push((place, vec![block])),
            }
        }
        runs
    }
}

// === impl EnginePolicy: blocks on the device ===

impl<H: SessionHost> EnginePolicy<H> {
    /// True if a request's blocks found in the engine's own cache are offered when they leave it, and not before. Blocks of windows and
    /// states leave that cache in another order.
    pub(super) fn offers_late(&self) -> bool {
        !self.options.keep_copies
            && self.options.saves
            && !self.set.several()
            && self.set.forms[0].kind == GroupKind::Full
            && self.set.forms[0].window == 0
            && self.groups[0].session.knows_devices()
    }

    /// Ends the log of a request with its blocks on the device. Returns false if the log must be closed instead.
    pub(super) fn end_on_device(&mut self, id: RequestId, way: u32) -> bool {
        if !self.offers_late() || !self.is_home(0) || !self.may_keep(id) {
            return false;
        }
        let Some(request) = self.requests.get_mut(id) else { return false };
        let (form, part) = (&self.set.forms[0], &request.parts[0]);
        let session = &mut self.groups[0].session;
        let generation = session.connection_count();
        let is_open = part.log >= 0 && part.generation == Some(generation) && !part.tailed;
        let own = part.filled.min(part.appended as usize).min(part.blocks.len());
        let blocks = part.blocks[..own].iter().copied().enumerate();
        let is_proven = |(place, block): &(usize, u32)| {
            request.log_key(form, *place).is_some_and(|key| self.proof.holds(*block, key))
        };
        let proven = blocks.filter(is_proven);
        let proven: Vec<(u32, u32)> = proven.map(|(place, block)| (place as u32, block)).collect();
        if request.arrival.hands_over || !is_open || proven.is_empty() || !session.end_log(part.log, way) {
            return false;
        }
        let log = EndedLog { log: part.log, generation, keys: part.appended as usize, blocks: 0 };
        let part = &mut request.parts[0];
        part.close_tail(session);
        part.generation = None;
        let emptied = self.device.add_log(log, proven.into_iter());
        self.close_ended(emptied);
        true
    }

    /// Offers blocks to be reused next. Accepted steps have filled them, so the copies wait for no step to end: the engine may reuse the
    /// blocks in its next step.
    pub(super) fn leave_device(&mut self, blocks: &[u32]) -> bool {
        let Some(step) = self.proof.accepted.filter(|_| !self.proof.stalled) else { return false };
        if self.device.logs.is_empty() || blocks.is_empty() || !self.is_home(0) {
            return false;
        }
        let mut right = blocks.to_vec();
        self.proof.retain_accepted(&mut right);
        let mut posted = false;
        for (first, blocks) in self.device.take_runs(right.into_iter()) {
            let (ended, count) = (&self.device.logs[&first.ended], blocks.len());
            let session = &mut self.groups[0].session;
            if ended.generation == session.connection_count() {
                posted |= session.post_save(ended.log, first.place, blocks, step, false);
            }
            self.lose_blocks(first, count);
        }
        posted
    }

    /// Notes the blocks reused by a step: those not offered before have left the device. Returns the number of
    /// blocks, reused next by the engine, to be named in this step; mostly 0.
    pub(super) fn reuse_blocks<'a>(&mut self, reused: impl Iterator<Item = &'a u32> + Clone) -> u32 {
        let generation = self.groups[0].session.connection_count();
        if self.device.logs.values().next().is_some_and(|log| log.generation != generation) {
            self.forget_device();
        }
        if self.device.logs.is_empty() {
            return 0;
        }
        for (first, blocks) in self.device.take_runs(reused.clone().copied()) {
            let ended = &self.device.logs[&first.ended];
            let places: Range<u32> = first.place..first.place + blocks.len() as u32;
            self.groups[0].session.leave_device(ended.log, places);
            self.lose_blocks(first, blocks.len());
        }
        self.device.count_named(reused.count() as u32)
    }

    /// Number of logs open for blocks of ended requests.
    pub fn ended_logs(&self) -> usize {
        let generation = self.groups[0].session.connection_count();
        self.device.logs.values().filter(|log| log.generation == generation).count()
    }

    /// Forgets all blocks on the device: none is offered again.
    pub(super) fn forget_device(&mut self) {
        let device = std::mem::take(&mut self.device);
        self.device.last = device.last;
        self.close_ended(device.logs.into_values().collect());
    }

    fn lose_blocks(&mut self, first: EndedPlace, count: usize) {
        let emptied = (0..count).filter_map(|_| self.device.lose_block(first)).collect();
        self.close_ended(emptied);
    }

    fn close_ended(&mut self, logs: Vec<EndedLog>) {
        let session = &mut self.groups[0].session;
        for EndedLog { log, generation, .. } in logs {
            if generation == session.connection_count() {
                session.close_log(log, 0);
            }
        }
    }
}
