//! Prefetches: blocks of peers come into DRAM before a request asks for them. A pod asks its peers for their best
//! blocks after its start, and leaving peers for the blocks of no other pod.
//!
//! - Nothing is prefetched while any block is on its way for a request, and one batch is on its way at a time: a
//!   request waits for one batch at most.
//! - Only blocks of a namespace with a served engine come, and count as this engine's: its share and its quota limit
//!   them.
//! - After a start, blocks come into free slots alone. A leaving peer's block may also take the place of one with fewer
//!   expected uses.
//! - A peer has a limit of blocks for each namespace; a list ends with its first batch without a block.

use std::collections::{BTreeMap, VecDeque};

use mesh::directory::PeerCandidate;
use mesh::listed::{BlocksAsk, LISTED_MAX, ListedBlock};
use mesh::transport::PeerNumber;
use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::source::Source;

use super::arrivals::PART;
use super::context::Context;
use super::namespaces::{Binding, Space};
use super::prefetched::PrefetchReason;
use super::tier::TierSpan;
use super::{Action, Base};

/// Milliseconds of prefetches after the first engine of a namespace.
const START_MS: u64 = 60_000;
/// Milliseconds of prefetches from a leaving peer: no sidecar stays longer.
const LEAVE_MS: u64 = 30_000;
/// Most peers asked for one namespace after a start.
const PEERS_MAX: usize = 8;
/// Bytes of a batch, at least one block: some milliseconds of a network of 10 Gbit/s.
const BATCH_BYTES: u64 = 4 << 20;
/// Most blocks of a batch.
const BATCH_BLOCKS_MAX: usize = 256;
/// A leaving peer may fill 1 of so many parts of the pool.
const LEAVE_PART: u64 = 2;

/// The lists of peers, and the questions for them.
#[derive(Debug, Default)]
pub(super) struct Prefetches {
    lists: VecDeque<PrefetchList>,
    /// The list of the batch on its way.
    current: Option<PrefetchList>,
    allowances: BTreeMap<(PeerNumber, Space, PrefetchReason), PeerAllowance>,
    /// The times of the first engines.
    began_ms: BTreeMap<Space, u64>,
}

/// The limit of a peer for one namespace and one reason.
#[derive(Copy, Clone, Debug)]
struct PeerAllowance {
    /// Further blocks of the peer.
    left: u32,
    phase: AllowancePhase,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum AllowancePhase {
    /// The peer may be asked.
    Idle,
    Asked,
    /// The blocks of its list are fetched.
    Listed,
}

/// The rest of a peer's list.
#[derive(Debug)]
struct PrefetchList {
    of: (PeerNumber, Space, PrefetchReason),
    /// Each block with the hash of its parent.
    blocks: VecDeque<(ListedBlock, Option<BlockHash>)>,
    until_ms: u64,
}

// === impl Prefetches: questions ===

impl Prefetches {
    /// Asks peers for their best blocks, as far as there is room for these.
    pub(super) fn ask_peers(&mut self, base: &mut Base) {
        let Base { engines, sources, cx } = base;
        let Some(mesh) = sources.mesh().filter(|mesh| mesh.lists_any() && !cx.draining) else { return };
        for binding in engines.bindings() {
            if !mesh.may_ask(&binding, cx) {
                continue;
            }
            let (space, bytes) = (binding.space(), binding.block_bytes());
            let began_ms = *self.began_ms.entry(space).or_insert(cx.now_ms);
            let is_new = cx.now_ms < began_ms.saturating_add(START_MS);
            let free = cx.dram.free_blocks(bytes);
            let peers: Vec<PeerNumber> = mesh.listing_peers().take(PEERS_MAX).collect();
            // An equal part of the free slots for each peer.
            let part = free.div_ceil(peers.len().max(1) as u64);
            let started = peers.into_iter().filter(|_| is_new && free > 0);
            let started = started.map(|peer| (peer, PrefetchReason::Started, part));
            let leave = cx.dram.config().pool_bytes / LEAVE_PART / bytes;
            let leaving = mesh.leaving_peers().map(|peer| (peer, PrefetchReason::Leaving, leave));
            for (peer, reason, most) in started.chain(leaving) {
                let left = u32::try_from(most).unwrap_or(u32::MAX);
                let new = PeerAllowance { left, phase: AllowancePhase::Idle };
                let allowance = self.allowances.entry((peer, space, reason)).or_insert(new);
                if allowance.phase != AllowancePhase::Idle || allowance.left == 0 {
                    continue;
                }
                allowance.phase = AllowancePhase::Asked;
                let blocks = allowance.left.min(LISTED_MAX as u32);
                let ask = BlocksAsk { namespace: space.digest, block_bytes: bytes, blocks };
                cx.actions.push(Action::AskBlocks { peer, ask });
            }
        }
    }

