//! The interface of a tier: a place below DRAM, from which blocks come back into slots of the pool.
//!
//! [`super::sources`] has the tiers in the order of their numbers, and looks for a block in this order. A slot belongs to a read until
//! the read has ended.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

use mesh::directory::Candidate;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;
use tiers::dram::{Dram, QuotaId, Standing};

use super::arrivals::{SourceLane, Waiter};
use super::context::Context;
use super::event::JobEnd;
use super::namespaces::Binding;

/// A part of a run in one tier, with its blocks to be read.
#[derive(Debug, Default)]
pub(super) struct Span {
    /// Place of its first block in the run.
    pub(super) from: usize,
    /// Length in blocks of the run.
    pub(super) reach: usize,
    /// Peers with the first blocks of it, the longest run first; empty if the tier is on this node.
    pub(super) holders: Vec<Candidate>,
    /// Blocks to be read, each with its place in the span.
    pub(super) blocks: Vec<(u32, BlockKey)>,
}

/// The end of a read.
#[derive(Debug)]
pub(super) struct ReadEnd {
    pub(super) key: BlockKey,
    pub(super) slot: SlotRef,
    /// Time of the request for the block.
    pub(super) since: Duration,
    /// Checksum of the block in its slot, or zero if it is unknown. `None`: the block did not come.
    pub(super) checksum: Option<u64>,
}

/// Figures of a tier's reads: counters since the start, and levels now.
#[derive(Clone, Debug, Default)]
pub struct TierStats {
    pub source: Source,
    /// Blocks and bytes on their way into DRAM.
    pub reading_blocks: u64,
    pub reading_bytes: u64,
    /// Blocks and bytes of reads that ended well.
    pub read_blocks: u64,
    pub read_bytes: u64,
    /// Blocks that did not come.
    pub failed_blocks: u64,
    /// Time with a read under way, up to the last end of one.
    pub busy: Duration,
    /// Time from the request for a block of the idle tier until it was in DRAM, at the last such request.
    pub first: Duration,
    /// Begin of the time that is not in `busy` yet.
    pub(super) since: Duration,
}

