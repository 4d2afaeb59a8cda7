//! The one list of messages. Macros make kinds, requests, codec, bounds and refusals from it.

/// Passes the messages to macro `$then`: code, variant, name, `reserved` for the right to the reserved slots, then for each sender the
/// fields, each with its place in a [`crate::message::Message`]. `of NAME` is a scheduler's message with a type of its own.
macro_rules! messages {
    ($then:ident) => {
        $then! {
            /// Opens a key log.
            1 Open "OPEN" {
                scheduler {
                    /// The log.
                    log: u32 = OPENED,
                }
            }
            /// Appends keys to a log.
            2 Append "APPEND" {
                of Append {
                    /// The keys.
                    keys: LogKeys = APPENDED,
                    /// This engine will save the keys of the log for another engine.
                    promised: bool = flag_bit::<APPEND_PROMISED, 2>(),
                    /// The last key is of a prompt's tail, a partly full block: the log ends with it.
                    tail: bool = flag_bit::<APPEND_TAIL, 2>(),
                    /// The chunks of the keys, as many as [`Append::chunks`] returns.
                    chunks: [u32; APPEND_CHUNKS] = TOUCHED,
                }
            }
            /// Asks for the leading hits of keys, under a lease. Answered in the completion table.
            3 Query "QUERY" {
                of Query {
                    /// The operation.
                    op: u64 = OP,
                    /// The keys, at most [`crate::layout::QUERY_KEYS`].
                    keys: LogKeys = ASKED,
                    /// The sidecar may answer while blocks are on their way.
                    arriving: bool = flag_bit::<QUERY_ARRIVING, 4>(),
                    /// Another engine computes these keys, or is about to.
                    awaits: bool = flag_bit::<QUERY_AWAIT, 4>(),
                    /// Asks for the last kept one of the keys, and not for the leading hits.
                    last: bool = flag_bit::<QUERY_LAST, 4>(),
                    /// The sidecar may answer with more hits than its pool holds.
                    streams: bool = flag_bit::<QUERY_STREAM, 4>(),
                }
            }
            /// Promises to load keys.
            4 Load "LOAD" reserved {
                of Load {
                    /// The operation.
                    op: u64 = OP,
                    /// The keys.
                    keys: LogKeys = KEYS,
                    /// Begin of the ids of the loaded blocks in the circle.
                    position: u32 = POSITION,
                    /// Step of the load.
                    step: u64 = STEP,
                    /// Operation of the query behind the lease.
                    lease: u64 = LEASE,
                    /// The flags of the load.
                    flags: LoadFlags = LOAD_FLAGS,
                }
            }
            /// Saves keys, once a step is done. One completion.
            5 Save "SAVE" {
                of Save {
                    /// The operation.
                    op: u64 = OP,
                    /// The keys.
                    keys: LogKeys = KEYS,
                    /// Begin of the ids of the saved blocks in the circle.
                    position: u32 = POSITION,
                    /// Step whose end makes the blocks whole.
                    step: u64 = STEP,
                    /// Blocks kept already are compared with these.
                    checked: bool = flag_bit::<SAVE_CHECKED, 2>(),
                    /// Another engine will load these blocks.
                    handover: bool = flag_bit::<SAVE_HANDOVER, 2>(),
                    /// The place of an earlier key of the log, counted from 1 on, of no use once this save is kept; 0: none.
                    replaced: u32 = REPLACED,
                }
            }
            /// Gives up blocks of a save.
            6 Cancel "CANCEL" reserved {
                of Cancel {
                    /// Operation of the save.
                    op: u64 = OP,
                    /// First block, counted from the save's own first one.
                    from: u32 = FROM,
                    /// Number of blocks.
                    count: u32 = BLOCKS,
                }
            }
            /// Ends a log's lease unused.
            7 Release "RELEASE" reserved {
                scheduler {
                    /// The log.
                    log: u32 = LOG,
                }
            }
            /// Ends a log and its lease; the engine may use its chunks again once the head has passed this message.
            8 Close "CLOSE" reserved {
                scheduler {
                    /// The log.
                    log: u32 = LOG,
                    /// A number for the way in which the request's answer ended, equal for equal ways; 0: not known;
                    /// [`WAY_LAST`](crate::message::WAY_LAST): its conversation ends.
                    way: u32 = WAY,
                }
            }
            /// Takes part in an engine's run.
            9 Join "JOIN" reserved {
                worker {
                    /// The run's id.
                    run: [u8; 16] = BYTES16,
                    /// The rank's last step before this session; 0: none.
                    step: u64 = STEP,
                }
            }
            /// The rank's part of a load has ended.
            10 Loaded "LOADED" reserved {
                worker {
                    /// Operation of the LOAD.
                    op: u64 = OP,
                    /// The end of the part.
                    end: LoadEnd = LOAD_END,
                }
            }
            /// Gives the engine's namespace a new generation.
            11 Salt "SALT" {
                scheduler {
                    /// Random bytes, of this generation alone.
                    salt: [u8; 16] = BYTES16,
                }
            }
            /// The rank has answered a STAGE.
            12 Staged "STAGED" reserved {
                worker {
                    /// Tag of the STAGE.
                    tag: u64 = OP,
                    /// Slot of the staging segment.
                    slot: u32 = FROM,
                    /// Whether the slot holds the block.
                    ok: bool = STAGED_OK,
                }
            }
            /// Announces a likely query for keys. Takes no lease, and has no answer.
            13 Hint "HINT" {
                scheduler {
                    /// The keys.
                    keys: LogKeys = ASKED,
                }
            }
            /// Announces a possible change of the weights (scheduler), or answers with a digest of the rank's weights (worker).
            14 Weights "WEIGHTS" reserved {
                scheduler {
                    /// Its number, from 1 on; greater than the session's last one.
                    number: u64 = NUMBER,
                }
                worker {
                    /// Its number, from 1 on; greater than the session's last one.
                    number: u64 = NUMBER,
                    /// The number of the answered WEIGHTS of the scheduler; 0: none.
                    answers: u64 = STEP,
                    /// Digest of a sample of the weights.
                    live: [u8; 16] = BYTES16,
                }
            }
            /// Tokens of a root block in the engine's namespace.
            15 Golden "GOLDEN" {
                of Golden {
                    /// How many tokens, 1 to [`crate::layout::GOLDEN_TOKENS`].
                    count: u32 = TOKENS,
                    /// Begin of the tokens in the circle of block ids.
                    position: u32 = POSITION,
                }
            }
            /// The engine went on with the output of a step: its saves may be kept, and those of earlier steps are void. Since
            /// [`crate::ACCEPT_SINCE`].
            16 Accept "ACCEPT" reserved {
                scheduler {
                    /// The step; every rank returned it.
                    step: u64 = STEP,
                }
            }
            /// Ends the request of a log, and its lease. The engine's device still has the blocks, so their copies are the first
            /// to go. Until its CLOSE the log takes saves of blocks about to be reused. Since
            /// [`crate::handshake::Welcome::devices`].
            17 Ended "ENDED" {
                scheduler {
                    /// The log.
                    log: u32 = LOG,
                    /// As in CLOSE.
                    way: u32 = WAY,
                }
            }
            /// The engine's device has reused the blocks of these keys of an ended request, without a SAVE before. Since
            /// [`crate::handshake::Welcome::devices`].
            18 Left "LEFT" {
                scheduler {
                    /// The keys.
                    keys: LogKeys = ASKED,
                }
            }
            /// Passes a client's hint for the blocks of keys on. Answered in the completion table. Since
            /// [`crate::handshake::Welcome::hints`].
            19 Advise "ADVISE" {
                of Advise {
                    /// The operation.
                    op: u64 = OP,
                    /// The keys.
                    keys: LogKeys = ASKED,
                    /// The action and its time.
                    advice: Advice = ADVICE,
                    /// No request has this log: its CLOSE counts as no use.
                    alone: bool = flag_bit::<ADVISE_ALONE, 1>(),
                }
            }
        }
    };
}
