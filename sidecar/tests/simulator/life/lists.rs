//! Lists of blocks between pods: peers answer questions for their best blocks, with blocks that they may not have,
//! and ask for those of this node.

use std::collections::BTreeSet;

use mesh::listed::{BlocksAsk, ListedBlock};
use mesh::transport::PeerNumber;
use shm_protocol::key::BlockHash;
use sidecar::core::{BestBlocks, MeshEvent};

use super::Life;
use super::mesh::Mesh;
use crate::ctx::Ctx;

// === impl Mesh ===

impl Mesh {
    /// A peer's answer to one of the questions, wrong in some blocks.
    pub(super) fn answer_list(&mut self, ctx: &mut Ctx) -> Option<MeshEvent> {
        let (peer, ask) = self.list_asks.pop()?;
        let of_namespace = self.labels().into_iter().filter(|label| label.namespace == ask.namespace);
        let mut hashes: Vec<BlockHash> = of_namespace.map(|label| label.hash).collect();
        hashes.retain(|_| !ctx.rng.one_in(3));
        let block = |(place, hash): (u32, BlockHash)| {
            let strange = ctx.rng.one_in(20).then(|| BlockHash::from_words([ctx.rng.next(), 1, 2, 3]));
            let parent = Some(ctx.rng.below(u64::from(place) + 1) as u32).filter(|parent| *parent < place);
            ListedBlock { hash: strange.unwrap_or(hash), parent, uses: ctx.rng.below(100) as f32 }
        };
        let blocks = (0..).zip(hashes).map(block).collect();
        Some(MeshEvent::Listed { peer, ask, blocks })
    }
}

// === impl Life: lists ===

impl Life {
    /// A peer asks for the best blocks here. All of them are kept, and none comes twice or before its parent.
    pub(super) fn list_for_peer(&mut self, ctx: &mut Ctx) {
        let Some((namespace, bytes)) = self.mesh.as_ref().and_then(|mesh| mesh.any_namespace(ctx)) else {
            return;
        };
        let blocks = ctx.rng.within(1, 40) as u32;
        let ask = BlocksAsk { namespace, block_bytes: bytes.into(), blocks };
        let asker = ctx.rng.one_in(2).then(|| PeerNumber(ctx.rng.within(1, 4) as u32));
        let mut list = Box::new(BestBlocks::new(asker, ask));
        let listed = loop {
            match self.core.list_blocks(list) {
                Ok(listed) => break listed,
                Err(more) => list = more,
            }
        };
        let kept: BTreeSet<BlockHash> =
            self.ledger.kept().filter(|(of, _)| *of == namespace).map(|(_, hash)| hash).collect();
        assert!(listed.len() <= blocks as usize, "more blocks than asked for");
        let mut seen = BTreeSet::new();
        for (place, block) in listed.iter().enumerate() {
            assert!(kept.contains(&block.hash), "a listed block is not kept");
            assert!(seen.insert(block.hash), "a block is listed twice");
            assert!(block.parent.is_none_or(|parent| (parent as usize) < place), "a block before its parent");
        }
        ctx.cover.add("sidecar listed a block", listed.len() as u64);
    }
}
