/*
 * Pillion's C interface: for engines that keep their KV cache in a Pillion sidecar. docs/c-api.md shows the order of calls.
 *
 * Written from connector-shim/src/c by `PILLION_WRITE_HEADER=1 cargo test -p connector-shim --test header`.
 *
 * Results. Every call that can fail returns a PillionStatus; its text is pillion_error_text(). Without a sidecar, or with
 * one that is slow, full or gone, calls succeed and answer "miss": no hits, nothing posted. No call waits for a sidecar
 * without a deadline. Pillion ends the process in one case alone, with a message on stderr: when a GPU's stream would
 * otherwise wait for ever.
 *
 * Threads. The caller uses a handle from one thread at a time, from any thread. A call during another thread's call with the
 * handle returns PILLION_STATUS_BUSY; only freeing a handle during another thread's call is undefined. Different handles
 * are independent. A forked child may free its parent's handles, and use them for nothing else.
 *
 * Memory. Arguments must stay unchanged until the call returns; Pillion does not keep them. Results belong to the
 * handle and are valid until the next call with that handle. Free each handle by its _free call. A pointer for a result may
 * point at uninitialised memory; a failed call leaves that memory as it is.
 *
 * Units. Blocks are numbered from 0 in the engine's memory (ids), and from 0 in a request (places in its log). Sizes are
 * bytes, unless their name says otherwise. `stream` is a CUstream as a number; 0 with host memory.
 */

#ifndef PILLION_H
#define PILLION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The result of a call. Without a sidecar, or with a slow or full one, a call succeeds and the answer is
 * "miss".
 */
typedef enum PillionStatus {
  /**
   * Done.
   */
  PILLION_STATUS_OK = 0,
  /**
   * The caller passed an invalid argument: correct the caller.
   */
  PILLION_STATUS_ARGUMENT = 1,
  /**
   * The sidecar refuses this engine: do what the text says.
   */
  PILLION_STATUS_REFUSED = 2,
  /**
   * The KV memory cannot be shared with the sidecar: run without the cache.
   */
  PILLION_STATUS_MEMORY = 3,
  /**
   * The GPU's driver failed.
   */
  PILLION_STATUS_DEVICE = 4,
  /**
   * The bytes are not a plan of this release: use one release in all processes of the engine.
   */
  PILLION_STATUS_PLAN = 5,
  /**
   * A forked child used a handle of its parent: make one in the child.
   */
  PILLION_STATUS_FORKED = 6,
  /**
   * Another thread is inside a call with this handle: let one thread at a time use it.
   */
  PILLION_STATUS_BUSY = 7,
  /**
   * An internal error of Pillion, described on stderr. Every later call with the handle returns this
   * status.
   */
  PILLION_STATUS_INTERNAL = 8,
} PillionStatus;

/**
 * The outcome of a hint.
 */
typedef enum PillionHintOutcome {
  /**
   * It was carried out for all blocks.
   */
  PILLION_HINT_OUTCOME_DONE = 0,
  /**
   * The engine's limit left some blocks out.
   */
  PILLION_HINT_OUTCOME_CLIPPED = 1,
  /**
   * Some blocks are nowhere, or there is no sidecar that knows hints.
   */
  PILLION_HINT_OUTCOME_MISSING = 2,
} PillionHintOutcome;

/**
 * Kinds of extra keys, in the order of a block's extra keys.
 */
enum PillionExtraKind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * The request's LoRA adapter, on every block: `text` is its name, `path` its source.
   */
  PILLION_EXTRA_KIND_LORA = 1,
  /**
   * An image or a similar item in the block: `text` identifies it, `offset` is its begin.
   */
  PILLION_EXTRA_KIND_MULTIMODAL = 2,
  /**
   * The request's cache salt, on its first block: `text`.
   */
  PILLION_EXTRA_KIND_CACHE_SALT = 3,
  /**
   * Prompt embeddings: `bytes` is their SHA-256.
   */
  PILLION_EXTRA_KIND_PROMPT_EMBEDS = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum PillionExtraKind PillionExtraKind;
#else
typedef uint32_t PillionExtraKind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * An engine of one process.
 */
typedef struct PillionEngine PillionEngine;

/**
 * The hashes of one request's blocks.
 */
typedef struct PillionKeys PillionKeys;

/**
 * The session of an engine's scheduler, one for each engine.
 */
typedef struct PillionScheduler PillionScheduler;

/**
 * The session of one rank.
 */
typedef struct PillionWorker PillionWorker;

/**
 * A text, UTF-8 with a zero at its end.
 */
typedef const char *PillionText;

/**
 * `count` items side by side. NULL if there are none.
 */
