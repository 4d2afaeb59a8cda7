//! The places of all words in a session's memfd: offsets in bytes, words little-endian.
//!
//! The sidecar creates the memfd, fixes its size by seals and writes the header, version word last. Each hot
//! word has a cache line of its own, so the two sides do not slow each other down by writing neighbours.

/// First word of a session memfd: `PILLION1` in ASCII.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PILLION1");

/// Bytes of a cache line on every served machine.
pub const LINE: usize = 64;

/// Words of a session memfd's header page.
pub mod header {
    /// u64: [`super::MAGIC`].
    pub const MAGIC: usize = 0;
    /// u32: protocol version, stored last with release.
    pub const VERSION: usize = 8;
    /// u64: the sidecar's epoch, a random id of one life of it.
    pub const EPOCH: usize = 16;
    /// u64: session id, unique within the epoch.
    pub const SESSION: usize = 24;
    /// u64: milliseconds of the sidecar's clock at its last turn of the loop; the number grows while the
    /// sidecar lives.
    pub const SIDECAR_HEARTBEAT: usize = 64;
    /// u32: 1 while the sidecar sleeps and must be woken through the eventfd.
    pub const SIDECAR_ASLEEP: usize = 128;
    /// u32: 1 while an engine thread sleeps on `SIGNAL`.
    pub const ENGINE_WAITING: usize = 192;
    /// u32: futex word, incremented before the engine is woken.
    pub const SIGNAL: usize = 256;
    /// u64: every save operation with an id below this one is void, even if its CANCEL found no room.
    pub const VOID_SAVES_BELOW: usize = 320;
    /// u32: tail of the submission ring, stored by the engine.
    pub const SUBMISSION_TAIL: usize = 384;
    /// u32: head of the submission ring, stored by the sidecar: everything before it has been copied out.
    pub const SUBMISSION_HEAD: usize = 448;
    /// u32: tail of the completion ring, stored by the sidecar.
    pub const COMPLETION_TAIL: usize = 512;
    /// u32: head of the completion ring, stored by the engine.
    pub const COMPLETION_HEAD: usize = 576;
    /// u64, worker sessions: last step whose forward may begin to read loaded blocks (stored by the engine).
    pub const FENCE_START: usize = 640;
    /// u64, worker sessions: last step whose KV has been written (stored by the engine).
    pub const FENCE_DONE: usize = 704;
    /// u64, worker sessions: blocks of loads the sidecar is writing, raised before it looks at a gate
    /// (sidecar).
    pub const FENCE_COPYING: usize = 832;
    /// u64, worker sessions on a GPU: batches of loads whose writes to engine memory began (the sidecar's
    /// stream).
    pub const FENCE_STARTED: usize = 896;
    /// u64, worker sessions: batches of loads whose writes ended (the sidecar's stream); on host memory
    /// blocks of loads (sidecar).
    pub const FENCE_ENDED: usize = 960;
    /// u64: number of this session's last WEIGHTS included in the two words below; 0: none (sidecar).
    pub const WEIGHTS: usize = 1024;
    /// 16 bytes: the fact `weights_live` of the bound namespace; zeros if it has none (sidecar).
    pub const WEIGHTS_LIVE: usize = 1032;
    /// u64: the first 8 bytes of the bound namespace, before any salt; 0 until the engine is bound (sidecar).
    pub const NAMESPACE: usize = 1088;
    /// u32, scheduler sessions: tail of the announcement ring, stored by the sidecar.
    pub const ANNOUNCEMENT_TAIL: usize = 1152;
    /// u32, scheduler sessions: head of the announcement ring, stored by the engine.
    pub const ANNOUNCEMENT_HEAD: usize = 1216;
    /// u64, scheduler sessions: how often the engine has asked for announcements of all blocks; 0: it gets
    /// none (engine).
    pub const ANNOUNCE: usize = 1280;
    /// u64, scheduler sessions: [`crate::prefill::PrefillRate`] of the engine; 0: not known (engine).
    pub const PREFILL: usize = 1344;
}

/// Bytes of the header page.
pub const HEADER_BYTES: usize = 4096;

