//! Forecasts of the hits of tiers with other sizes: miniatures of the real tier in several sizes at once,
//! with the same requests.
//!
//! If the real tier has more slots than the limit of a miniature, one block stands for a stride of
//! consecutive blocks of a chain: the last block of each stride, after the chain's first block, since many
//! chains share that. Chains with a shared beginning share it in the miniature, too, and every request
//! counts. A run that ends within a stride is taken to end in its middle.
//!
//! A set of cache groups has blocks of several kinds in one room. Its requests count once, in blocks of its full attention ([`Forecast::lead`]),
//! and are found up to the last end at which every other group has the blocks that it reads. The other groups keep what the engine saved
//! of them ([`Forecast::beside`]). A set has no strides: it is left out where the room has more slots than the limit of a miniature.

mod sets;

use std::collections::{HashSet, VecDeque};
use std::ops::Range;

use shm_protocol::key::{BlockHash, BlockKey, GROUP};
use shm_protocol::pool::{SlotRef, slot_count};

use crate::dram::{BlockAccount, Dram, DramConfig, Ending, HolderId};
use crate::index::KeyPrint;

pub use self::sets::{GroupReads, OtherGroup, OtherRequest, SavedKeys};

/// Sizes of the miniatures, in halves of the real room.
const HALVES: [u64; 4] = [1, 2, 4, 8];
/// Sizes of the rooms relative to the real room, in the order of [`Forecast::found`].
pub const ROOMS: [&str; HALVES.len() + 1] = ["0.5", "1", "2", "4", "endless"];
/// Most slots of the miniature of the real room; all together have seven and a half times as many.
pub const SLOTS_MAX: u64 = 1 << 15;
/// Blocks remembered by the endless room, as a multiple of the slots of the real one.
const ENDLESS: u64 = 16;
/// Five blocks to a segment, for any real size of blocks.
const SEGMENT_BYTES: u64 = 2 << 20;
const BLOCK_BYTES: u64 = 400_000;

/// The miniatures of one tier, and their hits.
#[derive(Debug)]
pub struct Forecast {
    stride: usize,
    rooms: [Miniature; HALVES.len()],
    endless: Endless,
    asked: u64,
    /// Twice the number of found blocks, so halves of strides are whole numbers.
    found: [u64; ROOMS.len()],
    /// The last block of each stride of a request; kept between calls for its capacity.
    chain: Vec<BlockHash>,
}

#[derive(Debug)]
struct Miniature {
    dram: Dram,
    /// Slots being filled, with their places in the chain.
    slots: Vec<(usize, SlotRef)>,
}

/// All blocks ever kept, as far as they are remembered.
#[derive(Debug)]
struct Endless {
    known: HashSet<KeyPrint>,
    order: VecDeque<KeyPrint>,
    blocks_max: usize,
}

// === impl Forecast ===

impl Forecast {
    /// Makes the forecast of a tier of so many slots, by a miniature of at most `slots_max`.
    pub fn new(slots: u64, slots_max: u64) -> Self {
        let stride = slots.div_ceil(slots_max.max(1)).max(1);
        let rooms = HALVES.map(|halves| Miniature::new((slots * halves).div_ceil(2 * stride)));
        let endless = Endless {
            known: HashSet::new(),
            order: VecDeque::new(),
            blocks_max: (slots * ENDLESS / stride) as usize,
        };
        Self { stride: stride as usize, rooms, endless, asked: 0, found: [0; ROOMS.len()], chain: Vec::new() }
    }

