//! Settings of glibc's heap.

/// A block of this size or more is mapped by itself. A body of 150,000 tokens is smaller: each of its pages would be mapped again.
const MAPPED_BYTES_MIN: libc::c_int = 1 << 20;
/// Free bytes kept at the heap's end for the next body.
const KEPT_BYTES: libc::c_int = 4 << 20;

/// Has the kernel get each large block back as soon as it is freed. Call it before a thread starts.
///
/// By default a freed block of up to 32 MiB raises glibc's limit to its size. Later blocks then lie between others on the heap, whose gaps
/// stay resident: with 64 MiB for bodies a router grew to 215 MiB in five waves, and with this to 120 MiB.
pub(super) fn return_large_blocks() {
    for (name, bytes) in [(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN), (libc::M_TRIM_THRESHOLD, KEPT_BYTES)] {
        // SAFETY: no other thread allocates meanwhile, and glibc takes any value.
        let is_set = unsafe { libc::mallopt(name, bytes) };
        debug_assert_eq!(is_set, 1, "a limit below 32 MiB");
    }
}
