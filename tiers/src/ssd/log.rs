//! The SSD tier's decisions: the place of each block, reclamation, refusals. Pure: no I/O, no clock.
//!
//! Blocks are appended to the open segment of their stream. When few segments are free, the one with the fewest
//! blocks in the room is reclaimed: these are written again, and the evicted ones are lost. If too few blocks of every
//! segment are evicted, a move would gain no place, and the oldest segment is dropped with its blocks. No write waits
//! for reclamation: without a place it is refused.

mod breaker;
mod distrusts;
mod ends;
mod order;
mod pace;
mod reclaim;
mod room;
mod streams;
mod table;
mod volume;
mod watch;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hint::black_box;

use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use thiserror::Error;

use self::order::LogOrder;
pub use self::pace::ReadPace;
use self::streams::WriteStream;
use self::table::{EntryState, EntryTable};
use self::volume::Volume;
use super::{DeviceGeometry, DeviceJob, DevicePlace, DeviceWork, FaultKind, Label, Ticket, format};
use crate::dram::Leaving;
use crate::index::{Index, KeyPrint};
use crate::list::Spot;
use crate::standing::Standing;
use crate::watch::ChangeWatch;

/// Keys looked up side by side, so their cache misses overlap.
const BATCH: usize = 32;
/// Sizes and limits of the tier.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// The devices, in the order of their numbers.
    pub devices: Vec<DeviceGeometry>,
    /// Most bytes on their way to one device; beyond, writes are refused.
    pub write_bytes_max: u64,
    /// Milliseconds after which a job is late. A device without an ended job for that long is taken for
    /// broken.
    pub late_ms: u64,
}

/// A block is not written, or not read. There are no other effects.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum LogRefusal {
    /// The block is kept already, or being written.
    #[error("the block is kept already")]
    Present,
    /// A device has enough writes on their way, or no segment is free yet.
    #[error("the devices are busy")]
    Busy,
    /// Every device's breaker is open.
    #[error("no device works")]
    Down,
    /// No segment can hold the block.
    #[error("the block is larger than a segment")]
    TooLarge,
}

/// The tier's fill level and counters, of all devices together and of each.
#[derive(Clone, Debug, Default)]
pub struct LogStats {
    /// Blocks that can be found.
    pub blocks: u64,
    pub devices: Vec<DeviceStats>,
}

/// The fill level and counters of one device.
#[derive(Clone, Debug, Default)]
pub struct DeviceStats {
    /// Blocks that can be found while the device works.
    pub blocks: u64,
    pub bytes: u64,
    pub segments: u32,
    /// Empty segments.
    pub segments_free: u32,
    /// Segments read for blocks of earlier lives; all of them once `recovering` is false.
    pub segments_read: u32,
    /// True while blocks of earlier lives are being read.
    pub recovering: bool,
    /// True while the breaker is open: the device answers "miss" and takes no writes.
    pub down: bool,
    /// Times the breaker opened.
    pub trips_total: u64,
    /// Blocks of earlier lives.
    pub recovered_blocks_total: u64,
    /// Blocks written, without moves.
    pub written_blocks_total: u64,
    pub written_bytes_total: u64,
    /// Blocks read and verified.
    pub read_blocks_total: u64,
    pub read_bytes_total: u64,
    /// Reads refused because too many were waiting for the device to read them in time.
    pub refused_reads_total: u64,
    /// Blocks rewritten by reclamation.
    pub moved_blocks_total: u64,
    pub moved_bytes_total: u64,
    /// Blocks dropped by reclamation.
    pub dropped_blocks_total: u64,
    pub jobs: u64,
    /// Bytes a second of a busy device, by the best of the last times; 0: not known.
    pub read_bytes_per_second: u64,
    /// Faults by kind, in the order of [`FaultKind::ALL`].
    pub faults: [u64; FaultKind::ALL.len()],
}