typedef struct PillionItemsU32 {
  /**
   * The first item.
   */
  const uint32_t *items;
  /**
   * Number of items.
   */
  size_t count;
} PillionItemsU32;

/**
 * `count` items side by side. NULL if there are none.
 */
typedef struct PillionItemsU8 {
  /**
   * The first item.
   */
  const uint8_t *items;
  /**
   * Number of items.
   */
  size_t count;
} PillionItemsU8;

/**
 * A reason besides the tokens why a block's KV differs. Fields that its kind does not name are ignored.
 */
typedef struct PillionExtraKey {
  /**
   * Number of the block, counted from the first block that was not full before the call.
   */
  uint32_t block;
  /**
   * A PillionExtraKind.
   */
  uint32_t kind;
  /**
   * See the kinds.
   */
  PillionText text;
  /**
   * See the kinds.
   */
  PillionText path;
  /**
   * The item's begin in tokens from the block's begin; negative if it lies before the block.
   */
  int64_t offset;
  /**
   * See the kinds.
   */
  struct PillionItemsU8 bytes;
} PillionExtraKey;

/**
 * `count` items side by side. NULL if there are none.
 */
typedef struct PillionItemsExtraKey {
  /**
   * The first item.
   */
  const struct PillionExtraKey *items;
  /**
   * Number of items.
   */
  size_t count;
} PillionItemsExtraKey;

/**
 * The hash of a block and of all blocks before it. A hash of 16 bytes has the second digest behind it, or
 * zeros if the engine does not make it.
 */
typedef struct PillionHash {
  /**
   * The bytes.
   */
  uint8_t bytes[32];
} PillionHash;

/**
 * `count` items side by side. NULL if there are none.
 */
typedef struct PillionItemsHash {
  /**
   * The first item.
   */
  const struct PillionHash *items;
  /**
   * Number of items.
   */
  size_t count;
} PillionItemsHash;

/**
 * `count` items side by side. NULL if there are none.
 */
typedef struct PillionItemsU64 {
  /**
   * The first item.
   */
  const uint64_t *items;
  /**
   * Number of items.
   */
  size_t count;
} PillionItemsU64;

/**
 * The places of K's or V's elements in a page, in bytes. A stride is 0 if its axis has the length 1.
 */
typedef struct PillionPlace {
  /**
   * Offset of the first element from the begin of the page.
   */
  uint64_t offset;
  /**
   * Stride from one head to the next.
   */
  uint64_t kv_heads;
  /**
   * Stride from one kernel block to the next.
   */
  uint64_t kernel_blocks;
  /**
   * Stride from one token of a kernel block to the next.
   */
  uint64_t tokens;
  /**
   * Stride from one element of a key or of a value to the next.
   */
  uint64_t elements;
} PillionPlace;

/**
 * The page of one layer. Token `t` is number `t % kernel_block_tokens` of kernel block `t / kernel_block_tokens`.
 */
typedef struct PillionPage {
  /**
   * Layers of a block, this layer included.
   */
  uint32_t layers;
  /**
   * Tokens of a block.
   */
  uint32_t tokens;
  /**
   * Tokens of a kernel block; equal to `tokens` if attention kernels do not divide blocks.
   */
  uint32_t kernel_block_tokens;
  /**
   * Heads of one shard.
   */
  uint32_t kv_heads;
  /**
   * Elements of a key.
   */
  uint32_t keys;
  /**
   * Elements of a value.
   */
  uint32_t values;
  /**
   * Type of an element, such as "bfloat16". Valid for ever.
   */
  const char *dtype;
  /**
   * Length of an element.
   */
  uint64_t element_bytes;
  /**
   * Offset of this page in its shard of a block.
   */
  uint64_t begin;
  /**
   * Length of this page.
   */
  uint64_t bytes;
  /**
   * Length of a shard of a block: the pages of all layers.
   */
  uint64_t shard_bytes;
  /**
   * The place of K.
   */
  struct PillionPlace k;
  /**
   * The place of V.
   */
  struct PillionPlace v;
} PillionPage;

/**
 * 16 random bytes that name one run of an engine; see `getrandom(2)`.
 */
typedef struct PillionRun {
  /**
   * The bytes.
   */
  uint8_t bytes[16];
} PillionRun;

/**
 * Settings of a scheduler's session.
 */
