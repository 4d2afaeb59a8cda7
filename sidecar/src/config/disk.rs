//! Disks for blocks: `--ssd` and its options.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use tiers::ssd::Backend;

use super::{ConfigError, Size};

/// Disks at once: more than a host has drive bays for NVMe.
const DISKS_MAX: usize = 32;

/// Suffix of a disk with permission to create its file.
const CREATE: &str = ":create";

/// A path on a disk and the bytes to use there, written `PATH:SIZE` or `PATH:SIZE:create`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(try_from = "String")]
pub struct Disk {
    /// A folder, a file or a block device.
    pub path: PathBuf,
    pub size: Size,
    /// True if a missing file is created, also on the root disk.
    pub create: bool,
}

shm_protocol::named! {
    /// Saved blocks to write to disks.
    #[derive(Deserialize)]
    #[serde(try_from = "String")]
    pub enum SsdAdmission {
        All = "all",
        /// Blocks requested again, or back after their eviction.
        SecondHit = "second-hit",
    }
}

shm_protocol::named! {
    /// The kind of I/O between disks and memory.
    #[derive(Deserialize)]
    #[serde(try_from = "String")]
    pub enum SsdIo {
        /// io_uring if the kernel allows it, otherwise threads.
        Auto = "auto",
        IoUring = "io_uring",
        Threads = "threads",
    }
}

/// Refuses a path given twice, and more disks than [`DISKS_MAX`].
pub(super) fn check_disks(disks: &[Disk]) -> Result<(), ConfigError> {
    let wrong = |value: String, rule| Err(ConfigError::Range { option: "ssd", value, rule });
    if disks.len() > DISKS_MAX {
        return wrong(format!("given {} times", disks.len()), "given at most 32 times");
    }
    let twice =
        disks.iter().enumerate().find(|(at, disk)| disks[..*at].iter().any(|it| it.path == disk.path));
    match twice {
        Some((_, disk)) => {
            wrong(disk.to_string(), "a different path each time, since two logs cannot share one")
        }
        None => Ok(()),
    }
}

// === impl Disk ===

impl FromStr for Disk {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (disk, create) = text.strip_suffix(CREATE).map_or((text, false), |disk| (disk, true));
        // From the right: a path may hold colons, a size cannot.
        let (path, size) = disk.rsplit_once(':').filter(|(path, _)| !path.is_empty()).ok_or_else(|| {
            format!(
                "\"{text}\" is not a disk: write a path, a colon and a size, such as /nvme/pillion:500GiB, and :create \
                 behind them to have a file created there"
            )
        })?;
        Ok(Self { path: path.into(), size: size.parse()?, create })
    }
}

impl fmt::Display for Disk {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.path.display(), self.size)
    }
}

// === impl SsdIo ===

impl SsdIo {
    /// The required backend; `None` allows both.
    pub fn wanted_backend(self) -> Option<Backend> {
        match self {
            Self::Auto => None,
            Self::IoUring => Some(Backend::IoUring),
            Self::Threads => Some(Backend::Threads),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(text: &str) -> Result<Disk, String> {
        text.parse()
    }

    #[test]
    fn a_disk_is_a_path_and_a_size() {
        let parsed = disk("/a:b/c:4GiB").unwrap();
        assert_eq!((parsed.path.to_str(), parsed.size.as_bytes()), (Some("/a:b/c"), 4 << 30));
        assert!(!parsed.create && disk("/a:b/c:4GiB:create").unwrap() == Disk { create: true, ..parsed });
        for (wrong, told) in [
            ("/nvme", "/nvme/pillion:500GiB"),
            (":4GiB", "a path, a colon"),
            ("/nvme:4", "30GiB"),
            ("/a:create", ":create behind"),
        ] {
            let error = disk(wrong).unwrap_err();
            assert!(error.contains(told), "{wrong}: {error}");
        }
        assert!("twice".parse::<SsdAdmission>().unwrap_err().contains("all, second-hit"));
        assert_eq!("io_uring".parse::<SsdIo>().unwrap().wanted_backend(), Some(Backend::IoUring));
        assert_eq!("auto".parse::<SsdIo>().unwrap().wanted_backend(), None);
        assert!("aio".parse::<SsdIo>().unwrap_err().contains("auto, io_uring, threads"));
    }

    #[test]
    fn one_path_is_given_once() {
        let disks = |texts: &[&str]| texts.iter().map(|text| disk(text).unwrap()).collect::<Vec<_>>();
        assert!(check_disks(&disks(&["/a:1GiB", "/b:1GiB"])).is_ok());
        let error = check_disks(&disks(&["/a:1GiB", "/a:2GiB"])).unwrap_err().to_string();
        assert!(error.contains("ssd is /a:2.0 GiB") && error.contains("a different path"), "{error}");
        assert!(check_disks(&vec![disk("/a:1GiB").unwrap(); 33]).unwrap_err().to_string().contains("32"));
    }
}