/// The purpose of a job.
#[derive(Copy, Clone, Debug)]
enum Errand {
    Write { key: BlockKey, slot: SlotRef, place: DevicePlace, bytes: u32 },
    Read { key: BlockKey, slot: SlotRef, place: DevicePlace, bytes: u32 },
    Move { key: BlockKey, from: DevicePlace, to: DevicePlace, bytes: u32 },
    Begin { segment: u32 },
    Seal { segment: u32 },
    Check,
    GiveUp,
    Distrust,
}

/// A job that has not ended.
#[derive(Copy, Clone, Debug)]
struct JobFlight {
    device: usize,
    since_ms: u64,
    late: bool,
    errand: Errand,
}

/// The SSD tier's index and its jobs on their way.
#[derive(Debug)]
pub struct SegmentLog {
    write_bytes_max: u64,
    late_ms: u64,
    volumes: Vec<Volume>,
    index: Index,
    table: EntryTable,
    order: LogOrder,
    /// The digest of each namespace, for labels on a device.
    digests: HashMap<u32, NamespaceDigest>,
    /// The group of each namespace in the order of eviction, if not the first.
    groups: HashMap<u32, usize>,
    /// Namespaces that were started again: no engine asks for their old blocks any more.
    retired: HashSet<u32>,
    /// Most units of copies of DRAM's blocks while others need room; `None` if copies of all have room.
    copies_max: Option<u64>,
    flights: BTreeMap<Ticket, JobFlight>,
    next_ticket: u64,
    now_ms: u64,
    /// The time of the last [`SegmentLog::tick`].
    ticked_ms: u64,
    jobs: Vec<DeviceJob>,
    /// Works wanted by a volume, on their way to become jobs.
    wanted: Vec<DeviceWork>,
    watch: ChangeWatch,
}

// === impl SegmentLog: looking up ===

impl SegmentLog {
    /// Makes an empty tier. A device takes writes once its blocks were recovered.
    pub fn new(config: LogConfig) -> Self {
        Self {
            write_bytes_max: config.write_bytes_max,
            late_ms: config.late_ms,
            volumes: config.devices.iter().map(Volume::new).collect(),
            index: Index::new(),
            table: EntryTable::default(),
            order: LogOrder::new(),
            digests: HashMap::new(),
            groups: HashMap::new(),
            retired: HashSet::new(),
            copies_max: None,
            flights: BTreeMap::new(),
            next_ticket: 0,
            now_ms: 0,
            ticked_ms: 0,
            jobs: Vec::new(),
            wanted: Vec::new(),
            watch: ChangeWatch::default(),
        }
    }

    /// Returns the number of blocks of the leading run of `hashes` that can be read now.
    pub fn probe(&self, namespace: u32, group: u32, hashes: &[BlockHash]) -> usize {
        let mut hits = 0;
        for batch in hashes.chunks(BATCH) {
            let prints = self.warmed(batch.iter().map(|hash| KeyPrint::new(namespace, group, hash)));
            for (hash, print) in batch.iter().zip(prints) {
                let key = BlockKey { namespace, group, hash: *hash };
                if !self.find_print(&key, print).is_some_and(|id| self.readable(id)) {
                    return hits;
                }
                hits += 1;
            }
        }
        hits
    }

    /// Returns prints of up to [`BATCH`] keys. The loads outside of the cache, bucket and entry, first run
    /// for all keys, in loops of their own: then the core has many of them in flight, and the comparing code
    /// finds all words near.
    fn warmed(&self, keys: impl Iterator<Item = KeyPrint>) -> [KeyPrint; BATCH] {
        let mut prints = [KeyPrint::default(); BATCH];
        prints.iter_mut().zip(keys).for_each(|(print, key)| *print = key);
        black_box(prints.iter().fold(0, |sum, print| sum ^ self.index.home(*print).load_word()));
        black_box(
            prints
                .iter()
                .fold(0, |sum, print| sum ^ self.table.touch(self.index.home(*print).glance(*print).entry)),
        );
        prints
    }

    /// Returns the bytes of the block, if it can be read now.
    pub fn keeps(&self, key: &BlockKey) -> Option<u32> {
        let id = self.find_key(key).filter(|id| self.readable(*id))?;
        Some(self.table.get(id).bytes)
    }