typedef struct PillionSchedulerOptions {
  /**
   * Path of the sidecar's socket.
   */
  PillionText socket;
  /**
   * Name of this engine, 1 to 256 bytes: the same in its scheduler and its workers, and different from
   * every other engine.
   */
  PillionText engine;
  /**
   * Workers of the engine, 1 to 64.
   */
  uint32_t world_size;
  /**
   * This run of the engine.
   */
  struct PillionRun run;
  /**
   * The longest total wait of all queries of one step, in microseconds, at most 10,000,000; usually 2,000.
   */
  uint64_t query_budget_us;
  /**
   * True if the sidecar writes loaded blocks into the engine's memory; false if the workers copy them. The
   * same as in PillionWorkerOptions.
   */
  bool sidecar_copies;
  /**
   * True if a load may begin as soon as the previous step is done. Set it only if a step does not zero or
   * copy blocks before its work.
   */
  bool early_loads;
  /**
   * Milliseconds, at most 2,000, for which a request's first query stays unknown (-1) while another pod
   * may still compute its blocks. 0, for an engine that computes its prompts itself: not at all.
   */
  uint32_t miss_wait_ms;
  /**
   * 16 bytes, or none: a digest of this engine's cache layout, equal in its scheduler and its workers. A
   * worker with another digest takes no part.
   */
  struct PillionItemsU8 groups;
} PillionSchedulerOptions;

/**
 * State of a scheduler's session.
 */
typedef struct PillionSchedulerState {
  /**
   * Connections so far. When it changes, all logs and leases are void: open the logs again.
   */
  uint64_t generation;
  /**
   * Blocks of unfinished saves: the engine must keep them as they are, or give their saves up.
   */
  uint64_t saving;
  /**
   * True while a sidecar is connected, as far as is known.
   */
  bool connected;
  /**
   * The next message for the engine's log, or NULL; each is handed over once.
   */
  const char *notice;
  /**
   * The first 8 bytes of the engine's namespace. 0 until every worker has begun a step of this run and,
   * after pillion_scheduler_weights, stated its weights.
   */
  uint64_t namespace_word;
  /**
   * Blocks compared so far with kept ones, by pillion_scheduler_check.
   */
  uint64_t blocks_checked;
  /**
   * Compared blocks with different bytes.
   */
  uint64_t blocks_differing;
  /**
   * Blocks not kept because no comparison has passed yet.
   */
  uint64_t blocks_unproven;
  /**
   * Blocks not kept because their step was not accepted.
   */
  uint64_t blocks_unaccepted;
} PillionSchedulerState;

/**
 * One run of bytes in every block: block `b` has `bytes` bytes at `offset + b * stride` of a memory.
 */
typedef struct PillionRegion {
  /**
   * Index of the descriptor or pointer, counted from 0.
   */
  uint32_t memory;
  /**
   * Offset of block 0, in bytes.
   */
  uint64_t offset;
  /**
   * Bytes from one block to the next; at least `bytes`.
   */
  uint64_t stride;
  /**
   * Length of the run.
   */
  uint64_t bytes;
} PillionRegion;

/**
 * `count` items side by side. NULL if there are none.
 */
typedef struct PillionItemsRegion {
  /**
   * The first item.
   */
  const struct PillionRegion *items;
  /**
   * Number of items.
   */
  size_t count;
} PillionItemsRegion;

/**
 * A fact: a property of an engine by which the bytes of its blocks are interchangeable with those of other
 * engines. Engines with the same facts share a namespace.
 */
typedef struct PillionFact {
  /**
   * The fact's name.
   */
  PillionText name;
  /**
   * The fact's value.
   */
  PillionText value;
} PillionFact;

/**
 * `count` items side by side. NULL if there are none.
 */
typedef struct PillionItemsFact {
  /**
   * The first item.
   */
  const struct PillionFact *items;
  /**
   * Number of items.
   */
  size_t count;
} PillionItemsFact;

/**
 * `count` items side by side. NULL if there are none.
 */
typedef struct PillionItemsI32 {
  /**
   * The first item.
   */
  const int32_t *items;
  /**
   * Number of items.
   */
  size_t count;
} PillionItemsI32;

/**
 * Settings of a worker's session. Pass either `descriptors` or `pointers`.
 */
