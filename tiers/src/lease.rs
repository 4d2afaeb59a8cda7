//! Leases: the readers of blocks and their deadlines. Pure; the caller acts on a lease's end.

use std::collections::VecDeque;

use crate::LeaseError;
use crate::ledger::HolderId;
use crate::list::{Link, Links, List};

/// Most leases at once: one for each of 65,536 logs of 16 engines. Beyond that a grant is refused: a miss.
pub(crate) const LEASES_MAX: usize = 1 << 20;
/// Workers of one lease: one bit each in a word.
pub const WORKERS_MAX: u32 = 64;
/// Ended leases kept as expired or consumed before their table entries serve again: the requests of some
/// scheduler steps.
const ENDED_KEPT: usize = 1024;
/// Entry numbers a table entry keeps allocated for its next lease: a prompt of 16,384 tokens at 16 a block.
const KEPT_CAPACITY_MAX: usize = 1024;

/// A lease's name: `generation << 32 | table index`. Generations start at 1, so zero names no lease.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd)]
pub struct LeaseId(pub u64);

#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
enum Phase {
    /// Ends at its deadline.
    Timed,
    /// A load was posted: the lease ends with its workers or its owner.
    Promised,
    Expired,
    Consumed,
    #[default]
    Released,
}

/// How a lease ended.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum LeaseEnd {
    /// Every worker ended its load.
    Consumed,
    Released,
    Expired,
}

#[derive(Debug, Default)]
struct Lease {
    generation: u32,
    phase: Phase,
    owner: u64,
    granted_ms: u64,
    /// The holder charged for the leased bytes.
    holder: HolderId,
    /// One bit for each worker whose load has not ended.
    awaited: u64,
    workers: u32,
    deadline_ms: u64,
    link: Link,
    entries: Vec<u32>,
}

/// The blocks of a lease.
#[derive(Debug)]
pub(crate) struct Held<E> {
    pub(crate) entries: E,
    pub(crate) holder: HolderId,
    pub(crate) is_promised: bool,
}

/// The blocks of an ended lease.
pub(crate) type Ended = Held<Vec<u32>>;

#[derive(Debug, Default)]
struct Table(Vec<Lease>);

#[derive(Debug)]
pub(crate) struct Leases {
    table: Table,
    /// Ended entries, the longest ended first: an old name is recognised as long as possible.
    ended: VecDeque<u32>,
    /// Timed leases; the tail is due first, since all have the same time from their last renewal.
    timed: List,
    ttl_ms: u64,
    last_deadline_ms: u64,
    /// The ends of leases with blocks, and the times of their grants, until the caller takes them.
    ends: Vec<(LeaseEnd, u64)>,
}

// === impl LeaseId ===