    /// Returns the device of a known block.
    pub fn device(&self, key: &BlockKey) -> Option<usize> {
        self.find_key(key).map(|id| self.table.get(id).device.into())
    }

    fn find_key(&self, key: &BlockKey) -> Option<u32> {
        self.find_print(key, KeyPrint::of_key(key))
    }

    #[inline]
    fn find_print(&self, key: &BlockKey, print: KeyPrint) -> Option<u32> {
        self.index.find_entry(print, |id| self.table.get(id).key == *key)
    }

    fn readable(&self, id: u32) -> bool {
        let entry = self.table.get(id);
        entry.state.is_found() && !self.volumes[usize::from(entry.device)].breaker.is_open()
    }

    /// Returns the entry of a block as long as it lies at a job's place.
    fn still_at(&self, key: &BlockKey, device: usize, place: DevicePlace) -> Option<u32> {
        self.find_key(key).filter(|id| {
            let entry = self.table.get(*id);
            usize::from(entry.device) == device && (entry.segment, entry.unit) == (place.segment, place.unit)
        })
    }
}

// === impl SegmentLog: writing and reading ===

impl SegmentLog {
    /// Takes a place for a committed block in `slot`, and begins its write. The caller keeps the slot as it
    /// is until [`super::EndedJob::Written`]. Never waits. Fails as [`LogRefusal`] says: an evicted block that can
    /// still be read gets room again, without a write.
    pub fn write_block(
        &mut self,
        block: &Leaving,
        namespace: NamespaceDigest,
        slot: SlotRef,
    ) -> Result<Ticket, LogRefusal> {
        let key = block.key;
        if let Some(id) = self.find_key(&key) {
            let state = self.table.get(id).state;
            // A block on a failed device is of no use; another device may take it.
            if !state.is_at_rest() || self.readable(id) {
                if state == EntryState::Evicted {
                    self.restore(id);
                }
                return Err(LogRefusal::Present);
            }
        }
        let bytes = u32::try_from(block.bytes).map_err(|_| LogRefusal::TooLarge)?;
        let stream = WriteStream::of(block.standing);
        let device = self.choose(bytes, stream)?;
        if let Some(id) = self.find_key(&key) {
            self.forget_entry(id);
        }
        let id = self.table.take_free().ok_or(LogRefusal::Busy)?;
        let volume = &mut self.volumes[device];
        let place = volume.take_place(stream, volume.units(bytes));
        let sequence = volume.segment(place.segment).sequence;
        volume.write_bytes += u64::from(bytes);
        self.enter_block(id, key, device, place, bytes, EntryState::Writing);
        self.learn(key.namespace, namespace, None);
        let label = Label { namespace, group: key.group, hash: key.hash, bytes };
        let work = DeviceWork::Write { place, sequence, label, from: slot.offset };
        Ok(self.issue(device, Errand::Write { key, slot, place, bytes }, work))
    }

    /// Chooses the device for a block: of those with room, the one with the least to do.
    fn choose(&mut self, bytes: u32, stream: WriteStream) -> Result<usize, LogRefusal> {
        if !self.volumes.iter().any(|volume| volume.could_hold(volume.units(bytes))) {
            return Err(LogRefusal::TooLarge);
        }
        if self.volumes.iter().all(|volume| volume.breaker.is_open()) {
            return Err(LogRefusal::Down);
        }
        let mut chosen: Option<usize> = None;
        for device in 0..self.volumes.len() {
            self.reclaim(device);
            let volume = &mut self.volumes[device];
            let full = volume.write_bytes > 0 && volume.write_bytes + u64::from(bytes) > self.write_bytes_max;
            let units = volume.units(bytes);
            if full || !volume.takes() || !volume.could_hold(units) || volume.spares_next(stream, units) {
                continue;
            }
            let room = volume.has_room(stream, units, &mut self.wanted);
            self.issue_wanted(device);
            let load = |device: usize| self.volumes[device].pending_load();
            if room && chosen.is_none_or(|chosen| load(chosen) > load(device)) {
                chosen = Some(device);
            }
        }
        chosen.ok_or(LogRefusal::Busy)
    }

