//! The three records of the handshake: CBOR maps on a UNIX SEQPACKET socket, one record a packet.
//!
//! The engine sends [`Hello`]. The sidecar answers [`Reply::Welcome`] with four descriptors (session memory,
//! eventfd, pool opened read-only, pidfd), or [`Reply::Refused`] with the reason and the remedy. After that
//! the socket carries nothing; its hang-up tells each side of the other's death.

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
/// The fact with a digest of the running weights. An engine without it shares with none that has it. The
/// sidecar makes it from the ranks' `live_weights`; a rank without `live_weights` may state it.
pub const WEIGHTS_LIVE: &str = "weights_live";
/// Facts a namespace may state.
pub const FACTS_MAX: usize = 256;

/// The first record, sent by an engine process.
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
    /// Schedulers only: milliseconds a request waits for blocks another node may still be producing. Absent
    /// or 0: it does not wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub miss_wait_ms: Option<u32>,
    /// Schedulers only: milliseconds a request waits for another engine with a promise for its prompt.
    /// Absent: [`PROMISED_WAIT_MS_MAX`](crate::layout::PROMISED_WAIT_MS_MAX), also the maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handover_wait_ms: Option<u32>,
    /// Schedulers only: milliseconds a request waits for the first, or the next, block of its prompt if no
    /// engine has promised it. Absent: [`AWAIT_MS`](crate::layout::AWAIT_MS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise_wait_ms: Option<u32>,
    /// Schedulers only: the limit of a pending query in milliseconds, while its blocks come faster than its
    /// engine computes them. Absent: [`QUERY_WAIT_MS_MAX`](crate::layout::QUERY_WAIT_MS_MAX).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_max_ms: Option<u32>,
    /// Schedulers only, in thousandths: the longest time of a load, as a multiple of computing its blocks.
    /// Absent: [`LOAD_PREFERENCE`](crate::layout::LOAD_PREFERENCE).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_preference: Option<u32>,
    /// Digest of the engine's table of cache groups. A rank with another digest than its scheduler does not
    /// join.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<HelloDigest>,
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
        #[serde(
            serialize_with = "serde_bytes::serialize_bytes",
            deserialize_with = "serde_bytes::deserialize_bytes"
        )]
        run: [u8; 16],
    },
    /// Owns KV memory.
    Worker(WorkerHello),
}

/// A worker's statements about its memory and its facts.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct WorkerHello {
    /// Rank, below `world_size`.
    pub rank: u32,
    /// Number of the distinct part of a block held by this rank, below `shards`.
    pub shard: u32,
    /// Distinct parts of a block over all ranks.
    pub shards: u32,
    /// Blocks in the engine's KV cache; block ids are below this.
    pub blocks: u32,
    /// The places of a block's bytes, in (group, layer) order.
    pub regions: Vec<BlockRegion>,
    /// The process that copies loaded blocks into engine memory.
    pub copy: Copier,
    /// Every property that makes bytes interchangeable, by name; digested into the namespace.
    pub facts: BTreeMap<String, String>,
    /// The expected namespace, 32 hex digits. The engine is refused if its facts digest to another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expects: Option<String>,
    /// Digest of a sample of every parameter loaded by this rank. The sidecar makes the fact [`WEIGHTS_LIVE`]
    /// from those of all ranks; `facts` then must not state it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_weights: Option<HelloDigest>,
    /// True if the engine has its facts from other engines and no sample of its weights: its saves are kept
    /// only after a check against the blocks of its namespace. A fact [`WEIGHTS_LIVE`] means the same.
    #[serde(default, skip_serializing_if = "is_false")]
    pub proves: bool,
    /// The GPU of the memory; `None` for host memory behind descriptors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<CudaMemory>,
    /// Slots of the rank's staging segment, if the sidecar cannot reach its memory. Saves go through these
    /// slots, and the only region describes their places.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staging: Option<u32>,
}

/// A digest of 16 bytes.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct HelloDigest(
    #[serde(
        serialize_with = "serde_bytes::serialize_bytes",
        deserialize_with = "serde_bytes::deserialize_bytes"
    )]
    pub [u8; 16],
);

