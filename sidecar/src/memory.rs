//! The pool's memory: reserved, locked for GPUs, and placed near them.

pub mod numa;
pub mod pinning;
pub mod reserve;
