//! The place of a log. It is checked completely before any write.

use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use shm_protocol::region::TMPFS_MAGIC;

use super::format::SUPER_BYTES;
use crate::Error;

/// Fewest segments of a log: the open one, the next one, and two with blocks.
pub(super) const SEGMENTS_MIN: u64 = 4;
/// The smallest default segment: it holds the blocks of common models.
pub(super) const SEGMENT_BYTES_MIN: u64 = 4 << 20;
/// The log's file in a folder given as a device.
const FILE_NAME: &str = "pillion.log";
/// `f_type` of ramfs, which keeps its files in memory as tmpfs does.
const RAMFS_MAGIC: u32 = 0x8584_58f6;

/// The treatment of a path without a file.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Missing {
    /// Refuse it, if its disk is most likely not mounted: see [`filled_instead`].
    Refuse,
    /// Make a file.
    Create,
}

/// Makes errors with the path of a device.
pub(super) struct DeviceErrors<'a>(pub(super) &'a Path);

/// Returns the file or block device for a log of `bytes` at `path`: a file, a folder (its file `pillion.log`)
/// or a block device. Writes nothing. Fails if the place cannot hold a log.
pub fn locate(path: &Path, bytes: u64, missing: Missing) -> Result<PathBuf, Error> {
    locate_beside(Path::new("/"), path, bytes, missing)
}

/// Does the same, with a folder of the root disk.
fn locate_beside(root: &Path, path: &Path, bytes: u64, missing: Missing) -> Result<PathBuf, Error> {
    let errors = DeviceErrors(path);
    let least = SUPER_BYTES + SEGMENTS_MIN * SEGMENT_BYTES_MIN;
    if bytes < least {
        return Err(errors
            .because(format!("has a size of {bytes} bytes, and the least is {least}"), "raise its size"));
    }
    let is_folder = path.is_dir();
    let file = if is_folder { path.join(FILE_NAME) } else { path.to_owned() };
    let folder = parent(&file);
    match rustix::fs::stat(&file).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
        Ok(FileType::BlockDevice) => return Ok(file),
        Ok(FileType::RegularFile) => {}
        Ok(_) => {
            return Err(
                errors.because("is not a file, a folder or a block device", "pass a path of one of these")
            );
        }
        Err(Errno::NOENT | Errno::NOTDIR) if !folder.is_dir() => {
            let problem = format!("does not exist, and {} is not a folder", folder.display());
            return Err(errors.because(problem, "mount the disk there, or create the folder"));
        }
        Err(Errno::NOENT) => {
            let filled = filled_instead(root, &folder, is_folder).filter(|_| missing == Missing::Refuse);
            if let Some(disk) = filled {
                let lacks = if is_folder { "has no pillion.log, which" } else { "does not exist, and" };
                let problem = format!("{lacks} would be created on the disk of {}", disk.display());
                let remedy = format!(
                    "mount the disk that is meant for it, or write --ssd {}:SIZE:create to create the file there",
                    path.display()
                );
                return Err(errors.because(problem, remedy));
            }
        }
        Err(errno) => return Err(errors.os("be found")(errno)),
    }
    let fs = rustix::fs::statfs(&folder).map_err(errors.os("be asked for its file system"))?;
    if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&(fs.f_type as u32)) {
        return Err(errors.because(
            "lies in memory (tmpfs)",
            "pass a path on a disk, and raise --dram if more memory is to be used",
        ));
    }
    Ok(file)
}

/// Returns the folder of a path.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Returns a folder of the disk that a new log would fill because its own is most likely not mounted: the
/// root disk, or the disk of a folder without a mount. In a folder given as a device, a log may lie on any
/// disk except the root disk.
fn filled_instead<'a>(root: &'a Path, folder: &'a Path, is_folder: bool) -> Option<&'a Path> {
    if device(folder) == device(root) {
        return Some(root);
    }
    (!is_folder && !is_mount_point(folder)).then_some(folder)
}

/// Returns the file system of a path.
fn device(path: &Path) -> Option<u64> {
    rustix::fs::stat(path).ok().map(|stat| stat.st_dev)
}

/// True if a disk other than the root disk is mounted at `folder`.
fn is_mount_point(folder: &Path) -> bool {
    let Ok(folder) = folder.canonicalize() else { return false };
    let Some(above) = folder.parent() else { return false };
    let known = rustix::fs::statx(CWD, &folder, AtFlags::empty(), StatxFlags::BASIC_STATS)
        .ok()
        .filter(|stat| stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT));
    match known {
        Some(stat) => stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
        // Before Linux 5.8, and in gVisor.
        None => device(&folder) != device(above),
    }
}

