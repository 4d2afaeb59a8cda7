//! What an engine process and the sidecar must agree on, byte for byte.
//!
//! Job: the handshake ([`handshake`]), the shared session memory ([`layout`], [`session`]), the rings in it
//! ([`ring`]), the messages on them (one list of all, `messages`; [`message`]) and what they ask ([`request`]), taking loads back ([`gate`]), block keys and
//! namespaces ([`key`], [`namespace`]) with the digest of weight files ([`weight_files`]) and the inside of pages ([`page_form`])
//! in them, the layout of the DRAM pool ([`pool`]) and the bytes of its blocks ([`blocks`]), where a query found a block
//! ([`source`]), what is told of kept blocks ([`announcement`]), and how two releases agree on a version of these ([`versions`]).
//! `PROTOCOL.md` beside this crate states the same for other languages.
//!
//! Beside these, for every crate: enums whose variants have names ([`names`]), and random numbers ([`random`]).
//!
//! May depend on: ciborium, sha2, twox-hash, hex, serde, rustix, libc. Never: decides anything, starts a thread, reads the environment,
//! trusts a peer's value twice, or, outside of [`blocks`], keeps a reference to plain memory that a peer can write.

#![warn(missing_docs)]

#[macro_use]
mod messages;

pub mod announcement;
pub mod blocks;
pub mod gate;
pub mod handshake;
pub mod key;
pub mod layout;
pub mod message;
pub mod names;
pub mod namespace;
pub mod page_form;
pub mod pool;
pub mod prefill;
pub mod random;
pub mod region;
pub mod request;
pub mod ring;
pub mod session;
pub mod source;
pub mod transport;
pub mod versions;
pub mod wait;
pub mod weight_files;

/// The newest version of the handshake, the session memory and the messages that this release speaks.
pub const PROTOCOL_VERSION: u32 = 3;
/// The oldest one that it speaks. Peers without a common version refuse each other, naming both ranges.
pub const PROTOCOL_OLDEST: u32 = 2;
/// The first version in which a scheduler says which steps it accepted: [`message::Kind::Accept`].
pub const ACCEPT_SINCE: u32 = 3;
