//! The KV blocks and the prefix cache of the engine. As in vLLM, a block is listed under its hash once the
//! step to fill it is scheduled.

use shm_protocol::key::BlockHash;

use crate::ctx::Ctx;

/// The entry of a block table for a block before a window.
pub(super) const NULL_BLOCK: u32 = 0;

/// All blocks except the null block.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Users of each block.
    users: Vec<u32>,
    /// The listed hash of each block, and its cache group.
    listed: Vec<Option<(usize, BlockHash)>>,
    free: Vec<u32>,
}

// === impl Blocks ===

impl Blocks {
    pub(super) fn new(count: u32) -> Self {
        let listed = vec![None; count as usize];
        Self { users: vec![0; count as usize], listed, free: (1..count).collect() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.is_empty()
    }

    /// Returns true if `count` blocks can be taken once the `own` ones are in use.
    pub(super) fn has_room(&self, count: usize, own: &[Vec<u32>]) -> bool {
        let is_unused = |block: &&u32| **block != NULL_BLOCK && self.users[**block as usize] == 0;
        let unused = own.iter().flatten().filter(is_unused).count();
        self.free.len() >= count + unused
    }

    /// Returns true if no block is in use.
    pub(super) fn are_unused(&self) -> bool {
        self.free.len() + 1 == self.users.len()
    }

    /// Returns the blocks listed under the leading hashes in a group.
    pub(super) fn find(&self, group: usize, keys: &[BlockHash]) -> Vec<u32> {
        keys.iter().map_while(|key| self.find_one(group, key)).collect()
    }

    /// Returns the block listed under a hash in a group.
    pub(super) fn find_one(&self, group: usize, key: &BlockHash) -> Option<u32> {
        let place = self.listed.iter().position(|listed| *listed == Some((group, *key)));
        place.map(|block| block as u32)
    }

    /// Adds a user to a block, except to the null block.
    pub(super) fn share(&mut self, block: u32) {
        if block == NULL_BLOCK {
            return;
        }
        self.users[block as usize] += 1;
        self.free.retain(|free| *free != block);
    }

    /// Takes a free block. Usually it is the last one freed, so saves in flight meet its next use.
    pub(super) fn take(&mut self, ctx: &mut Ctx) -> u32 {
        let last = self.free.len() - 1;
        let at = if ctx.rng.one_in(4) { ctx.rng.below(self.free.len() as u64) as usize } else { last };
        let block = self.free.swap_remove(at);
        self.listed[block as usize] = None;
        self.users[block as usize] = 1;
        block
    }

    /// Returns the blocks that are likely to be taken next.
    pub(super) fn next_taken(&self, count: u32) -> Vec<u32> {
        self.free.iter().rev().take(count as usize).copied().collect()
    }

    /// Removes a user from each of these blocks, except from the null block.
    pub(super) fn release(&mut self, blocks: &[u32]) {
        for block in blocks.iter().filter(|block| **block != NULL_BLOCK) {
            let users = &mut self.users[*block as usize];
            *users -= 1;
            if *users == 0 {
                self.free.push(*block);
            }
        }
    }

    /// Adds a user to a used block without a hash, so no request gets it; returns false for other blocks.
    pub(super) fn hold(&mut self, block: u32) -> bool {
        let holds = self.users[block as usize] > 0 && self.listed[block as usize].is_none();
        self.users[block as usize] += u32::from(holds);
        holds
    }

    pub(super) fn list(&mut self, group: usize, block: u32, key: BlockHash) {
        self.listed[block as usize] = Some((group, key));
    }

    pub(super) fn lists(&self, block: u32) -> bool {
        self.listed[block as usize].is_some()
    }

    /// Empties the prefix cache.
    pub(super) fn forget(&mut self) {
        self.listed.fill(None);
    }
}
