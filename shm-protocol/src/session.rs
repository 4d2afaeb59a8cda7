//! The session memfd in either process: creation, checks, and typed access to its parts.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use thiserror::Error;

use crate::key::BlockHash;
use crate::layout::{self, header};
use crate::message::{Outcome, Slot};
use crate::pool::SlotRef;
use crate::region::{Access, Region, descriptor_bytes};
use crate::ring::RingMemory;
use crate::source::Source;

/// A failure to make a session memfd, or a memfd unlike the one the peer promised.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The kernel refused the memory or its mapping.
    #[error("session memory cannot be made or mapped ({0}): raise this container's memory limit")]
    Os(#[from] rustix::io::Errno),
    /// The header holds another version than the handshake agreed on.
    #[error(
        "session memory is of version {found}, the handshake agreed on version {agreed}: install the same pillion release on both"
    )]
    Version {
        /// The version in the memory.
        found: u32,
        /// The version of the handshake.
        agreed: u32,
    },
    /// The size, the magic or a seal is wrong.
    #[error(
        "the session memory is not from a pillion sidecar ({0}): check which program listens on this socket"
    )]
    Malformed(&'static str),
}

/// One session's shared memory, mapped read-write.
#[derive(Clone, Debug)]
pub struct SessionMemory {
    region: Arc<Region>,
}

/// The namespace bound to a session, as stated by the session's words.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Bound {
    /// Number of the session's last WEIGHTS included in the other fields; 0: none. A namespace with another
    /// number than the reader's own does not count.
    pub weights: u64,
    /// The fact `weights_live`, if there is one.
    pub live: Option<[u8; 16]>,
    /// The first 8 bytes of the namespace, before any salt; 0: not bound.
    pub namespace: u64,
}

/// One of the rings of a session.
#[derive(Copy, Clone, Debug)]
pub enum Ring {
    /// Engine to sidecar.
    Submission,
    /// Sidecar to engine.
    Completion,
    /// Sidecar to engine, in a scheduler's session alone.
    Announcement,
}

/// A ring that lies in a session's memory.
#[derive(Clone, Debug)]
pub struct RegionRing {
    region: Arc<Region>,
    head: usize,
    tail: usize,
    slots: usize,
    capacity: u32,
}

// === impl SessionMemory ===

impl SessionMemory {
    /// Sidecar: makes a session's memory of the agreed version, sealed against any change of size, its
    /// version word written last.
    pub fn create(version: u32, epoch: u64, session: u64) -> Result<(OwnedFd, Self), SessionError> {
        let fd =
            rustix::fs::memfd_create("pillion-session", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, layout::SESSION_BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let region = Region::map(fd.as_fd(), layout::SESSION_BYTES, Access::ReadWrite)?;
        region.word64(header::MAGIC).store(layout::MAGIC, Ordering::Relaxed);
        region.word64(header::EPOCH).store(epoch, Ordering::Relaxed);
        region.word64(header::SESSION).store(session, Ordering::Relaxed);
        // SYNC POINT(version): release pairs with the acquire in `open`; a reader of the version sees the
        // header.
        region.word32(header::VERSION).store(version, Ordering::Release);
        Ok((fd, Self { region: Arc::new(region) }))
    }

    /// Engine: maps the memory sent by the sidecar. Fails unless size, seals, magic and the agreed version
    /// are right.
    pub fn open(version: u32, fd: impl AsFd) -> Result<Self, SessionError> {
        if descriptor_bytes(&fd)? != layout::SESSION_BYTES as u64 {
            return Err(SessionError::Malformed("its size differs"));
        }
        if !rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            return Err(SessionError::Malformed("it is not sealed against shrinking"));
        }
        let region = Region::map(fd.as_fd(), layout::SESSION_BYTES, Access::ReadWrite)?;
        // SYNC POINT(version): see `create`.
        let found = region.word32(header::VERSION).load(Ordering::Acquire);
        if region.word64(header::MAGIC).load(Ordering::Relaxed) != layout::MAGIC {
            return Err(SessionError::Malformed("its first word differs"));
        }
        if found != version {
            return Err(SessionError::Version { found, agreed: version });
        }
        Ok(Self { region: Arc::new(region) })
    }

