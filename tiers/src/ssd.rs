//! The SSD tier: an append-only log of blocks on each device.
//!
//! [`Log`] decides, purely, on the caller's thread: the place of each block, reclamation, refusals. A
//! [`Device`] carries out on its own threads, through io_uring if the kernel has it. The log sends [`Job`]s
//! down and the device [`Up`]s back, as plain data. The module `format` has the layout on a device;
//! `recovery` reads back the blocks that survive a kill or a power cut.

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

/// A place on a device: the begin of a structure.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct Place {
    pub segment: u32,
    /// Units from the segment's begin.
    pub unit: u32,
}

/// Sizes of one device, found or chosen when it was opened.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Geometry {
    /// Bytes of the smallest transfer: direct I/O and the file system handle this many whole.
    pub unit_bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    pub segments: u32,
    /// Sequences of this life begin here, above all sequences of earlier lives.
    pub first_sequence: u64,
}

/// Work for a device.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Job {
    /// Number of the device, as in [`Config::devices`].
    pub device: usize,
    /// The ticket repeated in [`Done`].
    pub ticket: Ticket,
    pub work: Work,
}

/// The kinds of work of a device. A pool offset names a slot; the job owns the slot until its [`Done`].
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Work {
    /// Writes a segment's header; every earlier block in the segment is gone.
    Begin { segment: u32, sequence: u64 },
    /// Computes a block's checksum and writes the block, header first, from the pool.
    Write {
        place: Place,
        sequence: u64,
        /// The label of the block.
        label: Label,
        /// Pool offset of its bytes.
        from: u64,
    },
    /// Reads a block into the pool and verifies its header and its checksum.
    Read {
        place: Place,
        /// The sequence under which it was written.
        sequence: u64,
        /// The expected label.
        label: Label,
        /// Pool offset for its bytes.
        into: u64,
    },
    /// Verifies a block and writes it again elsewhere on the device.
    Move {
        from: Place,
        /// The sequence under which it was written.
        from_sequence: u64,
        to: Place,
        /// The sequence of the segment there.
        to_sequence: u64,
        /// The expected label.
        label: Label,
    },
    /// Writes a segment's footer: the list of blocks written in it since its `Begin`.
    Seal { segment: u32, sequence: u64 },
    /// Checks if a failed device works again: writes and reads a unit of no other use.
    Check,
    /// Ends the queued reads and writes of blocks as [`Fault::Stopped`], since the device does not answer.
    GiveUp,
    /// Hides a namespace's blocks in segments of sequences below `before` from later lives.
    Distrust { namespace: NamespaceDigest, before: u64 },
}

/// A job has ended: its slot belongs to the caller again.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Done {
    pub device: usize,
    pub ticket: Ticket,
    /// Microseconds since the device took it up.
    pub micros: u64,
    /// The result of the job.
    pub result: Result<(), Fault>,
}

/// The reason of a job's failure. Each failure is a miss, and counted by its [`Fault::kind`].
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum Fault {
    #[error("{0}")]
    Io(#[from] Errno),
    /// A transfer ended early.
    #[error("{moved} of {wanted} bytes were transferred")]
    Short { moved: u64, wanted: u64 },
    /// The bytes there differ from the written ones.
    #[error("the {0} does not match")]
    Corrupt(&'static str),
    /// The device was stopped before the job's turn.
    #[error("the device was stopped")]
    Stopped,
}

shm_protocol::named! {
    /// Kinds of faults, for metrics.
    pub enum FaultKind {
        /// ENOSPC, EDQUOT or EFBIG: the file cannot hold what it was made for.
        NoSpace = "no_space",
        /// EIO and its like: the device failed.
        Io = "io",
        /// ENODEV, ENXIO: the device is gone.
        Gone = "gone",
        /// A transfer ended early.
        Short = "short",
        /// Other bytes than the written ones.
        Corrupt = "corrupt",
        /// A job took longer than [`Config::late_ms`].
        Late = "late",
        Other = "other",
    }
}

/// A report of a device to its caller.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Up {
    /// A job has ended.
    Done(Done),
    /// Blocks left by earlier lives: for [`Log::recovered`].
    Recovered(Recovered),
    /// A text for the operator's log.
    Note(String),
}

/// A function of the caller for every report from a device's threads.
pub(crate) type Tell = Arc<dyn Fn(Up) + Send + Sync>;

/// A part of the blocks left by earlier lives on a device, newest first.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Recovered {
    pub device: usize,
    /// The segment, with its sequence.
    pub segment: u32,
    /// The sequence of its blocks.
    pub sequence: u64,
    /// Blocks, with the units of their begins.
    pub blocks: Vec<(u32, Label)>,
    /// True if the segment could not be read, or not to its end: it may hold more.
    pub unreadable: bool,
    /// Number of segments read so far.
    pub segments_read: u32,
    /// True for the last part: from now on the device takes writes.
    pub last: bool,
}

/// The consequence of a job's end for the caller.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Ended {
    /// The write of the slot's block has ended: unpin the slot.
    Written {
        slot: SlotRef,
        /// True if the block is kept now.
        ok: bool,
    },
    /// The read into the slot has ended.
    Read {
        ticket: Ticket,
        key: BlockKey,
        slot: SlotRef,
        /// True if the slot holds the block, verified.
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
    /// Returns the kind under which the fault is counted; `None` for a fault without significance for the
    /// device.
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
