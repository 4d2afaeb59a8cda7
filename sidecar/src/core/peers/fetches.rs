//! Fetches: what a query misses here and peers may have comes into DRAM from them.
//!
//! The part of a run that peers may have is spread over several that do, each a contiguous part of it. A block that one
//! fails to give is asked of another, as long as somebody waits for it and time is left; else the run ends there.
//!
//! A fetched block is not offered to the SSD tier: its owner may have written it, and each node would write it again. It is
//! offered like any other when an engine here saves it anew.

use std::collections::BTreeMap;
use std::time::Duration;

use mesh::digest::Digest;
use mesh::directory::Candidate;
use mesh::transport::{Done, Fault, Fetch, Label, PeerNumber, Stage};
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;

use super::{Peers, stats};
use crate::core::Action;
use crate::core::arrivals::WAIT_MS_MAX;
use crate::core::context::Context;
use crate::core::namespaces::Binding;
use crate::system::clock::millis;

/// Peers that are asked for a block, one after the other.
const HOLDERS_MAX: usize = 3;
/// Times that the directory is asked how a run goes on, beside what is here of it: peers that were given the same prompts
/// have long parts of it.
pub(crate) const SPANS_MAX: usize = 4;
/// Bytes for which another peer is worth asking beside the first: what a stream of a transport takes at once.
const PART_BYTES_MIN: u64 = 4 << 20;

/// A part of a run, and who may have it.
#[derive(Debug)]
pub(crate) struct Span {
    /// Where in what was asked for it begins.
    from: usize,
    /// The longest run first; at least one.
    candidates: Vec<Candidate>,
    /// What is to be fetched, by its place in the span.
    blocks: Vec<(u32, BlockKey)>,
}

#[derive(Debug)]
pub(super) struct Fetching {
    peer: PeerNumber,
    /// When its blocks were first asked for.
    since: Duration,
    /// When it ends at the latest; who waits has gone by then.
    until_ms: u64,
    /// Peers that have failed to give its blocks.
    tried: Vec<PeerNumber>,
    namespace: NamespaceDigest,
    bytes: u32,
    /// `None`: it has ended.
    blocks: Vec<Option<Wanted>>,
    /// Those that have not.
    open: usize,
    /// Bytes that its peer had given when it began, until it is late. `None` too where another peer was asked before: it has only what
    /// is left of the time.
    given_before: Option<u64>,
}

/// Blocks that one peer failed to give and somebody waits for, by the ticket of the fetch that they were in and their place in it; with
/// each ticket the fetch without blocks.
#[derive(Debug, Default)]
pub(crate) struct Again(BTreeMap<u64, (Fetching, BTreeMap<u32, Wanted>)>);

/// A block that a peer has given.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) checksum: u64,
    /// When it was first asked for.
    pub(crate) since: Duration,
}

/// A block on its way.
#[derive(Debug)]
struct Wanted {
    key: BlockKey,
    slot: SlotRef,
}

// === impl Span ===

impl Span {
    /// What nobody may have of it begins here.
    pub(crate) fn end(&self) -> usize {
        self.from + self.candidates[0].run as usize
    }

    /// Blocks of it that are to be fetched.
    pub(crate) fn keys(&self) -> impl ExactSizeIterator<Item = BlockKey> + '_ {
        self.blocks.iter().map(|(_, key)| *key)
    }

    /// A block of it is to be fetched.
    pub(crate) fn push(&mut self, at: usize, key: BlockKey) {
        self.blocks.push(((at - self.from) as u32, key));
    }

    /// The run that it is of ends there: nothing behind is fetched.
    pub(crate) fn end_before(&mut self, at: usize) {
        let from = self.from;
        self.blocks.retain(|(place, _)| from + (*place as usize) < at);
    }

    /// Cuts what was begun of the span, in its order, so that each of the candidates has a part of it that it may have:
    /// those with the shortest runs the first parts.
    fn cut<T>(&self, begun: Vec<(u32, T)>, block_bytes: u64) -> Vec<(PeerNumber, Vec<T>)> {
        let worth = (begun.len() as u64 * block_bytes).div_ceil(PART_BYTES_MIN).max(1);
        let count = self.candidates.len().min(usize::try_from(worth).unwrap_or(usize::MAX));
        let mut parts = Vec::with_capacity(count);
        let mut rest = begun.into_iter().peekable();
        for (behind, candidate) in self.candidates[..count].iter().enumerate().rev() {
            let share = rest.len().div_ceil(behind + 1);
            let mut part = Vec::with_capacity(share);
            while part.len() < share
                && let Some((_, block)) = rest.next_if(|(place, _)| *place < candidate.run)
            {
                part.push(block);
            }
            if !part.is_empty() {
                parts.push((candidate.peer, part));
            }
        }
        assert!(rest.next().is_none(), "the best candidate may have all of it");
        parts
    }
}