    /// Records an ended request with these keys of a namespace; its query was for those in `asked`.
    pub fn request(&mut self, namespace: u32, keys: &[BlockHash], asked: Range<usize>, ending: Ending) {
        let Some((first, rest)) = keys.split_first() else { return };
        let Self { stride, rooms, endless, found, chain, .. } = self;
        let stride = *stride;
        chain.clear();
        chain.push(*first);
        chain.extend(rest.chunks_exact(stride).map(|blocks| blocks[stride - 1]));
        let end = asked.end.min(keys.len());
        let start = asked.start.min(end);
        // Strides before the range of the query.
        let from = if start == 0 { 0 } else { 1 + (start - 1) / stride };
        let mut note = |room: usize, run: usize| {
            // One for the first block alone: most such runs end there.
            let twice = match run {
                0 => 0,
                1 => 2,
                run => 2 * (1 + (run - 1) * stride) + stride - 1,
            };
            found[room] += (twice.clamp(2 * start, 2 * end) - 2 * start) as u64;
        };
        for (at, room) in rooms.iter_mut().enumerate() {
            note(at, room.request(namespace, chain, from, ending));
        }
        note(HALVES.len(), endless.request(namespace, chain, from));
        self.asked += (end - start) as u64;
    }

    /// Returns the number of queried blocks.
    pub fn asked(&self) -> u64 {
        self.asked
    }

    /// Returns, for each of [`ROOMS`], the number of queried blocks it would have found.
    pub fn found(&self) -> [u64; ROOMS.len()] {
        self.found.map(|twice| twice / 2)
    }
}

// === impl Miniature ===

impl Miniature {
    fn new(slots: u64) -> Self {
        let by_segment = u64::from(slot_count(SEGMENT_BYTES, BLOCK_BYTES).expect("they fit"));
        let pool_bytes = slots.div_ceil(by_segment).max(1) * SEGMENT_BYTES;
        let config = DramConfig { pool_bytes, segment_bytes: SEGMENT_BYTES, lease_ttl_ms: 0 };
        Self { dram: Dram::new(config).expect("sizes that are fit for a pool"), slots: Vec::new() }
    }

    /// Keeps a chain as the sidecar does. Returns the length of the part kept before; the query leaves out
    /// the first `from` blocks.
    fn request(&mut self, namespace: u32, chain: &[BlockHash], from: usize, ending: Ending) -> usize {
        let key = |at: usize| BlockKey { namespace, group: GROUP, hash: chain[at] };
        let run = self.run(namespace, chain, from);
        for at in 0..chain.len() {
            let slot = self.dram.begin_fill(key(at), BLOCK_BYTES, BlockAccount::default());
            self.slots.extend(slot.map(|slot| (at, slot)));
        }
        self.dram.use_run(namespace, chain);
        self.dram.drain_evicted().for_each(drop);
        self.dram.drain_assigned().for_each(drop);
        for (at, slot) in self.slots.drain(..) {
            match at {
                0 => self.dram.commit(slot),
                _ => self.dram.commit_behind(slot, &key(at - 1)),
            };
        }
        self.dram.end_chain(HolderId::NOBODY, namespace, chain, ending);
        run
    }

    /// Returns the length of the kept part of a chain; a query leaves out the first `from` blocks.
    fn run(&mut self, namespace: u32, chain: &[BlockHash], from: usize) -> usize {
        let from = from.min(chain.len());
        from + self.dram.probe(namespace, &chain[from..])
    }
}

// === impl Endless ===

impl Endless {
    /// Remembers a chain. Returns the length of the part known before; the query leaves out the first `from`
    /// blocks.
    fn request(&mut self, namespace: u32, chain: &[BlockHash], from: usize) -> usize {
        let run = self.run(namespace, chain, from);
        self.remember(namespace, chain);
        run
    }

    fn run(&self, namespace: u32, chain: &[BlockHash], from: usize) -> usize {
        let prints = chain.iter().skip(from).map(|hash| KeyPrint::new(namespace, GROUP, hash));
        from + prints.take_while(|print| self.known.contains(print)).count()
    }

    fn remember(&mut self, namespace: u32, chain: &[BlockHash]) {
        for print in chain.iter().map(|hash| KeyPrint::new(namespace, GROUP, hash)) {
            if self.known.insert(print) {
                self.order.push_back(print);
            }
        }
        while self.order.len() > self.blocks_max {
            let oldest = self.order.pop_front().expect("more than none");
            self.known.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests;
