//! The C interface, `include/pillion.h`: argument conversion, handles, and one table of errors. No decisions.
//!
//! `tests/header.rs` writes the header from these files and their doc comments. `cbindgen.toml` has the rules for all calls.

mod engine;
mod error;
mod handle;
mod handover;
mod keys;
mod page;
mod raw;
mod scheduler;
mod worker;
