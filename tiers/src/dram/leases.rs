//! Leases: an owner may read a run of blocks until every worker has read it, or the lease's time is over.

use shm_protocol::key::BlockHash;
use shm_protocol::pool::SlotRef;

use super::{Dram, HolderId};
use crate::entries::SlotState;
use crate::error::LeaseError;
use crate::lease::{Ended, LeaseEnd, LeaseId};

// === impl Dram: leases ===

impl Dram {
    /// Leases the leading committed run of `hashes` to `owner`, for `workers` workers (1 to [`WORKERS_MAX`]),
    /// as far as `holder` has room. Appends a reference for each block to `out`. Returns `None`, and leases
    /// no block, without a hit or without a table entry.
    #[expect(clippy::too_many_arguments, reason = "a query's fields, and the hot path's reused buffer")]
    pub fn grant(
        &mut self,
        owner: u64,
        holder: HolderId,
        workers: u32,
        namespace: u32,
        hashes: &[BlockHash],
        now_ms: u64,
        out: &mut Vec<SlotRef>,
    ) -> Option<LeaseId> {
        let lease = self.leases.grant(owner, holder, workers, now_ms)?;
        let hits = self.lease_hits(lease, owner, namespace, hashes, out).expect("granted above");
        if hits == 0 {
            self.release(lease, owner).expect("granted above");
            return None;
        }
        Some(lease)
    }

    /// Extends a lease not used by a worker yet by the leading hits of further hashes, and renews it.
    pub fn extend(
        &mut self,
        lease: LeaseId,
        owner: u64,
        namespace: u32,
        hashes: &[BlockHash],
        now_ms: u64,
        out: &mut Vec<SlotRef>,
    ) -> Result<usize, LeaseError> {
        self.renew(lease, owner, now_ms)?;
        if self.leases.begun(lease, owner)? {
            return Err(LeaseError::Consumed);
        }
        self.lease_hits(lease, owner, namespace, hashes, out)
    }

    fn lease_hits(
        &mut self,
        lease: LeaseId,
        owner: u64,
        namespace: u32,
        hashes: &[BlockHash],
        out: &mut Vec<SlotRef>,
    ) -> Result<usize, LeaseError> {
        let (holder, is_promised) = self.leases.whose(lease, owner)?;
        let mut entries = std::mem::take(self.leases.entries_mut(lease, owner)?);
        let (before, room, mut bytes) = (entries.len(), self.room(holder), 0);
        self.leading_hits(namespace, hashes, |dram, id| {
            let with_it = bytes + dram.slab.block_bytes(id);
            dram.stats.leases_cut_total += u64::from(with_it > room);
            let pinned = with_it <= room && dram.pin_id(id);
            if pinned {
                bytes = with_it;
                entries.push(id);
                out.push(dram.slab.slot_ref(id));
            }
            pinned
        });
        let hits = entries.len() - before;
        *self.leases.entries_mut(lease, owner)? = entries;
        self.ledger.lease(holder, is_promised, bytes);
        Ok(hits)
    }

    /// Gives a lease its whole time again. Fails if the lease has expired.
    pub fn renew(&mut self, lease: LeaseId, owner: u64, now_ms: u64) -> Result<(), LeaseError> {
        if self.leases.renew(lease, owner, now_ms)? {
            return Ok(());
        }
        self.expire(now_ms);
        Err(LeaseError::Expired)
    }

    /// Notes a load under the lease: the lease no longer ends by time.
    pub fn promise(&mut self, lease: LeaseId, owner: u64) -> Result<(), LeaseError> {
        let (holder, was_promised) = self.leases.whose(lease, owner)?;
        self.leases.promise(lease, owner)?;
        if !was_promised {
            let bytes = self.bytes_of(self.leases.entries(lease, owner)?);
            self.ledger.unlease(holder, false, bytes);
            self.ledger.lease(holder, true, bytes);
        }
        Ok(())
    }

    /// Turns one hold on each of these slots into a promised lease; the holds end with it. Returns `None`,
    /// and the slots stay held, if one of the blocks was removed, or without a table entry.
    pub fn promise_held(
        &mut self,
        owner: u64,
        holder: HolderId,
        workers: u32,
        slots: &[SlotRef],
        now_ms: u64,
    ) -> Option<LeaseId> {
        let is_whole = |id: &u32| self.slab.entries.get(*id).state() == SlotState::Committed;
        let entries: Option<_> =
            slots.iter().map(|slot| self.slab.find_slot(*slot).filter(is_whole)).collect();
        let entries = entries?;
        let lease = self.leases.grant(owner, holder, workers, now_ms)?;
        *self.leases.entries_mut(lease, owner).expect("granted above") = entries;
        self.promise(lease, owner).expect("granted above");
        Some(lease)
    }