/// KV memory on a GPU of this host.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct CudaMemory {
    /// UUID of the GPU, the same in every process.
    #[serde(
        serialize_with = "serde_bytes::serialize_bytes",
        deserialize_with = "serde_bytes::deserialize_bytes"
    )]
    pub uuid: [u8; 16],
    /// The rank's process id in its own PID namespace. CUDA refuses an IPC handle from a process of the same
    /// number.
    pub pid: u32,
    /// Allocations, named by regions in place of descriptors; offsets of regions count from an allocation's
    /// base.
    pub allocations: Vec<CudaAllocation>,
    /// The ends of the parts into which a load divides a block, ascending, in bytes of this rank's part. The
    /// last one is its length.
    pub cuts: Vec<u64>,
}

/// One allocation of GPU memory.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct CudaAllocation {
    /// `CUipcMemHandle`.
    #[serde(
        serialize_with = "serde_bytes::serialize_bytes",
        deserialize_with = "serde_bytes::deserialize_bytes"
    )]
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
    /// The process that writes loaded blocks into the engine's memory.
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
    /// The engine is accepted.
    Welcome(Welcome),
    /// The engine is refused. This record has the same form in every version: an engine of any release reads
    /// the reason.
    Refused {
        /// The sidecar's [`PROTOCOL_VERSION`].
        version: u32,
        /// The reason, and the remedy.
        reason: String,
    },
}

/// The facts an accepted engine needs; the descriptors travel beside them.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Welcome {
    /// The version of both sides from now on: [`agree_version`].
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
    /// A note for the engine's log: why it shares nothing with an engine it nearly could share with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// True if the sidecar knows the flags of handovers: an APPEND with a promise, a QUERY that awaits, a
    /// SAVE for another engine. Other sidecars end the session over them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub handover: bool,
    /// True if the sidecar knows an APPEND whose last key is the key of a prompt's tail. Other sidecars end
    /// the session over it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub tails: bool,
    /// True if the sidecar knows a QUERY for the last kept one of its keys, as for states. Other sidecars end
    /// the session over it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub states: bool,
    /// True if the sidecar knows ENDED and LEFT, by which it learns the blocks that the engine's device has.
    /// Other sidecars end the session over them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub devices: bool,
    /// True if the sidecar knows ADVISE, by which it gets the hints of clients. Other sidecars end the session over it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub hints: bool,
    /// True if the sidecar knows [`crate::message::QUERY_STREAM`]. Other sidecars end the session over it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub streams: bool,
}

/// An invalid record, or one of a release without a common version.
#[derive(Debug, Error, Eq, PartialEq)]
pub enum HandshakeError {
    /// The bytes are not CBOR, or not this record.
    #[error("the record is not a pillion handshake: {0}")]
    Malformed(String),
    /// The peer's release has no common version with this one.
    #[error(
        "the peer speaks protocol {theirs}, and this side {}: install the same pillion release on both",
        own_versions()
    )]
    Version {
        /// The range of protocol versions that the peer stated.
        theirs: Versions,
    },
    /// The record is too long for a packet.
    #[error("the handshake record has {bytes} bytes; at most {RECORD_BYTES_MAX} fit: state shorter facts")]
    Long {
        /// Bytes of the encoded record.
        bytes: usize,
    },
    /// A field is out of range.
    #[error("{field} is {value}; it must be {rule}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// Its valid values.
        rule: &'static str,
    },
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !value
}

/// The fields in the HELLO or Welcome of every protocol version. Protocol 1 stated `version` alone.
#[derive(Deserialize)]
struct StatedVersions {
    version: u32,
    oldest: Option<u32>,
    release: Option<String>,
}

/// The versions of this release.
fn own_versions() -> Versions {
    Versions::own(PROTOCOL_VERSION, PROTOCOL_OLDEST)
}

/// Returns the newest version in both ranges; fails if there is none.
pub fn agree_version(theirs: &Versions) -> Result<u32, HandshakeError> {
    own_versions().common(theirs).ok_or_else(|| HandshakeError::Version { theirs: theirs.clone() })
}

/// Encodes a record as CBOR.
pub fn encode_record<T: Serialize>(record: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    ciborium::into_writer(record, &mut bytes).expect("writing CBOR to memory cannot fail");
    bytes
}

/// Reads a [`Reply`]; fails if its version is not one of this release.
pub fn decode_reply(bytes: &[u8]) -> Result<Reply, HandshakeError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum AnyReply {
        Welcome(StatedVersions),
        Refused(IgnoredAny),
    }
    if let AnyReply::Welcome(stated) = decode_record(bytes)? {
        // A Welcome states the agreed version, not a range.
        agree_version(&StatedVersions { oldest: None, ..stated }.into())?;
    }
    decode_record(bytes)
}

