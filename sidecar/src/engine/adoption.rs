//! The pool comes into service part by part, with the blocks of earlier lives. Nobody finds such a block before its bytes were
//! compared with their checksum: those that are asked for first, the others one after the other.

use shm_protocol::key::{BlockKey, NamespaceDigest};
use shm_protocol::pool::{Remains, SlotRef};
use tiers::opener::Opened;

use super::namespaces::Space;
use super::{Action, Core};

/// Bytes of blocks that nobody asked for and that are being verified: what a block that is asked for waits for, some
/// milliseconds, and enough to keep the thread at work.
const AHEAD_BYTES_MAX: u64 = 16 << 20;

/// What the core knows of blocks being verified.
#[derive(Debug, Default)]
pub(super) struct Verification {
    bytes: u64,
    /// Blocks whose bytes were not what their checksums say.
    pub(super) corrupt: u64,
}

// === impl Core ===

impl Core {
    /// Takes in what can be used from now on. A verified block is found by engines of its namespace as soon as one connects.
    pub(super) fn open_part(&mut self, now_ms: u64, opened: Opened) {
        let (segment, block_bytes, first, remains) = match opened {
            Opened::Empty { segment } => return self.dram.open_empty(segment),
            Opened::Used { segment, block_bytes, first, remains } => (segment, block_bytes, first, remains),
        };
        if first == 0 && !self.dram.open_used(segment, block_bytes, now_ms) {
            // More block sizes than any engines have: nobody's pool.
            return;
        }
        // Neighbours are mostly of one namespace.
        let mut last: Option<(NamespaceDigest, _)> = None;
        for (index, remains) in (first..).zip(&remains) {
            let (namespace, quota) = match remains {
                Remains::Block { namespace, .. } => match last {
                    Some((digest, known)) if digest == *namespace => known,
                    _ => {
                        let space = Space { digest: *namespace, block_bytes };
                        let known = (self.namespaces.adopt(space), self.quota_of(*namespace));
                        last.insert((*namespace, known)).1
                    }
                },
                Remains::Free | Remains::Debris { .. } => (None, None),
            };
            self.dram.adopt(segment, index, remains, namespace, quota);
        }
    }

    /// Begins to verify blocks that somebody asks for; those that were begun.
    pub(super) fn begin_verifications(
        &mut self,
        wanted: &[BlockKey],
        out: &mut Vec<Action>,
    ) -> Vec<BlockKey> {
        let mut begun = Vec::with_capacity(wanted.len());
        for key in wanted {
            // A key that is named twice is begun once.
            let Some(slot) = self.dram.begin_verification(key) else { continue };
            self.verify(*key, slot, out);
            begun.push(*key);
        }
        begun
    }

    /// Goes on with what nobody asks for.
    pub(super) fn verify_ahead(&mut self, out: &mut Vec<Action>) {
        while !self.draining && self.verification.bytes < AHEAD_BYTES_MAX {
            let Some((key, slot)) = self.dram.begin_next_verification() else { return };
            self.verify(key, slot, out);
        }
    }

    fn verify(&mut self, key: BlockKey, slot: SlotRef, out: &mut Vec<Action>) {
        self.verification.bytes += self.verified_bytes(slot);
        // It takes no room of the pool beyond what it has.
        self.arrivals.begin(key, slot, 0);
        out.push(Action::Verify { key, slot });
    }

    fn verified_bytes(&self, slot: SlotRef) -> u64 {
        self.dram.block_bytes(slot).expect("a block that is verified stays in its slot")
    }

    /// A block's bytes were compared with their checksum; `trusted`, unless its engine was found to compute something else
    /// meanwhile.
    pub(super) fn end_verification(
        &mut self,
        slot: SlotRef,
        whole: bool,
        trusted: bool,
        out: &mut Vec<Action>,
    ) {
        self.verification.bytes -= self.verified_bytes(slot);
        self.dram.end_verification(slot, whole && trusted);
        if whole || self.draining {
            // In a pool that has lost bytes nothing is told of.
            return;
        }
        self.verification.corrupt += 1;
        if self.verification.corrupt == 1 {
            out.push(Action::Warn(
                "a block of the pool file is not what an earlier sidecar wrote: it is not kept \
                 (pillion_adoption_corrupt_total counts such blocks). Let nobody write to the file between two sidecars; if \
                 nobody did, have this machine's memory tested"
                    .into(),
            ));
        }
    }
}
