//! Errors, by the caller's reaction to them.

use std::io;
use std::path::PathBuf;

use shm_protocol::pool::LayoutError;
use thiserror::Error;

/// The tier cannot be built; the process should end with this text.
#[derive(Debug, Error)]
pub enum Error {
    /// The sizes fit no pool.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The pool has less than one segment.
    #[error("the DRAM tier would have {bytes} bytes, and the least is {min} (one segment): raise --dram")]
    TooSmall {
        bytes: u64,
        /// Bytes of the smallest pool.
        min: u64,
    },
    /// The pool has more slots than numbers.
    #[error("the DRAM tier would have {bytes} bytes, and the most is {max}: lower --dram")]
    TooLarge {
        bytes: u64,
        /// Bytes of the largest pool.
        max: u64,
    },
    /// The machine does not have the memory.
    #[error(
        "the DRAM tier needs {bytes} bytes, and {available} bytes are available in {place}: lower --dram or {remedy}"
    )]
    NoMemory {
        /// Bytes needed in all.
        bytes: u64,
        available: u64,
        /// The place of the pool.
        place: String,
        /// Another remedy.
        remedy: &'static str,
    },
    /// The machine has too few free huge pages.
    #[error(
        "the DRAM tier of {bytes} bytes takes {needed} huge pages of {page_kib} KiB, and {available} are free: reserve \
         more (sysctl vm.nr_hugepages={total}, best at boot; in Kubernetes also the resource hugepages-2Mi: {}Mi), or \
         lower --dram",
        .bytes >> 20
    )]
    NoHugePages {
        /// Bytes needed in all.
        bytes: u64,
        needed: u64,
        /// KiB of a page.
        page_kib: u64,
        /// Pages that are free.
        available: u64,
        /// Pages to reserve in all, those in use too.
        total: u64,
    },
    /// The huge pages are larger than a part of the pool.
    #[error(
        "the DRAM tier of {bytes} bytes is not a multiple of huge pages of {page_bytes} bytes: pass a --pool-path on a \
         hugetlbfs that is mounted with pagesize=2M"
    )]
    HugePageBytes {
        /// Bytes needed in all.
        bytes: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// Another process holds the file.
    #[error("another sidecar holds the pool file {0}: stop it, or pass another --pool-path")]
    Locked(PathBuf),
    /// The file must not hold a pool.
    #[error("the pool file {path} {problem}")]
    File {
        path: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// A device of the SSD tier cannot be used.
    #[error("--ssd {path} {problem}: {remedy}")]
    Device {
        /// The device, as in the option.
        path: PathBuf,
        /// The problem.
        problem: String,
        remedy: String,
    },
    /// Another program uses the device of the SSD tier. Transfers of a killed sidecar may be under way there.
    #[error("--ssd {path} {problem}: stop the program that uses it, or pass another path")]
    DeviceBusy { path: PathBuf, problem: &'static str },
    /// The device does not answer.
    #[error(
        "--ssd {path} did not open within {seconds} s: look at the kernel's log (dmesg), then repair or replace the \
         disk"
    )]
    DeviceHangs { path: PathBuf, seconds: u64 },
    /// The wanted backend, or threads, cannot be had.
    #[error(
        "cannot move the bytes of --ssd: {0}; let the container's seccomp profile allow io_uring_setup, io_uring_enter \
         and io_uring_register, and set sysctl kernel.io_uring_disabled=0, or pass --ssd-io threads"
    )]
    Carrier(io::Error),
    #[error("cannot {doing} for the DRAM pool: {source}")]
    Os {
        doing: &'static str,
        /// The kernel's error, its kind kept.
        source: io::Error,
    },
}

/// The lease is not valid for the call. The block bytes must not be used under it.
#[derive(Copy, Clone, Debug, Error, Eq, PartialEq)]
pub enum LeaseError {
    /// Never granted, released, or so old that its table entry serves another lease.
    #[error("the lease is unknown")]
    Unknown,
    /// Its time ran out before a load was posted.
    #[error("the lease has expired")]
    Expired,
    /// Granted to another owner, or the worker is not one of its workers.
    #[error("the lease belongs to another owner")]
    Foreign,
    /// This worker, or every worker, has ended its load already.
    #[error("the lease was used already")]
    Consumed,
}

/// The block is not kept. The save is dropped, without other effects.
#[derive(Copy, Clone, Debug, Error, Eq, PartialEq)]
pub enum FillError {
    #[error("the block is already kept")]
    Present,
    /// Another save is filling the block.
    #[error("the block is being filled")]
    Filling,
    /// Every slot of this size, or every block of its quota, is leased or being filled.
    #[error("no room: every slot of this size, or every block of its quota, is leased or being filled")]
    NoSpace,
    /// The block is larger than a segment.
    #[error("the block is larger than {max} bytes, the most a pool segment holds: raise --dram")]
    TooLarge {
        /// Bytes of the largest block.
        max: u64,
    },
    /// The block has no bytes.
    #[error("the block has no bytes")]
    Empty,
}

// === impl Error ===

impl Error {
    /// Attaches the failed step to an errno.
    pub(crate) fn os(doing: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Os { doing, source: errno.into() }
    }
}
