//! The tests of the SSD tier, for kernels without io_uring.

#[path = "ssd.rs"]
mod ssd;

use ssd::rig;
