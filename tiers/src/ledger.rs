//! The bytes of each holder, and their limits: every used byte of the pool belongs to a holder.
//!
//! A holder is an engine. While several are at work each has a share, the pool divided by their number:
//! - kept blocks may exceed it. Room for other holders then comes from the excess, and never from within the
//!   share of a holder at work;
//! - blocks that cannot be taken back at once (being filled, leased or promised) may exceed it as long as
//!   every other holder at work can still have its share.
//!
//! A holder alone at work may use the whole pool, without a limit here.

/// How long a holder counts as at work after its last sign of work.
pub(crate) const WORK_MS: u64 = 1000;

/// A holder's number, reused once the holder is gone.
#[derive(Copy, Clone, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct HolderId(u8);

/// Bytes of one holder.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Holdings {
    pub kept: u64,
    /// Bytes of blocks being filled.
    pub filling: u64,
    /// Bytes of blocks its queries may load or wait for, of any holder, each as often as it is leased.
    pub leased: u64,
    /// Bytes of blocks its loads are to read.
    pub promised: u64,
}

/// Some holders, one bit each.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct HolderSet([u64; 4]);

/// Bytes in use within a pool or a quota, by holder.
#[derive(Debug, Default)]
pub(crate) struct UsedBytes(Vec<u64>);

#[derive(Debug, Default)]
struct HolderAccount {
    /// True until the holder leaves.
    is_here: bool,
    busy_until_ms: u64,
    filling: u64,
    leased: u64,
    promised: u64,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    pool_bytes: u64,
    /// Number 0 is nobody: the holder of blocks without an engine.
    holders: Vec<HolderAccount>,
    used: UsedBytes,
    /// The time of the last work of any holder.
    now_ms: u64,
}

// === impl HolderId ===

impl HolderId {
    /// The holder of blocks no engine of this life has saved or used.
    pub const NOBODY: Self = Self(0);

    pub(crate) fn from_byte(byte: u8) -> Self {
        Self(byte)
    }

    pub(crate) fn byte(self) -> u8 {
        self.0
    }

    /// Returns the first `count` holders, from nobody on.
    pub(crate) fn first(count: usize) -> impl Iterator<Item = Self> + Clone {
        (0..=u8::MAX).map(Self).take(count)
    }

    /// Returns its place in tables of holders.
    #[inline]
    pub(crate) fn index(self) -> usize {
        self.0.into()
    }
}

// === impl Holdings ===

impl std::ops::AddAssign for Holdings {
    fn add_assign(&mut self, other: Self) {
        self.kept += other.kept;
        self.filling += other.filling;
        self.leased += other.leased;
        self.promised += other.promised;
    }
}

// === impl HolderSet ===

impl HolderSet {
    #[inline]
    pub(crate) fn has(&self, id: HolderId) -> bool {
        self.0[id.index() / 64] >> (id.index() % 64) & 1 == 1
    }
}

impl FromIterator<HolderId> for HolderSet {
    fn from_iter<T: IntoIterator<Item = HolderId>>(ids: T) -> Self {
        let mut group = Self::default();
        ids.into_iter().for_each(|id| group.0[id.index() / 64] |= 1 << (id.index() % 64));
        group
    }
}

impl From<HolderId> for HolderSet {
    fn from(id: HolderId) -> Self {
        [id].into_iter().collect()
    }
}

// === impl UsedBytes ===

impl UsedBytes {
    pub(crate) fn of_holder(&self, holder: HolderId) -> u64 {
        self.0.get(holder.index()).copied().unwrap_or(0)
    }

    pub(crate) fn all(&self) -> u64 {
        self.0.iter().sum()
    }

    pub(crate) fn add_bytes(&mut self, holder: HolderId, bytes: u64) {
        if self.0.len() <= holder.index() {
            self.0.resize(holder.index() + 1, 0);
        }
        self.0[holder.index()] += bytes;
    }

    pub(crate) fn take_bytes(&mut self, holder: HolderId, bytes: u64) {
        self.0[holder.index()] -= bytes;
    }
}

// === impl HolderAccount ===

impl HolderAccount {
    /// Returns the bytes that cannot be taken back at once.
    fn pinned(&self) -> u64 {
        self.filling + self.leased + self.promised
    }
}

// === impl Ledger ===

impl Ledger {
    pub(crate) fn new(pool_bytes: u64) -> Self {
        Self { pool_bytes, holders: vec![HolderAccount::default()], used: UsedBytes::default(), now_ms: 0 }
    }

    /// Registers a new holder. It takes the number of the gone holder with the fewest bytes, and those bytes
    /// with it. Returns nobody if every number is taken.
    pub(crate) fn enter_holder(&mut self) -> HolderId {
        let numbers = (1..=u8::MAX).map(HolderId);
        let vacant = numbers.filter(|id| match self.holders.get(id.index()) {
            Some(holder) => !holder.is_here && holder.pinned() == 0,
            None => true,
        });
        let Some(id) = vacant.min_by_key(|id| self.used.of_holder(*id)) else { return HolderId::NOBODY };
        if self.holders.len() <= id.index() {
            self.holders.resize_with(id.index() + 1, HolderAccount::default);
        }
        self.holders[id.index()] = HolderAccount { is_here: true, ..HolderAccount::default() };
        id
    }

