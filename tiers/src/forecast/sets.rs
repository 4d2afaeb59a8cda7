//! Sets of cache groups in the miniatures.

use std::ops::Range;

use shm_protocol::key::{BlockHash, BlockKey, GROUP};

use super::{BLOCK_BYTES, Endless, Forecast, HALVES, Miniature};
use crate::dram::{BlockAccount, Ending, HolderId};
use crate::index::KeyPrint;

/// A group's blocks read at the end of a hit.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum GroupReads {
    /// All of them.
    All,
    /// So many last ones.
    Last(usize),
}

/// A group beside the full attention of its set. A block has as many tokens, so it has the same key.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct OtherGroup {
    pub namespace: u32,
    pub reads: GroupReads,
}

/// Keys of a request saved together, all among its own.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedKeys {
    pub keys: Range<usize>,
    /// An earlier key of the request, given up for them.
    pub replaced: Option<usize>,
}

/// An ended request in a group beside the full attention of its set.
#[derive(Copy, Clone, Debug)]
pub struct OtherRequest<'a> {
    pub namespace: u32,
    /// All of its keys.
    pub keys: &'a [BlockHash],
    pub saved: &'a [SavedKeys],
    /// End of the keys asked for: the last boundary of the prompt.
    pub asked_end: usize,
    pub reads: GroupReads,
    pub ending: Ending,
    /// Bytes of a block by those of a block of full attention.
    pub size: f64,
}

/// A room, as far as a hit needs it.
trait Room {
    /// True if a block of this key is here.
    fn has(&self, namespace: u32, hash: &BlockHash) -> bool;

    /// Returns the last end of a hit from `from` up to `run` with the blocks read there in every group.
    fn end_of_hit(&self, chain: &[BlockHash], from: usize, run: usize, others: &[OtherGroup]) -> usize {
        let mut end = run;
        while end > from {
            let missing = |other: &OtherGroup| {
                other
                    .reads
                    .at(end)
                    .filter(|at| *at >= from)
                    .find(|at| !self.has(other.namespace, &chain[*at]))
            };
            // Every end beyond a missing block reads it, as far as this one does.
            let Some(lower) = others.iter().filter_map(missing).min() else { break };
            end = lower;
        }
        end.max(from)
    }
}

// === impl GroupReads ===

impl GroupReads {
    /// The blocks read at the end of a hit.
    fn at(self, end: usize) -> Range<usize> {
        match self {
            Self::All => 0..end,
            Self::Last(blocks) => end.saturating_sub(blocks)..end,
        }
    }
}

// === impl OtherRequest ===

impl OtherRequest<'_> {
    /// The keys saved in any room: the engine has the blocks read at the prompt's last boundary, found or computed.
    fn saves(&self) -> impl Iterator<Item = SavedKeys> + '_ {
        let prompt = self.reads.at(self.asked_end.min(self.keys.len()));
        std::iter::once(SavedKeys { keys: prompt, replaced: None }).chain(self.saved.iter().cloned())
    }
}

// === impl Forecast ===

impl Forecast {
    /// Records an ended request of a set, by the keys of its full attention.
    pub fn lead(
        &mut self,
        namespace: u32,
        keys: &[BlockHash],
        asked: Range<usize>,
        ending: Ending,
        others: &[OtherGroup],
    ) {
        if self.stride > 1 {
            return;
        }
        let end = asked.end.min(keys.len());
        let start = asked.start.min(end);
        let mut note = |room: usize, found: usize| self.found[room] += 2 * (found.min(end) - start) as u64;
        for (at, room) in self.rooms.iter_mut().enumerate() {
            let run = room.run(namespace, keys, start).min(end);
            note(at, room.end_of_hit(keys, start, run, others));
            room.request(namespace, keys, start, ending);
        }
        let run = self.endless.run(namespace, keys, start).min(end);
        note(HALVES.len(), self.endless.end_of_hit(keys, start, run, others));
        self.endless.remember(namespace, keys);
        self.asked += (end - start) as u64;
    }

    /// Records an ended request of a set in another group.
    pub fn beside(&mut self, request: &OtherRequest<'_>) {
        if self.stride > 1 || request.keys.is_empty() {
            return;
        }
        for room in &mut self.rooms {
            room.save_some(request);
        }
        for SavedKeys { keys, .. } in request.saves() {
            self.endless.remember(request.namespace, &request.keys[keys]);
        }
    }
}

// === impl Room ===

impl Room for Miniature {
    fn has(&self, namespace: u32, hash: &BlockHash) -> bool {
        self.dram.is_kept(&BlockKey { namespace, group: GROUP, hash: *hash })
    }
}

impl Room for Endless {
    fn has(&self, namespace: u32, hash: &BlockHash) -> bool {
        self.known.contains(&KeyPrint::new(namespace, GROUP, hash))
    }
}

// === impl Miniature ===

impl Miniature {
    /// Keeps the saved keys of a chain as the sidecar does for blocks without need of a parent.
    fn save_some(&mut self, request: &OtherRequest<'_>) {
        let OtherRequest { namespace, keys: chain, reads, ending, size, .. } = *request;
        let block_bytes = (BLOCK_BYTES as f64 * size).max(1.0) as u64;
        let key = |at: usize| BlockKey { namespace, group: GROUP, hash: chain[at] };
        // A request goes on from one state.
        let has_states = reads == GroupReads::Last(1);
        let mut prompt = 0..request.asked_end.min(chain.len());
        let read = prompt.rfind(|at| has_states && self.has(namespace, &chain[*at]));
        for SavedKeys { keys, replaced } in request.saves() {
            for at in keys {
                let slot = self.dram.begin_fill(key(at), block_bytes, BlockAccount::default());
                self.dram.drain_evicted().for_each(drop);
                self.dram.drain_assigned().for_each(drop);
                let Ok(slot) = slot else { continue };
                match at {
                    0 => self.dram.commit(slot),
                    _ => self.dram.commit_apart(slot, &key(at - 1)),
                };
                if let Some(replaced) = replaced {
                    self.dram.drop_replaced(HolderId::NOBODY, &key(replaced));
                    self.dram.drain_evicted().for_each(drop);
                }
            }
        }
        let ending = Ending { unread: read.unwrap_or(0), ..ending };
        self.dram.end_chain(HolderId::NOBODY, namespace, chain, ending);
    }
}