    /// Returns the mapping.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the mapping for owners who keep it mapped while other code uses its addresses.
    pub fn shared_region(&self) -> Arc<Region> {
        Arc::clone(&self.region)
    }

    /// Returns one of the rings.
    pub fn ring(&self, ring: Ring) -> RegionRing {
        let region = Arc::clone(&self.region);
        let submission = (header::SUBMISSION_HEAD, header::SUBMISSION_TAIL);
        let completion = (header::COMPLETION_HEAD, header::COMPLETION_TAIL);
        let announcement = (header::ANNOUNCEMENT_HEAD, header::ANNOUNCEMENT_TAIL);
        let ((head, tail), slots, capacity) = match ring {
            Ring::Submission => (submission, layout::SUBMISSION, layout::SUBMISSION_SLOTS as u32),
            Ring::Completion => (completion, layout::COMPLETION, layout::COMPLETION_SLOTS as u32),
            Ring::Announcement => (announcement, layout::ANNOUNCEMENTS, layout::ANNOUNCEMENT_SLOTS as u32),
        };
        RegionRing { region, head, tail, slots, capacity }
    }

    /// Stores the outcome of operation `op` in its word of the completion table.
    pub fn store_outcome(&self, op: u64, outcome: Outcome) {
        // SYNC POINT(outcome): release pairs with `load_outcome`; slot references are visible with it.
        self.outcome_word(op).store(outcome.encode(), Ordering::Release);
    }

    /// Returns the outcome of operation `op` once it is stored. A word that does not decode comes from a
    /// broken peer: no outcome.
    pub fn load_outcome(&self, op: u64) -> Option<Outcome> {
        // SYNC POINT(outcome): acquire.
        let outcome = Outcome::decode(self.outcome_word(op).load(Ordering::Acquire)).ok()?;
        (outcome.op == op as u32).then_some(outcome)
    }

    fn outcome_word(&self, op: u64) -> &std::sync::atomic::AtomicU64 {
        self.region.word64(layout::TABLE + (op as usize & (layout::OPERATIONS - 1)) * 8)
    }

