//! Tests of the program `pillion` and of a sidecar's server, in one binary: each binary more takes ten seconds to link.

#[path = "../client/mod.rs"]
mod client;

mod adoption;
mod bench;
mod control;
mod handshake;
mod init;
mod process;
mod quotas;
mod score;
mod sessions;
mod ssd;
mod staged;
