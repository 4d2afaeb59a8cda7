//! The C interface, `include/pillion.h`: argument conversion, handles, and one table of errors. No decisions.
//!
//! `tests/header.rs` writes the header from these files: their doc comments are its text, and what holds for all calls is
//! said in `cbindgen.toml`.

mod engine;
mod error;
mod handle;
mod handover;
mod keys;
mod page;
mod raw;
mod scheduler;
mod worker;
