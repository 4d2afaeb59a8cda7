//! Allocations of this process' GPU memory, as another process opens them.

use cudarc::driver::sys;

use super::CudaError;

/// What another process needs to open an allocation.
#[derive(Copy, Clone, Debug)]
pub struct Exported {
    pub handle: [u8; 64],
    /// Where the allocation begins in this process.
    pub base: u64,
    pub bytes: u64,
}

/// The allocation around a device pointer of this process, for another process to open.
pub fn export_allocation(pointer: u64) -> Result<Exported, CudaError> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: both results are valid to be written; a pointer that is no allocation's is answered with an error.
    let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, pointer) };
    CudaError::check_call("cuMemGetAddressRange", found)?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: `handle` is valid to be written, `base` was named by the driver.
    CudaError::check_call("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&raw mut handle, base) })?;
    Ok(Exported { handle: handle.reserved.map(|byte| byte as u8), base, bytes: bytes as u64 })
}