impl LeaseId {
    fn new(generation: u32, index: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(index))
    }

    fn index(self) -> u32 {
        self.0 as u32
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

// === impl Phase ===

impl From<LeaseEnd> for Phase {
    fn from(how: LeaseEnd) -> Self {
        match how {
            LeaseEnd::Consumed => Self::Consumed,
            LeaseEnd::Released => Self::Released,
            LeaseEnd::Expired => Self::Expired,
        }
    }
}

// === impl Lease ===

impl Lease {
    fn live(&self) -> bool {
        matches!(self.phase, Phase::Timed | Phase::Promised)
    }

    fn begin(&mut self, owner: u64, holder: HolderId, workers: u32) {
        assert!(
            (1..=WORKERS_MAX).contains(&workers),
            "a lease serves 1 to {WORKERS_MAX} workers, not {workers}"
        );
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        self.phase = Phase::Timed;
        (self.owner, self.holder) = (owner, holder);
        self.workers = workers;
        self.awaited = u64::MAX >> (WORKERS_MAX - workers);
    }
}

// === impl Table ===

impl Links for Table {
    fn link(&mut self, id: u32) -> &mut Link {
        &mut self.0[id as usize].link
    }
}

// === impl Leases ===

impl Leases {
    pub(crate) fn new(ttl_ms: u64) -> Self {
        let (table, ended, timed) = (Table::default(), VecDeque::new(), List::default());
        Self { table, ended, timed, ttl_ms, last_deadline_ms: 0, ends: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.0.len() - self.ended.len()
    }

    /// Makes a new lease over no entry yet, or `None` if there are too many.
    pub(crate) fn grant(
        &mut self,
        owner: u64,
        holder: HolderId,
        workers: u32,
        now_ms: u64,
    ) -> Option<LeaseId> {
        let index = self.vacancy()?;
        let lease = &mut self.table.0[index as usize];
        lease.begin(owner, holder, workers);
        lease.granted_ms = now_ms;
        let id = LeaseId::new(lease.generation, index);
        self.start_clock(index, now_ms);
        Some(id)
    }

    fn vacancy(&mut self) -> Option<u32> {
        if self.ended.len() > ENDED_KEPT || self.table.0.len() == LEASES_MAX {
            return self.ended.pop_front();
        }
        self.table.0.push(Lease::default());
        Some(self.table.0.len() as u32 - 1)
    }

    fn start_clock(&mut self, index: u32, now_ms: u64) {
        // Deadlines never decrease along the list, even if the caller's clock does.
        self.last_deadline_ms = self.last_deadline_ms.max(now_ms.saturating_add(self.ttl_ms));
        self.table.0[index as usize].deadline_ms = self.last_deadline_ms;
        self.timed.push_head(&mut self.table, index);
    }

    /// Returns the table index of a live lease of `owner`; fails for any other lease.
    fn check(&self, id: LeaseId, owner: u64) -> Result<u32, LeaseError> {
        let lease = self.table.0.get(id.index() as usize).ok_or(LeaseError::Unknown)?;
        if lease.generation != id.generation() {
            return Err(LeaseError::Unknown);
        }
        match lease.phase {
            Phase::Released => Err(LeaseError::Unknown),
            _ if lease.owner != owner => Err(LeaseError::Foreign),
            Phase::Expired => Err(LeaseError::Expired),
            Phase::Consumed => Err(LeaseError::Consumed),
            Phase::Timed | Phase::Promised => Ok(id.index()),
        }
    }

    /// Returns the entries of a live lease.
    pub(crate) fn entries(&self, id: LeaseId, owner: u64) -> Result<&[u32], LeaseError> {
        self.check(id, owner).map(|index| self.table.0[index as usize].entries.as_slice())
    }

    /// Returns the same for changes: the caller pins added entries and unpins removed ones.
    pub(crate) fn entries_mut(&mut self, id: LeaseId, owner: u64) -> Result<&mut Vec<u32>, LeaseError> {
        self.check(id, owner).map(|index| &mut self.table.0[index as usize].entries)
    }

    /// Returns a live lease's holder, and true if it is promised.
    pub(crate) fn whose(&self, id: LeaseId, owner: u64) -> Result<(HolderId, bool), LeaseError> {
        let lease = &self.table.0[self.check(id, owner)? as usize];
        Ok((lease.holder, lease.phase == Phase::Promised))
    }

    /// True if a worker has ended its load already.
    pub(crate) fn begun(&self, id: LeaseId, owner: u64) -> Result<bool, LeaseError> {
        let lease = &self.table.0[self.check(id, owner)? as usize];
        Ok(lease.awaited.count_ones() < lease.workers)
    }

    /// Gives a timed lease its whole time again. `Ok(false)`: the lease was due, and the caller must expire
    /// it.
    pub(crate) fn renew(&mut self, id: LeaseId, owner: u64, now_ms: u64) -> Result<bool, LeaseError> {
        let index = self.check(id, owner)?;
        let lease = &self.table.0[index as usize];
        if lease.phase == Phase::Promised {
            return Ok(true);
        }
        if lease.deadline_ms <= now_ms {
            return Ok(false);
        }
        self.timed.remove(&mut self.table, index);
        self.start_clock(index, now_ms);
        Ok(true)
    }

    /// Stops the lease's clock.
    pub(crate) fn promise(&mut self, id: LeaseId, owner: u64) -> Result<(), LeaseError> {
        let index = self.check(id, owner)?;
        self.stop_clock(index, Phase::Promised);
        Ok(())
    }

    fn stop_clock(&mut self, index: u32, phase: Phase) {
        let before = std::mem::replace(&mut self.table.0[index as usize].phase, phase);
        if before == Phase::Timed {
            self.timed.remove(&mut self.table, index);
        }
    }

    /// Notes the end of one worker's load. Returns `Some` once all have ended.
    pub(crate) fn consume(
        &mut self,
        id: LeaseId,
        owner: u64,
        worker: u32,
    ) -> Result<Option<Ended>, LeaseError> {
        let index = self.check(id, owner)?;
        let lease = &mut self.table.0[index as usize];
        if worker >= lease.workers {
            return Err(LeaseError::Foreign);
        }
        if lease.awaited & 1 << worker == 0 {
            return Err(LeaseError::Consumed);
        }
        lease.awaited &= !(1 << worker);
        Ok((lease.awaited == 0).then(|| self.end(index, LeaseEnd::Consumed)))
    }

    pub(crate) fn release(&mut self, id: LeaseId, owner: u64) -> Result<Ended, LeaseError> {
        let index = self.check(id, owner)?;
        Ok(self.end(index, LeaseEnd::Released))
    }

    /// Ends the lease due first, if it is due. Looks at one lease.
    pub(crate) fn expire_one(&mut self, now_ms: u64) -> Option<Ended> {
        let index = self.timed.tail()?;
        let due = self.table.0[index as usize].deadline_ms <= now_ms;
        due.then(|| self.end(index, LeaseEnd::Expired))
    }

    /// Returns the blocks of every live lease.
    pub(crate) fn live(&self) -> impl Iterator<Item = Held<&[u32]>> {
        let live = self.table.0.iter().filter(|lease| lease.live());
        live.map(|lease| Held {
            entries: lease.entries.as_slice(),
            holder: lease.holder,
            is_promised: lease.phase == Phase::Promised,
        })
    }

    /// Returns leases without a load, with their owners, that have an entry for which `is_meant` is true.
    /// Looks at all leases.
    pub(crate) fn timed_with(&self, is_meant: impl Fn(u32) -> bool) -> Vec<(LeaseId, u64)> {
        let meant =
            |lease: &Lease| lease.phase == Phase::Timed && lease.entries.iter().any(|id| is_meant(*id));
        let leases = self.table.0.iter().enumerate().filter(|(_, lease)| meant(lease));
        leases.map(|(index, lease)| (LeaseId::new(lease.generation, index as u32), lease.owner)).collect()
    }

    /// Returns the ends of leases with blocks since the last call, and the times of their grants.
    pub(crate) fn drain_ends(&mut self) -> impl Iterator<Item = (LeaseEnd, u64)> + '_ {
        self.ends.drain(..)
    }

    fn end(&mut self, index: u32, how: LeaseEnd) -> Ended {
        let is_promised = self.table.0[index as usize].phase == Phase::Promised;
        self.stop_clock(index, how.into());
        self.ended.push_back(index);
        let lease = &mut self.table.0[index as usize];
        if !lease.entries.is_empty() {
            self.ends.push((how, lease.granted_ms));
        }
        Ended { entries: std::mem::take(&mut lease.entries), holder: lease.holder, is_promised }
    }

    /// Takes back an ended lease's emptied list, so the next lease need not allocate.
    pub(crate) fn recycle(&mut self, mut entries: Vec<u32>) {
        entries.clear();
        if let Some(index) = self.ended.back()
            && entries.capacity() <= KEPT_CAPACITY_MAX
        {
            self.table.0[*index as usize].entries = entries;
        }
    }
}
