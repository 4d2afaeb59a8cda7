//! Settings of glibc's heap.

/// The heap maps a block of this size or more by itself. glibc begins with this value.
const MAPPED_BYTES_MIN: libc::c_int = 128 << 10;

/// Has the kernel get each large block back as soon as it is freed. Call it before a thread starts.
///
/// By default a freed block of up to 32 MiB raises glibc's limit to its size. Later blocks then lie between others on the heap, whose gaps
/// stay resident: with 64 MiB for bodies a router grew to 215 MiB in five waves, and with this to 105 MiB.
pub(super) fn return_large_blocks() {
    // SAFETY: no thread is there that allocates meanwhile, and glibc takes any value.
    let is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN) };
    debug_assert_eq!(is_set, 1, "a limit below 32 MiB");
}
