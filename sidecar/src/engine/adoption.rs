//! The pool comes into service part by part, with the blocks of earlier lives.

use shm_protocol::key::NamespaceDigest;
use shm_protocol::pool::Remains;
use tiers::opener::Opened;

use super::Core;
use super::namespaces::Space;

// === impl Core ===

impl Core {
    /// Takes in what can be used from now on. A block is found by engines of its namespace as soon as one connects.
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
}
