//! Fetches: blocks missing here come into DRAM from peers.
//!
//! The part of a run held by peers is spread over several of them, each with a contiguous part. If a peer
//! fails to give a block, another one is asked for it, as long as an operation waits for it and time is left;
//! otherwise the run ends there.
//!
//! A fetched block is not offered to the SSD tier: its owner may have written it, and each node would write
//! it again. It is offered like any other when an engine here saves it again.

use std::collections::BTreeMap;
use std::time::Duration;

use mesh::digest::Digest;
use mesh::transport::{Fetch, FetchDone, FetchFault, FetchStage, Label, PeerNumber, StandingTerms};
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;
use tiers::dram::Dram;

use super::fruitless::WAITED_MS_MIN;
use super::{MeshPeers, stats};
use crate::core::Action;
use crate::core::arrivals::{PART, SourceLane, WAIT_MS_MAX, Waiter};
use crate::core::context::Context;
use crate::core::event::{JobEnd, TierJob};
use crate::core::namespaces::Binding;
use crate::core::tier::{Notice, ReadEnd, Tier, TierSpan};
use crate::system::clock::count_millis;

/// Limit of peers asked for a block, one after the other.
const HOLDERS_MAX: usize = 3;
/// Limit of searches of the directory for one run, beside the blocks here: peers with the same prompts have
/// long parts of it.
pub(super) const SPANS_MAX: usize = 4;
/// Bytes worth one more peer: as many as a stream of a transport takes at once.
const PART_BYTES_MIN: u64 = 4 << 20;

#[derive(Debug)]
pub(super) struct PeerFetch {
    peer: PeerNumber,
    /// True if its asks stand at the peer until the blocks are committed.
    stands: bool,
    /// When its blocks were first asked for.
    since: Duration,
    /// Its latest end; all waiters are gone by then.
    until_ms: u64,
    /// Peers without success for its blocks.
    tried: Vec<PeerNumber>,
    namespace: NamespaceDigest,
    bytes: u32,
    /// Its blocks; `None` for an ended one.
    blocks: Vec<Option<WantedBlock>>,
    /// Number of its unended blocks.
    open: usize,
    /// True if some blocks have come.
    gave: bool,
    /// True if it took the longest time, and its peer gave too little meanwhile.
    is_slow: bool,
    /// Bytes given by its peer before the fetch began, until it is late. `None` also after a request to
    /// another peer: it has only the rest of the time.
    given_before: Option<u64>,
}

/// Blocks not given by one peer and still awaited, by the ticket of their fetch and their place in it. Beside
/// each ticket stands the fetch without its blocks.
#[derive(Debug, Default)]
pub(super) struct Again(BTreeMap<u64, (PeerFetch, BTreeMap<u32, WantedBlock>)>);

/// A block on its way.
#[derive(Debug)]
pub(super) struct WantedBlock {
    pub(super) key: BlockKey,
    pub(super) slot: SlotRef,
}

// === impl PeerFetch ===

impl PeerFetch {
    fn new(peer: PeerNumber, now: Duration, binding: &Binding, blocks: Vec<WantedBlock>) -> Self {
        let bytes = u32::try_from(binding.block_bytes()).expect("it fits a segment of the pool");
        let (open, blocks) = (blocks.len(), blocks.into_iter().map(Some).collect());
        let until_ms = count_millis(now).saturating_add(WAIT_MS_MAX);
        let (since, tried, namespace) = (now, Vec::new(), binding.digest);
        Self {
            peer,
            stands: false,
            since,
            until_ms,
            tried,
            namespace,
            bytes,
            blocks,
            open,
            gave: false,
            is_slow: false,
            given_before: None,
        }
    }

    /// Returns a fetch of promised blocks, whose asks stand at the peer.
    pub(super) fn standing(
        peer: PeerNumber,
        now: Duration,
        binding: &Binding,
        blocks: Vec<WantedBlock>,
    ) -> Self {
        Self { stands: true, ..Self::new(peer, now, binding, blocks) }
    }

    pub(super) fn stands(&self) -> bool {
        self.stands
    }

    /// Returns the same fetch with other blocks, and maybe another peer.
    fn with(&self, peer: PeerNumber, blocks: impl IntoIterator<Item = WantedBlock>) -> Self {
        let blocks: Vec<_> = blocks.into_iter().map(Some).collect();
        Self { peer, open: blocks.len(), blocks, tried: self.tried.clone(), ..*self }
    }