typedef struct PillionWorkerOptions {
  /**
   * As in PillionSchedulerOptions.
   */
  PillionText socket;
  /**
   * As in PillionSchedulerOptions.
   */
  PillionText engine;
  /**
   * As in PillionSchedulerOptions.
   */
  uint32_t world_size;
  /**
   * This worker's number, below `world_size`.
   */
  uint32_t rank;
  /**
   * Number of the part of every block in this worker's memory: `rank / (world_size / shards)`.
   */
  uint32_t shard;
  /**
   * Distinct parts of a block over all ranks, a divisor of `world_size`: fewer than ranks if several ranks
   * hold equal bytes.
   */
  uint32_t shards;
  /**
   * Blocks in the memory; a block's id is below it. Block 0 is never saved.
   */
  uint32_t blocks;
  /**
   * True if the sidecar writes loaded blocks: true on a GPU. On a host, false keeps a frozen sidecar from
   * writing late.
   */
  bool sidecar_copies;
  /**
   * The regions of a block, in the order of its bytes in the cache; 1 to 1,024.
   */
  struct PillionItemsRegion regions;
  /**
   * At most 256. `pillion ctl namespaces` prints the facts of the connected engines.
   */
  struct PillionItemsFact facts;
  /**
   * The expected namespace of the facts, 32 hex digits. The sidecar refuses a rank with another namespace
   * and names the differences. NULL: any namespace.
   */
  PillionText expects;
  /**
   * 16 bytes, or none: a digest of a sample of the rank's live weights, equal in all engines with the same
   * weights. Engines with this digest share no blocks with engines without it. An engine that joins others
   * may instead state their fact `weights_live`, as `pillion ctl namespaces` prints it. Such an engine,
   * and one with `expects` and no digest, must pass a comparison of its blocks before it may save: see
   * pillion_scheduler_check.
   */
  struct PillionItemsU8 live_weights;
  /**
   * Host memory, by writable descriptors of shared memory (memfd_create(2)); at most 64. The caller keeps
   * them and may close them after the call.
   */
  struct PillionItemsI32 descriptors;
  /**
   * GPU memory, by CUDA device pointers into allocations that can be exported (cudaMalloc); at most 64.
   * The calling thread must have the GPU's context. Connect before any use of the memory: the call writes
   * zeros into the last block. Free the memory only after pillion_worker_free, and after
   * pillion_worker_poll has returned the end of every load.
   */
  struct PillionItemsU64 pointers;
  /**
   * With `pointers`: ascending ends, in bytes, of the parts (cuts) of a block in which a load is
   * delivered. The last end is the block's length. At most 255.
   */
  struct PillionItemsU64 cuts;
  /**
   * With `pointers`: the CUstream on which the engine computes.
   */
  uint64_t stream;
  /**
   * As in PillionSchedulerOptions.
   */
  struct PillionItemsU8 groups;
} PillionWorkerOptions;

/**
 * State of a worker's session.
 */
typedef struct PillionWorkerState {
  /**
   * Connections so far.
   */
  uint64_t generation;
  /**
   * True while a sidecar is connected, as far as is known.
   */
  bool connected;
  /**
   * The namespace of this rank's blocks, 32 hex digits; empty while it is not known. If several workers
   * state their weights, it is known once each has begun a step, and after pillion_scheduler_weights once
   * each has answered.
   */
  const char *namespace_id;
  /**
   * The next message for the engine's log, or NULL; each is handed over once.
   */
  const char *notice;
} PillionWorkerState;

/**
 * The end of a load.
 */
typedef struct PillionLoaded {
  /**
   * True if the load has ended; for pillion_worker_poll, true if there is an end to return.
   */
  bool ended;
  /**
   * Number of the load, the same as pillion_worker_load returned for it.
   */
  uint64_t op;
  /**
   * Blocks whose load failed: the engine must compute them and call pillion_scheduler_void_saves.
   */
  struct PillionItemsU32 failed;
} PillionLoaded;

/**
 * An engine, its namespace and its memory.
 */
typedef struct PillionEngineOptions {
  /**
   * Path of the sidecar's socket.
   */
  PillionText socket;
  /**
   * Name of this engine, 1 to 256 bytes; each engine has another one.
   */
  PillionText name;
  /**
   * As in PillionWorkerOptions.
   */
  struct PillionItemsFact facts;
  /**
   * The namespace joined with other engines' facts, 32 hex digits. NULL: the facts are this engine's own.
   */
  PillionText expects;
  /**
   * Parts of a block, each with some of the heads: 1, or as many as the other engines have ranks.
   */
  uint32_t shards;
  /**
   * A descriptor of shared memory (memfd_create(2)) that can be written; the caller closes it.
   */
  int32_t descriptor;
  /**
   * Blocks in the memory. Block 0 is never used.
   */
  uint32_t blocks;
  /**
   * Bytes of a block, all shards.
   */
  uint64_t block_bytes;
  /**
   * Bytes of a piece, a divisor of `block_bytes`: the memory has the first pieces of all blocks, then their second ones. With
   * several shards a block is one piece.
   */
  uint64_t piece_bytes;
  /**
   * Hits from one checked hit to the next, 0: none is checked. vLLM's default is 1,000.
   */
  uint32_t check_every;
  /**
   * Tokens of wholly computed hits for 1,000 loaded ones. vLLM's default is 2.
   */
  uint32_t check_per_mille;
  /**
   * How long a load waits for blocks that an engine in another pod is computing, in milliseconds; at most 2,000.
   */
  uint32_t miss_wait_ms;
} PillionEngineOptions;