// === impl DeviceErrors ===

impl DeviceErrors<'_> {
    pub(super) fn because(&self, problem: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::Device { path: self.0.to_owned(), problem: problem.into(), remedy: remedy.into() }
    }

    pub(super) fn busy(&self, problem: &'static str) -> Error {
        Error::DeviceBusy { path: self.0.to_owned(), problem }
    }

    pub(super) fn os(&self, doing: &'static str) -> impl FnOnce(Errno) -> Error + '_ {
        move |errno| {
            let problem = format!("cannot {doing} ({})", std::io::Error::from(errno));
            self.because(problem, remedy(errno))
        }
    }
}

/// Returns the remedy for an error of the kernel.
fn remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::ACCESS | Errno::PERM => {
            "give this user read and write permission (in Kubernetes fsGroup or runAsUser)"
        }
        Errno::ROFS => "mount its disk writable",
        _ => "look at the kernel's log (dmesg), or pass another path",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 17 << 20;

    fn refusal(path: &Path, missing: Missing) -> String {
        locate(path, BYTES, missing).unwrap_err().to_string()
    }

    /// A new folder on a disk.
    fn folder(name: &str) -> PathBuf {
        let program = std::env::current_exe().unwrap();
        let folder = program.with_file_name(format!("ssd-location-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_missing_path_is_no_reason_to_fill_the_disk_of_its_folder() {
        let folder = folder("missing");
        let file = folder.join("log");
        let text = refusal(&file, Missing::Refuse);
        assert!(text.contains("mount the disk") && text.contains("log:SIZE:create"), "{text}");
        assert_eq!(locate(&file, BYTES, Missing::Create).unwrap(), file);
        let text = refusal(&folder.join("none/log"), Missing::Create);
        assert!(text.contains("none is not a folder"), "{text}");
        let text = refusal(&file.join("log"), Missing::Create);
        assert!(text.contains("is not a folder"), "{text}");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "nothing was made");
        std::fs::write(&file, "").unwrap();
        assert_eq!(locate(&file, BYTES, Missing::Refuse).unwrap(), file);
        std::fs::remove_dir_all(&folder).unwrap();
        let text = refusal(Path::new("/pillion-none"), Missing::Refuse);
        assert!(text.contains("would be created on the disk of /:"), "{text}");
    }

    /// The mount point of a disk that is not mounted is a folder of the root disk.
    #[test]
    fn a_new_log_in_a_folder_of_the_root_disk_is_refused_unless_that_is_asked_for() {
        let (folder, other) = (folder("root"), Path::new("/proc"));
        let log = folder.join(FILE_NAME);
        let found = |root: &Path, missing| locate_beside(root, &folder, BYTES, missing);
        assert_eq!(found(other, Missing::Refuse).unwrap(), log, "another disk than that of /");
        let text = found(&folder, Missing::Refuse).unwrap_err().to_string();
        assert!(text.contains("has no pillion.log, which would be created on the disk of"), "{text}");
        assert!(text.contains("mount the disk") && text.contains(":SIZE:create"), "{text}");
        assert_eq!(found(&folder, Missing::Create).unwrap(), log);
        std::fs::write(&log, "").unwrap();
        assert_eq!(found(&folder, Missing::Refuse).unwrap(), log, "a log that is there");
        std::fs::remove_dir_all(&folder).unwrap();
        let text = refusal(Path::new("/"), Missing::Refuse);
        assert!(text.contains("would be created on the disk of /:"), "{text}");
    }

    #[test]
    fn mount_points_are_told_from_folders() {
        assert!(is_mount_point(Path::new("/proc")) && is_mount_point(Path::new("/dev/shm")));
        assert!(!is_mount_point(Path::new("/")) && !is_mount_point(Path::new("/proc/self")));
    }

    #[test]
    fn memory_is_no_disk() {
        for path in ["/dev/shm", "/dev/shm/pillion-none"] {
            let text = refusal(Path::new(path), Missing::Refuse);
            assert!(text.contains("lies in memory") && text.contains("raise --dram"), "{text}");
        }
        assert!(!Path::new("/dev/shm/pillion-none").exists());
    }
}