/// The longest time of a pending query, in milliseconds, unless its blocks are known to come sooner than its
/// engine computes them. Then the sidecar answers with the blocks it has.
pub const QUERY_WAIT_MS_MAX: u32 = 2_000;
/// The largest limit of a scheduler for its pending queries, while blocks come faster than it computes, in
/// milliseconds.
pub const LOAD_WAIT_MS_MAX: u32 = 600_000;
/// The most loads under an answer with more hits than the pool holds.
pub const STREAM_PARTS_MAX: usize = 256;
/// The limit of vLLM's connector, unless its user gives one.
pub const LOAD_WAIT_MS: u32 = 30_000;
/// The default preference for loading, in thousandths.
pub const LOAD_PREFERENCE: u32 = 1_000;
/// The largest preference for loading, in thousandths; see [`LOAD_PREFERENCE`].
pub const LOAD_PREFERENCE_MAX: u32 = 100_000;
/// The time of a QUERY's wait for the first, or the next, key of a prompt to be computed by another engine,
/// in milliseconds: some steps of that engine. A scheduler may state another time, up to
/// [`QUERY_WAIT_MS_MAX`].
pub const AWAIT_MS: u32 = 1_000;
/// The longest wait of a QUERY for keys promised by another engine, in milliseconds.
pub const PROMISED_WAIT_MS_MAX: u32 = 30_000;

/// Slots of the submission ring: 32 waiting requests of 8,192 keys need 32 x (22 APPEND + 2) = 768; the rest
/// is room for a step with saves of 1,024 requests at once. Power of two.
pub const SUBMISSION_SLOTS: usize = 4096;
/// Slots for LOAD, CANCEL, RELEASE, CLOSE, LOADED, JOIN, STAGED and WEIGHTS alone, so giving up is always
/// possible.
pub const SUBMISSION_RESERVED: usize = 1024;
/// Slots of the completion ring, and with it the most saves in flight of one session. Power of two.
pub const COMPLETION_SLOTS: usize = 4096;
/// Bytes of a ring slot: one message or one completion.
pub const SLOT_BYTES: usize = 64;
/// Words of the completion table: the most queries and loads in flight of one session. Power of two.
pub const OPERATIONS: usize = 4096;

/// Keys in one chunk of the key arena.
pub const CHUNK_KEYS: usize = 64;
/// Bytes of a key in a chunk; behind a hash of 16 bytes the second digest, or zeros.
pub const KEY_BYTES: usize = 32;
/// Bytes of a slot reference in a chunk: pool offset and generation, written by the sidecar.
pub const REF_BYTES: usize = 16;
/// Bytes of a chunk: 64 keys, then 64 slot references.
pub const CHUNK_BYTES: usize = CHUNK_KEYS * (KEY_BYTES + REF_BYTES);
/// Chunks of the key arena: 2^20 keys, the KV of 16 million tokens at 16 tokens a block; 48 MiB, touched as used.
pub const CHUNKS: usize = 16_384;
/// Logs one session may hold open: running and waiting requests of one engine.
pub const LOGS: usize = 65_536;
/// The most keys in one log, equal to the whole arena.
pub const LOG_KEYS: usize = CHUNKS * CHUNK_KEYS;
/// The most keys of one QUERY: a million tokens at 16 a block. The sidecar needs some 4 ms for them, and
/// other engines wait meanwhile.
pub const QUERY_KEYS: usize = 1 << 16;
/// The most tokens of one GOLDEN, those of one block; blocks have some hundreds at most.
pub const GOLDEN_TOKENS: usize = 1 << 12;
/// Block ids in the block-id arena, a circle of u32 used in message order.
pub const BLOCK_IDS: usize = 1 << 18;