    /// Returns the number of its unended blocks.
    pub(super) fn open_blocks(&self) -> u64 {
        self.open as u64
    }

    fn label(&self, key: &BlockKey) -> Label {
        Label { namespace: self.namespace, group: key.group, hash: key.hash, bytes: self.bytes }
    }
}

// === impl MeshPeers ===

impl MeshPeers {
    pub(super) fn post_fetch(
        &mut self,
        mut fetching: PeerFetch,
        standing: Option<StandingTerms>,
        cx: &mut Context,
    ) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        // Blocks that a peer does not have yet do not show its rate.
        let lane = SourceLane::Peer(fetching.peer);
        for wanted in fetching.blocks.iter().flatten().filter(|_| standing.is_none()) {
            cx.arrivals.send_for(&wanted.key, lane, fetching.bytes.into(), cx.now_ms);
        }
        self.stats.fetches += 1;
        let wanted = fetching.blocks.iter().flatten();
        let blocks: Vec<_> = wanted.map(|wanted| (fetching.label(&wanted.key), wanted.slot.offset)).collect();
        let given = self.directory.began(fetching.peer, blocks.len() as u32);
        fetching.given_before = fetching.tried.is_empty().then_some(given);
        let deadline = Duration::from_millis(fetching.until_ms.saturating_sub(cx.now_ms));
        let job = TierJob::Fetch(Fetch { ticket, peer: fetching.peer, blocks, deadline, standing });
        cx.actions.push(Action::Transfer { tier: self.number, job });
        self.fetches.insert(ticket, fetching);
    }

    /// Takes a block out of its fetch. Returns it, and the fetch without blocks.
    fn end_block(&mut self, end: &FetchDone, cx: &mut Context) -> (WantedBlock, PeerFetch) {
        let now_ms = cx.now_ms;
        let fetching = self.fetches.get_mut(&end.ticket).expect("a fetch lasts until all of it has ended");
        let wanted = fetching.blocks[end.index as usize].take().expect("a block ends once");
        let is_late = end.result == Err(FetchFault::Timeout(FetchStage::Whole));
        fetching.open -= 1;
        fetching.gave |= end.result.is_ok();
        let (peer, since_ms) = (fetching.peer, count_millis(fetching.since));
        self.directory.note_end(now_ms, peer, &end.result);
        if let Some(given_before) = fetching.given_before.take_if(|_| is_late) {
            fetching.is_slow = self.directory.late(now_ms, peer, since_ms, given_before);
        }
        let (of, is_last) = (fetching.with(peer, []), fetching.open == 0);
        if of.stands {
            self.forget_standing(Digest::of_label(&of.label(&wanted.key)));
        }
        if is_last {
            self.fetches.remove(&end.ticket);
            self.judge_waits(end, &of, cx);
        }
        match end.result {
            Ok(_) => self.directory.gave(now_ms, of.peer, of.bytes.into()),
            Err(FetchFault::Absent) if !of.stands => {
                self.directory.lacked(now_ms, of.peer, Digest::of_label(&of.label(&wanted.key)));
            }
            Err(_) => {}
        }
        (wanted, of)
    }

    /// Ends a block's part of the requested bytes, which standing blocks have none of.
    fn end_pace(&mut self, of: &PeerFetch, moved: bool, now_ms: u64) {
        if !of.stands {
            self.pace.end_read(of.bytes.into(), moved, now_ms);
        }
    }

    /// Judges an ended fetch: requests stop waiting for peers after fetches with no or too few blocks, and
    /// wait again once a fetch brings blocks.
    fn judge_waits(&mut self, last: &FetchDone, of: &PeerFetch, cx: &mut Context) {
        if of.gave && !of.is_slow {
            if self.fruitless.end_pause() {
                cx.actions
                    .push(Action::Warn("peers give blocks again, so requests wait for them".to_owned()));
            }
            return;
        }
        let waited = cx.now_ms.saturating_sub(count_millis(of.since)) >= WAITED_MS_MIN;
        if !waited || matches!(last.result, Err(FetchFault::Absent | FetchFault::Stopped)) {
            return;
        }
        self.stats.fruitless_fetches += 1;
        if self.fruitless.count_fetch(cx.now_ms) {
            let text = "the last fetches brought no block from any peer, or too few, so requests do not wait for peers. One fetch \
                        tries after 1 s, later after up to 30 s. Check this node's link to the other pods, and their load";
            cx.actions.push(Action::Warn(text.to_owned()));
        }
    }

    /// Returns another peer that may have the begin of a run, and the length of this part in blocks.
    fn other_holder(&self, now_ms: u64, run: &[Digest], tried: &[PeerNumber]) -> Option<(PeerNumber, usize)> {
        let holders = self.directory.probe(now_ms, run);
        let other = holders.iter().find(|holder| !tried.contains(&holder.peer))?;
        Some((other.peer, other.run as usize))
    }

    /// True if any peer can be asked for blocks of this engine.
    pub(in crate::core) fn may_ask(&self, binding: &Binding, cx: &Context) -> bool {
        let is_retired = cx.namespaces.is_retired(binding.space());
        let passes = self.fruitless.lets_pass(cx.now_ms, !self.fetches.is_empty());
        passes && !binding.is_private() && !is_retired && self.directory.peers().next().is_some()
    }

    /// True if any peer can be asked for a run.
    pub(super) fn may_ask_for(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> bool {
        self.may_ask(binding, cx) && run.first().is_some_and(|hash| !self.distrusts(binding, hash))
    }
}

