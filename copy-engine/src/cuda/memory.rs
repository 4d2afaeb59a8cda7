//! Memory that crosses a process boundary: allocations of a GPU by IPC handle, and host memory locked for its use.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use shm_protocol::region::{Access, Region};

use super::{CudaError, Gpu};

/// An allocation of another process. Closed on drop; its memory is freed only then, if its owner is gone.
#[derive(Debug)]
pub struct Imported {
    gpu: Arc<Gpu>,
    base: sys::CUdeviceptr,
}

/// A part of a mapping, locked and known to the GPU. Unlocked on drop.
#[derive(Debug)]
pub struct Registered {
    gpu: Arc<Gpu>,
    region: Arc<Region>,
    /// Start of the locked part in the region, and its bytes.
    start: usize,
    len: usize,
    /// Address of the part for the GPU.
    device: sys::CUdeviceptr,
}

// === impl Imported ===

impl Imported {
    /// Opens another process's allocation on `gpu`. Fails if it has fewer than `bytes`.
    pub fn open(gpu: &Arc<Gpu>, handle: [u8; 64], bytes: u64) -> Result<Self, CudaError> {
        gpu.bind()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let mut base = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: `base` is valid to be written; the driver checks the handle.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut base, handle, flags) };
        CudaError::check("cuIpcOpenMemHandle", opened)?;
        let imported = Self { gpu: Arc::clone(gpu), base };
        let (mut start, mut held) = (0, 0);
        // SAFETY: both results are valid to be written.
        let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut held, base) };
        CudaError::check("cuMemGetAddressRange", found)?;
        match start == base && held as u64 >= bytes {
            true => Ok(imported),
            false => Err(CudaError::missing("cuIpcOpenMemHandle", "the allocation is smaller than stated")),
        }
    }

    /// Address of the allocation in this process.
    pub fn base(&self) -> u64 {
        self.base
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: opened by `open` and closed once; every user of it has waited for the end of its
            // stream.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.base) };
        }
    }
}

// === impl Registered ===

impl Registered {
    /// Locks `len` bytes at `start` of a mapping, both multiples of a page, for every GPU of this process.
    pub fn new(gpu: &Arc<Gpu>, region: &Arc<Region>, start: usize, len: usize) -> Result<Self, CudaError> {
        gpu.bind()?;
        let outside = CudaError::missing("cuMemHostRegister", "the range lies outside the mapping");
        let host: *mut c_void = region.bytes_at(start, len).ok_or(outside)?.as_ptr().cast();
        let read_only = match region.access() {
            Access::ReadOnly => sys::CU_MEMHOSTREGISTER_READ_ONLY,
            Access::ReadWrite => 0,
        };
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP | read_only;
        // SAFETY: the range is mapped as long as `region`, kept by this value, lives; it is unlocked before.
        CudaError::check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(host, len, flags) })?;
        let mut registered = Self { gpu: Arc::clone(gpu), region: Arc::clone(region), start, len, device: 0 };
        // SAFETY: the result is valid to be written, and `host` was registered just now.
        let seen = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut registered.device, host, 0) };
        CudaError::check("cuMemHostGetDevicePointer", seen)?;
        Ok(registered)
    }

    /// The GPU's address of byte `offset` of the region, counted from the region's start.
    pub fn device_address(&self, offset: usize) -> u64 {
        assert!((self.start..self.start + self.len).contains(&offset), "a word that is not locked");
        self.device + (offset - self.start) as u64
    }

    /// The mapping of the locked part.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let host = self.region.bytes_at(self.start, self.len).expect("checked when it was locked");
        if self.gpu.bind().is_ok() {
            // SAFETY: locked by `new` and unlocked once; by the module's obligation no stream uses it any
            // more.
            let _ = unsafe { sys::cuMemHostUnregister(host.as_ptr().cast()) };
        }
    }
}