/// Offset of the submission ring's slots.
pub const SUBMISSION: usize = HEADER_BYTES;
/// Offset of the completion ring's slots.
pub const COMPLETION: usize = SUBMISSION + SUBMISSION_SLOTS * SLOT_BYTES;
/// Offset of the completion table.
pub const TABLE: usize = COMPLETION + COMPLETION_SLOTS * SLOT_BYTES;
/// Offset of the block-id arena.
pub const BLOCK_ID_ARENA: usize = TABLE + OPERATIONS * 8;
/// Offset of the key arena.
pub const KEY_ARENA: usize = BLOCK_ID_ARENA + BLOCK_IDS * 4;
/// Offset of the load words of a worker on a GPU: `operation << 8 | cuts delivered`, one u64 per operation.
pub const LOAD_WORDS: usize = KEY_ARENA + CHUNKS * CHUNK_BYTES;
/// Bytes of the load words.
pub const LOAD_WORDS_BYTES: usize = OPERATIONS * 8;
/// Offset of the gates of a worker's loads: the negated operation of the last load of a word taken back by
/// the engine, one u64 per operation. The word falls as the operation rises, so a GPU can wait for it.
pub const GATES: usize = LOAD_WORDS + LOAD_WORDS_BYTES;
/// Bytes of the gates.
pub const GATES_BYTES: usize = OPERATIONS * 8;
/// Offset of the announcement ring of a scheduler, whose session has no load words and no gates.
pub const ANNOUNCEMENTS: usize = LOAD_WORDS;
/// Slots of the announcement ring. Further announcements wait in the sidecar. Power of two.
pub const ANNOUNCEMENT_SLOTS: usize = (LOAD_WORDS_BYTES + GATES_BYTES) / SLOT_BYTES;
/// Bytes of a session memfd.
pub const SESSION_BYTES: usize = GATES + GATES_BYTES;

/// Most slots of a staging segment: a word for each on its first page.
pub const STAGING_SLOTS_MAX: usize = STAGING_WORDS_BYTES / 8;
/// Bytes of a staging segment's first page, with the words of its slots.
pub const STAGING_WORDS_BYTES: usize = 4096;

/// Returns the offset of the word of slot `slot` of a staging segment: the tag of the STAGE for the block
/// being written into it.
pub const fn staging_word(slot: u32) -> usize {
    slot as usize * 8
}

/// Returns the offset of key `index` in chunk `chunk`.
pub const fn key_offset(chunk: usize, index: usize) -> usize {
    KEY_ARENA + chunk * CHUNK_BYTES + index * KEY_BYTES
}

/// Returns the offset of slot reference `index` in chunk `chunk`.
pub const fn ref_offset(chunk: usize, index: usize) -> usize {
    KEY_ARENA + chunk * CHUNK_BYTES + CHUNK_KEYS * KEY_BYTES + index * REF_BYTES
}

/// Returns the offset of operation `op`'s load word.
pub const fn load_word(op: u64) -> usize {
    LOAD_WORDS + (op as usize & (OPERATIONS - 1)) * 8
}

/// Returns the offset of the gate of load `op`.
pub const fn gate_word(op: u64) -> usize {
    GATES + (op as usize & (OPERATIONS - 1)) * 8
}

/// Returns the value of the load word of `op` once `cuts` of its cuts are delivered. A stream waits for this
/// value.
pub const fn load_word_value(op: u64, cuts: usize) -> u64 {
    op << 8 | cuts as u64
}

const _: () = {
    assert!(SUBMISSION_SLOTS.is_power_of_two() && COMPLETION_SLOTS.is_power_of_two());
    assert!(OPERATIONS.is_power_of_two() && BLOCK_IDS.is_power_of_two());
    assert!(SUBMISSION_RESERVED < SUBMISSION_SLOTS);
    assert!(ANNOUNCEMENT_SLOTS.is_power_of_two());
    assert!(header::PREFILL + LINE <= HEADER_BYTES);
    assert!(SUBMISSION.is_multiple_of(LINE) && COMPLETION.is_multiple_of(LINE) && TABLE.is_multiple_of(LINE));
    assert!(
        BLOCK_ID_ARENA.is_multiple_of(LINE)
            && KEY_ARENA.is_multiple_of(LINE)
            && CHUNK_BYTES.is_multiple_of(LINE)
    );
    // Separate pages, so a GPU driver can lock them.
    assert!(LOAD_WORDS.is_multiple_of(4096) && LOAD_WORDS_BYTES.is_multiple_of(4096));
    assert!(GATES_BYTES.is_multiple_of(4096));
    assert!(CHUNK_BYTES == 3072 && SESSION_BYTES == 52_006_912);
};
