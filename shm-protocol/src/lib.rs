//! The protocol between an engine process and the sidecar, byte for byte. `PROTOCOL.md` beside this crate
//! states the same for other languages.
//!
//! Job: the handshake ([`handshake`]) and the versions of two releases ([`versions`]); the shared session
//! memory ([`layout`], [`session`]) with its rings ([`ring`]), their messages (one list, `messages`;
//! [`message`]) and requests ([`request`]), and the gates by which an engine takes loads back ([`gate`]);
//! block keys and namespaces ([`key`], [`namespace`]) with the digest of weight files ([`weight_files`]) and
//! the inside of pages ([`page_form`]); the layout of the DRAM pool ([`pool`]), the bytes of its blocks
//! ([`blocks`]), the tier of a hit ([`source`]), the announcements of kept blocks ([`announcement`]), and the schema
//! of clients' hints ([`hints`]).
//!
//! Beside these, for every crate: enums with a name for each variant ([`names`]), and random numbers
//! ([`random`]).
//!
//! May depend on: ciborium, sha2, twox-hash, hex, serde, serde_json, rustix, libc. Never: decides anything, starts a
//! thread, reads the environment, reads a peer's value again after checking it, or, outside of [`blocks`],
//! keeps a reference to plain memory writable by a peer.

#![warn(missing_docs)]

#[macro_use]
mod messages;

pub mod announcement;
pub mod blocks;
pub mod gate;
pub mod handshake;
pub mod hints;
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

/// The newest version of the handshake, the session memory and the messages in this release.
pub const PROTOCOL_VERSION: u32 = 3;
/// The oldest version in this release. Peers without a common version refuse each other, naming both ranges.
pub const PROTOCOL_OLDEST: u32 = 2;
/// The first version with [`message::Kind::Accept`], by which a scheduler names the steps it accepted.
pub const ACCEPT_SINCE: u32 = 3;
