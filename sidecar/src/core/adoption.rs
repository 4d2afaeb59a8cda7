//! The pool comes into service part by part, with the blocks of earlier lives. No query finds such a block
//! before its bytes were compared with their checksum: requested blocks first, the others one after the
//! other.

use shm_protocol::key::{BlockKey, NamespaceDigest};
use shm_protocol::pool::{Remains, SlotRef};
use shm_protocol::source::Source;
use tiers::dram::Dram;
use tiers::opener::Opened;

use super::arrivals::SourceLane;
use super::context::Context;
use super::namespaces::Space;
use super::tier::Notice;
use super::{Action, Base};

/// Limit of bytes under verification without a request. A requested block waits for them, some milliseconds;
/// they are enough to keep the thread at work.
const AHEAD_BYTES_MAX: u64 = 16 << 20;

/// Blocks under verification.
#[derive(Debug, Default)]
pub(super) struct Verification {
    bytes: u64,
    /// Number of blocks whose bytes did not match their checksums.
    pub(super) corrupt: u64,
}

/// Adopts an opened part of the pool. Engines find its verified blocks as soon as one of the namespace
/// connects.
pub(super) fn open_part(opened: Opened, Base { sources, cx, .. }: &mut Base) {
    let (segment, block_bytes, first, remains) = match opened {
        Opened::Empty { segment } => return cx.dram.open_empty(segment),
        Opened::Used { segment, block_bytes, first, remains } => (segment, block_bytes, first, remains),
    };
    if first == 0 && !cx.dram.open_used(segment, block_bytes, cx.now_ms) {
        // The file has more block sizes than any engines have: it is no pool of theirs.
        return;
    }
    // Blocks side by side are mostly of one namespace.
    let mut last: Option<(NamespaceDigest, _)> = None;
    for (index, remains) in (first..).zip(&remains) {
        let (namespace, quota) = match remains {
            Remains::Block { namespace, .. } => match last {
                Some((digest, known)) if digest == *namespace => known,
                _ => {
                    let space = Space { digest: *namespace, block_bytes };
                    let known = (cx.namespaces.adopt(space), cx.quotas.of(*namespace));
                    if let Some(number) = known.0 {
                        // Tiers may take its blocks before an engine of it connects.
                        sources.tell_tiers(Notice::Learned(number, *namespace, known.1), cx);
                    }
                    last.insert((*namespace, known)).1
                }
            },
            Remains::Free | Remains::Debris { .. } => (None, None),
        };
        cx.dram.adopt(segment, index, remains, namespace, quota);
    }
}

// === impl Verification ===

impl Verification {
    /// Begins to verify requested blocks. Returns the begun ones.
    pub(super) fn begin(&mut self, wanted: &[BlockKey], cx: &mut Context) -> Vec<BlockKey> {
        let mut begun = Vec::with_capacity(wanted.len());
        for key in wanted {
            // A key named twice is begun once.
            let Some(slot) = cx.dram.begin_verification(key) else { continue };
            self.verify(*key, slot, cx);
            begun.push(*key);
        }
        begun
    }

    /// Goes on with the verification of blocks without a request.
    pub(super) fn go_on(&mut self, cx: &mut Context) {
        while self.bytes < AHEAD_BYTES_MAX {
            let Some((key, slot)) = cx.dram.begin_next_verification() else { return };
            self.verify(key, slot, cx);
        }
    }

    fn verify(&mut self, key: BlockKey, slot: SlotRef, cx: &mut Context) {
        self.bytes += bytes_of(slot, &cx.dram);
        // The block takes no room of the pool beyond its own slot.
        cx.arrivals.begin(key, slot, 0, Source::Memory);
        cx.arrivals.send(&key, SourceLane::Pool, bytes_of(slot, &cx.dram), cx.now_ms);
        cx.actions.push(Action::Verify { key, slot });
    }

    /// Ends the verification of a block. `whole`: its bytes match their checksum; `trusted`: nobody has
    /// distrusted it meanwhile. During a drain a mismatch is not counted or logged.
    pub(super) fn end(&mut self, slot: SlotRef, whole: bool, trusted: bool, cx: &mut Context) {
        self.bytes -= bytes_of(slot, &cx.dram);
        cx.dram.end_verification(slot, whole && trusted);
        if whole || cx.draining {
            return;
        }
        self.corrupt += 1;
        if self.corrupt == 1 {
            cx.actions.push(Action::Warn(
                "a block of the pool file differs from what an earlier sidecar wrote, and is dropped \
                 (pillion_adoption_corrupt_total counts such blocks). Let no program write to the file between two \
                 sidecars; if none did, test this machine's memory"
                    .into(),
            ));
        }
    }
}

fn bytes_of(slot: SlotRef, dram: &Dram) -> u64 {
    dram.block_bytes(slot).expect("a block that is verified stays in its slot")
}
