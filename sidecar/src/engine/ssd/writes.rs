//! Write-behind: a committed block waits in a queue until the log has room, is held in DRAM while it is written, and is
//! dropped where there is none. No save ever waits for it.

use shm_protocol::key::{BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use tiers::dram::{Dram, HolderId};
use tiers::ssd::Refused;

use super::Ssd;
use crate::config::SsdAdmission;

/// Blocks that wait to be written: as many as saves may have waiting to be copied.
const QUEUE_MAX: usize = 65_536;
/// Blocks of the queue that one event looks at, 0.1 ms.
const LOOKS_MAX: usize = 1024;

/// A block that is to be written.
#[derive(Debug)]
pub(super) struct Unwritten {
    key: BlockKey,
    namespace: NamespaceDigest,
    bytes: u64,
}

// === impl Ssd ===

impl Ssd {
    fn enqueue(&mut self, block: Unwritten) {
        if self.log.keeps(&block.key).is_some() || self.queued.contains(&block.key) {
            return;
        }
        if self.queue.len() >= QUEUE_MAX {
            self.stats.dropped_queue_full += 1;
            return;
        }
        self.queued.insert(block.key);
        self.queue.push_back(block);
    }
    /// A block was committed: it is written, by the admission rule at once or when it is asked for again.
    pub(crate) fn offer_saved(
        &mut self,
        slot: SlotRef,
        key: BlockKey,
        namespace: NamespaceDigest,
        bytes: u64,
        dram: &Dram,
    ) {
        if self.admission == SsdAdmission::All || dram.has_returned(slot) {
            self.enqueue(Unwritten { key, namespace, bytes });
        }
    }

    /// A block that lies in DRAM was asked for or offered again: it is worth a place, also one that it lost meanwhile.
    pub(crate) fn offer_again(&mut self, key: BlockKey, namespace: NamespaceDigest, bytes: u64) {
        self.enqueue(Unwritten { key, namespace, bytes });
    }

    /// Hands the log what it has room for.
    pub(super) fn write_behind(&mut self, dram: &mut Dram) {
        for _ in 0..LOOKS_MAX {
            if self.full {
                return;
            }
            let Some(block) = self.queue.front() else { return };
            let written = match dram.hold(&block.key, HolderId::NOBODY) {
                None => {
                    self.stats.dropped_evicted += 1;
                    Ok(())
                }
                Some(slot) => {
                    let written = self.log.write(block.key, block.namespace, block.bytes, slot);
                    match written {
                        Ok(_) => self.writing += 1,
                        Err(_) => dram.unhold(slot, HolderId::NOBODY),
                    }
                    written.map(drop)
                }
            };
            match written {
                Err(Refused::Busy) => {
                    self.full = true;
                    return;
                }
                Err(Refused::Down) => self.stats.dropped_down += 1,
                Err(Refused::TooLarge) => self.stats.dropped_too_large += 1,
                Ok(()) | Err(Refused::Present) => {}
            }
            let block = self.queue.pop_front().expect("looked at above");
            self.queued.remove(&block.key);
        }
    }
}