    /// Returns the number of a lease's first blocks in its holder's room: all of them, unless other holders
    /// began to work since the grant.
    pub fn fitting(&self, lease: LeaseId, owner: u64) -> Result<usize, LeaseError> {
        let (holder, _) = self.leases.whose(lease, owner)?;
        let entries = self.leases.entries(lease, owner)?;
        let mut room = self.room_without(holder, self.bytes_of(entries));
        let fits = |id: &&u32| {
            let left = room.checked_sub(self.slab.block_bytes(**id));
            room = left.unwrap_or(0);
            left.is_some()
        };
        Ok(entries.iter().take_while(fits).count())
    }

    pub(super) fn bytes_of(&self, entries: &[u32]) -> u64 {
        entries.iter().map(|id| self.slab.block_bytes(*id)).sum()
    }

    /// Keeps blocks `first..first + count` leased, as far as there are such, and ends the lease of the
    /// others.
    pub fn truncate(
        &mut self,
        lease: LeaseId,
        owner: u64,
        first: usize,
        count: usize,
    ) -> Result<(), LeaseError> {
        let (holder, is_promised) = self.leases.whose(lease, owner)?;
        let entries = self.leases.entries_mut(lease, owner)?;
        let first = first.min(entries.len());
        let mut dropped = entries.split_off(first.saturating_add(count).min(entries.len()));
        dropped.extend(entries.drain(..first));
        self.unpin_all(&mut Ended { entries: dropped, holder, is_promised });
        Ok(())
    }

    /// Returns references of a lease's blocks, in the order of the query.
    pub fn slots(
        &self,
        lease: LeaseId,
        owner: u64,
    ) -> Result<impl Iterator<Item = SlotRef> + '_, LeaseError> {
        Ok(self.leases.entries(lease, owner)?.iter().map(|id| self.slab.slot_ref(*id)))
    }

    /// Ends `worker`'s load; each worker may do so once. Returns true for the last one: then the lease has
    /// ended.
    pub fn consume(&mut self, lease: LeaseId, owner: u64, worker: u32) -> Result<bool, LeaseError> {
        let ended = self.leases.consume(lease, owner, worker)?;
        Ok(ended.map(|ended| self.end_lease(ended)).is_some())
    }

    pub fn release(&mut self, lease: LeaseId, owner: u64) -> Result<(), LeaseError> {
        let ended = self.leases.release(lease, owner)?;
        self.end_lease(ended);
        Ok(())
    }

    /// Ends all leases whose time is up, and returns their number. If none is due, it looks at one lease.
    /// Ends the hold of adopted blocks, and hints at the end of their time, too.
    pub fn expire(&mut self, now_ms: u64) -> usize {
        self.end_hold(now_ms);
        self.expire_hints(now_ms);
        let mut expired = 0;
        while let Some(ended) = self.leases.expire_one(now_ms) {
            self.end_lease(ended);
            expired += 1;
        }
        expired
    }

    /// Returns the ends of blocks' leases since the last call, each with the time of its grant.
    pub fn drain_ended_leases(&mut self) -> impl Iterator<Item = (LeaseEnd, u64)> + '_ {
        self.leases.drain_ends()
    }

    /// Pins a block. Returns false if the count of its leases and holds is at its limit.
    pub(super) fn pin_id(&mut self, id: u32) -> bool {
        let entry = self.slab.entries.get_mut(id);
        let Some(pins) = entry.claims.pin() else { return false };
        if pins == 1 {
            self.slab.segments[self.slab.entries.segment(id)].held += 1;
            self.stats.bytes_leased += self.slab.block_bytes(id);
        }
        true
    }

    /// Unpins a block. Returns true if that was its last lease or hold.
    pub(super) fn unpin_id(&mut self, id: u32) -> bool {
        let last = self.slab.entries.get_mut(id).claims.unpin() == 0;
        if last {
            self.slab.segments[self.slab.entries.segment(id)].held -= 1;
            self.stats.bytes_leased -= self.slab.block_bytes(id);
        }
        last
    }

    fn unpin_all(&mut self, ended: &mut Ended) {
        let bytes = self.bytes_of(&ended.entries);
        self.ledger.unlease(ended.holder, ended.is_promised, bytes);
        // Each is an access, the deepest first.
        ended.entries.reverse();
        ended.entries.retain(|id| self.unpin_id(*id) && !self.free_removed(*id));
        self.policy.touch(&mut self.slab, &ended.entries);
    }

    fn end_lease(&mut self, mut ended: Ended) {
        self.unpin_all(&mut ended);
        self.leases.recycle(ended.entries);
    }
}