/**
 * The blocks of a request, and the tokens with their KV in them. Valid until the next call with the engine.
 */
typedef struct PillionHeldTokens {
  /**
   * Tokens with KV, from the request's first one on.
   */
  uint32_t tokens;
  /**
   * Block ids, in the order of the tokens.
   */
  struct PillionItemsU32 blocks;
} PillionHeldTokens;

/**
 * The begin of a proof.
 */
typedef struct PillionProofBegin {
  /**
   * The engine may save: nothing is to be computed.
   */
  bool proven;
  /**
   * The request of the tokens to compute; 0: there is none, as the first block is not kept.
   */
  uint64_t request;
} PillionProofBegin;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The release of this library, such as "0.1.0". Valid for ever.
 */
const char *pillion_version(void);

/**
 * The cause of this thread's last failed call, and the remedy; empty before the first failure. Valid until
 * the next failed call of this thread.
 */
const char *pillion_error_text(void);

/**
 * Begins the hashes of a request. The arguments are the namespace's facts about its keys, word for word:
 * `hash_algorithm` (such as "sha256"), `none_hash` (hex digits), `extra_keys` ("tagged" or "bare"), and
 * `block_tokens`.
 */
enum PillionStatus pillion_keys_new(PillionText hash_algorithm,
                                    PillionText none_hash,
                                    PillionText extra_keys,
                                    uint32_t block_tokens,
                                    struct PillionKeys **keys);

/**
 * Frees the handle; NULL is allowed.
 */
void pillion_keys_free(struct PillionKeys *keys);

/**
 * Appends tokens. `extra` is empty for most requests; give the extra keys of a block that stays partial
 * again when it fills. `hashes` becomes all hashes so far, one for each full block from the first on, valid
 * until the next call with this handle. `hashes` may be NULL.
 */
enum PillionStatus pillion_keys_append(const struct PillionKeys *keys,
                                       struct PillionItemsU32 tokens,
                                       struct PillionItemsExtraKey extra,
                                       struct PillionItemsHash *hashes);

/**
 * Appends tokens of 64 bits, as pillion_keys_append does.
 */
enum PillionStatus pillion_keys_append64(const struct PillionKeys *keys,
                                         struct PillionItemsU64 tokens,
                                         struct PillionItemsExtraKey extra,
                                         struct PillionItemsHash *hashes);

/**
 * Returns the places of K and V in the page of layer `layer`, counted from 0, from the text of the fact
 * `page_form`. Fails with PILLION_STATUS_ARGUMENT for pages without strides (any `packing` but "none") and
 * for a layer that does not exist; the text names the cause.
 */
enum PillionStatus pillion_page_form(PillionText page_form,
                                     uint32_t layer,
                                     struct PillionPage *page);

/**
 * Connects to the sidecar; without one, retries in the background. Until every worker is connected too, each
 * query is a miss.
 */
enum PillionStatus pillion_scheduler_connect(const struct PillionSchedulerOptions *options,
                                             struct PillionScheduler **scheduler);

/**
 * Leaves the sidecar and frees the handle; NULL is allowed. Unfinished saves are dropped, leases end.
 */
void pillion_scheduler_free(struct PillionScheduler *scheduler);

/**
 * Opens a log: the list of one request's block hashes, from its first block on. `log` becomes -1 while there
 * is no sidecar or no room (65,536 logs may be open); every call with such a log does nothing and answers
 * "miss".
 */
enum PillionStatus pillion_scheduler_open(const struct PillionScheduler *scheduler,
                                          int64_t *log);

/**
 * Opens a log as pillion_scheduler_open does, and mixes `fold`, 16 bytes, into each of its hashes. Use it
 * for requests whose KV depends on something outside the hashes and the facts, such as an adapter's weights;
 * `fold` is then a digest of these.
 */
enum PillionStatus pillion_scheduler_open_folded(const struct PillionScheduler *scheduler,
                                                 struct PillionItemsU8 fold,
                                                 int64_t *log);

/**
 * Appends hashes. The first is the request's block `start`, which must equal the log's length so far.
 * `length` becomes the log's length: unchanged if there is no room for all of them, 0 if the log is void; it
 * may be NULL. All open logs together have room for 1,048,576 hashes; each log counts up to a multiple of
 * 64.
 */
enum PillionStatus pillion_scheduler_append(const struct PillionScheduler *scheduler,
                                            int64_t log,
                                            uint32_t start,
                                            struct PillionItemsHash hashes,
                                            uint32_t *length);

/**
 * Announces a later query of the log's blocks `start..start + count`: the sidecar fetches those on a disk
 * before it. Call this as soon as the request has arrived. The call does not wait and promises nothing.
 */
