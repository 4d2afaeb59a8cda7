//! What the SSD tier asks of the kernel: buffers that direct I/O accepts, and a ring. The only unsafe code beside the
//! mapping of the pool.

#[expect(unsafe_code, reason = "anonymous mappings, and the pool's bytes as slices")]
pub(crate) mod buf;
#[expect(unsafe_code, reason = "the kernel is given addresses")]
pub(crate) mod uring;
