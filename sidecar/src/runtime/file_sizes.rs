//! Checks the sizes of the sidecar's files against the limit of its process (RLIMIT_FSIZE).

use std::os::unix::fs::FileTypeExt;

use rustix::process::{Resource, getrlimit};
use shm_protocol::{layout, pool};

use crate::config::{Disk, ServeConfig};
use crate::error::StartError;

/// Fails if a file would be larger than the limit. The kernel counts memfds as files too.
pub(super) fn check_file_sizes(config: &ServeConfig) -> Result<(), StartError> {
    getrlimit(Resource::Fsize).current.map_or(Ok(()), |limit| check_limit(config, limit))
}

fn check_limit(config: &ServeConfig, limit: u64) -> Result<(), StartError> {
    let is_file =
        |disk: &&Disk| !std::fs::metadata(&disk.path).is_ok_and(|it| it.file_type().is_block_device());
    let disks = config.ssd.iter().filter(is_file);
    let disks = disks.map(|disk| (format!("the disk {disk} of --ssd"), disk.size.as_bytes()));
    let pool = ("the pool of --dram".to_owned(), config.dram.as_bytes() + pool::SEGMENT_ALIGN);
    let session = ("the session of an engine".to_owned(), layout::SESSION_BYTES as u64);
    let largest = [pool, session].into_iter().chain(disks).max_by_key(|(_, bytes)| *bytes);
    match largest.filter(|(_, bytes)| *bytes > limit) {
        Some((file, needed)) => Err(StartError::FileSize { file, needed, limit }),
        None => Ok(()),
    }
}