enum PillionStatus pillion_scheduler_hint(const struct PillionScheduler *scheduler,
                                          int64_t log,
                                          uint32_t start,
                                          uint32_t count);

/**
 * Asks how many of the log's blocks `start..start + count` the cache holds from `start` on, and waits for
 * the answer within the step's budget. `hits` becomes that number, and the log holds a lease on these blocks
 * until load, release, close, another query, or a time limit. `hits` is -1 while the answer is not known:
 * ask again in a later step. Blocks beyond the log's length, and more than 65,536 at once, are not asked
 * for.
 */
enum PillionStatus pillion_scheduler_query(const struct PillionScheduler *scheduler,
                                           int64_t log,
                                           uint32_t start,
                                           uint32_t count,
                                           int64_t *hits);

/**
 * Promises that in step `step` every worker loads the log's blocks from `start` on into the engine's blocks
 * `blocks`, and uses up the lease. `plan` becomes the bytes for pillion_worker_load; hand them to every
 * worker. They are valid until the next call with this handle. An empty plan: no lease covers these blocks
 * (any more), load nothing. `sync`: the step needs the blocks; without it the request waits until
 * pillion_worker_poll of every worker has returned the load's end.
 */
enum PillionStatus pillion_scheduler_load(const struct PillionScheduler *scheduler,
                                          int64_t log,
                                          uint32_t start,
                                          struct PillionItemsU32 blocks,
                                          uint64_t step,
                                          bool sync,
                                          struct PillionItemsU8 *plan);

/**
 * Saves the log's blocks from `start` on from the engine's blocks `blocks`, once every worker has called
 * pillion_worker_done for step `step`. The sidecar keeps them once pillion_scheduler_accept has named that
 * step. They must stay as they are until the save is over (PillionSchedulerState), or be given up before.
 * `posted` becomes false if the save was dropped for lack of a sidecar or of room; it may be NULL.
 */
enum PillionStatus pillion_scheduler_save(const struct PillionScheduler *scheduler,
                                          int64_t log,
                                          uint32_t start,
                                          struct PillionItemsU32 blocks,
                                          uint64_t step,
                                          bool *posted);

/**
 * Compares blocks that this engine computed itself with kept blocks: the log's blocks from `start` on, in
 * the engine's blocks `blocks`, once every worker has called pillion_worker_done for step `step`.
 * PillionSchedulerState counts the results. An engine that took over its facts (PillionWorkerOptions) may
 * load at once, but its saves are not kept until some of its blocks have passed, unless it is the first of
 * its namespace. For this it computes the first block of a request although that block is kept. An engine
 * whose blocks differ is served nothing any more. `posted` as in pillion_scheduler_save.
 */
enum PillionStatus pillion_scheduler_check(const struct PillionScheduler *scheduler,
                                           int64_t log,
                                           uint32_t start,
                                           struct PillionItemsU32 blocks,
                                           uint64_t step,
                                           bool *posted);

/**
 * Says that the engine went on with the output of step `step`, and that every worker returned from it
 * without an error. No save of that step is kept before this call. Saves of earlier steps without this call
 * are dropped. If a load of the step failed, call pillion_scheduler_void_saves first.
 */
enum PillionStatus pillion_scheduler_accept(const struct PillionScheduler *scheduler,
                                            uint64_t step);

/**
 * Gives up every unfinished save of these blocks. Call this before a load into them. Call it also in a step
 * that may overwrite them, before that step's saves and its pillion_scheduler_end_step: a save given up
 * later may keep wrong bytes.
 */
enum PillionStatus pillion_scheduler_overwrite(const struct PillionScheduler *scheduler,
                                               struct PillionItemsU32 blocks);

/**
 * Gives up every unfinished save. Call this when a load failed and blocks may have been computed from it.
 */
enum PillionStatus pillion_scheduler_void_saves(const struct PillionScheduler *scheduler);

/**
 * Ends the log's lease, if it has one: the engine will not load.
 */
enum PillionStatus pillion_scheduler_release(const struct PillionScheduler *scheduler, int64_t log);

/**
 * Closes a log when its request is over. Promised loads and saves go on.
 */
enum PillionStatus pillion_scheduler_close(const struct PillionScheduler *scheduler, int64_t log);

/**
 * Says that the weights may have changed for the `count`th time. Unfinished saves are given up, and nothing
 * is served until every worker has called pillion_worker_weights with this count. Equal weights give the old
 * blocks back. The caller must not save blocks that were computed before this call, or from such blocks. A
 * count not above the last one has no effect.
 */
enum PillionStatus pillion_scheduler_weights(const struct PillionScheduler *scheduler,
                                             uint64_t count);