/// Encodes a [`Hello`] for a packet with so many descriptors, after the checks of [`decode_hello`].
pub fn encode_hello(hello: &Hello, descriptors: usize) -> Result<Vec<u8>, HandshakeError> {
    hello.check(descriptors)?;
    let record = encode_record(hello);
    if record.len() > RECORD_BYTES_MAX {
        return Err(HandshakeError::Long { bytes: record.len() });
    }
    Ok(record)
}

/// Reads a [`Hello`], and checks every field against the limits and against the number of received
/// descriptors.
pub fn decode_hello(bytes: &[u8], descriptors: usize) -> Result<Hello, HandshakeError> {
    agree_version(&decode_record::<StatedVersions>(bytes)?.into())?;
    let hello: Hello = decode_record(bytes)?;
    hello.check(descriptors)?;
    Ok(hello)
}

fn decode_record<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, HandshakeError> {
    if bytes.len() > RECORD_BYTES_MAX {
        return Err(HandshakeError::Long { bytes: bytes.len() });
    }
    ciborium::from_reader(bytes).map_err(|error| HandshakeError::Malformed(error.to_string()))
}

// === impl Versions ===

impl From<StatedVersions> for Versions {
    fn from(stated: StatedVersions) -> Self {
        let StatedVersions { version, oldest, release } = stated;
        let release = release.filter(|release| check::check_release(release).is_ok()).unwrap_or_default();
        Self { version, oldest: oldest.unwrap_or(version), release }
    }
}

// === impl Hello ===

impl Hello {
    /// Makes the HELLO of a process of this release, its optional fields absent.
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

    /// Returns the versions of the sender.
    pub fn versions(&self) -> Versions {
        let Self { version, oldest, release, .. } = self;
        StatedVersions { version: *version, oldest: *oldest, release: Some(release.clone()) }.into()
    }
}

// === impl BlockRegion ===

impl BlockRegion {
    /// Returns the end of the run of the last of `blocks` blocks in its descriptor, in bytes; `None` if no
    /// file is so long, or if there is no block.
    pub fn checked_end(&self, blocks: u32) -> Option<u64> {
        let last = u64::from(blocks.checked_sub(1)?).checked_mul(self.stride)?;
        let end = last.checked_add(self.offset)?.checked_add(self.bytes)?;
        (end <= i64::MAX as u64).then_some(end)
    }

    /// Returns the end of the run of the last of `blocks` blocks in its descriptor, in bytes. The handshake
    /// has checked the sum for overflow.
    pub fn end_offset(&self, blocks: u32) -> u64 {
        self.offset + u64::from(blocks - 1) * self.stride + self.bytes
    }
}

// === impl WorkerHello ===

impl WorkerHello {
    /// Returns the bytes of this rank's part of a block; `None` if the sum overflows.
    pub fn block_bytes(&self) -> Option<u64> {
        self.regions.iter().try_fold(0_u64, |sum, region| sum.checked_add(region.bytes))
    }

    /// True if the engine has its facts from other engines and no sample of its own: see
    /// [`WorkerHello::proves`].
    pub fn must_prove(&self) -> bool {
        self.live_weights.is_none() && (self.proves || self.facts.contains_key(WEIGHTS_LIVE))
    }

    /// Returns the bytes of memory `fd` needed to hold every block.
    pub fn descriptor_bytes(&self, fd: u32) -> u64 {
        let ends = self.regions.iter().filter(|region| region.fd == fd);
        ends.map(|region| region.end_offset(self.blocks)).max().unwrap_or(0)
    }
}

/// Fixed-length byte strings in serde.
mod serde_bytes {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize_bytes<S: Serializer, const N: usize>(
        bytes: &[u8; N],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize_bytes<'de, D: Deserializer<'de>, const N: usize>(
        deserializer: D,
    ) -> Result<[u8; N], D::Error> {
        let value = ciborium::Value::deserialize(deserializer)?;
        let wrong = || D::Error::custom(format!("a byte string of {N} bytes is wanted"));
        value.as_bytes().ok_or_else(wrong)?.as_slice().try_into().map_err(|_| wrong())
    }
}
