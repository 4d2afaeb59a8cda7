//! Disks, peers and checksums, as the data thread sees them.

pub mod checksums;
pub mod disks;
pub mod peers;
