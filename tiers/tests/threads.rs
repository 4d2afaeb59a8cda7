//! The tests of the SSD tier, where the kernel gives no io_uring.

#[path = "ssd.rs"]
mod ssd;

use ssd::rig;