    /// Sidecar: states the binding of the session. An unchanged binding is not stored again.
    pub fn store_bound(&self, bound: Bound) {
        if self.load_bound() == bound {
            return;
        }
        let namespace = self.region.word64(header::NAMESPACE);
        namespace.store(0, Ordering::Relaxed);
        for (word, bytes) in self.live_words().iter().zip(bound.live.unwrap_or_default().as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        // SYNC POINT(bound): release pairs with the acquire of the same word. A reader of the new number sees
        // no namespace of an earlier number, and a reader of the namespace sees the words before it.
        self.region.word64(header::WEIGHTS).store(bound.weights, Ordering::Release);
        namespace.store(bound.namespace, Ordering::Release);
    }

    /// Engine: returns the binding of the session.
    pub fn load_bound(&self) -> Bound {
        // SYNC POINT(bound): acquire, the number first.
        let weights = self.region.word64(header::WEIGHTS).load(Ordering::Acquire);
        let namespace = self.region.word64(header::NAMESPACE).load(Ordering::Acquire);
        let mut live = [0; 16];
        for (bytes, word) in live.as_chunks_mut::<8>().0.iter_mut().zip(self.live_words()) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
        Bound { weights, live: (live != [0; 16]).then_some(live), namespace }
    }

    fn live_words(&self) -> &[std::sync::atomic::AtomicU64] {
        self.region.words64(header::WEIGHTS_LIVE, 2)
    }

    /// Engine: writes a key into chunk `chunk` as key `index`. Behind a hash of 16 bytes lies the second
    /// digest, or zeros.
    #[inline]
    pub fn write_key(&self, chunk: u32, index: usize, hash: &BlockHash) {
        assert!(index < layout::CHUNK_KEYS);
        let words = self.region.words64(layout::key_offset(chunk as usize, index), layout::KEY_BYTES / 8);
        for (word, value) in words.iter().zip(hash.words()) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Sidecar: appends a copy of `count` keys of a chunk to `out`. The caller has checked the chunk's
    /// number.
    pub fn read_keys(&self, chunk: u32, index: usize, count: usize, out: &mut Vec<BlockHash>) {
        assert!(index + count <= layout::CHUNK_KEYS);
        let words =
            self.region.words64(layout::key_offset(chunk as usize, index), count * layout::KEY_BYTES / 8);
        let (keys, _) = words.as_chunks::<4>();
        out.extend(
            keys.iter().map(|key| {
                BlockHash::from_words([0, 1, 2, 3].map(|index| key[index].load(Ordering::Relaxed)))
            }),
        );
    }

    /// Sidecar: writes the slots of `count` keys of a chunk, and the sources of their blocks.
    pub fn write_refs(
        &self,
        chunk: u32,
        index: usize,
        count: usize,
        found: &mut impl Iterator<Item = (SlotRef, Source)>,
    ) {
        assert!(index + count <= layout::CHUNK_KEYS);
        let words = self.region.words64(layout::ref_offset(chunk as usize, index), 2 * count);
        let (refs, _) = words.as_chunks::<2>();
        for ([offset, mark], (slot, source)) in refs.iter().zip(found) {
            offset.store(slot.offset, Ordering::Relaxed);
            mark.store(source.mark(slot.generation), Ordering::Relaxed);
        }
    }

    /// Engine: returns the slot of key `index` of chunk `chunk`, valid once the query's outcome has been
    /// seen.
    pub fn read_ref(&self, chunk: u32, index: usize) -> SlotRef {
        assert!(index < layout::CHUNK_KEYS);
        let words = self.region.words64(layout::ref_offset(chunk as usize, index), 2);
        let (_, generation) = Source::parse(words[1].load(Ordering::Relaxed));
        SlotRef { offset: words[0].load(Ordering::Relaxed), generation }
    }

    /// Engine: returns the source of that key's block, for statistics alone.
    pub fn read_source(&self, chunk: u32, index: usize) -> Source {
        assert!(index < layout::CHUNK_KEYS);
        let words = self.region.words64(layout::ref_offset(chunk as usize, index), 2);
        Source::parse(words[1].load(Ordering::Relaxed)).0
    }

    /// Engine: writes one block id at circle position `position`.
    pub fn write_block_id(&self, position: u32, block: u32) {
        self.block_id_word(position).store(block, Ordering::Relaxed);
    }

    /// Sidecar: appends a copy of `count` block ids to `out`, from circle position `position` on.
    pub fn read_block_ids(&self, position: u32, count: u32, out: &mut Vec<u32>) {
        assert!(count as usize <= layout::BLOCK_IDS);
        out.extend((0..count).map(|i| self.block_id_word(position.wrapping_add(i)).load(Ordering::Relaxed)));
    }

    fn block_id_word(&self, position: u32) -> &std::sync::atomic::AtomicU32 {
        self.region.word32(layout::BLOCK_ID_ARENA + (position as usize & (layout::BLOCK_IDS - 1)) * 4)
    }
}

// === impl RegionRing ===

impl RingMemory for RegionRing {
    fn capacity(&self) -> u32 {
        self.capacity
    }
    fn load_tail(&self) -> u32 {
        self.region.word32(self.tail).load(Ordering::Acquire)
    }
    fn store_tail(&self, tail: u32) {
        self.region.word32(self.tail).store(tail, Ordering::Release);
    }
    fn load_head(&self) -> u32 {
        self.region.word32(self.head).load(Ordering::Acquire)
    }
    fn store_head(&self, head: u32) {
        self.region.word32(self.head).store(head, Ordering::Release);
    }
    fn read_slot(&self, index: u32) -> Slot {
        let words = self.region.words64(self.slots + index as usize * layout::SLOT_BYTES, 8);
        std::array::from_fn(|i| words[i].load(Ordering::Relaxed))
    }
    fn write_slot(&self, index: u32, slot: &Slot) {
        let words = self.region.words64(self.slots + index as usize * layout::SLOT_BYTES, 8);
        for (word, value) in words.iter().zip(slot) {
            word.store(*value, Ordering::Relaxed);
        }
    }
}