// === impl Fetching ===

impl Fetching {
    fn new(peer: PeerNumber, now: Duration, binding: &Binding, blocks: Vec<Wanted>) -> Self {
        let bytes = u32::try_from(binding.block_bytes()).expect("it fits a segment of the pool");
        let (open, blocks) = (blocks.len(), blocks.into_iter().map(Some).collect());
        let until_ms = millis(now).saturating_add(WAIT_MS_MAX);
        let (since, tried, namespace) = (now, Vec::new(), binding.digest);
        Self { peer, since, until_ms, tried, namespace, bytes, blocks, open, given_before: None }
    }

    /// The same of other blocks and maybe another peer.
    fn with(&self, peer: PeerNumber, blocks: impl IntoIterator<Item = Wanted>) -> Self {
        let blocks: Vec<_> = blocks.into_iter().map(Some).collect();
        Self { peer, open: blocks.len(), blocks, tried: self.tried.clone(), ..*self }
    }

    /// Blocks of it that have not ended.
    pub(super) fn open(&self) -> u64 {
        self.open as u64
    }

    fn label(&self, key: &BlockKey) -> Label {
        Label { namespace: self.namespace, group: key.group, hash: key.hash, bytes: self.bytes }
    }
}

// === impl Peers ===

impl Peers {
    fn post(&mut self, mut fetching: Fetching, cx: &mut Context) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.stats.fetches += 1;
        let wanted = fetching.blocks.iter().flatten();
        let blocks: Vec<_> = wanted.map(|wanted| (fetching.label(&wanted.key), wanted.slot.offset)).collect();
        let given = self.directory.began(fetching.peer, blocks.len() as u32);
        fetching.given_before = fetching.tried.is_empty().then_some(given);
        let deadline = Duration::from_millis(fetching.until_ms.saturating_sub(cx.now_ms));
        cx.actions.push(Action::Fetch(Fetch { ticket, peer: fetching.peer, blocks, deadline }));
        self.fetches.insert(ticket, fetching);
    }

    /// Takes a block out of its fetch; with it the fetch without blocks.
    fn end(&mut self, now_ms: u64, end: &Done) -> (Wanted, Fetching) {
        let fetching = self.fetches.get_mut(&end.ticket).expect("a fetch lasts until all of it has ended");
        let wanted = fetching.blocks[end.index as usize].take().expect("a block ends once");
        let is_late = end.result == Err(Fault::Timeout(Stage::Whole));
        let late_after = fetching.given_before.take_if(|_| is_late);
        fetching.open -= 1;
        let of = fetching.with(fetching.peer, []);
        if fetching.open == 0 {
            self.fetches.remove(&end.ticket);
        }
        self.directory.ended(now_ms, of.peer, &end.result);
        if end.result.is_ok() {
            self.directory.gave(now_ms, of.peer, of.bytes.into());
        }
        if let Some(given_before) = late_after {
            self.directory.late(now_ms, of.peer, millis(of.since), given_before);
        }
        (wanted, of)
    }

    /// Another peer that may have the begin of a run, and how many blocks of it.
    fn other_holder(&self, now_ms: u64, run: &[Digest], tried: &[PeerNumber]) -> Option<(PeerNumber, usize)> {
        let holders = self.directory.probe(now_ms, run);
        let other = holders.iter().find(|holder| !tried.contains(&holder.peer))?;
        Some((other.peer, other.run as usize))
    }

    /// Whether anybody can be asked for blocks of this engine.
    pub(crate) fn may_ask(&self, binding: &Binding, cx: &Context) -> bool {
        let is_retired = cx.namespaces.is_retired(binding.space());
        !binding.is_private() && !is_retired && self.directory.peers().next().is_some()
    }

    /// Whether anybody can be asked for a run.
    pub(crate) fn may_ask_for(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> bool {
        self.may_ask(binding, cx) && run.first().is_some_and(|hash| !self.distrusts(binding, hash))
    }

    /// Who may have the begin of a run, which is at `from` of what was asked for.
    pub(crate) fn probe(
        &self,
        binding: &Binding,
        from: usize,
        hashes: &[BlockHash],
        cx: &Context,
    ) -> Option<Span> {
        if !self.may_ask(binding, cx) {
            return None;
        }
        let digests: Vec<Digest> = hashes.iter().map(|hash| binding.block_digest(hash)).collect();
        let candidates = self.directory.probe(cx.now_ms, &digests);
        (!candidates.is_empty()).then_some(Span { from, candidates, blocks: Vec::new() })
    }

    /// Fetches those blocks of a span that have slots, in its order.
    pub(crate) fn fetch(&mut self, binding: &Binding, span: &Span, slots: &[SlotRef], cx: &mut Context) {
        let wanted = |(&(place, key), &slot): (&(u32, BlockKey), &SlotRef)| (place, Wanted { key, slot });
        let begun: Vec<(u32, Wanted)> = span.blocks.iter().zip(slots).map(wanted).collect();
        for (peer, blocks) in span.cut(begun, binding.block_bytes()) {
            self.post(Fetching::new(peer, cx.now, binding, blocks), cx);
        }
    }

    /// A block of a fetch has ended: it, its slot and, if it is here, what was fetched; none where it is `again` to be asked for.
    pub(crate) fn ended(
        &mut self,
        now_ms: u64,
        end: &Done,
        is_wished: impl FnOnce(&BlockKey) -> bool,
        again: &mut Again,
    ) -> Option<(BlockKey, SlotRef, Option<Fetched>)> {
        let (wanted, of) = self.end(now_ms, end);
        let fault = match end.result {
            Ok(checksum) => {
                self.stats.fetched_blocks += 1;
                self.stats.fetched_bytes += u64::from(of.bytes);
                return Some((wanted.key, wanted.slot, Some(Fetched { checksum, since: of.since })));
            }
            Err(fault) => fault,
        };
        self.stats.faults[stats::index(fault)] += 1;
        let may_ask = of.tried.len() + 1 < HOLDERS_MAX && now_ms < of.until_ms;
        if !may_ask || !is_wished(&wanted.key) {
            return Some((wanted.key, wanted.slot, None));
        }
        let (_, failed) = again.0.entry(end.ticket).or_insert_with(|| (of, BTreeMap::new()));
        failed.insert(end.index, wanted);
        None
    }

    /// Asks other peers for what one has failed to give: for each fetch the directory is looked at as often as for a run. The blocks
    /// that nobody else may have, and those behind them.
    pub(crate) fn fetch_again(&mut self, again: Again, cx: &mut Context) -> Vec<(BlockKey, SlotRef)> {
        let mut left = Vec::new();
        for (mut of, failed) in again.0.into_values() {
            of.tried.push(of.peer);
            let mut failed: Vec<Wanted> = failed.into_values().collect();
            for _ in 0..SPANS_MAX {
                let run: Vec<Digest> =
                    failed.iter().map(|wanted| Digest::of(&of.label(&wanted.key))).collect();
                let Some((peer, run)) = self.other_holder(cx.now_ms, &run, &of.tried) else { break };
                let fetching = of.with(peer, failed.drain(..run));
                self.stats.retried_blocks += fetching.open();
                self.post(fetching, cx);
                if failed.is_empty() {
                    break;
                }
            }
            left.extend(failed.into_iter().map(|wanted| (wanted.key, wanted.slot)));
        }
        left
    }

    /// Blocks that nobody waits for any more.
    pub(crate) fn late(&self, now_ms: u64) -> Vec<BlockKey> {
        let late = self.fetches.values().filter(|fetching| fetching.until_ms <= now_ms);
        late.flat_map(|fetching| fetching.blocks.iter().flatten()).map(|wanted| wanted.key).collect()
    }

    /// Ends every fetch early.
    pub(crate) fn cancel(&self, cx: &mut Context) {
        let tickets = self.fetches.keys();
        cx.actions.extend(tickets.map(|&ticket| Action::CancelFetch { ticket }));
    }
}