/// A change in the core, for all tiers.
#[derive(Copy, Clone, Debug)]
pub(super) enum Notice<'a> {
    /// Tiers may keep this block of DRAM: it was committed just now in the slot, or asked for or offered again.
    Offered(BlockKey, Option<SlotRef>, &'a Binding),
    /// DRAM gave a block up.
    Left(&'a BlockKey, Standing),
    /// DRAM has a block of a tier.
    Came(&'a BlockKey),
    /// An event has added blocks to DRAM, with true, and removed others.
    Changed(&'a [(BlockKey, bool)]),
    /// A namespace has this number, this digest in labels, and this quota.
    Learned(u32, NamespaceDigest, Option<QuotaId>),
    /// Engines disagree about a namespace: later lives find none of its kept blocks. With true this life finds none, either.
    Distrusted(&'a Binding, bool),
    /// These blocks are wrong by a check of their engine.
    Refuted(&'a BTreeSet<BlockKey>),
    /// A block is removed everywhere.
    Removed(&'a BlockKey),
    /// Engines follow changes from now on.
    Watched,
    /// An event is over: work without a waiting engine may go on.
    Over,
    /// The sidecar is to end: nothing new is begun.
    Draining,
    /// Memory ends with the sidecar: tiers take as much of it as they can.
    Ending,
}

/// A tier for a core not yet made.
#[derive(Debug)]
pub struct NewTier(Box<dyn Tier>);

/// A place below DRAM. The defaults suit a tier without blocks of earlier lives.
pub(super) trait Tier: Any + Debug + Send {
    /// Takes its number, and its part of DRAM, before the first block comes.
    fn attach(&mut self, number: usize, dram: &mut Dram);

    /// The source of its blocks, as engines know it.
    fn source(&self) -> Source;

    /// Returns the part of a run in this tier, from the first block on. `spans` is the number of spans
    /// already found for the run.
    fn find(&self, binding: &Binding, run: &[BlockHash], spans: usize, cx: &Context) -> Option<Span>;

    /// True if it may hold the first block of a run. The blocks behind may be a hint.
    fn may_have(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> bool {
        self.find(binding, run, 0, cx).is_some()
    }

    /// True if it keeps a readable block of any size.
    fn has(&self, _key: &BlockKey) -> bool {
        false
    }

    /// Shows some of its blocks, in a walk from 0 on. Returns the place to go on from; `None` at the end.
    fn walk(&self, _from: usize, _see: &mut dyn FnMut(&BlockKey)) -> Option<usize> {
        None
    }

    /// True while it looks for blocks of earlier lives.
    fn recovers(&self) -> bool {
        false
    }

    /// Returns the standing of a block at its last eviction from DRAM.
    fn standing(&self, _key: &BlockKey) -> Option<Standing> {
        None
    }

    /// Returns the source of the first block of a run.
    fn lane(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> Option<SourceLane>;

    /// Plans to read a block of so many bytes into a slot, within 1 of `parts` of the tier's queue. False: it
    /// cannot read the block in time.
    fn begin_read(
        &mut self,
        _key: BlockKey,
        _slot: SlotRef,
        _bytes: u64,
        _parts: u64,
        _now: Duration,
    ) -> bool {
        true
    }

    /// Begins to read the first blocks of a span into these slots.
    fn read(&mut self, _binding: &Binding, _span: &Span, _slots: &[SlotRef], _cx: &mut Context) {}

    /// Returns the read ended by a job; `None` while a query or load `waits` for it and [`Tier::retry`] may
    /// still bring it.
    fn ended(&mut self, end: JobEnd, waits: &dyn Fn(&Waiter) -> bool, cx: &mut Context) -> Option<ReadEnd>;

    /// Tries failed reads another way, after all ends of an event. Returns the reads with no other way.
    fn retry(&mut self, _cx: &mut Context) -> Vec<ReadEnd> {
        Vec::new()
    }

    /// Returns the late blocks, to be given up.
    fn late(&mut self, _now_ms: u64) -> Vec<BlockKey> {
        Vec::new()
    }

    /// Follows a change in the core.
    fn take_notice(&mut self, notice: Notice<'_>, cx: &mut Context);

    /// Returns a figure of its health. After each change of it, engines are told all of its blocks again.
    fn working(&self) -> (usize, u64) {
        (0, 0)
    }

    /// Returns the changes since the last call, after [`Notice::Watched`]: true for a new block, false for a
    /// gone one.
    fn drain_changes(&mut self) -> Vec<(BlockKey, bool)> {
        Vec::new()
    }

    /// True while blocks are to be written, or slots are in use for anything but its reads.
    fn busy(&self) -> bool {
        false
    }

    /// True if time must pass for the tier to go on.
    fn waits(&self) -> bool {
        false
    }
}

// === impl NewTier ===

impl NewTier {
    pub(super) fn new(tier: impl Tier) -> Self {
        Self(Box::new(tier))
    }

    /// Returns the tier, attached with this number to a core over `dram`.
    pub(super) fn attached(mut self, number: usize, dram: &mut Dram) -> Box<dyn Tier> {
        self.0.attach(number, dram);
        self.0
    }
}

// === impl TierStats ===

impl TierStats {
    /// Counts the begin of a read of so many bytes.
    pub(super) fn begin_read(&mut self, bytes: u64, now: Duration) {
        if self.reading_blocks == 0 {
            self.since = now;
        }
        self.reading_blocks += 1;
        self.reading_bytes += bytes;
    }

    /// Counts the end of a read of so many bytes.
    pub(super) fn end_read(&mut self, read: &ReadEnd, bytes: u64, now: Duration) {
        self.reading_blocks -= 1;
        self.reading_bytes -= bytes;
        let is_whole = read.checksum.is_some();
        self.read_blocks += u64::from(is_whole);
        self.read_bytes += if is_whole { bytes } else { 0 };
        self.failed_blocks += u64::from(!is_whole);
        if is_whole && self.since == read.since {
            self.first = now.saturating_sub(read.since);
        }
        self.busy += now.saturating_sub(self.since);
        self.since = now;
    }

    /// Returns the bytes per second of the time with a read under way.
    pub fn bytes_per_second(&self) -> u64 {
        u64::try_from(u128::from(self.read_bytes) * 1_000_000 / self.busy.as_micros().max(1))
            .unwrap_or(u64::MAX)
    }
}

// === impl Span ===

impl Span {
    /// Returns the place in the run behind the span.
    pub(super) fn end(&self) -> usize {
        self.from + self.reach
    }

    /// Returns the blocks to be read, each with its place in the run.
    pub(super) fn wanted(&self) -> impl Iterator<Item = (usize, BlockKey)> + '_ {
        self.blocks.iter().map(|(place, key)| (self.from + *place as usize, *key))
    }

    /// Adds a block to be read.
    pub(super) fn push(&mut self, at: usize, key: BlockKey) {
        self.blocks.push(((at - self.from) as u32, key));
    }
}
