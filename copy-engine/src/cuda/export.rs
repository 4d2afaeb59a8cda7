//! Allocations of this process's GPU memory, exported to another process.

use cudarc::driver::sys;

use super::CudaError;

/// An allocation in the form that another process needs to open it.
#[derive(Copy, Clone, Debug)]
pub struct Exported {
    pub handle: [u8; 64],
    /// Address of the allocation in this process.
    pub base: u64,
    pub bytes: u64,
}

/// Exports the allocation around a device pointer of this process.
pub fn export(pointer: u64) -> Result<Exported, CudaError> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: both results are valid to be written; the driver answers a pointer outside allocations with an
    // error.
    let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, pointer) };
    CudaError::check("cuMemGetAddressRange", found)?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: `handle` is valid to be written, `base` comes from the driver.
    CudaError::check("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&raw mut handle, base) })?;
    Ok(Exported { handle: handle.reserved.map(|byte| byte as u8), base, bytes: bytes as u64 })
}
