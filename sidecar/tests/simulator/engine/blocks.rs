//! The KV blocks and the prefix cache of the engine. As in vLLM, a block is listed under its hash when the step to fill it is scheduled.

use shm_protocol::key::BlockHash;

use crate::ctx::Ctx;

/// Every block but 0, the null block.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Users of each block.
    users: Vec<u32>,
    /// The listed hash of each block.
    listed: Vec<Option<BlockHash>>,
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

    /// Returns whether `count` blocks can be taken once the `own` ones are in use.
    pub(super) fn has_room(&self, count: usize, own: &[u32]) -> bool {
        let unused = own.iter().filter(|block| self.users[**block as usize] == 0).count();
        self.free.len() >= count + unused
    }

    /// Returns whether no block is in use.
    pub(super) fn are_unused(&self) -> bool {
        self.free.len() + 1 == self.users.len()
    }

    /// Returns the blocks listed under the leading hashes.
    pub(super) fn find(&self, keys: &[BlockHash]) -> Vec<u32> {
        let find = |key: &BlockHash| self.listed.iter().position(|listed| listed.as_ref() == Some(key));
        keys.iter().map_while(|key| find(key).map(|block| block as u32)).collect()
    }

    /// One more user of a block.
    pub(super) fn share(&mut self, block: u32) {
        self.users[block as usize] += 1;
        self.free.retain(|free| *free != block);
    }

    /// Takes a free block off the list. Mostly the block freed last is used first, so saves in flight meet its next use.
    pub(super) fn take(&mut self, ctx: &mut Ctx) -> u32 {
        let last = self.free.len() - 1;
        let at = if ctx.rng.one_in(4) { ctx.rng.below(self.free.len() as u64) as usize } else { last };
        let block = self.free.swap_remove(at);
        self.listed[block as usize] = None;
        self.users[block as usize] = 1;
        block
    }

    /// One user less of each of these.
    pub(super) fn release(&mut self, blocks: &[u32]) {
        for block in blocks {
            let users = &mut self.users[*block as usize];
            *users -= 1;
            if *users == 0 {
                self.free.push(*block);
            }
        }
    }

    /// Adds a user to a used block without a hash, so no request is given it; false for other blocks.
    pub(super) fn hold(&mut self, block: u32) -> bool {
        let holds = self.users[block as usize] > 0 && self.listed[block as usize].is_none();
        self.users[block as usize] += u32::from(holds);
        holds
    }

    pub(super) fn list(&mut self, block: u32, key: BlockHash) {
        self.listed[block as usize] = Some(key);
    }

    pub(super) fn lists(&self, block: u32) -> bool {
        self.listed[block as usize].is_some()
    }

    /// No block is found any more.
    pub(super) fn forget(&mut self) {
        self.listed.fill(None);
    }
}
