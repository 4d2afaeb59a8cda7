//! The three records of the handshake, CBOR maps on a UNIX SEQPACKET socket, one record a packet.
//!
//! The engine sends [`Hello`]; the sidecar answers [`Reply::Welcome`] with four descriptors (session memory, eventfd,
//! pool opened read-only, pidfd), or [`Reply::Refused`] with a text that names the remedy. After that the socket carries
//! nothing; its hang-up tells each side of the other's death.

mod check;

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::versions::{RELEASE, Versions};
use crate::{PROTOCOL_OLDEST, PROTOCOL_VERSION};

/// Bytes of the largest record: 1,024 regions of some 40 bytes and a page of facts.
pub const RECORD_BYTES_MAX: usize = 64 * 1024;
/// Descriptors of the largest record: one per KV storage of a rank.
pub const DESCRIPTORS_MAX: usize = 64;
/// Regions a block may have: two for each of 512 layers.
pub const REGIONS_MAX: usize = 1024;
/// Ranks of an engine: one bit each in a word.
pub const RANKS_MAX: u32 = 64;
/// Parts that a block may be cut into: counted in a byte of a load word.
pub const CUTS_MAX: usize = 255;
/// The fact that says which weights run: an engine without it shares with none that has it. The sidecar makes it of the ranks'
/// `live_weights`, and a rank that has none may state it.
pub const WEIGHTS_LIVE: &str = "weights_live";
/// Facts a namespace may state.
pub const FACTS_MAX: usize = 256;

/// What an engine process says first.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// [`PROTOCOL_OLDEST`] of the sender; absent means `version`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest: Option<u32>,
    /// Release of the sender, 1 to 64 bytes, for logs and errors alone.
    pub release: String,
    /// `engine_id` of vLLM's configuration, the same in the scheduler and the workers.
    pub engine: String,
    /// Ranks of the engine.
    pub world_size: u32,
    /// A scheduler's: milliseconds that a request waits for blocks which another node may still be producing. Absent or 0: it
    /// does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub miss_wait_ms: Option<u32>,
    /// A scheduler's: milliseconds that a request waits for another engine that has promised its prompt. Absent:
    /// [`PROMISED_WAIT_MS_MAX`](crate::layout::PROMISED_WAIT_MS_MAX), which is the most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handover_wait_ms: Option<u32>,
    /// A scheduler's: milliseconds that a request waits for the first, or the next, block of its prompt where no engine has
    /// promised it. Absent: [`AWAIT_MS`](crate::layout::AWAIT_MS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise_wait_ms: Option<u32>,
    /// A scheduler's: the limit of a pending query in milliseconds, while its blocks come faster than its engine computes them. Absent: [`QUERY_WAIT_MS_MAX`](crate::layout::QUERY_WAIT_MS_MAX).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_max_ms: Option<u32>,
    /// A scheduler's, in thousandths: a load may take so many times as long as computing. Absent:
    /// [`LOAD_PREFERENCE`](crate::layout::LOAD_PREFERENCE).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_preference: Option<u32>,
    /// Digest of the engine's table of cache groups: a rank whose differs from its scheduler's does not join.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Digest>,
    /// The sender's part in the engine.
    pub role: Role,
}

/// The run of a probe, such as `pillion bench ring`: no rank joins it, and it counts as no engine.
pub const PROBE_RUN: [u8; 16] = [0; 16];

/// The part of an engine that a session serves.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Posts queries, loads and saves.
    Scheduler {
        /// Random id of this run of the engine; workers JOIN it.
        #[serde(with = "serde_bytes")]
        run: [u8; 16],
    },
    /// Owns KV memory.
    Worker(WorkerHello),
}

/// What a worker states about its memory.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct WorkerHello {
    /// Rank, below `world_size`.
    pub rank: u32,
    /// Which distinct part of a block this rank holds, below `shards`.
    pub shard: u32,
    /// Distinct parts of a block over all ranks.
    pub shards: u32,
    /// Blocks in the engine's KV cache; block ids are below this.
    pub blocks: u32,
    /// Where a block's bytes lie, in (group, layer) order.
    pub regions: Vec<BlockRegion>,
    /// Who copies loaded blocks into engine memory.
    pub copy: Copier,
    /// Everything that makes bytes interchangeable, by name; digested into the namespace.
    pub facts: BTreeMap<String, String>,
    /// The namespace that the engine must belong to, 32 hex digits; refused where its facts digest to another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expects: Option<String>,
    /// Digest of a sample of every parameter that this rank has loaded; with those of the other ranks it makes the fact
    /// [`WEIGHTS_LIVE`], which `facts` then do not state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_weights: Option<Digest>,
    /// The engine has its facts from others and no sample of its weights: what it saves is kept once it was shown to be what its
    /// namespace keeps. A fact [`WEIGHTS_LIVE`] says the same.
    #[serde(default, skip_serializing_if = "is_false")]
    pub proves: bool,
    /// The GPU that holds the memory; host memory behind descriptors where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<CudaMemory>,
    /// Slots of the rank's staging segment, where the sidecar cannot reach its memory: saves go through them, and the
    /// only region says where they lie.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staging: Option<u32>,
}

