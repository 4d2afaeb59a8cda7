//! The SSD tier's use of the kernel: buffers for direct I/O, and transfers by io_uring or by threads. The
//! only unsafe code of this crate.

#[expect(unsafe_code, reason = "anonymous mappings")]
pub(crate) mod buf;
pub(crate) mod carrier;
mod threads;
pub(crate) mod transfer;
#[expect(unsafe_code, reason = "the kernel is given addresses")]
mod uring;