impl Tier for MeshPeers {
    fn attach(&mut self, number: usize, dram: &mut Dram) {
        dram.watch();
        self.number = number;
        self.granted_bytes_max = dram.config().pool_bytes / PART;
    }

    fn source(&self) -> Source {
        Source::Peer
    }

    /// Returns the begin of a run at peers, with its possible holders. It ends before a distrusted block.
    fn find(&self, binding: &Binding, run: &[BlockHash], spans: usize, cx: &Context) -> Option<TierSpan> {
        if spans >= SPANS_MAX || !self.may_ask_for(binding, run, cx) {
            return None;
        }
        let digests: Vec<Digest> = run.iter().map(|hash| binding.block_digest(hash)).collect();
        let mut holders = self.directory.probe(cx.now_ms, &digests);
        let best = *holders.first()?;
        // The other holders are asked once these fail.
        holders.retain(|holder| holder.absence_level == best.absence_level);
        let run = &run[..best.run as usize];
        let reach = run.iter().position(|hash| self.distrusts(binding, hash)).unwrap_or(run.len());
        Some(TierSpan { reach, holders, ..TierSpan::default() })
    }

    fn may_have(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> bool {
        let digests = run.iter().map(|hash| binding.block_digest(hash));
        self.may_ask_for(binding, run, cx) && self.directory.may_have(cx.now_ms, digests)
    }

    fn lane(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> Option<SourceLane> {
        Some(SourceLane::Peer(self.find(binding, run, 0, cx)?.holders.first()?.peer))
    }

    /// True while the reads fit into a fetch's time, as far as the rate is known: later blocks would be late.
    fn begin_read(&mut self, _key: BlockKey, _slot: SlotRef, bytes: u64, parts: u64, now: Duration) -> bool {
        let takes = self.pace.takes(bytes, parts);
        if takes {
            self.pace.began(bytes, count_millis(now));
        }
        takes
    }

    /// Fetches the blocks of a span for which there are slots, in its order.
    fn read_span(&mut self, binding: &Binding, span: &TierSpan, slots: &[SlotRef], cx: &mut Context) {
        let wanted =
            |(&(place, key), &slot): (&(u32, BlockKey), &SlotRef)| (place, WantedBlock { key, slot });
        let begun: Vec<(u32, WantedBlock)> = span.blocks.iter().zip(slots).map(wanted).collect();
        for (peer, blocks) in cut_span(span, begun, binding.block_bytes()) {
            self.post_fetch(PeerFetch::new(peer, cx.now, binding, blocks), None, cx);
        }
    }

    fn end_job(&mut self, end: JobEnd, waits: &dyn Fn(&Waiter) -> bool, cx: &mut Context) -> Option<ReadEnd> {
        let JobEnd::Peer(end) = end else { unreachable!("no peer says {end:?}") };
        let (WantedBlock { key, slot }, of) = self.end_block(&end, cx);
        let read = ReadEnd { key, slot, since: of.since, checksum: end.result.ok() };
        if of.stands && end.result == Err(FetchFault::Absent) {
            return Some(read);
        }
        let Err(fault) = end.result else {
            self.end_pace(&of, true, cx.now_ms);
            self.stats.fetched_blocks += 1;
            self.stats.fetched_bytes += u64::from(of.bytes);
            return Some(read);
        };
        self.stats.faults[stats::index_fault(fault)] += 1;
        let may_ask =
            !of.stands && of.tried.len() + 1 < HOLDERS_MAX && cx.now_ms < of.until_ms && !cx.draining;
        if !may_ask || !cx.arrivals.is_wished(&key, waits) {
            self.end_pace(&of, false, cx.now_ms);
            return Some(read);
        }
        let (_, failed) = self.again.0.entry(end.ticket).or_insert_with(|| (of, BTreeMap::new()));
        failed.insert(end.index, WantedBlock { key, slot });
        None
    }

    /// Asks other peers for blocks not given by one: for each fetch, the directory is searched as often as
    /// for a run. Returns the blocks without another possible holder, and those behind them.
    fn retry(&mut self, cx: &mut Context) -> Vec<ReadEnd> {
        let mut left = Vec::new();
        for (mut of, failed) in std::mem::take(&mut self.again).0.into_values() {
            of.tried.push(of.peer);
            let mut failed: Vec<WantedBlock> = failed.into_values().collect();
            for _ in 0..SPANS_MAX {
                let run: Vec<Digest> =
                    failed.iter().map(|wanted| Digest::of_label(&of.label(&wanted.key))).collect();
                let Some((peer, run)) = self.other_holder(cx.now_ms, &run, &of.tried) else { break };
                let fetching = of.with(peer, failed.drain(..run));
                self.stats.retried_blocks += fetching.open_blocks();
                self.post_fetch(fetching, None, cx);
                if failed.is_empty() {
                    break;
                }
            }
            failed.iter().for_each(|_| self.end_pace(&of, false, cx.now_ms));
            let end = |WantedBlock { key, slot }| ReadEnd { key, slot, since: of.since, checksum: None };
            left.extend(failed.into_iter().map(end));
        }
        left
    }

    fn late(&mut self, now_ms: u64) -> Vec<BlockKey> {
        let late = self.fetches.values().filter(|fetching| fetching.until_ms <= now_ms);
        late.flat_map(|fetching| fetching.blocks.iter().flatten()).map(|wanted| wanted.key).collect()
    }

    fn take_notice(&mut self, notice: Notice<'_>, cx: &mut Context) {
        match notice {
            Notice::Changed(changes) => {
                self.tell_changes(changes, cx);
                self.answer_committed(changes, cx);
            }
            Notice::Refuted(keys) => self.distrust(keys, cx),
            // Every fetch ends early, and no ask stands any longer.
            Notice::Draining => {
                self.answer_all_kept(cx);
                let cancel =
                    |&ticket| Action::Transfer { tier: self.number, job: TierJob::CancelFetch { ticket } };
                cx.actions.extend(self.fetches.keys().map(cancel));
            }
            _ => {}
        }
    }

    /// True while a peer reads from this pool.
    fn busy(&self) -> bool {
        !self.grants.is_empty()
    }
}

/// Cuts the begun blocks of a span, in its order, into parts for its holders: each may have its own part, so
/// holders with the shortest runs get the first ones.
fn cut_span<T>(span: &TierSpan, begun: Vec<(u32, T)>, block_bytes: u64) -> Vec<(PeerNumber, Vec<T>)> {
    let worth = (begun.len() as u64 * block_bytes).div_ceil(PART_BYTES_MIN).max(1);
    let count = span.holders.len().min(usize::try_from(worth).unwrap_or(usize::MAX));
    let mut parts = Vec::with_capacity(count);
    let mut rest = begun.into_iter().peekable();
    for (behind, holder) in span.holders[..count].iter().enumerate().rev() {
        let share = rest.len().div_ceil(behind + 1);
        let mut part = Vec::with_capacity(share);
        while part.len() < share
            && let Some((_, block)) = rest.next_if(|(place, _)| *place < holder.run)
        {
            part.push(block);
        }
        if !part.is_empty() {
            parts.push((holder.peer, part));
        }
    }
    assert!(rest.next().is_none(), "the best holder may have all of it");
    parts
}
