//! The SSD tier: an append-only log of blocks on each device.
//!
//! [`Log`] decides, purely, on the caller's thread: which block lies where, what is reclaimed, what is refused. A
//! [`Device`] carries out on threads of its own, through io_uring where the kernel has it. Between them go [`Job`]s down and [`Up`]s back, plain
//! data. The layout on a device is the module `format`; what survives a kill or a power cut is read back by `recovery`.

mod device;
mod format;
mod location;
mod log;
mod opened;
pub mod raw;
mod recovery;

use std::fmt;
use std::sync::Arc;

use rustix::io::Errno;
pub use shm_protocol::key::Label;
use shm_protocol::key::{BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use thiserror::Error;

pub use self::device::Device;
pub use self::location::{Missing, locate};
pub use self::log::{Config, DeviceStats, Log, Pace, Refused, Stats};
pub use self::opened::Opened;
pub use crate::io::carrier::Backend;

/// Names a job; unique within a [`Log`].
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(pub(crate) u64);

/// Where something begins on a device.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct Place {
    pub segment: u32,
    /// Units from the segment's begin.
    pub unit: u32,
}

/// Sizes of one device, as they were found or chosen when it was opened.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Geometry {
    /// Bytes of the smallest transfer: what direct I/O and the file system handle whole.
    pub unit_bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    pub segments: u32,
    /// Sequences of this life begin here: above all that earlier lives gave out.
    pub first_sequence: u64,
}

/// Work for a device.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Job {
    /// Number of the device, as in [`Config::devices`].
    pub device: usize,
    /// The name that [`Done`] answers with.
    pub ticket: Ticket,
    pub work: Work,
}

/// What a device can do. Pool offsets name slots that stay the job's until its [`Done`].
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Work {
    /// Writes a segment's header; every earlier block in it is gone.
    Begin { segment: u32, sequence: u64 },
    /// Computes a block's checksum and writes it, header first, from the pool.
    Write {
        place: Place,
        sequence: u64,
        /// What the block is.
        label: Label,
        /// Where its bytes lie in the pool.
        from: u64,
    },
    /// Reads a block into the pool and verifies its header and its checksum.
    Read {
        place: Place,
        /// The sequence it was written under.
        sequence: u64,
        /// What it must be.
        label: Label,
        /// Where its bytes go in the pool.
        into: u64,
    },
    /// Verifies a block and writes it again elsewhere on the device.
    Move {
        from: Place,
        /// The sequence it was written under.
        from_sequence: u64,
        to: Place,
        /// The sequence of the segment there.
        to_sequence: u64,
        /// What it must be.
        label: Label,
    },
    /// Writes a segment's footer: what was written in it since its `Begin`.
    Seal { segment: u32, sequence: u64 },
    /// Finds out whether a device that failed works again: writes and reads a unit that holds nothing.
    Check,
    /// Ends the reads and writes of blocks that the device was not given yet, as [`Fault::Stopped`]: it does not answer.
    GiveUp,
    /// No later life finds a namespace's blocks in segments of sequences below `before`.
    Distrust { namespace: NamespaceDigest, before: u64 },
}

/// A job has ended: the slot it had is the caller's again.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Done {
    pub device: usize,
    pub ticket: Ticket,
    /// Microseconds from when the device took it up.
    pub micros: u64,
    /// What came of it.
    pub result: Result<(), Fault>,
}

/// Why a job failed. Each is a miss, and counted by its [`Fault::kind`].
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum Fault {
    #[error("{0}")]
    Io(#[from] Errno),
    /// A transfer ended early.
    #[error("{moved} of {wanted} bytes were transferred")]
    Short { moved: u64, wanted: u64 },
    /// What lies there is not what was written.
    #[error("the {0} does not match")]
    Corrupt(&'static str),
    /// The device was stopped before the job's turn.
    #[error("the device was stopped")]
    Stopped,
}

shm_protocol::named! {
    /// Faults as they are counted.
    pub enum FaultKind {
        /// ENOSPC, EDQUOT or EFBIG: the file cannot hold what it was made for.
        NoSpace = "no_space",
        /// EIO and its like: the device failed.
        Io = "io",
        /// ENODEV, ENXIO: the device is gone.
        Gone = "gone",
        /// A transfer ended early.
        Short = "short",
        /// Other bytes than were written.
        Corrupt = "corrupt",
        /// A job took longer than [`Config::late_ms`].
        Late = "late",
        Other = "other",
    }
}

/// What a device tells its caller.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Up {
    /// A job has ended.
    Done(Done),
    /// Blocks that earlier lives left: for [`Log::recovered`].
    Recovered(Recovered),
    /// Something an operator should know.
    Note(String),
}

/// A function of the caller for everything from a device's threads.
pub(crate) type Tell = Arc<dyn Fn(Up) + Send + Sync>;

/// A part of what earlier lives left on a device, newest first.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Recovered {
    pub device: usize,
    /// The segment, with its sequence.
    pub segment: u32,
    /// The sequence of its blocks.
    pub sequence: u64,
    /// Blocks, with the units they begin at.
    pub blocks: Vec<(u32, Label)>,
    /// Whether the segment could not be read, or not to its end: it may hold more.
    pub unreadable: bool,
    /// Segments that were read so far.
    pub segments_read: u32,
    /// Whether this was all: from now on the device takes writes.
    pub last: bool,
}

/// What a job's end means for the caller.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Ended {
    /// The slot's block was written, or not: unpin the slot.
    Written {
        slot: SlotRef,
        /// Whether the block is kept now.
        ok: bool,
    },
    /// The slot holds the block, verified, or nothing of worth.
    Read {
        ticket: Ticket,
        key: BlockKey,
        slot: SlotRef,
        /// Whether the slot holds the block.
        ok: bool,
    },
}

// === impl Ticket ===

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl Fault ===

impl Fault {
    /// The kind it is counted under; `None` for one that says nothing of the device.
    pub fn kind(&self) -> Option<FaultKind> {
        Some(match self {
            Self::Io(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => FaultKind::NoSpace,
            Self::Io(Errno::NODEV | Errno::NXIO | Errno::SHUTDOWN) => FaultKind::Gone,
            Self::Io(Errno::IO | Errno::NODATA | Errno::ILSEQ | Errno::TIMEDOUT) => FaultKind::Io,
            Self::Io(_) => FaultKind::Other,
            Self::Short { .. } => FaultKind::Short,
            Self::Corrupt(_) => FaultKind::Corrupt,
            Self::Stopped => return None,
        })
    }
}