/// A digest of 16 bytes.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Digest(#[serde(with = "serde_bytes")] pub [u8; 16]);

/// KV memory on a GPU of this host.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct CudaMemory {
    /// The GPU, whatever number each process knows it by.
    #[serde(with = "serde_bytes")]
    pub uuid: [u8; 16],
    /// The rank's process id as it sees it itself: an IPC handle cannot be opened by a process of the same number.
    pub pid: u32,
    /// What regions name instead of descriptors; their offsets count from an allocation's base.
    pub allocations: Vec<CudaAllocation>,
    /// Where a block is cut into the parts that a load delivers one after the other: ascending ends, in bytes of this
    /// rank's part; the last is its length.
    pub cuts: Vec<u64>,
}

/// One allocation of GPU memory.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct CudaAllocation {
    /// `CUipcMemHandle`.
    #[serde(with = "serde_bytes")]
    pub handle: [u8; 64],
    /// Bytes of the allocation.
    pub bytes: u64,
}

/// One run of bytes in every block: block `b` has it at `offset + b * stride` of descriptor `fd`.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct BlockRegion {
    /// Index of the descriptor sent along.
    pub fd: u32,
    /// Bytes from the descriptor's start to block 0.
    pub offset: u64,
    /// Bytes from one block to the next.
    pub stride: u64,
    /// Bytes of the run.
    pub bytes: u64,
}

crate::named! {
    /// Who writes loaded blocks into the engine's memory.
    #[derive(Default, Deserialize, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Copier {
        /// The engine copies from the pool, which it maps read-only.
        #[default]
        Engine = "engine",
        /// The sidecar copies into the engine's memory, sent with write access.
        Sidecar = "sidecar",
    }
}

/// The sidecar's answer.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Accepted.
    Welcome(Welcome),
    /// Not accepted. Every version writes it so: an engine of any release reads the reason.
    Refused {
        /// The sidecar's [`PROTOCOL_VERSION`].
        version: u32,
        /// Why, and what to change.
        reason: String,
    },
}

/// What an accepted engine needs to know; the descriptors travel beside it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Welcome {
    /// The version that both speak from now on: [`agree`].
    pub version: u32,
    /// Release of the sidecar, 1 to 64 bytes, for logs and errors alone.
    pub release: String,
    /// Random id of this life of the sidecar.
    pub epoch: u64,
    /// Session id.
    pub session: u64,
    /// Milliseconds a lease lives unless a load is posted or the query is repeated.
    pub lease_ttl_ms: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of a pool segment.
    pub segment_bytes: u64,
    /// The namespace of a worker's blocks, 32 hex digits; empty for a scheduler.
    pub namespace: String,
    /// What a person should read about this engine: why it shares nothing with one that it nearly could.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The sidecar knows the flags of handovers: an APPEND that promises, a QUERY that awaits, a SAVE for another engine. A sidecar
    /// that does not know them ends the session over them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub handover: bool,
    /// The sidecar knows an APPEND whose last key is that of a prompt's tail. A sidecar that does not ends the session over it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub tails: bool,
    /// The sidecar knows a QUERY for the last kept one of its keys, as of states. Other sidecars end the session over it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub states: bool,
}

/// A record that must not be followed.
#[derive(Debug, Error, Eq, PartialEq)]
pub enum HandshakeError {
    /// Not CBOR, or not this record.
    #[error("the record is not a pillion handshake: {0}")]
    Malformed(String),
    /// A peer of a release without a common version.
    #[error(
        "the peer speaks protocol {theirs}, and this side {}: install the same pillion release on both",
        own_versions()
    )]
    Version {
        /// The range of protocol versions that the peer stated.
        theirs: Versions,
    },
    /// A record that no packet holds.
    #[error("the handshake record has {bytes} bytes; at most {RECORD_BYTES_MAX} fit: state shorter facts")]
    Long {
        /// Bytes of the encoded record.
        bytes: usize,
    },
    /// A field is out of range.
    #[error("{field} is {value}; it must be {rule}")]
    Range {
        /// Field.
        field: &'static str,
        /// What it holds.
        value: String,
        /// What it may hold.
        rule: &'static str,
    },
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !value
}

/// The fields that a HELLO or Welcome of every protocol version holds. Protocol 1 stated `version` alone.
#[derive(Deserialize)]
struct Stated {
    version: u32,
    oldest: Option<u32>,
    release: Option<String>,
}

/// What this release speaks.
fn own_versions() -> Versions {
    Versions::own(PROTOCOL_VERSION, PROTOCOL_OLDEST)
}

/// The version that both sides speak: the newest one in both ranges.
pub fn agree(theirs: &Versions) -> Result<u32, HandshakeError> {
    own_versions().common(theirs).ok_or_else(|| HandshakeError::Version { theirs: theirs.clone() })
}

