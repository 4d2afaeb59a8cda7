//! A path that is to keep blocks, as `pillion serve --ssd` would find it. Nothing is created or written.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, FileType};

use super::{Finding, Level};
use crate::config::Disk;

/// The file in a folder.
const FILE_NAME: &str = "pillion.log";
const STAT_BLOCK_BYTES: u64 = 512;
const MIB: u64 = 1 << 20;

/// What is wrong with it, or nothing.
pub(super) fn look(disk: &Disk) -> Finding {
    let bad =
        |text: String, remedy: &str| Finding::bad(Level::Fail, "ssd", format!("{disk}: {text}"), remedy);
    let file = if disk.path.is_dir() { disk.path.join(FILE_NAME) } else { disk.path.clone() };
    let stat = rustix::fs::stat(&file).ok();
    let kind = stat.map(|stat| FileType::from_raw_mode(stat.st_mode));
    // What must be writable: what is there, or the folder where it is made.
    let folder = parent(&file);
    let (place, access) = match kind {
        Some(FileType::BlockDevice | FileType::RegularFile) => (&file, Access::READ_OK | Access::WRITE_OK),
        Some(_) => {
            return bad("is neither a file, a folder nor a block device".into(), "pass one of these");
        }
        None if !folder.is_dir() => {
            return bad(format!("{} is no folder", folder.display()), "create it, or mount the disk there");
        }
        None => (&folder, Access::WRITE_OK | Access::EXEC_OK),
    };
    if let Err(error) = rustix::fs::access(place, access) {
        let remedy =
            "give this user the right to it (in Kubernetes fsGroup or runAsUser), or pass another path";
        return bad(format!("{} may not be written: {error}", place.display()), remedy);
    }
    if kind == Some(FileType::BlockDevice) {
        return Finding::ok("ssd", format!("{disk}: a block device that may be written"));
    }
    let own = stat.map_or(0, |stat| stat.st_blocks as u64 * STAT_BLOCK_BYTES);
    let Ok(fs) = rustix::fs::statvfs(&folder) else {
        return bad("its file system cannot be looked at".into(), "pass another path");
    };
    let room = fs.f_bavail * fs.f_frsize + own;
    if room < disk.size.as_bytes() {
        let text = format!("its file system has room for {} MiB", room / MIB);
        return bad(text, "ask for less, or free some of it");
    }
    Finding::ok("ssd", format!("{disk}: may be written, and its file system has room for {} MiB", room / MIB))
}

fn parent(file: &Path) -> PathBuf {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: &Path, size: &str) -> Finding {
        look(&format!("{}:{size}", path.display()).parse().unwrap())
    }

    #[test]
    fn a_disk_is_judged_before_anything_is_written_there() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(at(folder.path(), "1MiB").level, Level::Ok);
        assert_eq!(at(&folder.path().join("file"), "1MiB").level, Level::Ok);
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "nothing was created");
        let full = at(folder.path(), "900000GiB");
        assert!(full.level == Level::Fail && full.text.contains("room for"), "{full:?}");
        let absent = at(&folder.path().join("absent/file"), "1MiB");
        assert!(absent.text.contains("is no folder"), "{absent:?}");
        assert!(at(Path::new("/dev/null"), "1MiB").text.contains("neither"));
    }
}