/**
 * Forgets this engine's earlier saves: unfinished saves are given up, and earlier blocks are not served to
 * it any more.
 */
enum PillionStatus pillion_scheduler_reset(const struct PillionScheduler *scheduler);

/**
 * Ends the scheduling of a step: all posted requests become visible to the sidecar, finished saves are
 * counted, and the budget of queries is whole again. Call this before the workers begin that step. `state`
 * may be NULL; its notice is valid until the next call with this handle.
 */
enum PillionStatus pillion_scheduler_end_step(const struct PillionScheduler *scheduler,
                                              struct PillionSchedulerState *state);

/**
 * Says that another engine computes the blocks of this log, or is about to. Queries of the log answer -1
 * (not known yet) until these blocks are kept, for at most 2 s, or at most 30 s while the other engine has
 * promised them and works. Call this before the log's first query. A sidecar of an older release ignores it.
 */
enum PillionStatus pillion_scheduler_await(const struct PillionScheduler *scheduler,
                                           int64_t log);

/**
 * Says that another engine will load the blocks of this log: saves of this log from now on stay until the
 * other engine has loaded them, for a limited time. A sidecar of an older release ignores it.
 */
enum PillionStatus pillion_scheduler_hand_over(const struct PillionScheduler *scheduler,
                                               int64_t log);

/**
 * Says that this engine is about to compute the blocks of this log for another engine. An engine that awaits
 * them waits until this log is closed, at most 30 s, while this engine makes a call, or begins or ends a
 * step, at least every 5 s. At most 64 logs of an engine count at once. Saves of this log are handed over as
 * by pillion_scheduler_hand_over. Call this as soon as the request has arrived, after open and before the
 * log's first append. A sidecar of an older release ignores it.
 */
enum PillionStatus pillion_scheduler_promise(const struct PillionScheduler *scheduler,
                                             int64_t log);

/**
 * Shares a rank's KV memory with the sidecar; without a sidecar, retries in the background. Fails if the
 * sidecar refuses, and the text says why.
 */
enum PillionStatus pillion_worker_connect(const struct PillionWorkerOptions *options,
                                          struct PillionWorker **worker);

/**
 * Leaves the sidecar and frees the handle; NULL is allowed. Loads in progress end by themselves, and may
 * write until then: poll their ends before you free the memory.
 */
void pillion_worker_free(struct PillionWorker *worker);

/**
 * Returns the session's state; its texts are valid until the next call with this handle.
 */
enum PillionStatus pillion_worker_state(const struct PillionWorker *worker,
                                        struct PillionWorkerState *state);

/**
 * Says that step `step` of run `run` begins: the blocks are as the scheduler planned, and loads of the step
 * may be written. On a GPU this holds once `stream` reaches this call. The scheduler numbers steps from 1
 * on, and never backwards.
 */
enum PillionStatus pillion_worker_start(const struct PillionWorker *worker,
                                        const struct PillionRun *run,
                                        uint64_t step,
                                        uint64_t stream);

/**
 * States the weights of this rank, in answer to the `count`th pillion_scheduler_weights: `live` is a digest
 * of 16 bytes as in PillionWorkerOptions. None: the weights are not known, and this rank's blocks are from
 * now on not shared. Call this before pillion_worker_start of the first step that the scheduler posted after
 * its call; loads fail until all workers have called it.
 */
enum PillionStatus pillion_worker_weights(const struct PillionWorker *worker,
                                          uint64_t count,
                                          struct PillionItemsU8 live);

/**
 * Says that the KV of step `step` is written; on a GPU, once `stream` reaches this call. Do not call it for
 * a step computed from blocks that were not loaded, until the scheduler has voided its saves. `wake`: a load
 * or save waits for this step, so wake a sleeping sidecar.
 */
enum PillionStatus pillion_worker_done(const struct PillionWorker *worker,
                                       uint64_t step,
                                       bool wake,
                                       uint64_t stream);

/**
 * Carries out this rank's part of a load, after pillion_worker_start of its step. A synchronous load has
 * ended when the call returns; on a GPU, `stream` waits for it instead: at this call, or with `by_cuts` at
 * pillion_worker_wait_cut. An asynchronous load goes on; pillion_worker_poll returns its end.
 * `loaded.failed` is valid until the next call with this handle.
 */
enum PillionStatus pillion_worker_load(const struct PillionWorker *worker,
                                       struct PillionItemsU8 plan,
                                       uint64_t stream,
                                       bool by_cuts,
                                       struct PillionLoaded *loaded);

/**
 * On a GPU: `stream` waits for cut `cut` (counted from 0) of every synchronous load of the step, and for all
 * cuts before it. Call this for the last cut before the step ends.
 */
