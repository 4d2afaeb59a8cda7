//! Room for new blocks on the disks, and the disks' knowledge of DRAM's blocks.

use shm_protocol::key::{BlockKey, NamespaceDigest};

use super::SegmentLog;
use super::table::EntryState;
use crate::dram::{Dram, Judge, Leaving, QuotaId};
use crate::list::Spot;
use crate::standing::Standing;

/// Most blocks dropped for one new block: one is enough, unless sizes differ.
const DROPS_MAX: u32 = 64;
/// Copies of all blocks in DRAM have place if the room has at least so many times DRAM's size.
const COPIES_ROOMS: u64 = 8;
/// In a smaller room copies may take 1 of so many parts of DRAM's size: twice those written ahead.
const COPIES_PART: u64 = 16;

// === impl SegmentLog: room ===

impl SegmentLog {
    /// Makes this a tier below `dram`, before the first block comes. A quota's limit here is the same part of
    /// the room as of DRAM.
    pub fn put_below(&mut self, dram: &mut Dram) {
        let (room, pool) = (self.room_bytes(), dram.config().pool_bytes);
        dram.add_below(room);
        let units = u128::from(self.units_max());
        let part = |bytes: u64, of: u64| (units * u128::from(bytes) / u128::from(of.max(1))) as u64;
        self.copies_max = (room / COPIES_ROOMS < pool).then(|| part(pool / COPIES_PART, room));
        let quotas: Vec<u64> = dram.quotas().map(|quota| part(quota.bytes_max, pool)).collect();
        quotas.into_iter().for_each(|units_max| self.order.add_group(units_max));
    }

    /// Stores the digest and the quota of a namespace's blocks. The first statement stands.
    pub fn learn(&mut self, namespace: u32, digest: NamespaceDigest, quota: Option<QuotaId>) {
        self.digests.entry(namespace).or_insert(digest);
        self.groups.entry(namespace).or_insert(quota.map_or(0, |quota| quota.index() + 1));
    }

    /// Returns the digest of a namespace, if stated.
    pub fn namespace_digest(&self, namespace: u32) -> Option<NamespaceDigest> {
        self.digests.get(&namespace).copied()
    }

    pub(super) fn group(&self, namespace: u32) -> usize {
        self.groups.get(&namespace).copied().unwrap_or(0)
    }

    /// Returns the most units of blocks: moves need the rest.
    fn units_max(&self) -> u64 {
        self.volumes.iter().map(|volume| volume.units_max()).sum()
    }

    fn room_bytes(&self) -> u64 {
        self.volumes.iter().map(|volume| volume.units_max() * volume.unit_bytes).sum()
    }

    fn units_of(&self, bytes: u64) -> u64 {
        let units = |bytes| self.volumes.first().map_or(0, |volume| volume.share(bytes));
        u32::try_from(bytes).map_or(u64::MAX, |bytes| units(bytes).into())
    }

    /// Makes room for a block by evicting the next blocks to go, if there is none. Returns false if no block
    /// may go, or the next one is worth more than this one.
    pub fn make_room(&mut self, block: &Leaving, judge: Judge<'_>) -> bool {
        let (more, group) = (self.units_of(block.bytes), self.group(block.key.namespace));
        let most = self.units_max();
        for _ in 0..DROPS_MAX {
            let of = match self.order.is_over(group, more) {
                true => Some(group),
                false if self.order.units().saturating_add(more) > most => None,
                false => return true,
            };
            let Some(id) = self.order.next(&self.table, judge, of, self.copies_max) else { return false };
            let next = self.table.get(id).standing;
            let is_copy = block.standing == Standing::ABOVE || next == Standing::ABOVE;
            if !is_copy && judge.is_worth_less(block.standing.leave_dram(), next) {
                return false;
            }
            self.evict(id);
        }
        false
    }

    /// Gives a block's room up. It can be found until its segment is reclaimed.
    fn evict(&mut self, id: u32) {
        let volume = &mut self.volumes[usize::from(self.table.get(id).device)];
        // Reclamation has passed a moving block, and would not forget it.
        if self.table.get(id).state == EntryState::Moving {
            volume.stats.dropped_blocks_total += 1;
            return self.forget_entry(id);
        }
        let entry = self.table.get(id);
        volume.unsettle(entry.segment, volume.units(entry.bytes));
        let (group, units) = self.measure(id);
        self.order.leave_list(&mut self.table, id, group, units);
        self.table.get_mut(id).state = EntryState::Evicted;
    }

    /// Gives an evicted block room again, as a copy of a block in DRAM.
    pub(super) fn restore(&mut self, id: u32) {
        let entry = self.table.get_mut(id);
        (entry.state, entry.standing) = (EntryState::Kept, Standing::ABOVE);
        let volume = &mut self.volumes[usize::from(entry.device)];
        volume.settle(entry.segment, volume.units(entry.bytes));
        let (group, units) = self.measure(id);
        self.order.enter_list(&mut self.table, id, group, units, Spot::Head);
    }

    /// True if there is room for a copy of a block in DRAM. Only a room with place for copies of all blocks
    /// drops other blocks for a copy.
    pub fn has_room_for_copy(&self, namespace: u32, bytes: u64) -> bool {
        let more = self.units_of(bytes);
        self.copies_max.is_none()
            || self.order.units().saturating_add(more) <= self.units_max()
                && !self.order.is_over(self.group(namespace), more)
    }

    /// Ends the limit of copies: DRAM's content is about to go.
    pub fn keep_copies(&mut self) {
        self.copies_max = None;
    }

    /// Notes that DRAM has evicted a block.
    pub fn leave_dram(&mut self, key: &BlockKey, standing: Standing) {
        let Some(id) = self.find_key(key) else { return };
        match self.table.get(id).state {
            EntryState::Kept | EntryState::Moving => self.stand(id, standing.leave_dram()),
            EntryState::Evicted => self.table.get_mut(id).standing = standing.leave_dram(),
            EntryState::Writing | EntryState::Vacant => {}
        }
    }

    /// Notes that DRAM has a block. Returns true if it has room here, too, or is on its way.
    pub fn came(&mut self, key: &BlockKey) -> bool {
        let Some(id) = self.find_key(key) else { return false };
        match self.table.get(id).state {
            EntryState::Writing => return true,
            EntryState::Evicted => return false,
            _ => self.stand(id, Standing::ABOVE),
        }
        // A block on a failed device is of no use.
        self.readable(id)
    }

    fn stand(&mut self, id: u32, standing: Standing) {
        let (group, units) = self.measure(id);
        self.order.leave_list(&mut self.table, id, group, units);
        self.table.get_mut(id).standing = standing;
        self.order.enter_list(&mut self.table, id, group, units, Spot::Head);
    }

    /// Returns the standing of a block at its eviction from DRAM.
    pub fn standing(&self, key: &BlockKey) -> Option<Standing> {
        let standing = self.table.get(self.find_key(key)?).standing;
        (standing != Standing::ABOVE).then_some(standing)
    }
}
