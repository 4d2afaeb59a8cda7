//! One transfer between a file and memory, as every backend takes it.

use super::buf::Buffer;

/// Transfers in flight at most: two for each job that a device takes on at a time.
pub(crate) const TRANSFERS_MAX: usize = 256;

/// Which way bytes go.
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

/// Bytes that move between the file and memory.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// What the caller knows it by.
    pub(crate) token: u64,
    pub(crate) direction: Direction,
    /// Where in the file.
    pub(crate) at: u64,
    pub(crate) memory: Memory,
    pub(crate) len: u32,
    /// Of a write: whether it ends only once its bytes lie on the medium.
    pub(crate) durable: bool,
    /// Bytes of them that earlier rounds moved.
    pub(crate) moved: u32,
}
