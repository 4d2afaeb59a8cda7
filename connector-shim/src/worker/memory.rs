//! The memory that a rank shows to the sidecar, and what is checked before anything is sent.

use std::os::fd::{AsRawFd, OwnedFd};

use copy_engine::{EngineMemory, HostMemory, Staging};
use rustix::fs::{Mode, OFlags};
use shm_protocol::handshake::{self, BlockRegion, CUTS_MAX, Copier};
use shm_protocol::region::Access;

use super::device::Device;
use crate::error::{ShimError, argument};

/// The memory that a rank's regions name by index.
#[derive(Debug)]
pub enum Memory {
    /// Descriptors, open for reading and writing.
    Host(Vec<OwnedFd>),
    /// Memory of the GPU whose context is the calling thread's.
    Gpu {
        /// Where each storage begins; the offsets of its regions count from there.
        pointers: Vec<u64>,
        /// Where a block is cut into the parts that a load is delivered in; see [`handshake::CudaMemory`].
        cuts: Vec<u64>,
        /// The engine's stream.
        stream: u64,
    },
}

/// A rank's memory, ready for copies.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) memory: EngineMemory,
    pub(super) device: Option<Device>,
    /// Where a load's cuts end.
    pub(super) cuts: Vec<u64>,
    /// Where the sidecar does not reach the memory.
    pub(super) staging: Option<Staging>,
    /// What is sent to the sidecar.
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Makes a rank's memory ready, and says in `worker` what is shown of it.
pub(super) fn open_memory(
    worker: &mut handshake::Worker,
    memory: Memory,
    staged: bool,
) -> Result<Opened, ShimError> {
    let mut opened = match memory {
        Memory::Host(descriptors) => {
            let sent = descriptors.iter().map(|fd| export(fd, worker.copy)).collect::<Result<_, _>>()?;
            let memory = HostMemory::new(descriptors, &worker.regions, worker.blocks, Access::ReadWrite)?;
            let cuts = vec![memory.block_bytes()];
            let memory = EngineMemory::Host(memory);
            Opened { memory, device: None, cuts, staging: None, descriptors: sent }
        }
        Memory::Gpu { pointers, cuts, stream } => {
            let (device, memory) = Device::new(worker, &pointers, cuts.clone(), stream, staged)?;
            let memory = EngineMemory::Cuda(memory);
            Opened { memory, device: Some(device), cuts, staging: None, descriptors: Vec::new() }
        }
    };
    if staged {
        let staging = Staging::new(&opened.memory)?;
        (worker.staging, worker.regions) = (Some(staging.slots()), vec![staging.place()]);
        opened.descriptors = vec![export(&staging.file(), Copier::Engine)?];
        opened.staging = Some(staging);
    }
    Ok(opened)
}

/// What is sent to the sidecar: where the engine copies, a descriptor that cannot be written through.
fn export(descriptor: &impl AsRawFd, copier: Copier) -> Result<OwnedFd, ShimError> {
    let mode = match copier {
        Copier::Engine => OFlags::RDONLY,
        Copier::Sidecar => OFlags::RDWR,
    };
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let opened = rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty());
    Ok(opened.map_err(copy_engine::CopyError::from)?)
}

/// The rules of the handshake, told before anything is sent.
pub(super) fn check_worker(
    worker: &handshake::Worker,
    world_size: u32,
    memory: &Memory,
    staged: bool,
) -> Result<(), ShimError> {
    let (memories, cuts) = match memory {
        Memory::Host(descriptors) => (descriptors.len(), None),
        Memory::Gpu { pointers, cuts, .. } => (pointers.len(), Some(cuts)),
    };
    let fits = |region: &BlockRegion| {
        let last = u64::from(worker.blocks - 1).checked_mul(region.stride);
        let end = last.and_then(|at| at.checked_add(region.offset)?.checked_add(region.bytes));
        (region.fd as usize) < memories
            && region.bytes > 0
            && region.stride >= region.bytes
            && end.is_some_and(|end| end <= i64::MAX as u64)
    };
    let rules = [
        (worker.rank < world_size, "rank must be below world_size"),
        ((1..=world_size).contains(&worker.shards), "shards must be 1 to world_size"),
        (worker.shard < worker.shards, "shard must be below shards"),
        (worker.blocks > 0, "there must be at least one block"),
        (worker.facts.len() <= handshake::FACTS_MAX, "there may be at most 256 facts"),
        (memories <= handshake::DESCRIPTORS_MAX, "there may be at most 64 descriptors or pointers"),
        ((1..=handshake::REGIONS_MAX).contains(&worker.regions.len()), "there must be 1 to 1,024 regions"),
        (
            cuts.is_none_or(|cuts| are_cuts(cuts, worker)),
            "cuts must ascend to the bytes of a block, at most 255",
        ),
        (!staged || worker.copy == Copier::Engine, "copy must be 'engine' where saves are staged"),
    ];
    if let Some((_, rule)) = rules.iter().find(|(holds, _)| !holds) {
        return argument(*rule);
    }
    match worker.regions.iter().position(|region| !fits(region)) {
        Some(index) => {
            argument(format!("region {index} is not inside its memory, or its stride is below its bytes"))
        }
        None => Ok(()),
    }
}

fn are_cuts(cuts: &[u64], worker: &handshake::Worker) -> bool {
    (1..=CUTS_MAX).contains(&cuts.len())
        && cuts[0] > 0
        && cuts.is_sorted_by(|one, next| one < next)
        && cuts.last().copied() == worker.block_bytes()
}

// === impl Memory ===

impl Memory {
    /// Host memory behind a caller's descriptors, which stay the caller's.
    pub fn host(descriptors: &[i32]) -> Result<Self, ShimError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let duplicate = |fd: &i32| {
            rustix::fs::open(format!("/proc/self/fd/{fd}"), flags, Mode::empty()).or_else(|errno| {
                argument(format!("descriptor {fd} cannot be opened for reading and writing: {errno}"))
            })
        };
        Ok(Self::Host(descriptors.iter().map(duplicate).collect::<Result<_, _>>()?))
    }
}