    /// Ends a holder. Its blocks stay, and belong to the next holder that uses them.
    pub(crate) fn leave_holder(&mut self, id: HolderId) {
        self.holders[id.index()].is_here = false;
    }

    #[inline]
    pub(crate) fn is_here(&self, id: HolderId) -> bool {
        self.holders[id.index()].is_here
    }

    /// Notes that a holder was at work. Returns true if it was not before.
    pub(crate) fn work(&mut self, id: HolderId, now_ms: u64) -> bool {
        self.now_ms = self.now_ms.max(now_ms);
        let begins = !self.works(id);
        self.holders[id.index()].busy_until_ms = now_ms.saturating_add(WORK_MS);
        begins
    }

    /// True if a holder is at work.
    pub(crate) fn works(&self, id: HolderId) -> bool {
        self.is_at_work(&self.holders[id.index()])
    }

    /// Returns every holder that ever was, and nobody.
    pub(crate) fn ids(&self) -> impl Iterator<Item = HolderId> + use<> {
        HolderId::first(self.holders.len())
    }

    fn numbered(&self) -> impl Iterator<Item = (HolderId, &HolderAccount)> {
        self.ids().zip(&self.holders)
    }

    fn is_at_work(&self, holder: &HolderAccount) -> bool {
        holder.is_here && holder.busy_until_ms > self.now_ms
    }

    pub(crate) fn at_work(&self) -> u64 {
        self.holders.iter().filter(|holder| self.is_at_work(holder)).count() as u64
    }

    /// Returns the holders that may lose a block of those `used`: while several are at work, none of them
    /// with no more than its share.
    pub(crate) fn losers(&self, used: &UsedBytes) -> HolderSet {
        let (at_work, all) = (self.at_work(), used.all());
        let may_lose = |id: HolderId, holder: &HolderAccount| {
            at_work < 2 || !self.is_at_work(holder) || used.of_holder(id).saturating_mul(at_work) > all
        };
        self.numbered().filter(|(id, holder)| may_lose(*id, holder)).map(|(id, _)| id).collect()
    }

    /// True if a holder has less than its share.
    pub(crate) fn is_short(&self, id: HolderId) -> bool {
        self.used.of_holder(id).saturating_mul(self.at_work()) < self.used.all()
    }

    /// Returns the further bytes a holder may have filled, leased or promised. `pinned` bytes of the pool are
    /// so now, and `less` of the holder's own do not count.
    pub(crate) fn room(&self, id: HolderId, pinned: u64, less: u64) -> u64 {
        let others = || {
            let others = self.numbered().filter(|(other, holder)| *other != id && self.is_at_work(holder));
            others.map(|(_, holder)| holder)
        };
        let count = others().count() as u64;
        if count == 0 || id == HolderId::NOBODY {
            return u64::MAX;
        }
        let share = self.pool_bytes / (count + 1);
        let unused = |pinned: u64| share.saturating_sub(pinned);
        let of_others: u64 = others().map(|other| unused(other.pinned())).sum();
        let lent = self.pool_bytes.saturating_sub(pinned).saturating_sub(of_others);
        lent.max(unused(self.holders[id.index()].pinned() - less))
    }

    /// Returns the bytes in use, by holder.
    pub(crate) fn used(&self) -> &UsedBytes {
        &self.used
    }

    /// Charges a block to a holder.
    pub(crate) fn charge(&mut self, id: HolderId, bytes: u64) {
        self.used.add_bytes(id, bytes);
    }

    /// Ends the charge: the slot is free, or has another holder.
    pub(crate) fn discharge(&mut self, id: HolderId, bytes: u64) {
        self.used.take_bytes(id, bytes);
    }

    /// Charges a block's filling to a holder.
    pub(crate) fn begin_fill(&mut self, id: HolderId, bytes: u64) {
        self.holders[id.index()].filling += bytes;
    }

    /// Ends the charge of a filling.
    pub(crate) fn end_fill(&mut self, id: HolderId, bytes: u64) {
        self.holders[id.index()].filling -= bytes;
    }

    /// Charges leased or promised bytes to a holder.
    pub(crate) fn lease(&mut self, id: HolderId, is_promised: bool, bytes: u64) {
        *self.leased(id, is_promised) += bytes;
    }

    /// Ends the charge of leased or promised bytes.
    pub(crate) fn unlease(&mut self, id: HolderId, is_promised: bool, bytes: u64) {
        *self.leased(id, is_promised) -= bytes;
    }

    fn leased(&mut self, id: HolderId, is_promised: bool) -> &mut u64 {
        let holder = &mut self.holders[id.index()];
        if is_promised { &mut holder.promised } else { &mut holder.leased }
    }

    pub(crate) fn holdings(&self, id: HolderId) -> Holdings {
        let HolderAccount { filling, leased, promised, .. } = self.holders[id.index()];
        Holdings { kept: self.used.of_holder(id) - filling, filling, leased, promised }
    }

    /// Returns the bytes being filled, of all holders.
    pub(crate) fn filling(&self) -> u64 {
        self.holders.iter().map(|holder| holder.filling).sum()
    }
}