enum PillionStatus pillion_worker_wait_cut(const struct PillionWorker *worker,
                                           uint32_t cut,
                                           uint64_t stream);

/**
 * Returns the end of one asynchronous load; each end is returned once. `loaded.failed` is valid until the
 * next call with this handle.
 */
enum PillionStatus pillion_worker_poll(const struct PillionWorker *worker,
                                       struct PillionLoaded *loaded);

/**
 * Joins a namespace. Fails where the sidecar refuses the engine, and the text says why; and where there is none.
 */
enum PillionStatus pillion_engine_join(const struct PillionEngineOptions *options,
                                       struct PillionEngine **engine);

/**
 * Leaves the sidecar and frees the handle; NULL is allowed.
 */
void pillion_engine_free(struct PillionEngine *engine);

/**
 * Begins a request of these tokens, with the KV kept for them: from the first token on, of all but the last one at most. Waits for
 * blocks of disks and of other pods, 2 s at most. Without a sidecar, and without room, nothing is held: see pillion_engine_held.
 * Some hits leave the last blocks for the engine to compute: these are compared once they are saved.
 */
enum PillionStatus pillion_engine_load(const struct PillionEngine *engine,
                                       struct PillionItemsU32 tokens,
                                       uint64_t *request);

/**
 * pillion_engine_load of tokens that another engine computes, or is about to: waits for that, 2 s at most, and 30 s while the other
 * engine promises them.
 */
enum PillionStatus pillion_engine_load_awaited(const struct PillionEngine *engine,
                                               struct PillionItemsU32 tokens,
                                               uint64_t *request);

/**
 * pillion_engine_load, and a promise: this engine computes and saves the rest for another one, which may await it meanwhile. The promise
 * lasts until pillion_engine_end, 30 s at most, while the engine makes a call at least every 5 s. 64 of an engine count at once.
 */
enum PillionStatus pillion_engine_promise(const struct PillionEngine *engine,
                                          struct PillionItemsU32 tokens,
                                          uint64_t *request);

/**
 * The tokens held by a request, and its blocks: none of a request that has ended.
 */
enum PillionStatus pillion_engine_held(const struct PillionEngine *engine,
                                       uint64_t request,
                                       struct PillionHeldTokens *held);

/**
 * Gives a request blocks for the KV of `tokens`: all of the request from its first one on, those of its answer too. `blocks` has them
 * then, and `tokens` is the first token whose KV is to be written. Fails without room, and for other tokens than before.
 */
enum PillionStatus pillion_engine_reserve(const struct PillionEngine *engine,
                                          uint64_t request,
                                          struct PillionItemsU32 tokens,
                                          struct PillionHeldTokens *blocks);

/**
 * Keeps the KV of the reserved tokens, which is written: they are held then. Returns once the sidecar has taken the blocks that are full;
 * `kept` becomes how many of these it keeps. May be NULL. To be called once the computation has returned without an error.
 */
enum PillionStatus pillion_engine_save(const struct PillionEngine *engine,
                                       uint64_t request,
                                       uint64_t *kept);

/**
 * Carries a hint out for the kept blocks of these tokens. `hint` is a JSON object as in docs/hints.md, such as
 * {"action": "pin", "seconds": 600}. Fails if it breaks the schema. It is no use of the blocks.
 */
enum PillionStatus pillion_engine_hint(const struct PillionEngine *engine,
                                       struct PillionItemsU32 tokens,
                                       PillionText hint,
                                       enum PillionHintOutcome *outcome);

/**
 * Ends a request: its blocks are free, and its promise is over.
 */
enum PillionStatus pillion_engine_end(const struct PillionEngine *engine, uint64_t request);

/**
 * Begins a proof by the first block of these tokens: in a namespace that it joined, nothing of an engine is kept before a comparison
 * has proven it, unless it is the first there. With a `proof.request`, reserve that block's tokens, write their KV, and call
 * pillion_engine_end_proof.
 */
enum PillionStatus pillion_engine_begin_proof(const struct PillionEngine *engine,
                                              struct PillionItemsU32 tokens,
                                              struct PillionProofBegin *proof);

/**
 * Compares the computed block with the kept one. `proven` becomes whether the engine may save. PILLION_STATUS_REFUSED: they differ, and
 * the namespace is closed to the engine.
 */
enum PillionStatus pillion_engine_end_proof(const struct PillionEngine *engine,
                                            uint64_t request,
                                            bool *proven);

/**
 * The next message for the engine's log, or NULL; each is handed over once, and valid until the next call with this handle.
 */
enum PillionStatus pillion_engine_notice(const struct PillionEngine *engine,
                                         const char **notice);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PILLION_H */
