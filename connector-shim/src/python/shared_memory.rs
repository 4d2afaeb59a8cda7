//! Room for a host's KV memory in shared memory.

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

/// The file system of shared memory.
const SHARED_MEMORY: &str = "/dev/shm";
const MIB: u64 = 1 << 20;
/// Left for other users of it.
const OTHERS_MIB: u64 = 64;

/// Raises an OSError unless there is room for so many bytes, which each rank of the engine moves. `full`: there was none.
#[pyfunction]
pub(super) fn check_shared_memory(needed: u64, ranks: u64, full: bool) -> PyResult<()> {
    let room = rustix::fs::statvfs(SHARED_MEMORY).map_err(std::io::Error::from)?;
    let free = room.f_bavail * room.f_frsize;
    if free >= needed && !full {
        return Ok(());
    }
    let used = (room.f_blocks - room.f_bfree) * room.f_frsize;
    let size = (used + needed * ranks).div_ceil(MIB) + OTHERS_MIB;
    Err(PyOSError::new_err(format!(
        "the KV cache of {} MiB must lie in {SHARED_MEMORY}, which has {} MiB free: enlarge it, by volumes: [{{name: shm, \
         emptyDir: {{medium: Memory, sizeLimit: {size}Mi}}}}] mounted at {SHARED_MEMORY}, or docker run --shm-size={size}m",
        needed.div_ceil(MIB),
        free / MIB
    )))
}
