//! Saved blocks are searched for non-finite numbers (NaN, infinity): a block with one is kept for no later request.
//!
//! A save is committed once its search ended. Blocks for another engine are committed before the search, because the engine awaits them.
//! They are held during the search, and removed if it finds something. A prompt's tail is exempt: any bytes lie behind its tokens.
//! Pages of mere bytes, such as quantised ones with scales, are not searched.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::dram::HolderId;

use super::saves::SaveEvent;
use super::{Action, Base, Binding, OpKey, SessionId, Transfers};
use crate::core::inspection::{InspectedBlocks, Inspection};

/// Bytes searched by a thread at once: the threads share a large save, whose blocks take room until its last search ended.
const SEARCH_BYTES: u64 = 32 << 20;

/// The searches of saves.
#[derive(Debug, Default)]
pub(super) struct Scans(BTreeMap<OpKey, Scan>);

/// The search of a save.
#[derive(Debug)]
struct Scan {
    /// The committed blocks among the searched ones.
    committed: Vec<(SlotRef, BlockKey)>,
    /// Number of parts whose search runs.
    running: usize,
    /// Blocks with a non-finite number, in the other parts.
    broken: Vec<SlotRef>,
}

// === impl Scans ===

impl Scans {
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    pub(super) fn is_running(&self, save: OpKey) -> bool {
        self.0.contains_key(&save)
    }
}

// === impl Transfers ===

impl Transfers {
    /// Begins a search of these slots, with the committed blocks among them. False: pages of mere bytes are
    /// not searched.
    pub(super) fn scan(
        &mut self,
        save: OpKey,
        binding: Binding,
        slots: Vec<SlotRef>,
        committed: Vec<(SlotRef, BlockKey)>,
        base: &mut Base,
    ) -> bool {
        let rank = base.engines.ranks(save.0).next();
        let Some((_, rank)) = rank.filter(|(_, rank)| rank.layers.has_numbers() && !slots.is_empty()) else {
            return false;
        };
        let (layers, shards) = (Arc::clone(&rank.layers), binding.shards);
        for (_, key) in &committed {
            base.cx.dram.hold(key, HolderId::NOBODY).expect("committed in this event");
        }
        let parts = slots.chunks((SEARCH_BYTES / binding.block_bytes()).max(1) as usize);
        let running = parts.len();
        base.cx.actions.extend(parts.map(|part| {
            let (blocks, layers) = (InspectedBlocks::Alone(part.to_vec()), Arc::clone(&layers));
            Action::Inspect(Inspection { save, blocks, shards, layers, sums: false })
        }));
        self.scans.0.insert(save, Scan { committed, running, broken: Vec::new() });
        true
    }

    /// Ends the search of a part. With the last one, committed blocks with a non-finite number are removed.
    pub(crate) fn scanned(&mut self, save: OpKey, broken: &[SlotRef], base: &mut Base) {
        let scan = self.scans.0.get_mut(&save).expect("a search ends once");
        scan.running -= 1;
        scan.broken.extend(broken);
        if scan.running > 0 {
            return;
        }
        let Scan { committed, broken, .. } = self.scans.0.remove(&save).expect("found above");
        if committed.is_empty() {
            return self.change_save(save, SaveEvent::Scanned(broken), base);
        }
        committed.iter().for_each(|(slot, _)| base.cx.dram.unhold(*slot, HolderId::NOBODY));
        let keys = committed.iter().filter(|(slot, _)| broken.contains(slot)).map(|(_, key)| *key);
        let keys: BTreeSet<BlockKey> = keys.collect();
        if !keys.is_empty() {
            count_broken(save.0, broken.len() as u64, base);
            base.sources.remove(&keys, &mut base.cx);
            base.cx.dram.end_removal();
            base.cx.apply_evictions();
        }
    }
}

/// Counts blocks dropped for a non-finite number; at the first of all, a warning names the engine.
pub(super) fn count_broken(session: SessionId, blocks: u64, base: &mut Base) {
    if blocks == 0 {
        return;
    }
    if base.cx.stats.not_finite_blocks == 0 {
        let engine = base.engines.name(session).unwrap_or("of an ended session");
        base.cx.actions.push(Action::Warn(format!(
            "engine {engine} computed KV with non-finite numbers (NaN or infinity), and {blocks} blocks are not kept. Its \
             answers to such prompts are wrong with and without Pillion: check its GPU, its weights and their quantisation, then \
             restart it. pillion_not_finite_blocks_total counts these blocks; this line is logged once"
        )));
    }
    base.cx.stats.not_finite_blocks += blocks;
}
