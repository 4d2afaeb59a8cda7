//! GPUs, and the contexts of this process on them.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::CudaError;

/// A GPU and a context on it: the primary one, also used by torch, unless it was made by [`Gpu::beside`].
#[derive(Debug)]
pub struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    primary: bool,
    uuid: [u8; 16],
    address: String,
}

/// Bytes of a PCI address with its final zero, `0000:1b:00.0`, and some spare.
const ADDRESS_BYTES: usize = 32;

/// `cuMemcpyBatchAsync` as of CUDA 12.8; see docs/decisions/0007.
pub(super) type MemcpyBatch = unsafe extern "C" fn(
    dsts: *mut sys::CUdeviceptr,
    srcs: *mut sys::CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut sys::CUmemcpyAttributes,
    attribute_indices: *mut usize,
    attribute_count: usize,
    failed: *mut usize,
    stream: sys::CUstream,
) -> sys::CUresult;

/// The interface version of the type above.
const MEMCPY_BATCH_VERSION: i32 = 12_080;

// SAFETY: a context handle may be used from any thread; the driver locks by itself, and `uuid` and `device`
// are plain.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// True if libcuda can be opened here and knows a GPU. Checked once.
pub fn is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    *PRESENT.get_or_init(|| {
        // SAFETY: opening a library runs its initialisers; libcuda's are made for any process and thread.
        let library = unsafe { sys::is_culib_present() };
        library && count().is_ok_and(|count| count > 0)
    })
}

/// The newest CUDA release of the driver, 1000 times its major and 10 times its minor number. Call it only if
/// [`is_present`].
pub fn driver_version() -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: `version` is valid to be written.
    CudaError::check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version)
}

/// Number of GPUs for this process. Initialises the driver.
fn count() -> Result<i32, CudaError> {
    // SAFETY: the only valid flags are 0; repeated calls are allowed.
    CudaError::check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: `count` is valid to be written.
    CudaError::check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(count)
}

// === impl Gpu ===

impl Gpu {
    /// Every GPU of this process, or the error for it: one in exclusive mode leaves the others usable.
    pub fn all() -> Result<Vec<Result<Arc<Self>, CudaError>>, CudaError> {
        Ok((0..count()?).map(|ordinal| Self::retain(device(ordinal)?)).collect())
    }

    /// The GPU of the context current on this thread.
    pub fn of_thread() -> Result<Arc<Self>, CudaError> {
        count()?;
        let mut device = 0;
        // SAFETY: `device` is valid to be written.
        CudaError::check("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&raw mut device) })?;
        Self::retain(device)
    }

    fn retain(device: sys::CUdevice) -> Result<Arc<Self>, CudaError> {
        let (uuid, address) = (uuid_of(device)?, address_of(device)?);
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is valid to be written and `device` comes from the driver.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        CudaError::check("cuDevicePrimaryCtxRetain", retained)?;
        Ok(Arc::new(Self { device, context, primary: true, uuid, address }))
    }

    /// The same GPU with a context of its own: calls in the other context go on while one waits in it. It
    /// takes 0.5 GiB of the GPU's memory and 0.2 s, and becomes the thread's current context. Locked memory
    /// is visible in it as well.
    pub fn beside(&self) -> Result<Arc<Self>, CudaError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is valid to be written and `device` comes from the driver.
        let made = unsafe { sys::cuCtxCreate_v2(&raw mut context, 0, self.device) };
        CudaError::check("cuCtxCreate", made)?;
        let address = self.address.clone();
        Ok(Arc::new(Self { device: self.device, context, primary: false, uuid: self.uuid, address }))
    }

    /// The GPU's own name, the same in every process and container.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Its PCI address as the kernel writes it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Makes its context the current one of this thread, as every other call of this module requires.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        CudaError::check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Checks that its memory can be exported to another process: of an allocation made for that, and freed.
    pub fn try_export(&self) -> Result<(), CudaError> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: `pointer` is valid to be written.
        CudaError::check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut pointer, 1) })?;
        let exported = super::export(pointer);
        // SAFETY: allocated above, and used by nothing else.
        CudaError::check("cuMemFree", unsafe { sys::cuMemFree_v2(pointer) })?;
        exported.map(drop)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Errors at the end of the process do not matter.
        let _ = match self.primary {
            // SAFETY: pairs with the retain.
            true => unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) },
            // SAFETY: made by `beside`, and everything made in it holds `self`.
            false => unsafe { sys::cuCtxDestroy_v2(self.context) },
        };
    }
}

fn device(ordinal: i32) -> Result<sys::CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: `device` is valid to be written.
    CudaError::check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
    Ok(device)
}

fn uuid_of(device: sys::CUdevice) -> Result<[u8; 16], CudaError> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` is valid to be written.
    CudaError::check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) })?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

fn address_of(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut text = [0_u8; ADDRESS_BYTES];
    // SAFETY: `text` is valid to be written up to the length that is passed.
    let asked = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), ADDRESS_BYTES as i32, device) };
    CudaError::check("cuDeviceGetPCIBusId", asked)?;
    let name = text.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).to_lowercase())
}

/// `cuMemcpyBatchAsync`, if this driver has it.
pub(super) fn memcpy_batch() -> Option<MemcpyBatch> {
    static FOUND: OnceLock<Option<MemcpyBatch>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let mut function: *mut c_void = std::ptr::null_mut();
        let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
        let name = c"cuMemcpyBatchAsync".as_ptr();
        // SAFETY: the name ends with a zero; both results are valid to be written; 0 asks for the default
        // variant.
        let asked = unsafe {
            sys::cuGetProcAddress_v2(name, &raw mut function, MEMCPY_BATCH_VERSION, 0, &raw mut status)
        };
        let found = asked == sys::CUresult::CUDA_SUCCESS && !function.is_null();
        // SAFETY: the driver promises the interface of the requested version, which the type states.
        found.then(|| unsafe { std::mem::transmute::<*mut c_void, MemcpyBatch>(function) })
    })
}
