//! One transfer between a file and memory, for every backend.

use super::buf::Buffer;

/// Most transfers in flight: two for each job a device takes on at a time.
pub(crate) const TRANSFERS_MAX: usize = 256;

/// The direction of a transfer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Direction {
    Read,
    Write,
}

/// The memory of a transfer.
#[derive(Debug)]
pub(crate) enum Memory {
    /// A buffer, from its start.
    Own(Buffer),
    /// The pool, from this offset.
    Pool(u64),
}

/// A move of bytes between the file and memory.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// The caller's number for the transfer.
    pub(crate) token: u64,
    pub(crate) direction: Direction,
    /// The offset in the file.
    pub(crate) at: u64,
    pub(crate) memory: Memory,
    pub(crate) len: u32,
    /// True for a write that ends only once its bytes lie on the medium.
    pub(crate) durable: bool,
    /// Bytes moved in earlier rounds.
    pub(crate) moved: u32,
}
