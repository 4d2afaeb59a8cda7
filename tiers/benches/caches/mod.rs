//! The compared caches: the real tier, filled as the sidecar fills it, LRU, and a clairvoyant cache.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::{SlotRef, slot_count};
use tiers::dram::{BlockAccount, Dram, DramConfig, EndedChain, Ending};

/// A chain of blocks, as in one request.
pub(crate) type Chain = Vec<BlockHash>;

/// A request, and the end of its answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) chain: Chain,
    pub(crate) ending: Ending,
}

/// The rank of a block on the GPU, and the block before it in its ended request.
#[derive(Copy, Clone)]
struct LeavingBlock {
    rank: (EndedChain, usize),
    parent: Option<BlockHash>,
}

const SEGMENT_BYTES: u64 = 2 << 20;
/// Five to a segment, so a pool has room for exactly a multiple of five blocks.
pub(crate) const BLOCK_BYTES: u64 = 400_000;
/// Blocks computed in one step, for prompts computed in steps.
pub(crate) const STEP_BLOCKS: usize = 16;

pub(crate) trait Cache {
    /// Serves a request whose `found` leading blocks lie in the GPU's own cache: uses the kept ones of the
    /// others, and keeps the missing ones. Returns the number of its leading blocks found here or in the
    /// GPU's cache.
    fn request(&mut self, request: &Request, found: usize) -> usize;

    /// Keeps blocks that leave the GPU's cache, the first to leave first.
    fn leave_device(&mut self, _leaving: &[BlockHash]) {}
}

/// The least recently used block goes first; the deepest block of a request counts as used before the others.
#[derive(Default)]
pub(crate) struct Lru {
    capacity: usize,
    pub(crate) clock: u64,
    pub(crate) used: HashMap<BlockHash, u64>,
    pub(crate) order: BTreeMap<u64, BlockHash>,
    /// Blocks dropped since they were last taken.
    pub(crate) dropped: Vec<BlockHash>,
}

/// The block with the latest next use goes first, and of one request the deepest block.
pub(crate) struct Clairvoyant {
    capacity: usize,
    now: usize,
    /// Requests of each block.
    uses: HashMap<BlockHash, VecDeque<usize>>,
    /// The next use of each kept block, and its depth there.
    pub(crate) kept: HashMap<BlockHash, (usize, usize)>,
    order: BTreeSet<(usize, usize, BlockHash)>,
    /// Blocks dropped since they were last taken.
    pub(crate) dropped: Vec<BlockHash>,
}

pub(crate) struct Tier {
    pub(crate) dram: Dram,
    /// Holder and quota of the next request's blocks.
    pub(crate) whose: BlockAccount,
    /// Blocks computed by one step.
    step_blocks: usize,
    /// Slots being filled, with their places in the chain.
    slots: Vec<(usize, SlotRef)>,
    /// The ended request, place and parent of blocks on the GPU, if they are kept once alone.
    on_device: Option<HashMap<BlockHash, LeavingBlock>>,
}

// === impl Request ===

impl From<Chain> for Request {
    fn from(chain: Chain) -> Self {
        Self { chain, ..Self::default() }
    }
}

// === impl Lru ===

impl Lru {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Uses blocks, the deepest first; missing ones are added.
    pub(crate) fn use_all(&mut self, chain: &[BlockHash]) {
        for hash in chain.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used.insert(*hash, self.clock) {
                self.order.remove(&before);
            } else if self.used.len() > self.capacity {
                self.drop_oldest();
            }
            self.order.insert(self.clock, *hash);
        }
    }

    pub(crate) fn drop_oldest(&mut self) {
        let (_, oldest) = self.order.pop_first().expect("more than none");
        self.used.remove(&oldest);
        self.dropped.push(oldest);
    }

    pub(crate) fn leading(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|hash| self.used.contains_key(hash)).count()
    }
}

impl Cache for Lru {
    fn request(&mut self, Request { chain, .. }: &Request, found: usize) -> usize {
        let hits = self.leading(&chain[found..]);
        self.use_all(chain);
        found + hits
    }
}

// === impl Clairvoyant ===

impl Clairvoyant {
    pub(crate) fn new(capacity: usize, requests: &[Request]) -> Self {
        let mut uses: HashMap<BlockHash, VecDeque<usize>> = HashMap::new();
        for (at, request) in requests.iter().enumerate() {
            request.chain.iter().for_each(|hash| uses.entry(*hash).or_default().push_back(at));
        }
        let (kept, order, dropped) = Default::default();
        Self { capacity, now: 0, uses, kept, order, dropped }
    }
}

impl Cache for Clairvoyant {
    fn request(&mut self, Request { chain, .. }: &Request, found: usize) -> usize {
        let hits = chain[found..].iter().take_while(|hash| self.kept.contains_key(hash)).count();
        for (depth, hash) in chain.iter().enumerate() {
            let uses = self.uses.get_mut(hash).expect("a request of the trace");
            while uses.front().is_some_and(|at| *at <= self.now) {
                uses.pop_front();
            }
            let next = uses.front().map_or(usize::MAX, |at| *at);
            if let Some((next, depth)) = self.kept.insert(*hash, (next, depth)) {
                self.order.remove(&(next, depth, *hash));
            }
            self.order.insert((next, depth, *hash));
        }
        while self.kept.len() > self.capacity {
            let (_, _, last) = self.order.pop_last().expect("more than none");
            self.kept.remove(&last);
            self.dropped.push(last);
        }
        self.now += 1;
        found + hits
    }
}