    /// Begins to read a kept block into a slot being filled by the caller. The job owns the slot until
    /// [`super::EndedJob::Read`]. The read may use 1 of `parts` of the bytes that may wait for a device. Returns `None`
    /// if the block is not kept (any more), or its device is down or cannot read it in time.
    pub fn read_block(&mut self, now_ms: u64, key: &BlockKey, slot: SlotRef, parts: u64) -> Option<Ticket> {
        self.now_ms = self.now_ms.max(now_ms);
        let id = self.find_key(key).filter(|id| self.readable(*id))?;
        let entry = self.table.get(id);
        let (device, bytes) = (usize::from(entry.device), entry.bytes);
        let place = DevicePlace { segment: entry.segment, unit: entry.unit };
        let label = self.label(key, bytes);
        let volume = &mut self.volumes[device];
        if !volume.pace.takes(bytes.into(), parts) {
            volume.stats.refused_reads_total += 1;
            return None;
        }
        volume.pace.began(bytes.into(), self.now_ms);
        let segment = volume.segment(place.segment);
        segment.reads += 1;
        let work = DeviceWork::Read { place, sequence: segment.sequence, label, into: slot.offset };
        Some(self.issue(device, Errand::Read { key: *key, slot, place, bytes }, work))
    }

    fn label(&self, key: &BlockKey, bytes: u32) -> Label {
        let namespace = self.digests[&key.namespace];
        Label { namespace, group: key.group, hash: key.hash, bytes }
    }

    /// Forgets a block in this life. Returns false if it was not known. A begun read goes on. The bytes on
    /// the device stay until their segment is reclaimed, and a later life finds the block there.
    pub fn remove(&mut self, key: &BlockKey) -> bool {
        let id = self.find_key(key);
        id.iter().for_each(|id| self.forget_entry(*id));
        id.is_some()
    }

    /// Distrusts a namespace about whose KV engines disagreed: later lives find none of its blocks on
    /// devices, also none written later in this life by moves and from memory. With `begins_anew`, no engine
    /// asks for the known blocks of this life, and they stay where they lie; later writes are of engines that
    /// start again, too, and later lives find those.
    pub fn distrust(&mut self, namespace: u32, digest: NamespaceDigest, begins_anew: bool) {
        if begins_anew {
            self.retired.insert(namespace);
        }
        for device in 0..self.volumes.len() {
            let next = self.volumes[device].next_sequence;
            let before = if begins_anew { next } else { format::life_end(next) };
            self.volumes[device].distrusts.add_namespace(digest, before);
            self.tell_distrusted(device);
        }
    }

    /// Issues the next job of distrusted blocks for a device, if one waits and none is under way.
    fn tell_distrusted(&mut self, device: usize) {
        if let Some(work) = self.volumes[device].distrusts.next(self.now_ms) {
            self.issue(device, Errand::Distrust, work);
        }
    }

    /// Passes the next blocks of a walk to `see`: those on a device or being written. The walk begins at 0.
    /// Returns the next place, `None` at the end. Blocks that come or go between two steps may be seen or
    /// not.
    pub fn walk(&self, from: usize, see: impl FnMut(&BlockKey)) -> Option<usize> {
        self.table.keys_of(from)?.for_each(see);
        Some(from + 1)
    }

