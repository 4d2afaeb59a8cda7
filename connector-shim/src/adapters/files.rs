//! The files of an adapter's folder that ranks read.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sha2::{Digest, Sha256};

/// The first, and one of the others.
const FILES: [&str; 4] =
    ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"];
/// Bytes read at once.
const READ_BYTES: usize = 1 << 20;

/// A file as it is on its disk. A copy may keep size, mtime and inode, as `rsync --inplace --times` does; no program sets a ctime.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct AdapterFile {
    name: &'static str,
    size: u64,
    inode: u64,
    /// Seconds and nanoseconds of mtime and ctime.
    times: [(i64, i64); 2],
}

/// The adapter's files; none where ranks would look elsewhere, such as at a hub.
pub(super) fn files_of(folder: &Path) -> Vec<AdapterFile> {
    let stated = |name: &&'static str| {
        let stat = fs::metadata(folder.join(name)).ok()?;
        let times = [(stat.mtime(), stat.mtime_nsec()), (stat.ctime(), stat.ctime_nsec())];
        Some(AdapterFile { name, size: stat.size(), inode: stat.ino(), times })
    };
    let found: Vec<_> = FILES.iter().filter_map(stated).collect();
    if found.len() > 1 && found[0].name == FILES[0] { found } else { Vec::new() }
}

/// A digest of names and bytes, all of them; none where the files differ from `files`, before or after.
pub(super) fn digest_files(folder: &Path, files: &[AdapterFile]) -> Option<[u8; 32]> {
    let mut digest = Sha256::new();
    let mut piece = vec![0; READ_BYTES];
    for AdapterFile { name, size, .. } in files {
        digest.update(format!("{name} {size}\n"));
        let mut file = File::open(folder.join(name)).ok()?;
        loop {
            match file.read(&mut piece).ok()? {
                0 => break,
                read => digest.update(&piece[..read]),
            }
        }
    }
    (files_of(folder) == files).then(|| digest.finalize().into())
}