    /// Takes a peer's list. One without a question has no effect.
    pub(super) fn take_list(
        &mut self,
        peer: PeerNumber,
        ask: BlocksAsk,
        listed: &[ListedBlock],
        cx: &mut Context,
    ) {
        let space = Space { digest: ask.namespace, block_bytes: ask.block_bytes };
        let reasons = [PrefetchReason::Leaving, PrefetchReason::Started];
        for of in reasons.map(|reason| (peer, space, reason)) {
            let asked = |allowance: &&mut PeerAllowance| allowance.phase == AllowancePhase::Asked;
            let Some(allowance) = self.allowances.get_mut(&of).filter(asked) else { continue };
            cx.prefetched.stats.lists += 1;
            allowance.phase = AllowancePhase::Listed;
            let count = listed.len().min(ask.blocks as usize);
            // A list shorter than asked for has all of the peer's blocks.
            let is_full = count == ask.blocks as usize;
            allowance.left = if is_full { allowance.left.saturating_sub(ask.blocks) } else { 0 };
            let parent = |block: &ListedBlock| Some(listed.get(block.parent? as usize)?.hash);
            let blocks = listed[..count].iter().map(|block| (*block, parent(block))).collect();
            let wait_ms = if of.2 == PrefetchReason::Started { START_MS } else { LEAVE_MS };
            self.lists.push_back(PrefetchList { of, blocks, until_ms: cx.now_ms.saturating_add(wait_ms) });
            return;
        }
    }

    /// Forgets a gone peer.
    pub(super) fn forget_peer(&mut self, peer: PeerNumber) {
        self.lists.retain(|list| list.of.0 != peer);
        self.allowances.retain(|(of, ..), _| *of != peer);
    }
}

// === impl Prefetches: batches ===

impl Prefetches {
    /// Begins the next batch, if nothing is on its way. The lists of peers take turns.
    pub(super) fn go_on(&mut self, base: &mut Base) {
        if (self.lists.is_empty() && self.current.is_none()) || base.cx.arrivals.bytes() > 0 {
            return;
        }
        let gave = base.cx.prefetched.batch.take().is_some_and(|(came, _)| came > 0);
        if let Some(list) = self.current.take() {
            if gave {
                self.lists.push_back(list);
            } else {
                self.end_list(&list);
            }
        }
        while let Some(mut list) = self.lists.pop_front() {
            if list.begin_batch(base) {
                self.current = Some(list);
                return;
            }
            self.end_list(&list);
        }
    }

    fn end_list(&mut self, list: &PrefetchList) {
        self.allowances
            .get_mut(&list.of)
            .into_iter()
            .for_each(|allowance| allowance.phase = AllowancePhase::Idle);
    }
}

// === impl PrefetchList ===

impl PrefetchList {
    /// Fetches its next blocks. Returns false if there are none, or no room for them.
    fn begin_batch(&mut self, base: &mut Base) -> bool {
        let Base { engines, sources, cx } = base;
        let (peer, space, reason) = self.of;
        let binding = engines.bindings().into_iter().find(|binding| binding.space() == space);
        let may_ask = |binding: &Binding| sources.may_ask_peers(binding, cx);
        let is_over = cx.draining || cx.now_ms >= self.until_ms;
        let Some(binding) = binding.filter(|binding| !is_over && may_ask(binding)) else { return false };
        let Some(tier) = sources.tiers.iter().position(|tier| tier.source() == Source::Peer) else {
            return false;
        };
        let most = (BATCH_BYTES / space.block_bytes).clamp(1, BATCH_BLOCKS_MAX as u64) as usize;
        let (mut blocks, mut slots) = (Vec::new(), Vec::new());
        while slots.len() < most
            && let Some((listed, parent)) = self.blocks.pop_front()
        {
            let key = binding.block_key(&listed.hash);
            if !is_absent(&key, cx) || sources.mesh().is_some_and(|it| it.distrusts(&binding, &listed.hash)) {
                continue;
            }
            let has_room = match cx.dram.uses_given_up(space.block_bytes) {
                None => true,
                Some(uses) => reason == PrefetchReason::Leaving && listed.uses > uses,
            };
            let slot = has_room.then(|| sources.begin_block(tier, &binding, key, PART, cx)).flatten();
            let Some(slot) = slot else {
                // No later block is worth more.
                self.blocks.clear();
                break;
            };
            cx.prefetched.coming.insert(key, parent.map(|hash| binding.block_key(&hash)));
            blocks.push((slots.len() as u32, key));
            slots.push(slot);
        }
        if slots.is_empty() {
            return false;
        }
        let (reach, absence_level) = (slots.len(), 0);
        let holders = vec![PeerCandidate { peer, run: reach as u32, absence_level }];
        let span = TierSpan { from: 0, reach, holders, blocks };
        sources.tiers[tier].read_span(&binding, &span, &slots, cx);
        cx.prefetched.batch = Some((0, reason));
        true
    }
}

/// True for a block not here, and not on its way.
fn is_absent(key: &BlockKey, cx: &Context) -> bool {
    let is_here = cx.dram.is_kept(key) || cx.dram.is_adopted(key) || cx.dram.filling(key).is_some();
    !is_here && cx.arrivals.source(key).is_none()
}
