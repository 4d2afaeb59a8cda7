//! The blocks of no request.

use std::collections::BTreeSet;
use std::ops::Range;

/// Blocks free to be taken.
#[derive(Debug)]
pub(super) struct FreeBlocks(BTreeSet<u32>);

// === impl FreeBlocks ===

impl FreeBlocks {
    pub(super) fn new(blocks: Range<u32>) -> Self {
        Self(blocks.collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// So many blocks, consecutive ones if there are any: an engine may read these without a copy. None: there are not so many.
    pub(super) fn take_blocks(&mut self, count: usize) -> Option<Vec<u32>> {
        if count > self.0.len() {
            return None;
        }
        let mut taken: Vec<u32> = Vec::with_capacity(count);
        for block in &self.0 {
            if taken.len() == count {
                break;
            }
            if taken.last().is_some_and(|last| last + 1 < *block) {
                taken.clear();
            }
            taken.push(*block);
        }
        if taken.len() < count {
            taken = self.0.iter().copied().take(count).collect();
        }
        taken.iter().for_each(|block| _ = self.0.remove(block));
        Some(taken)
    }

    pub(super) fn give_back(&mut self, blocks: &[u32]) {
        self.0.extend(blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_blocks_are_taken_if_there_are_any() {
        let mut free = FreeBlocks::new(1..9);
        assert_eq!(free.take_blocks(3), Some(vec![1, 2, 3]));
        free.give_back(&[2]);
        assert_eq!(free.take_blocks(2), Some(vec![4, 5]), "not 2, whose next one is taken");
        free.give_back(&[4]);
        assert_eq!(free.take_blocks(4), Some(vec![2, 4, 6, 7]), "none are so many in a row");
        assert_eq!((free.len(), free.take_blocks(2), free.take_blocks(0)), (1, None, Some(Vec::new())));
    }
}
