//! Reclamation: the blocks of an old segment are moved or dropped. Also the adoption of blocks left by
//! earlier lives.

use shm_protocol::key::{BlockKey, NamespaceDigest};

use super::streams::WriteStream;
use super::table::EntryState;
use super::{BATCH, Errand, SegmentLog};
use crate::index::KeyPrint;
use crate::list::Spot;
use crate::ssd::{DevicePlace, DeviceWork, FaultKind, Recovered};
use crate::standing::Standing;

/// Most blocks looked at by one call of reclamation: some 20 us.
const RECLAIM_STEPS: u32 = 64;
/// Most blocks of a device moving at a time: their buffers are the device's own.
const MOVES_MAX: u32 = 4;

// === impl SegmentLog: reclamation and recovery ===

impl SegmentLog {
    /// Continues the reclamation of a segment, if one is due: a few blocks at a time.
    pub(super) fn reclaim(&mut self, device: usize) {
        for _ in 0..RECLAIM_STEPS {
            let volume = &mut self.volumes[device];
            let Some(number) = volume.due_for_reclamation() else { return };
            let segment = volume.segment(number);
            let Some(id) = segment.blocks.last().copied() else { break };
            let entry = self.table.get(id);
            let is_here =
                usize::from(entry.device) == device && entry.segment == number && entry.state.is_at_rest();
            if !is_here {
                segment.blocks.pop();
                continue;
            }
            let units = volume.units(entry.bytes);
            let wanted = entry.state == EntryState::Kept && !self.retired.contains(&entry.key.namespace);
            if wanted && volume.moved_units + units <= volume.moved_units_max() {
                let room =
                    volume.moves < MOVES_MAX && volume.has_room(WriteStream::Moved, units, &mut self.wanted);
                let soon = volume.moves > 0 || volume.awaits_next();
                self.issue_wanted(device);
                if room {
                    self.volumes[device].segment(number).blocks.pop();
                    self.begin_move(device, id, units);
                    continue;
                }
                if soon {
                    return;
                }
            }
            self.volumes[device].stats.dropped_blocks_total += 1;
            self.forget_entry(id);
        }
        self.volumes[device].reclaimed();
    }

    fn begin_move(&mut self, device: usize, id: u32, units: u32) {
        let entry = self.table.get_mut(id);
        entry.state = EntryState::Moving;
        let (key, bytes) = (entry.key, entry.bytes);
        let from = DevicePlace { segment: entry.segment, unit: entry.unit };
        let label = self.label(&key, bytes);
        let volume = &mut self.volumes[device];
        volume.moved_units += units;
        volume.moves += 1;
        let to = volume.take_place(WriteStream::Moved, units);
        let to_sequence = volume.segment(to.segment).sequence;
        let source = volume.segment(from.segment);
        source.reads += 1;
        let work = DeviceWork::Move { from, from_sequence: source.sequence, to, to_sequence, label };
        self.issue(device, Errand::Move { key, from, to, bytes }, work);
    }

    /// Takes over blocks left by earlier lives on a device. `number` returns the number, in this life, of a
    /// namespace's blocks of one size in bytes, or `None` to hide them.
    pub fn recovered(
        &mut self,
        found: &Recovered,
        mut number: impl FnMut(NamespaceDigest, u32) -> Option<u32>,
    ) {
        let device = found.device;
        let volume = &mut self.volumes[device];
        volume.stats.segments_read = found.segments_read;
        if found.unreadable {
            volume.stats.faults[FaultKind::Io as usize] += 1;
            volume.unreadable(found.segment);
        }
        let mut named: Option<((NamespaceDigest, u32), Option<u32>)> = None;
        for batch in found.blocks.chunks(BATCH) {
            let mut keys = [None; BATCH];
            for (key, (_, label)) in keys.iter_mut().zip(batch) {
                let kind = (label.namespace, label.bytes);
                if named.is_none_or(|named| named.0 != kind) {
                    let number = number(label.namespace, label.bytes);
                    number.into_iter().for_each(|number| self.learn(number, label.namespace, None));
                    named = Some((kind, number));
                }
                let namespace = named.and_then(|named| named.1);
                *key =
                    namespace.map(|namespace| BlockKey { namespace, group: label.group, hash: label.hash });
            }
            self.warmed(keys.iter().flatten().map(KeyPrint::of_key));
            for (key, (unit, label)) in keys.iter().zip(batch) {
                let place = DevicePlace { segment: found.segment, unit: *unit };
                if let Some(key) = key {
                    self.take_over(device, *key, place, label.bytes, found.sequence);
                }
            }
        }
        if found.last {
            self.volumes[device].recovered();
        }
    }

    /// Keeps the later of two copies of a block: segments come newest first, and the blocks of one in the
    /// order of their writes.
    fn take_over(&mut self, device: usize, key: BlockKey, place: DevicePlace, bytes: u32, sequence: u64) {
        let volume = &mut self.volumes[device];
        let units = volume.units(bytes);
        let inside =
            place.segment < volume.stats.segments && place.unit.saturating_add(units) <= volume.segment_units;
        if !inside {
            return;
        }
        volume.remains(place.segment, sequence, units);
        if let Some(id) = self.find_key(&key) {
            let known = self.table.get_mut(id);
            let is_earlier = usize::from(known.device) == device
                && known.segment == place.segment
                && known.unit < place.unit;
            if is_earlier {
                known.unit = place.unit;
            }
            return;
        }
        let Some(id) = self.table.take_free() else { return };
        self.volumes[device].stats.recovered_blocks_total += 1;
        self.enter_block(id, key, device, place, bytes, EntryState::Kept);
        self.table.get_mut(id).standing = Standing::RECOVERED;
        // The next segments are older.
        self.keep(id, Spot::Tail);
    }
}
