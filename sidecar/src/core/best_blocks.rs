//! Lists of the best blocks of a namespace. Peers fetch them before a request asks for them: after their start, or
//! while this sidecar is about to end.
//!
//! - A list names blocks of one published namespace in DRAM; no block comes before its parent.
//! - A serving sidecar leaves out the blocks announced by the peer. A leaving one lists the blocks of no peer, each in
//!   one list.
//! - The walk over DRAM takes many steps. A block gone meanwhile may be listed: it is absent when a peer asks for it.

use std::collections::HashMap;

use mesh::listed::{BlocksAsk, LISTED_MAX, ListedBlock};
use mesh::transport::PeerNumber;
use shm_protocol::key::BlockKey;
use tiers::dram::{RankedBlock, Walk};

use super::Base;
use super::census::slots_of_step;
use super::namespaces::Space;

/// Most blocks of a list, and most blocks found before the best of them are chosen: some milliseconds of sorting.
const FOUND_MAX: usize = 2 * LISTED_MAX;

/// A list under way.
#[derive(Debug)]
pub struct BestBlocks {
    asker: Option<PeerNumber>,
    ask: BlocksAsk,
    /// `None` once all blocks are looked at.
    at: Option<Walk>,
    found: Vec<RankedBlock>,
}

// === impl BestBlocks ===

impl BestBlocks {
    pub fn new(asker: Option<PeerNumber>, ask: BlocksAsk) -> Self {
        Self { asker, ask, at: Some(Walk::default()), found: Vec::new() }
    }

    /// Looks at some more blocks. Returns false once all are looked at.
    pub(super) fn step(&mut self, base: &Base) -> bool {
        let (cx, mesh) = (&base.cx, base.sources.mesh());
        let space = Space { digest: self.ask.namespace, block_bytes: self.ask.block_bytes };
        let number = cx.namespaces.known(space).filter(|number| cx.namespaces.shared(*number).is_some());
        let (Some(at), Some(namespace), Some(mesh)) = (self.at, number, mesh) else { return false };
        let slots = slots_of_step(mesh.directory().peer_count());
        self.at = cx.dram.walk_ranked(at, slots, |block| {
            if block.key.namespace == namespace && mesh.may_list(&block.key, self.asker, cx) {
                self.found.push(*block);
            }
        });
        if self.found.len() > FOUND_MAX {
            self.found.select_nth_unstable_by(LISTED_MAX, compare_ranks);
            self.found.truncate(LISTED_MAX);
        }
        self.at.is_some()
    }

    /// Returns the list.
    pub(super) fn finish(mut self, base: &mut Base) -> Vec<ListedBlock> {
        self.found.sort_unstable_by(compare_ranks);
        let most = (self.ask.blocks as usize).min(LISTED_MAX);
        let (keys, listed) = list_chains(&self.found, most);
        if let Some(mesh) = base.sources.mesh_mut() {
            mesh.note_listed(keys, &base.cx);
        }
        listed
    }
}

/// The likelier to be used comes first; among equals the one filled before, as a parent mostly is.
fn compare_ranks(one: &RankedBlock, other: &RankedBlock) -> std::cmp::Ordering {
    other.uses.total_cmp(&one.uses).then(one.generation.cmp(&other.generation))
}

/// Lists the first blocks of an order, each behind those before it in its chain.
fn list_chains(order: &[RankedBlock], most: usize) -> (Vec<BlockKey>, Vec<ListedBlock>) {
    let by_generation: HashMap<u64, &RankedBlock> =
        order.iter().map(|block| (block.generation, block)).collect();
    let mut places: HashMap<u64, u32> = HashMap::new();
    let (mut keys, mut listed) = (Vec::new(), Vec::new());
    for block in order {
        // A parent is worth as much as the best block behind it.
        let uses = block.uses;
        let above = |block: &&RankedBlock| by_generation.get(&block.parent?).copied();
        let line = std::iter::successors(Some(block), above);
        let line: Vec<_> = line.take_while(|block| !places.contains_key(&block.generation)).collect();
        for block in line.into_iter().rev() {
            if listed.len() == most {
                return (keys, listed);
            }
            let parent = block.parent.and_then(|parent| places.get(&parent).copied());
            places.insert(block.generation, listed.len() as u32);
            keys.push(block.key);
            listed.push(ListedBlock { hash: block.key.hash, parent, uses });
        }
    }
    (keys, listed)
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    fn ranked(generation: u64, parent: Option<u64>, uses: f32) -> RankedBlock {
        let key = BlockKey { namespace: 1, group: 0, hash: BlockHash::from_words([generation, 0, 0, 0]) };
        RankedBlock { key, generation, parent, uses }
    }

    fn list(mut blocks: Vec<RankedBlock>, most: usize) -> Vec<(u64, Option<u32>)> {
        blocks.sort_unstable_by(compare_ranks);
        let (keys, listed) = list_chains(&blocks, most);
        assert!(keys.iter().zip(&listed).all(|(key, block)| key.hash == block.hash));
        listed.iter().map(|block| (block.hash.words()[0], block.parent)).collect()
    }

    #[test]
    fn a_chain_comes_from_its_root_and_the_best_chain_first() {
        let blocks = vec![
            ranked(1, None, 0.1),
            ranked(2, Some(1), 0.1),
            ranked(3, None, 0.2),
            ranked(4, Some(3), 0.9),
            ranked(5, Some(99), 0.5),
        ];
        assert_eq!(list(blocks.clone(), 9), [(3, None), (4, Some(0)), (5, None), (1, None), (2, Some(3))]);
        assert_eq!(list(blocks, 3), [(3, None), (4, Some(0)), (5, None)]);
    }
}
