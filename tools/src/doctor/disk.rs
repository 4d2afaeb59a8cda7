//! A path for blocks, checked with the rules of `pillion serve --ssd`. Nothing is created or written.

use std::path::Path;

use rustix::fs::{Access, FileType};

use super::{Finding, FindingLevel};
use sidecar::config::Disk;
use sidecar::ports::disks;

const STAT_BLOCK_BYTES: u64 = 512;
const MIB: u64 = 1 << 20;

/// Checks the path.
pub(super) fn check_disk(disk: &Disk) -> Finding {
    let bad = |text: String, remedy: &str| {
        Finding::bad(FindingLevel::Fail, "ssd", format!("{disk}: {text}"), remedy)
    };
    let file = match disks::locate_disk(disk) {
        Ok(file) => file,
        Err(tiers::TierError::Device { problem, remedy, .. }) => return bad(problem, &remedy),
        Err(error) => return bad(error.to_string(), "pass another path"),
    };
    let stat = rustix::fs::stat(&file).ok();
    // A path that exists must be writable, or else its folder.
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (place, access) = match &stat {
        Some(_) => (file.as_path(), Access::READ_OK | Access::WRITE_OK),
        None => (folder, Access::WRITE_OK | Access::EXEC_OK),
    };
    if let Err(error) = rustix::fs::access(place, access) {
        let remedy =
            "give this user write permission (in Kubernetes fsGroup or runAsUser), or pass another path";
        return bad(format!("{} cannot be written: {error}", place.display()), remedy);
    }
    if stat.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice) {
        return Finding::ok("ssd", format!("{disk}: a writable block device"));
    }
    let own = stat.map_or(0, |stat| stat.st_blocks as u64 * STAT_BLOCK_BYTES);
    let Ok(fs) = rustix::fs::statvfs(folder) else {
        return bad("its file system cannot be examined".into(), "pass another path");
    };
    let room = fs.f_bavail * fs.f_frsize + own;
    if room < disk.size.as_bytes() {
        let text = format!("its file system has only {} MiB free", room / MIB);
        return bad(text, "lower the size, or free space");
    }
    Finding::ok("ssd", format!("{disk}: writable, and its file system has {} MiB free", room / MIB))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: &Path, rest: &str) -> Finding {
        check_disk(&format!("{}:{rest}", path.display()).parse().unwrap())
    }

    #[test]
    fn a_disk_is_judged_before_anything_is_written_there() {
        let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        assert_eq!(at(folder.path(), "64MiB:create").level, FindingLevel::Ok);
        let file = folder.path().join("file");
        assert_eq!(at(&file, "64MiB:create").level, FindingLevel::Ok);
        let missing = at(&file, "64MiB");
        assert!(missing.remedy.is_some_and(|remedy| remedy.contains(":create")), "{}", missing.text);
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "nothing was created");
        let full = at(folder.path(), "900000GiB:create");
        assert!(full.level == FindingLevel::Fail && full.text.contains("MiB free"), "{full:?}");
        let unmounted = at(Path::new("/"), "64MiB");
        assert!(
            unmounted.level == FindingLevel::Fail && unmounted.text.contains("on the disk of /"),
            "{unmounted:?}"
        );
        let absent = at(&folder.path().join("absent/file"), "64MiB");
        assert!(absent.text.contains("is not a folder"), "{absent:?}");
        assert!(at(Path::new("/dev/null"), "64MiB").text.contains("a block device"));
        assert!(at(Path::new("/dev/shm"), "64MiB").text.contains("memory"));
    }
}
