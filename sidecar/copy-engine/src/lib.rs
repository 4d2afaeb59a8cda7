//! Moves KV bytes between an engine's memory and the DRAM pool.
//!
//! Job: copy blocks, exactly as placed by a rank's regions, and say when a copy could not be made whole. Linked by the
//! sidecar (saves, and loads where it is asked to) and by the shim (loads and rescue).
//! May depend on: shm-protocol (regions, mappings), libc. Never: decides what is copied, waits for a peer, or maps
//! memory that a peer could shrink.

pub mod host;

pub use host::{CopyError, HostMemory};
