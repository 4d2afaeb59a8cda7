//! Room: what goes so that another block has a place, and what DRAM says of blocks that come and go there.

use shm_protocol::key::{BlockKey, NamespaceDigest};

use super::Log;
use super::table::State;
use crate::dram::{Dram, Judge, QuotaId};
use crate::list::Spot;
use crate::standing::Standing;

/// Blocks that go for one that comes, at most: one, unless sizes differ.
const DROPS_MAX: u32 = 64;
/// The part of a room that has place for copies of all that DRAM has; in a smaller one they may take that part of DRAM's size.
const COPIES_PART: u64 = 8;

// === impl Log: room ===

impl Log {
    /// Makes this a tier below `dram`, before the first block comes. A quota may take the part of this room that it may of DRAM's.
    pub fn put_below(&mut self, dram: &mut Dram) {
        let (room, pool) = (self.room_bytes(), dram.config().pool_bytes);
        dram.add_below(room);
        let units = u128::from(self.units_max());
        let part = |bytes: u64, of: u64| (units * u128::from(bytes) / u128::from(of.max(1))) as u64;
        self.copies_max = (room / COPIES_PART < pool).then(|| part(pool / COPIES_PART, room));
        let quotas: Vec<u64> = dram.quotas().map(|quota| part(quota.bytes_max, pool)).collect();
        quotas.into_iter().for_each(|units_max| self.order.add_group(units_max));
    }

    /// What a namespace's blocks say on a device, and what they count to. What was said first stands.
    pub fn learn(&mut self, namespace: u32, digest: NamespaceDigest, quota: Option<QuotaId>) {
        self.digests.entry(namespace).or_insert(digest);
        self.groups.entry(namespace).or_insert(quota.map_or(0, |quota| quota.index() + 1));
    }

    /// What a namespace's blocks say on a device, if that was said.
    pub fn digest(&self, namespace: u32) -> Option<NamespaceDigest> {
        self.digests.get(&namespace).copied()
    }

    pub(super) fn group(&self, namespace: u32) -> usize {
        self.groups.get(&namespace).copied().unwrap_or(0)
    }

    /// Units that blocks may take: cleaning needs the rest.
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

    /// Makes room for a block, unless there is: what goes next goes. False where nothing may.
    pub fn make_room(&mut self, namespace: u32, bytes: u64, judge: Judge<'_>) -> bool {
        let (more, group, most) = (self.units_of(bytes), self.group(namespace), self.units_max());
        for _ in 0..DROPS_MAX {
            let of = match self.order.is_over(group, more) {
                true => Some(group),
                false if self.order.units().saturating_add(more) > most => None,
                false => return true,
            };
            let Some(id) = self.order.next(&self.table, judge, of, self.copies_max) else { return false };
            self.volumes[usize::from(self.table.get(id).device)].stats.dropped_blocks_total += 1;
            self.forget(id);
        }
        false
    }

    /// Whether there is room for a copy of a block that DRAM keeps for now: nothing that DRAM lacks goes for one, unless the room has
    /// place for copies of all.
    pub fn has_room_for_copy(&self, namespace: u32, bytes: u64) -> bool {
        let more = self.units_of(bytes);
        self.copies_max.is_none()
            || self.order.units().saturating_add(more) <= self.units_max()
                && !self.order.is_over(self.group(namespace), more)
    }

    /// DRAM is about to go with all that it has: copies may take what they need.
    pub fn keep_copies(&mut self) {
        self.copies_max = None;
    }

    /// DRAM gave a block up.
    pub fn left(&mut self, key: &BlockKey, standing: Standing) {
        let id = self.find(key).filter(|id| self.table.get(*id).state != State::Writing);
        id.into_iter().for_each(|id| self.stand(id, standing.left()));
    }

    /// DRAM has a block; whether it is kept here, too, or on its way.
    pub fn came(&mut self, key: &BlockKey) -> bool {
        let Some(id) = self.find(key) else { return false };
        if self.table.get(id).state == State::Writing {
            return true;
        }
        self.stand(id, Standing::ABOVE);
        // On a device that is gone it is of no use.
        self.readable(id)
    }

    fn stand(&mut self, id: u32, standing: Standing) {
        let (group, units) = self.measure(id);
        self.order.leave(&mut self.table, id, group, units);
        self.table.get_mut(id).standing = standing;
        self.order.enter(&mut self.table, id, group, units, Spot::Head);
    }

    /// What was known of a block when DRAM gave it up.
    pub fn standing(&self, key: &BlockKey) -> Option<Standing> {
        let standing = self.table.get(self.find(key)?).standing;
        (standing != Standing::ABOVE).then_some(standing)
    }
}
