//! Standing asks of peers: for blocks of a prompt promised by an engine here, before they are committed.
//!
//! A standing ask is answered once, as any other ask: when all its blocks are committed, when its patience, its
//! promise or its connection has ended, or at drain. Blocks not here by then are denied. The ask holds no slot
//! before its answer.
//!
//! The asks and their missing blocks are limited, and a peer's share is half of the room left by the others.
//! An ask beyond its share is answered at once.

use std::collections::{BTreeMap, BTreeSet};

use mesh::transport::{Label, PeerNumber, StandingTerms};
use shm_protocol::key::BlockKey;

use super::MeshPeers;
use crate::core::SessionId;
use crate::core::context::Context;
use crate::core::namespaces::Space;

/// Limit of the asks of all peers: half of the waiting asks of a transport.
const ASKS_MAX: usize = 2048;
/// Limit of their missing blocks.
const BLOCKS_MAX: usize = 1 << 14;

/// All standing asks here.
#[derive(Debug, Default)]
pub(super) struct KeptAsks {
    asks: BTreeMap<u64, KeptAsk>,
    /// Each missing block, with each ask for it.
    missing: BTreeSet<(BlockKey, u64)>,
}

/// A standing ask of a peer.
#[derive(Debug)]
pub(in crate::core) struct KeptAsk {
    peer: PeerNumber,
    blocks: Vec<Label>,
    /// Its uncommitted blocks.
    missing: BTreeSet<BlockKey>,
    /// Its last block, with the block's place in the prompt. The key depends on all blocks before it.
    pub(in crate::core) last: (BlockKey, u32),
    /// The scheduler and the log of the promise at the begin; `None` if saves were filling its blocks.
    pub(in crate::core) promise: Option<(SessionId, u32)>,
    pub(in crate::core) until_ms: u64,
}

// === impl KeptAsk ===

impl KeptAsk {
    /// Returns an ask, not looked up so far. `None`: its namespace is unknown.
    pub(in crate::core) fn new(
        peer: PeerNumber,
        blocks: Vec<Label>,
        terms: StandingTerms,
        cx: &Context,
    ) -> Option<Self> {
        let key = |label: &Label| {
            let space = Space { digest: label.namespace, block_bytes: label.bytes.into() };
            let namespace = cx.namespaces.known(space)?;
            Some(BlockKey { namespace, group: label.group, hash: label.hash })
        };
        let keys: Vec<BlockKey> = blocks.iter().map(key).collect::<Option<_>>()?;
        let last = (*keys.last()?, terms.place.checked_add(keys.len() as u32 - 1)?);
        let missing = keys.into_iter().filter(|key| !cx.dram.is_kept(key)).collect();
        let until_ms = cx.now_ms.saturating_add(terms.patience_ms.into());
        Some(Self { peer, blocks, missing, last, promise: None, until_ms })
    }

    /// True if saves are filling all of its missing blocks.
    pub(in crate::core) fn is_filling(&self, cx: &Context) -> bool {
        self.missing.iter().all(|key| cx.dram.filling(key).is_some())
    }
}

// === impl KeptAsks ===

impl KeptAsks {
    /// True if there is room for one more ask of its peer.
    fn has_room(&self, ask: &KeptAsk) -> bool {
        let of_peer = self.asks.values().filter(|other| other.peer == ask.peer);
        let (asks, blocks) =
            of_peer.fold((0, 0), |(asks, blocks), other| (asks + 1, blocks + other.missing.len()));
        let share = |max: usize, all: usize, own: usize| (max - (all - own)) / 2;
        asks < share(ASKS_MAX, self.asks.len(), asks)
            && blocks + ask.missing.len() <= share(BLOCKS_MAX, self.missing.len(), blocks)
    }

    fn insert(&mut self, number: u64, ask: KeptAsk) {
        self.missing.extend(ask.missing.iter().map(|key| (*key, number)));
        self.asks.insert(number, ask);
    }

    fn remove(&mut self, number: u64) -> Option<KeptAsk> {
        let ask = self.asks.remove(&number)?;
        ask.missing.iter().for_each(|key| _ = self.missing.remove(&(*key, number)));
        Some(ask)
    }

    /// Notes a committed block. Returns the asks without a missing block now.
    fn commit(&mut self, key: &BlockKey) -> Vec<u64> {
        let of_block = self.missing.range((*key, 0)..=(*key, u64::MAX));
        let numbers: Vec<u64> = of_block.map(|(_, number)| *number).collect();
        let lacks_none = |number: &u64| {
            self.missing.remove(&(*key, *number));
            let ask = self.asks.get_mut(number).expect("both know it");
            ask.missing.remove(key);
            ask.missing.is_empty()
        };
        numbers.into_iter().filter(lacks_none).collect()
    }
}

// === impl MeshPeers ===

impl MeshPeers {
    /// Keeps an ask until its blocks are committed, if all of the missing ones are promised or being filled and
    /// there is room; otherwise answers it now.
    pub(in crate::core) fn keep_ask(&mut self, number: u64, ask: KeptAsk, cx: &mut Context) {
        let is_coming = ask.promise.is_some() || ask.is_filling(cx);
        if ask.missing.is_empty() || !is_coming || cx.draining || !self.kept_asks.has_room(&ask) {
            return self.grant_blocks(number, ask.peer, &ask.blocks, cx);
        }
        self.stats.kept_asks += 1;
        self.kept_asks.insert(number, ask);
    }

    /// Returns the standing asks here.
    pub(in crate::core) fn kept_asks(&self) -> impl Iterator<Item = (u64, &KeptAsk)> {
        self.kept_asks.asks.iter().map(|(number, ask)| (*number, ask))
    }

    /// Answers a standing ask with its blocks here. Without effect if it was answered before.
    pub(in crate::core) fn answer_kept(&mut self, number: u64, cx: &mut Context) {
        if let Some(ask) = self.kept_asks.remove(number) {
            self.grant_blocks(number, ask.peer, &ask.blocks, cx);
        }
    }

    /// Answers the standing asks without a missing block after an event's changes in DRAM.
    pub(super) fn answer_committed(&mut self, changes: &[(BlockKey, bool)], cx: &mut Context) {
        if self.kept_asks.asks.is_empty() {
            return;
        }
        for (key, _) in changes.iter().filter(|(_, added)| *added) {
            for number in self.kept_asks.commit(key) {
                self.stats.granted_behind += 1;
                self.answer_kept(number, cx);
            }
        }
    }

    /// Answers every standing ask with its blocks here.
    pub(super) fn answer_all_kept(&mut self, cx: &mut Context) {
        let numbers: Vec<u64> = self.kept_asks.asks.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.answer_kept(number, cx));
    }
}
