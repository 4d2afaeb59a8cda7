//! The transfers of this tier alone, without a log, checksums or jobs, to measure the most a device can move.

use std::io;
use std::sync::Arc;

use shm_protocol::blocks::Blocks;
use shm_protocol::region::Region;
use shm_protocol::wait;

use super::format::SUPER_BYTES;
use super::{Backend, Opened};
use crate::io::carrier::Carrier;
pub use crate::io::transfer::Direction;
use crate::io::transfer::{Memory, TRANSFERS_MAX, Transfer};

/// Transfers of one device. Their writes leave no readable log.
pub struct Raw {
    carrier: Carrier,
    /// Bytes behind the first MiB; that MiB is left as it is.
    bytes: u64,
}

// === impl Raw ===

impl Raw {
    /// Uses the wanted backend, otherwise the first one the kernel allows; transfers move bytes of `pool`.
    pub fn new(opened: Opened, pool: &Arc<Region>, wanted: Option<Backend>) -> io::Result<Self> {
        let wake = wait::eventfd()?;
        let bytes = opened.layout.segment_bytes * u64::from(opened.layout.segments);
        let carrier = Carrier::new(wanted, opened.fd, Arc::new(wake), Blocks::new(Arc::clone(pool)))?;
        Ok(Self { carrier, bytes })
    }

    /// Returns the backend that moves the bytes.
    pub fn backend(&self) -> Backend {
        self.carrier.backend()
    }

    /// Returns the number of blocks of a size in the device's room.
    pub fn blocks(&self, block_bytes: u32) -> u64 {
        self.bytes / u64::from(block_bytes)
    }

    /// Moves these blocks, each between its place and one of `slots` slots of the pool from `offset` on.
    /// Returns when all have been moved, or fails when one was not.
    pub fn run(
        &mut self,
        direction: Direction,
        block_bytes: u32,
        (offset, slots): (u64, u64),
        blocks: &[u64],
    ) -> io::Result<()> {
        let slots = slots.min(TRANSFERS_MAX as u64);
        let mut free: Vec<u64> = (0..slots).map(|slot| offset + slot * u64::from(block_bytes)).collect();
        let (mut left, mut open, mut result) = (blocks.iter(), 0, Ok(()));
        loop {
            while result.is_ok()
                && let Some(slot) = free.pop()
                && let Some(block) = left.next()
            {
                let at = SUPER_BYTES + block * u64::from(block_bytes);
                let memory = Memory::Pool(slot);
                let (len, durable) = (block_bytes, false);
                let transfer = Transfer { token: slot, direction, at, memory, len, durable, moved: 0 };
                self.carrier.push(transfer).map_err(|_| io::Error::other("too many transfers"))?;
                open += 1;
            }
            if open == 0 {
                return result;
            }
            self.carrier.wait(None)?;
            while let Some((transfer, moved)) = self.carrier.reap() {
                open -= 1;
                free.push(transfer.token);
                match moved {
                    Ok(moved) if moved == transfer.len => {}
                    Ok(moved) => {
                        result =
                            Err(io::Error::other(format!("{moved} of {} bytes were moved", transfer.len)));
                    }
                    Err(errno) => result = Err(errno.into()),
                }
            }
        }
    }
}