/// A record's bytes.
pub fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    ciborium::into_writer(record, &mut bytes).expect("writing CBOR to memory cannot fail");
    bytes
}

/// Reads a [`Reply`].
pub fn decode_reply(bytes: &[u8]) -> Result<Reply, HandshakeError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum AnyReply {
        Welcome(Stated),
        Refused(IgnoredAny),
    }
    if let AnyReply::Welcome(stated) = decode(bytes)? {
        // A Welcome states the agreed version, not a range.
        agree(&Stated { oldest: None, ..stated }.into())?;
    }
    decode(bytes)
}

/// The record of a [`Hello`] that travels with so many descriptors, checked as [`decode_hello`] does.
pub fn encode_hello(hello: &Hello, descriptors: usize) -> Result<Vec<u8>, HandshakeError> {
    hello.check(descriptors)?;
    let record = encode(hello);
    if record.len() > RECORD_BYTES_MAX {
        return Err(HandshakeError::Long { bytes: record.len() });
    }
    Ok(record)
}

/// Reads a [`Hello`] and checks every field against the limits and against the number of descriptors that came.
pub fn decode_hello(bytes: &[u8], descriptors: usize) -> Result<Hello, HandshakeError> {
    agree(&decode::<Stated>(bytes)?.into())?;
    let hello: Hello = decode(bytes)?;
    hello.check(descriptors)?;
    Ok(hello)
}

fn decode<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, HandshakeError> {
    if bytes.len() > RECORD_BYTES_MAX {
        return Err(HandshakeError::Long { bytes: bytes.len() });
    }
    ciborium::from_reader(bytes).map_err(|error| HandshakeError::Malformed(error.to_string()))
}

// === impl Versions ===

impl From<Stated> for Versions {
    fn from(stated: Stated) -> Self {
        let Stated { version, oldest, release } = stated;
        let release = release.filter(|release| check::release(release).is_ok()).unwrap_or_default();
        Self { version, oldest: oldest.unwrap_or(version), release }
    }
}

// === impl Hello ===

impl Hello {
    /// What a process of this release says, its optional fields absent.
    pub fn new(engine: String, world_size: u32, role: Role) -> Self {
        Self {
            version: PROTOCOL_VERSION,
            oldest: Some(PROTOCOL_OLDEST),
            release: RELEASE.into(),
            engine,
            world_size,
            miss_wait_ms: None,
            handover_wait_ms: None,
            promise_wait_ms: None,
            wait_max_ms: None,
            load_preference: None,
            groups: None,
            role,
        }
    }

    /// What the sender speaks.
    pub fn versions(&self) -> Versions {
        let Self { version, oldest, release, .. } = self;
        Stated { version: *version, oldest: *oldest, release: Some(release.clone()) }.into()
    }
}

// === impl BlockRegion ===

impl BlockRegion {
    /// Where the run of the last of `blocks` blocks ends in its descriptor, in bytes; `None` where no file reaches there,
    /// or there is no block.
    pub fn checked_end(&self, blocks: u32) -> Option<u64> {
        let last = u64::from(blocks.checked_sub(1)?).checked_mul(self.stride)?;
        let end = last.checked_add(self.offset)?.checked_add(self.bytes)?;
        (end <= i64::MAX as u64).then_some(end)
    }

    /// Where the run of the last of `blocks` blocks ends in its descriptor, in bytes. The handshake has checked that the
    /// sum does not overflow.
    pub fn end(&self, blocks: u32) -> u64 {
        self.offset + u64::from(blocks - 1) * self.stride + self.bytes
    }
}

// === impl WorkerHello ===

impl WorkerHello {
    /// Bytes of this rank's part of a block; `None` where the sum overflows.
    pub fn block_bytes(&self) -> Option<u64> {
        self.regions.iter().try_fold(0_u64, |sum, region| sum.checked_add(region.bytes))
    }

    /// Whether its engine has its facts from others and no sample of its own: see [`WorkerHello::proves`].
    pub fn must_prove(&self) -> bool {
        self.live_weights.is_none() && (self.proves || self.facts.contains_key(WEIGHTS_LIVE))
    }

    /// Bytes that memory `fd` must hold for every block to lie inside it.
    pub fn descriptor_bytes(&self, fd: u32) -> u64 {
        let ends = self.regions.iter().filter(|region| region.fd == fd);
        ends.map(|region| region.end(self.blocks)).max().unwrap_or(0)
    }
}

/// Fixed-length byte strings.
mod serde_bytes {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer, const N: usize>(
        bytes: &[u8; N],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, const N: usize>(
        deserializer: D,
    ) -> Result<[u8; N], D::Error> {
        let value = ciborium::Value::deserialize(deserializer)?;
        let wrong = || D::Error::custom(format!("a byte string of {N} bytes is wanted"));
        value.as_bytes().ok_or_else(wrong)?.as_slice().try_into().map_err(|_| wrong())
    }
}
