//! The plan of a load: made by the scheduler, carried in the step's metadata, executed by the ranks.
//!
//! Little-endian: `op u64, epoch u64, namespace u64, count u32, flags u32`, then per block `block u32, zero
//! u32, pool offset u64, generation u64`. The epoch names the life of the sidecar with these offsets: the
//! pool of another life may hold other bytes under the same offset and generation. The namespace is the one
//! of the blocks, in the form of the header word of that name.

use shm_protocol::layout::LOG_KEYS;
use shm_protocol::message::{LOAD_ARRIVING, LOAD_BY_ENGINE, LOAD_STREAMED, LOAD_SYNC};
use shm_protocol::pool::SlotRef;
use thiserror::Error;

const HEADER_BYTES: usize = 32;
const BLOCK_BYTES: usize = 24;

/// One load.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Plan {
    /// Operation id of the LOAD.
    pub op: u64,
    /// The life of the sidecar with these offsets.
    pub epoch: u64,
    /// The namespace of the blocks, equal to the namespace of the rank; 0: none.
    pub namespace: u64,
    /// [`LOAD_SYNC`], [`LOAD_BY_ENGINE`], [`LOAD_ARRIVING`], [`LOAD_STREAMED`].
    pub flags: u8,
    /// Each block of the engine with its slot in the pool.
    pub blocks: Vec<(u32, SlotRef)>,
}

/// Bytes that are not a plan.
#[derive(Debug, Error, Eq, PartialEq)]
#[error(
    "the data is not a load plan of this pillion release ({0}): run the same release in the scheduler and the workers"
)]
pub struct PlanError(&'static str);

// === impl Plan ===

impl Plan {
    /// Returns the plan's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.blocks.len() * BLOCK_BYTES);
        bytes.extend(self.op.to_le_bytes());
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.namespace.to_le_bytes());
        bytes.extend((self.blocks.len() as u32).to_le_bytes());
        bytes.extend(u32::from(self.flags).to_le_bytes());
        for (block, slot) in &self.blocks {
            bytes.extend(u64::from(*block).to_le_bytes());
            bytes.extend(slot.offset.to_le_bytes());
            bytes.extend(slot.generation.to_le_bytes());
        }
        bytes
    }

    /// Reads a plan, checking every field.
    pub fn decode(bytes: &[u8]) -> Result<Self, PlanError> {
        let (header, rest) =
            bytes.split_first_chunk::<HEADER_BYTES>().ok_or(PlanError("its header is incomplete"))?;
        let count = u32_at(header, 24) as usize;
        if count == 0 || count > LOG_KEYS {
            return Err(PlanError("its block count is out of range"));
        }
        if rest.len() != count * BLOCK_BYTES {
            return Err(PlanError("its length differs from its block count"));
        }
        let flags = u8::try_from(u32_at(header, 28)).map_err(|_| PlanError("unknown flags"))?;
        if flags & !(LOAD_SYNC | LOAD_BY_ENGINE | LOAD_ARRIVING | LOAD_STREAMED) != 0 {
            return Err(PlanError("unknown flags"));
        }
        let blocks = rest.as_chunks::<BLOCK_BYTES>().0.iter().map(decode_block).collect::<Result<_, _>>()?;
        let [op, epoch, namespace] = [0, 8, 16].map(|at| u64_at(header, at));
        Ok(Self { op, epoch, namespace, flags, blocks })
    }

    /// The blocks written by the plan.
    pub fn block_ids(&self) -> Vec<u32> {
        self.blocks.iter().map(|(block, _)| *block).collect()
    }

    /// True if the ranks copy the blocks themselves.
    pub fn by_engine(&self) -> bool {
        self.flags & LOAD_BY_ENGINE != 0
    }

    /// True if some blocks may still be on their way to the pool.
    pub fn arriving(&self) -> bool {
        self.flags & LOAD_ARRIVING != 0
    }

    /// True if the blocks have no slots yet, and the load may begin much later.
    pub fn streamed(&self) -> bool {
        self.flags & LOAD_STREAMED != 0
    }
}

fn decode_block(bytes: &[u8; BLOCK_BYTES]) -> Result<(u32, SlotRef), PlanError> {
    let block = u32::try_from(u64_at(bytes, 0)).map_err(|_| PlanError("a block's padding is not zero"))?;
    Ok((block, SlotRef { offset: u64_at(bytes, 8), generation: u64_at(bytes, 16) }))
}

fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let slot = |n: u64| SlotRef { offset: n << 32 | 512, generation: n << 40 | 1 };
        Plan {
            op: 7 << 33,
            epoch: u64::MAX,
            namespace: 9 << 60,
            flags: LOAD_SYNC | LOAD_ARRIVING,
            blocks: vec![(0, slot(1)), (u32::MAX, slot(2))],
        }
    }

    #[test]
    fn a_plan_survives_the_way() {
        assert_eq!(Plan::decode(&plan().encode()), Ok(plan()));
    }

    #[test]
    fn damaged_plans_are_refused() {
        let good = plan().encode();
        for length in 0..good.len() {
            assert!(Plan::decode(&good[..length]).is_err(), "cut to {length}");
        }
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            Plan::decode(&bytes)
        };
        assert!(with(24, 3).is_err() && with(24, 0).is_err() && with(27, 1).is_err(), "count");
        assert!(with(28, 4).is_err() && with(31, 1).is_err(), "flags");
        assert!(with(36, 1).is_err(), "padding");
    }
}