    /// Returns the next jobs of the devices, in the order in which the devices must get them.
    pub fn drain_jobs(&mut self) -> impl Iterator<Item = DeviceJob> + '_ {
        self.jobs.drain(..)
    }

    fn issue(&mut self, device: usize, errand: Errand, work: DeviceWork) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let volume = &mut self.volumes[device];
        if volume.flights == 0 {
            volume.moved_ms = self.now_ms;
        }
        volume.flights += 1;
        self.flights.insert(ticket, JobFlight { device, since_ms: self.now_ms, late: false, errand });
        self.jobs.push(DeviceJob { device, ticket, work });
        ticket
    }

    fn issue_wanted(&mut self, device: usize) {
        while let Some(work) = self.wanted.pop() {
            let errand = match work {
                DeviceWork::Begin { segment, .. } => Errand::Begin { segment },
                DeviceWork::Seal { segment, .. } => Errand::Seal { segment },
                _ => unreachable!("a volume wants nothing else"),
            };
            self.issue(device, errand, work);
        }
    }

    /// Puts a vacant entry into the index, as a copy of a block in DRAM.
    fn enter_block(
        &mut self,
        id: u32,
        key: BlockKey,
        device: usize,
        place: DevicePlace,
        bytes: u32,
        state: EntryState,
    ) {
        let entry = self.table.get_mut(id);
        (entry.key, entry.bytes, entry.state, entry.standing) = (key, bytes, state, Standing::ABOVE);
        (entry.device, entry.segment, entry.unit) = (device as u8, place.segment, place.unit);
        self.index.insert(KeyPrint::of_key(&key), id);
        let volume = &mut self.volumes[device];
        let units = volume.units(bytes);
        volume.place_block(place.segment, id, units);
    }

    /// Adds an entry of no list to its list: it is kept from now on.
    fn keep(&mut self, id: u32, spot: Spot) {
        let (group, units) = self.measure(id);
        let entry = self.table.get_mut(id);
        entry.state = EntryState::Kept;
        self.watch.note_change(entry.key, true);
        let volume = &mut self.volumes[usize::from(entry.device)];
        volume.stats.blocks += 1;
        volume.stats.bytes += u64::from(entry.bytes);
        self.order.enter_list(&mut self.table, id, group, units, spot);
    }

    /// Returns the group of an entry's block, and its units.
    fn measure(&self, id: u32) -> (usize, u32) {
        let entry = self.table.get(id);
        let units = self.volumes[usize::from(entry.device)].share(entry.bytes);
        (self.group(entry.key.namespace), units)
    }

    /// Takes an entry out of the index; it is vacant then.
    fn forget_entry(&mut self, id: u32) {
        let (group, units) = self.measure(id);
        let entry = self.table.get(id);
        let (key, segment, bytes, state) = (entry.key, entry.segment, entry.bytes, entry.state);
        let volume = &mut self.volumes[usize::from(entry.device)];
        if state != EntryState::Evicted {
            volume.unsettle(segment, volume.units(bytes));
        }
        if state.is_found() {
            self.watch.note_change(key, false);
            volume.stats.blocks -= 1;
            volume.stats.bytes -= u64::from(bytes);
        }
        if state.is_listed() {
            self.order.leave_list(&mut self.table, id, group, units);
        }
        let print = KeyPrint::of_key(&key);
        assert!(self.index.remove(print, id), "an entry in use is in the index");
        self.table.put_back(id);
    }
}

// === impl SegmentLog: state ===

impl SegmentLog {
    /// True if a job is in flight, blocks are still to be moved or dropped, or a device must write distrusted
    /// blocks again: [`SegmentLog::tick`] should be called soon.
    pub fn busy(&self) -> bool {
        let is_due = |volume: &Volume| volume.reclaiming.is_some() && volume.takes();
        !self.flights.is_empty() || self.tells_distrusted() || self.volumes.iter().any(is_due)
    }

    /// True if a working device has not written yet which blocks are distrusted.
    pub fn tells_distrusted(&self) -> bool {
        self.volumes.iter().any(|volume| volume.distrusts.any() && !volume.breaker.is_open())
    }

    /// Returns the fill level and the counters.
    pub fn log_stats(&self) -> LogStats {
        let device = |volume: &Volume| DeviceStats {
            segments_free: volume.free_segments(),
            recovering: volume.recovering,
            down: volume.breaker.is_open(),
            trips_total: volume.breaker.trips_total,
            jobs: volume.flights,
            read_bytes_per_second: volume.pace.rate().map_or(0, |rate| (rate * 1e3) as u64),
            ..volume.stats.clone()
        };
        let devices: Vec<DeviceStats> = self.volumes.iter().map(device).collect();
        LogStats { blocks: devices.iter().map(|device| device.blocks).sum(), devices }
    }
}

#[cfg(test)]
mod tests;
