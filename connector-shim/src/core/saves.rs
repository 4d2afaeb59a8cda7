//! Unfinished saves: blocks in use by the sidecar, and their cancellation.

use std::collections::HashMap;

use shm_protocol::layout::COMPLETION_SLOTS;
use shm_protocol::request::Cancel;

/// The place of a block in a save.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct SaveOrigin {
    /// Operation of the save.
    pub(crate) op: u64,
    /// Index of the block in the save.
    pub(crate) index: u32,
}

/// The saves without a completion.
#[derive(Debug, Default)]
pub(crate) struct Saves {
    sources: HashMap<u32, SaveOrigin>,
    /// Further saves of blocks in `sources`: two requests have filled the same block. Rare, so a list.
    further: Vec<(u32, SaveOrigin)>,
    open: HashMap<u64, Vec<u32>>,
}

// === impl Saves ===

impl Saves {
    /// True if one more save may be posted: its completion must find room.
    pub(crate) fn has_room(&self) -> bool {
        self.open.len() < COMPLETION_SLOTS
    }

    /// Blocks that the sidecar may still read.
    pub(crate) fn block_count(&self) -> usize {
        self.sources.len() + self.further.len()
    }

    /// True if the sidecar may still read this block.
    pub(crate) fn has(&self, block: u32) -> bool {
        self.sources.contains_key(&block)
    }

    /// Notes a posted save.
    pub(crate) fn begin_save(&mut self, op: u64, blocks: Vec<u32>) {
        for (index, block) in blocks.iter().enumerate() {
            let source = SaveOrigin { op, index: index as u32 };
            if let Some(earlier) = self.sources.insert(*block, source) {
                self.further.push((*block, earlier));
            }
        }
        self.open.insert(op, blocks);
    }

    /// Notes a completion. Returns false if no such save was open.
    pub(crate) fn end_save(&mut self, op: u64) -> bool {
        let Some(blocks) = self.open.remove(&op) else { return false };
        self.further.retain(|(_, source)| source.op != op);
        for block in blocks {
            if self.sources.get(&block).is_some_and(|source| source.op == op) {
                self.sources.remove(&block);
                self.promote(block);
            }
        }
        true
    }

    fn promote(&mut self, block: u32) {
        if let Some(at) = self.further.iter().position(|(other, _)| *other == block) {
            let (_, source) = self.further.swap_remove(at);
            self.sources.insert(block, source);
        }
    }

    /// Removes every unfinished save of these blocks. Returns their cancels, in as few ranges as possible.
    pub(crate) fn cancel(&mut self, blocks: impl Iterator<Item = u32>) -> Vec<Cancel> {
        let mut sources = Vec::new();
        for block in blocks {
            while let Some(source) = self.sources.remove(&block) {
                sources.push(source);
                self.promote(block);
            }
        }
        sources.sort_unstable();
        let mut cancels: Vec<Cancel> = Vec::new();
        for SaveOrigin { op, index } in sources {
            match cancels.last_mut() {
                Some(last) if last.op == op && last.from + last.count == index => last.count += 1,
                _ => cancels.push(Cancel { op, from: index, count: 1 }),
            }
        }
        cancels
    }

    /// Forgets every source, and returns the number of their blocks. The completions are still to come.
    pub(crate) fn void(&mut self) -> usize {
        let blocks = self.block_count();
        self.sources.clear();
        self.further.clear();
        self.open.values_mut().for_each(Vec::clear);
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancels_are_coalesced_within_a_save() {
        let mut saves = Saves::default();
        saves.begin_save(5, vec![10, 11, 12, 13]);
        saves.begin_save(6, vec![20, 14]);
        let cancels = saves.cancel([14, 12, 11, 99, 10, 20].into_iter());
        let expected = [Cancel { op: 5, from: 0, count: 3 }, Cancel { op: 6, from: 0, count: 2 }];
        assert_eq!(cancels, expected);
        assert_eq!(saves.block_count(), 1);
        assert!(saves.cancel([10, 11].into_iter()).is_empty(), "each is given up once");
        assert!(saves.end_save(5) && !saves.end_save(5));
        assert_eq!(saves.block_count(), 0);
    }

    #[test]
    fn a_block_in_two_saves_is_given_up_in_both() {
        let mut saves = Saves::default();
        saves.begin_save(5, vec![7, 8]);
        saves.begin_save(6, vec![8]);
        let mut both = saves.cancel([8].into_iter());
        both.sort_by_key(|cancel| cancel.op);
        assert_eq!(both, [Cancel { op: 5, from: 1, count: 1 }, Cancel { op: 6, from: 0, count: 1 }]);
    }

    #[test]
    fn the_end_of_the_later_save_leaves_the_earlier() {
        let mut saves = Saves::default();
        saves.begin_save(5, vec![8]);
        saves.begin_save(6, vec![8]);
        assert_eq!(saves.block_count(), 2);
        saves.end_save(6);
        assert_eq!(saves.cancel([8].into_iter()), [Cancel { op: 5, from: 0, count: 1 }]);
    }

    #[test]
    fn void_saves_still_await_their_completions() {
        let mut saves = Saves::default();
        saves.begin_save(5, vec![1, 2]);
        assert_eq!(saves.void(), 2);
        assert_eq!(saves.block_count(), 0);
        assert!(saves.end_save(5), "its completion is no surprise");
    }
}
