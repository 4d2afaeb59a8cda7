//! A rank's memory, as shown to the sidecar.

use std::os::fd::{AsRawFd, OwnedFd};

use copy_engine::{EngineMemory, HostMemory, Staging};
use rustix::fs::{Mode, OFlags};
use shm_protocol::handshake::{self, Copier};
use shm_protocol::region::Access;

use super::device::StreamDevice;
use crate::error::{ShimError, refuse_argument};

/// The memory that a rank's regions name by index.
#[derive(Debug)]
pub enum RegionMemory {
    /// Descriptors, open for reading and writing.
    Host(Vec<OwnedFd>),
    /// Memory of a GPU; the calling thread must have the GPU's context.
    Gpu {
        /// Address of each storage; the offsets of its regions count from there.
        pointers: Vec<u64>,
        /// Ends of the cuts in which a block is loaded; see [`handshake::CudaMemory`].
        cuts: Vec<u64>,
        /// The engine's stream.
        stream: u64,
    },
}

/// A rank's memory, ready for copies.
#[derive(Debug)]
pub(super) struct OpenedMemory {
    pub(super) memory: EngineMemory,
    pub(super) device: Option<StreamDevice>,
    /// Ends of a load's cuts.
    pub(super) cuts: Vec<u64>,
    /// The staging segment, if the sidecar does not reach the memory.
    pub(super) staging: Option<Staging>,
    /// Descriptors for the sidecar.
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Opens a rank's memory for copies, and describes in `worker` the part shown to the sidecar.
pub(super) fn open_memory(
    worker: &mut handshake::WorkerHello,
    memory: RegionMemory,
    staged: bool,
) -> Result<OpenedMemory, ShimError> {
    let mut opened = match memory {
        RegionMemory::Host(descriptors) => {
            let sent = descriptors.iter().map(|fd| export(fd, worker.copy)).collect::<Result<_, _>>()?;
            let memory = HostMemory::new(descriptors, &worker.regions, worker.blocks, Access::ReadWrite)?;
            let cuts = vec![memory.block_bytes()];
            let memory = EngineMemory::Host(memory);
            OpenedMemory { memory, device: None, cuts, staging: None, descriptors: sent }
        }
        RegionMemory::Gpu { pointers, cuts, stream } => {
            // With staged saves no cuts are sent, but loads are still copied by them.
            worker.check_cuts(&cuts)?;
            let (device, memory) = StreamDevice::new(worker, &pointers, cuts.clone(), stream, staged)?;
            let memory = EngineMemory::Cuda(memory);
            OpenedMemory { memory, device: Some(device), cuts, staging: None, descriptors: Vec::new() }
        }
    };
    if staged {
        let staging = Staging::new(&opened.memory)?;
        (worker.staging, worker.regions) = (Some(staging.slots()), vec![staging.block_region()]);
        opened.descriptors = vec![export(&staging.file(), Copier::Engine)?];
        opened.staging = Some(staging);
    }
    Ok(opened)
}

/// Returns a descriptor for the sidecar: read-only if the engine copies.
fn export(descriptor: &impl AsRawFd, copier: Copier) -> Result<OwnedFd, ShimError> {
    let mode = match copier {
        Copier::Engine => OFlags::RDONLY,
        Copier::Sidecar => OFlags::RDWR,
    };
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let opened = rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty());
    Ok(opened.map_err(copy_engine::CopyError::from)?)
}

// === impl RegionMemory ===

impl RegionMemory {
    /// Number of memories for regions to name.
    pub(super) fn memory_count(&self) -> usize {
        match self {
            Self::Host(descriptors) => descriptors.len(),
            Self::Gpu { pointers, .. } => pointers.len(),
        }
    }

    /// Host memory behind descriptors, which the caller keeps, or memory of a GPU. Fails for both, and for
    /// neither.
    pub fn new(
        descriptors: &[i32],
        pointers: Vec<u64>,
        cuts: Vec<u64>,
        stream: u64,
    ) -> Result<Self, ShimError> {
        match (descriptors, pointers.is_empty()) {
            ([], true) => refuse_argument("the rank has no memory: pass descriptors or pointers"),
            ([], false) => Ok(Self::Gpu { pointers, cuts, stream }),
            (_, true) => Self::host(descriptors),
            (_, false) => refuse_argument(
                "the rank has descriptors and pointers: pass one kind, descriptors of host memory or \
                 pointers into GPU memory",
            ),
        }
    }

    fn host(descriptors: &[i32]) -> Result<Self, ShimError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let duplicate = |fd: &i32| {
            rustix::fs::open(format!("/proc/self/fd/{fd}"), flags, Mode::empty()).or_else(|errno| {
                refuse_argument(format!("descriptor {fd} cannot be opened for reading and writing: {errno}"))
            })
        };
        Ok(Self::Host(descriptors.iter().map(duplicate).collect::<Result<_, _>>()?))
    }
}