// === impl Tier ===

impl Tier {
    /// Makes a tier with room for `blocks`, rounded up to a multiple of five.
    pub(crate) fn new(blocks: usize) -> Self {
        let slots = u64::from(slot_count(SEGMENT_BYTES, BLOCK_BYTES).expect("fits"));
        let pool_bytes = (blocks as u64).div_ceil(slots) * SEGMENT_BYTES;
        let config = DramConfig { pool_bytes, segment_bytes: SEGMENT_BYTES, lease_ttl_ms: 30_000 };
        let dram = Dram::new(config).expect("sizes");
        Self {
            dram,
            whose: BlockAccount::default(),
            step_blocks: usize::MAX,
            slots: Vec::new(),
            on_device: None,
        }
    }

    /// Makes a tier whose copies of the GPU's blocks go first.
    pub(crate) fn once(blocks: usize) -> Self {
        let mut tier = Self { on_device: Some(HashMap::new()), ..Self::new(blocks) };
        tier.whose.holder = tier.dram.enter_holder();
        tier
    }

    /// Ends the engine, with the GPU's cache, and begins another one.
    pub(crate) fn restart_engine(&mut self) {
        if let Some(on_device) = &mut self.on_device {
            on_device.clear();
            self.dram.leave_holder(self.whose.holder);
            self.whose.holder = self.dram.enter_holder();
        }
    }

    /// Makes a tier for prompts computed, and saved, in steps.
    pub(crate) fn chunked(blocks: usize) -> Self {
        Self { step_blocks: STEP_BLOCKS, ..Self::new(blocks) }
    }

    /// Saves blocks of a chain as the sidecar does: kept ones are used, the others are filled.
    pub(crate) fn save(&mut self, chain: &[BlockHash], blocks: Range<usize>) {
        let key = |at: usize| BlockKey { namespace: 0, group: 0, hash: chain[at] };
        for at in blocks.clone() {
            let slot = self.dram.begin_fill(key(at), BLOCK_BYTES, self.whose);
            self.slots.extend(slot.map(|slot| (at, slot)));
        }
        self.dram.use_run(0, &chain[blocks]);
        self.dram.drain_evicted().for_each(drop);
        self.dram.drain_assigned().for_each(drop);
        for (at, slot) in self.slots.drain(..) {
            assert!(match at {
                0 => self.dram.commit(slot),
                _ if self.on_device.is_some() => self.dram.commit_before(slot, &key(at - 1)),
                _ => self.dram.commit_behind(slot, &key(at - 1)),
            });
        }
    }

    /// Returns the number of kept blocks of these requests without a parent, kept or in the GPU's cache, and the
    /// number of all kept blocks.
    pub(crate) fn unreachable(&mut self, requests: &[Request], gpu: &Lru) -> (usize, usize) {
        let (mut seen, mut found) = (HashSet::new(), Vec::new());
        let (mut unreachable, mut kept) = (0, 0);
        for Request { chain, .. } in requests {
            found.clear();
            self.dram.lookup(0, chain, &mut found);
            for (at, hash) in chain.iter().enumerate().filter(|(at, _)| found[*at]) {
                if seen.insert(*hash) {
                    kept += 1;
                    unreachable +=
                        usize::from(at > 0 && !found[at - 1] && !gpu.used.contains_key(&chain[at - 1]));
                }
            }
        }
        (unreachable, kept)
    }
}

impl Cache for Tier {
    fn request(&mut self, Request { chain, ending }: &Request, found: usize) -> usize {
        let found_here = self.dram.probe(0, &chain[found..]);
        let began_on = found + found_here;
        let in_steps = self.step_blocks < usize::MAX;
        let mut next = chain.len().min(began_on.saturating_add(self.step_blocks));
        self.save(chain, began_on..next);
        // Blocks found at the request's begin are saved again in the step after. Without steps and a GPU's
        // cache the query has covered them.
        if self.on_device.is_none() && (found > 0 || in_steps) {
            self.save(chain, 0..began_on);
        }
        while next < chain.len() {
            let end = chain.len().min(next + self.step_blocks);
            self.save(chain, next..end);
            next = end;
        }
        let ending = Ending { on_device: self.on_device.is_some(), ..*ending };
        let ended = self.dram.end_chain(self.whose.holder, 0, chain, ending);
        if let Some(on_device) = &mut self.on_device {
            for (at, hash) in chain.iter().enumerate() {
                let parent = at.checked_sub(1).map(|at| chain[at]);
                on_device.insert(*hash, LeavingBlock { rank: (ended, at), parent });
            }
        }
        began_on
    }

    fn leave_device(&mut self, leaving: &[BlockHash]) {
        let key = |hash| BlockKey { namespace: 0, group: 0, hash };
        for hash in leaving {
            let known = self.on_device.as_mut().and_then(|known| known.remove(hash));
            let Some(LeavingBlock { rank, parent }) = known else { continue };
            match self.dram.begin_fill(key(*hash), BLOCK_BYTES, self.whose) {
                Ok(slot) => assert!(self.dram.commit_left(slot, parent.map(key).as_ref(), rank)),
                Err(_) => assert_eq!(self.dram.leave_device(0, &[*hash]), 1),
            }
            self.dram.drain_evicted().for_each(drop);
            self.dram.drain_assigned().for_each(drop);
        }
    }
}
