//! The data thread's interface to disks, peers and checksums.

pub mod checksums;
pub mod disks;
pub mod peers;
