/*
 * Pillion's C interface: for engines that keep their KV cache in a Pillion sidecar. docs/c-api.md shows the order of calls.
 *
 * Written from connector-shim/src/c by `PILLION_WRITE_HEADER=1 cargo test -p connector-shim --test header`.
 *
 * Results. Every call that can fail returns a PillionStatus; its text is pillion_error_text(). Without a sidecar, or with
 * one that is slow, full or gone, calls succeed and answer "miss": no hits, nothing posted. No call waits for a sidecar
 * without a deadline. The process is ended in one case alone, and loudly: when a GPU's stream would wait for ever.
 *
 * Threads. A handle is used by one thread at a time, whichever; the caller sees to that. A second thread inside a call is
 * told PILLION_STATUS_BUSY; only freeing a handle under another thread's call is undefined. Different handles are
 * independent. A forked child may free its parent's handles, and nothing else.
 *
 * Memory. What is passed to a call must stay as it is until the call returns, and is not kept. What a call hands out
 * belongs to the handle and is valid until the next call with that handle. Handles are freed by their _free call. A
 * result's place may be uninitialised; a failed call leaves it as it is.
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
 * What became of a call. Without a sidecar, or with one that is slow or full, a call succeeds and the answer is "miss".
 */
typedef enum PillionStatus {
  /**
   * Done.
   */
  PILLION_STATUS_OK = 0,
  /**
   * An argument that cannot be: correct the caller.
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
   * The bytes are no plan of this release: use one release in all processes of the engine.
   */
  PILLION_STATUS_PLAN = 5,
  /**
   * A forked child used its parent's handle: make one in the child.
   */
  PILLION_STATUS_FORKED = 6,
  /**
   * Another thread is inside a call with this handle: let one thread at a time use it.
   */
  PILLION_STATUS_BUSY = 7,
  /**
   * A fault of Pillion, described on stderr; the handle only answers this from now on.
   */
  PILLION_STATUS_INTERNAL = 8,
} PillionStatus;

/**
 * Kinds of extra keys, in the order in which those of one block are given.
 */
enum PillionExtraKind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * The request's LoRA adapter, on every block: `text` is its name, `path` where it was loaded from.
   */
  PILLION_EXTRA_KIND_LORA = 1,
  /**
   * An image or the like that reaches into the block: `text` identifies it, `offset` is where it begins.
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
 * `count` items side by side. NULL where there are none.
 */
typedef struct PillionItemsU32 {
  /**
   * The first item.
   */
  const uint32_t *items;
  /**
   * How many there are.
   */
  size_t count;
} PillionItemsU32;

/**
 * `count` items side by side. NULL where there are none.
 */
typedef struct PillionItemsU8 {
  /**
   * The first item.
   */
  const uint8_t *items;
  /**
   * How many there are.
   */
  size_t count;
} PillionItemsU8;

/**
 * What else than tokens a block's KV depends on. What its kind does not name is ignored.
 */
typedef struct PillionExtraKey {
  /**
   * The block, counted from the first that was not full before the call.
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
   * In tokens from the block's begin; negative if before it.
   */
  int64_t offset;
  /**
   * See the kinds.
   */
  struct PillionItemsU8 bytes;
} PillionExtraKey;

/**
 * `count` items side by side. NULL where there are none.
 */
typedef struct PillionItemsExtraKey {
  /**
   * The first item.
   */
  const struct PillionExtraKey *items;
  /**
   * How many there are.
   */
  size_t count;
} PillionItemsExtraKey;

/**
 * The hash of a block and of all before it. One of 16 bytes has the second digest behind it, or zeros if the engine does not make it.
 */
typedef struct PillionHash {
  /**
   * The bytes.
   */
  uint8_t bytes[32];
} PillionHash;

/**
 * `count` items side by side. NULL where there are none.
 */
typedef struct PillionItemsHash {
  /**
   * The first item.
   */
  const struct PillionHash *items;
  /**
   * How many there are.
   */
  size_t count;
} PillionItemsHash;

/**
 * `count` items side by side. NULL where there are none.
 */
typedef struct PillionItemsU64 {
  /**
   * The first item.
   */
  const uint64_t *items;
  /**
   * How many there are.
   */
  size_t count;
} PillionItemsU64;

/**
 * Where the elements of K or of V are in a page, in bytes. A stride is 0 where its axis has the length 1.
 */
typedef struct PillionPlace {
  /**
   * Of the first element, from the begin of the page.
   */
  uint64_t offset;
  /**
   * From one head to the next.
   */
  uint64_t kv_heads;
  /**
   * From one kernel block to the next.
   */
  uint64_t kernel_blocks;
  /**
   * From one token of a kernel block to the next.
   */
  uint64_t tokens;
  /**
   * From one element of a key or of a value to the next.
   */
  uint64_t elements;
} PillionPlace;

/**
 * The page of one layer. Token `t` is number `t % kernel_block_tokens` of kernel block `t / kernel_block_tokens`.
 */
typedef struct PillionPage {
  /**
   * Layers of a block: this one and all others.
   */
  uint32_t layers;
  /**
   * Tokens of a block.
   */
  uint32_t tokens;
  /**
   * Tokens of a kernel block; as many as of a block where attention kernels divide none.
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
   * Of an element, such as "bfloat16". Valid for ever.
   */
  const char *dtype;
  /**
   * Length of an element.
   */
  uint64_t element_bytes;
  /**
   * Where this page begins in its shard of a block.
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
   * Where K is.
   */
  struct PillionPlace k;
  /**
   * Where V is.
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
 * What a scheduler's session needs to know.
 */
typedef struct PillionSchedulerOptions {
  /**
   * Path of the sidecar's socket.
   */
  PillionText socket;
  /**
   * Name of this engine, 1 to 256 bytes: the same in its scheduler and its workers, and no other engine's.
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
   * The longest that all queries of one step may wait together, in microseconds; at most 10,000,000. 2,000 is usual.
   */
  uint64_t query_budget_us;
  /**
   * Whether the sidecar writes loaded blocks into the engine's memory; else the workers copy them. As in
   * PillionWorkerOptions.
   */
  bool sidecar_copies;
  /**
   * Whether a load may begin as soon as the step before its own is done: true only where a step neither zeroes nor
   * copies blocks before its work.
   */
  bool early_loads;
  /**
   * How long a request's first query stays unknown (-1) for blocks that another pod may still be computing, in
   * milliseconds; at most 2,000. 0: not at all, which is right for an engine that computes its prompts itself.
   */
  uint32_t miss_wait_ms;
  /**
   * 16 bytes, or none: a digest of how this engine's cache is laid out, equal in its scheduler and its workers; a worker
   * that states another one takes no part.
   */
  struct PillionItemsU8 groups;
} PillionSchedulerOptions;

/**
 * What is known of a scheduler's session.
 */
typedef struct PillionSchedulerState {
  /**
   * Connections so far. When it changes, all logs and leases are void: open logs anew.
   */
  uint64_t generation;
  /**
   * Blocks whose save is not over: the engine must keep them as they are, or give them up.
   */
  uint64_t saving;
  /**
   * Whether a sidecar is there, as far as is known.
   */
  bool connected;
  /**
   * The next message for the engine's log, or NULL; each is handed over once.
   */
  const char *notice;
  /**
   * The first 8 bytes of the namespace that the engine is bound to; 0 until every worker has begun a step of this run
   * and, after pillion_scheduler_weights, stated its weights.
   */
  uint64_t namespace_word;
  /**
   * Blocks compared so far, those of them that differ, and blocks not kept because nothing was compared yet.
   */
  uint64_t blocks_checked;
  /**
   * See blocks_checked.
   */
  uint64_t blocks_differing;
  /**
   * See blocks_checked.
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
   * Which of the descriptors, or of the pointers, counted from 0.
   */
  uint32_t memory;
  /**
   * Where block 0 begins, in bytes.
   */
  uint64_t offset;
  /**
   * From one block to the next, in bytes; at least `bytes`.
   */
  uint64_t stride;
  /**
   * Length of the run.
   */
  uint64_t bytes;
} PillionRegion;

/**
 * `count` items side by side. NULL where there are none.
 */
typedef struct PillionItemsRegion {
  /**
   * The first item.
   */
  const struct PillionRegion *items;
  /**
   * How many there are.
   */
  size_t count;
} PillionItemsRegion;

/**
 * One of the facts that make the bytes of two engines interchangeable. The same facts are the same namespace.
 */
typedef struct PillionFact {
  /**
   * Its name.
   */
  PillionText name;
  /**
   * Its value.
   */
  PillionText value;
} PillionFact;

/**
 * `count` items side by side. NULL where there are none.
 */
typedef struct PillionItemsFact {
  /**
   * The first item.
   */
  const struct PillionFact *items;
  /**
   * How many there are.
   */
  size_t count;
} PillionItemsFact;

/**
 * `count` items side by side. NULL where there are none.
 */
typedef struct PillionItemsI32 {
  /**
   * The first item.
   */
  const int32_t *items;
  /**
   * How many there are.
   */
  size_t count;
} PillionItemsI32;

/**
 * What a worker's session needs to know. Either `descriptors` or `pointers` are given.
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
   * Which part of every block lies here: `rank / (world_size / shards)`.
   */
  uint32_t shard;
  /**
   * Distinct parts of a block over all ranks, a divisor of `world_size`: fewer than ranks where ranks hold equal bytes.
   */
  uint32_t shards;
  /**
   * Blocks in the memory; a block's id is below it. Block 0 is never saved.
   */
  uint32_t blocks;
  /**
   * Whether the sidecar writes loaded blocks: true on a GPU; on a host false keeps a frozen sidecar from writing late.
   */
  bool sidecar_copies;
  /**
   * What a block consists of, in the order of its bytes in the cache; 1 to 1,024.
   */
  struct PillionItemsRegion regions;
  /**
   * At most 256. `pillion ctl namespaces` tells those of the engines that it knows.
   */
  struct PillionItemsFact facts;
  /**
   * The namespace that the facts must make, 32 hex digits: another one is refused, with what differs. NULL: any.
   */
  PillionText expects;
  /**
   * 16 bytes, or none: a digest of a sample of the rank's live weights, equal in every engine that loaded the same.
   * Engines that state it share with no engine that does not. Instead, an engine that joins others may state the fact
   * `weights_live` that `pillion ctl namespaces` tells of them. An engine that does, or that has `expects` and no digest, has
   * to prove what it computes before it may save: see pillion_scheduler_check.
   */
  struct PillionItemsU8 live_weights;
  /**
   * Host memory, by descriptors of shared memory (memfd_create(2)) that can be written; at most 64. They stay the
   * caller's and may be closed after the call.
   */
  struct PillionItemsI32 descriptors;
  /**
   * GPU memory, by CUDA device pointers into allocations that can be exported (cudaMalloc); at most 64. The
   * calling thread's context is the GPU's. A connect writes zeros into the last block, so it comes before any use. The
   * memory is freed after pillion_worker_free only, and after pillion_worker_poll has told the end of every load.
   */
  struct PillionItemsU64 pointers;
  /**
   * With `pointers`: ascending ends of the parts of a block in which a load is delivered, in bytes, the last one the
   * block's; at most 255.
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
 * What is known of a worker's session.
 */
typedef struct PillionWorkerState {
  /**
   * Connections so far.
   */
  uint64_t generation;
  /**
   * Whether a sidecar is there, as far as is known.
   */
  bool connected;
  /**
   * The namespace of this rank's blocks, 32 hex digits; empty while it is not known. Where several workers state their
   * weights it is known once each has begun a step, and after pillion_scheduler_weights once each has answered.
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
   * Whether the load has ended; of pillion_worker_poll: whether there is one to tell.
   */
  bool ended;
  /**
   * Number of the load, by which the end of an asynchronous one is known again.
   */
  uint64_t op;
  /**
   * Blocks that do not hold what was asked for and must be computed; then pillion_scheduler_void_saves is due.
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
 * Why the last failed call of this thread failed, and what to do; empty before the first. Valid until the next
 * failed call of this thread.
 */
const char *pillion_error_text(void);

/**
 * Begins the hashes of a request. The arguments are those facts of the namespace that say how its keys are made, word
 * for word: `hash_algorithm` (such as "sha256"), `none_hash` (hex digits), `extra_keys` ("tagged" or "bare"), and
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
 * Appends tokens. `extra` is empty for most requests; keys of a block that stays partial are to be given again when it
 * fills. `hashes` becomes all hashes so far, one for each full block from the first on, valid until the next call with
 * this handle. May be NULL.
 */
enum PillionStatus pillion_keys_append(const struct PillionKeys *keys,
                                       struct PillionItemsU32 tokens,
                                       struct PillionItemsExtraKey extra,
                                       struct PillionItemsHash *hashes);

/**
 * The same for tokens of 64 bits.
 */
enum PillionStatus pillion_keys_append64(const struct PillionKeys *keys,
                                         struct PillionItemsU64 tokens,
                                         struct PillionItemsExtraKey extra,
                                         struct PillionItemsHash *hashes);

/**
 * Where K and V are in the page of a layer, counted from 0, by the fact `page_form`, word for word. Pages that no strides
 * describe (any `packing` but "none") are PILLION_STATUS_ARGUMENT, and the text says so; so is a layer that is none.
 */
enum PillionStatus pillion_page_form(PillionText page_form,
                                     uint32_t layer,
                                     struct PillionPage *page);

/**
 * Connects to the sidecar, or leaves that to the background while none is there. Until every worker is connected too,
 * each query is a miss.
 */
enum PillionStatus pillion_scheduler_connect(const struct PillionSchedulerOptions *options,
                                             struct PillionScheduler **scheduler);

/**
 * Leaves the sidecar and frees the handle; NULL is allowed. Saves that are not over are dropped, leases end.
 */
void pillion_scheduler_free(struct PillionScheduler *scheduler);

/**
 * Opens a log: the list of one request's block hashes, from its first block on. `log` becomes -1 while there is no
 * sidecar or no room (65,536 logs may be open); every call with such a log does nothing and answers "miss".
 */
enum PillionStatus pillion_scheduler_open(const struct PillionScheduler *scheduler,
                                          int64_t *log);

/**
 * The same, with `fold`, 16 bytes, mixed into each of its hashes: for requests whose KV depends on something that neither the
 * hashes nor the facts tell, such as an adapter's weights, of which it is a digest.
 */
enum PillionStatus pillion_scheduler_open_folded(const struct PillionScheduler *scheduler,
                                                 struct PillionItemsU8 fold,
                                                 int64_t *log);

/**
 * Appends hashes, the first of which is the request's block `start`, which must be the log's length so far. `length`
 * becomes the log's length: unchanged where there is no room for all of them, 0 where the log is void. May be NULL. All open logs
 * have room for 1,048,576 hashes, each counted up to a multiple of 64.
 */
enum PillionStatus pillion_scheduler_append(const struct PillionScheduler *scheduler,
                                            int64_t log,
                                            uint32_t start,
                                            struct PillionItemsHash hashes,
                                            uint32_t *length);

/**
 * Tells, as soon as a request has arrived, that its log's blocks `start..start + count` will be asked for: what lies on a
 * disk is then fetched before they are. Waits for nothing, promises nothing.
 */
enum PillionStatus pillion_scheduler_hint(const struct PillionScheduler *scheduler,
                                          int64_t log,
                                          uint32_t start,
                                          uint32_t count);

/**
 * Asks how many of the log's blocks `start..start + count` the cache holds from `start` on, and waits for the answer
 * within the step's budget. `hits` becomes that number, and the log holds a lease on these blocks, which ends by
 * load, release, close, another query or time; or -1: not known yet, ask again in a later step. Blocks beyond the log's
 * length, and beyond 65,536 at once, are not asked for.
 */
enum PillionStatus pillion_scheduler_query(const struct PillionScheduler *scheduler,
                                           int64_t log,
                                           uint32_t start,
                                           uint32_t count,
                                           int64_t *hits);

/**
 * Promises that in step `step` every worker loads the log's blocks from `start` on into the engine's blocks named by
 * `blocks`, and uses up the lease. `plan` becomes what pillion_worker_load takes, to be handed to every worker; it is
 * valid until the next call with this handle. No bytes: no lease covers these blocks (any more), load nothing.
 * `sync`: the step needs the blocks; else the request waits until every worker's pillion_worker_poll told the end.
 */
enum PillionStatus pillion_scheduler_load(const struct PillionScheduler *scheduler,
                                          int64_t log,
                                          uint32_t start,
                                          struct PillionItemsU32 blocks,
                                          uint64_t step,
                                          bool sync,
                                          struct PillionItemsU8 *plan);

/**
 * Saves the log's blocks from `start` on from the engine's blocks named by `blocks`, once every worker said that step
 * `step` is done. They are kept once pillion_scheduler_accept named that step. They must stay as they are until the save is over
 * (PillionSchedulerState), or be given up before.
 * `posted` becomes false where the save was dropped for lack of a sidecar or of room. May be NULL.
 */
enum PillionStatus pillion_scheduler_save(const struct PillionScheduler *scheduler,
                                          int64_t log,
                                          uint32_t start,
                                          struct PillionItemsU32 blocks,
                                          uint64_t step,
                                          bool *posted);

/**
 * Has blocks compared that this engine computed itself, and that are kept already: the log's from `start` on, in the engine's
 * blocks named by `blocks`, once every worker said that step `step` is done. PillionSchedulerState counts what came of it. An
 * engine that has its facts from others (PillionWorkerOptions) may load, but nothing that it saves is kept until blocks of its have passed, unless it is the
 * first of its namespace: it computes the first block of a request whose first block is kept. One whose blocks
 * differ is served nothing any more. `posted` as of pillion_scheduler_save.
 */
enum PillionStatus pillion_scheduler_check(const struct PillionScheduler *scheduler,
                                           int64_t log,
                                           uint32_t start,
                                           struct PillionItemsU32 blocks,
                                           uint64_t step,
                                           bool *posted);

/**
 * Says that the engine went on with the output of step `step`, which every worker returned without an error. Until then no save of
 * that step is kept; without this call none ever is. Saves of earlier steps that were not accepted are dropped. To be called
 * after pillion_scheduler_void_saves, where a load of the step failed.
 */
enum PillionStatus pillion_scheduler_accept(const struct PillionScheduler *scheduler,
                                            uint64_t step);

/**
 * Gives up every unfinished save of these blocks. To be called before a load into them, and, in the step that may
 * overwrite them, before its own saves and its pillion_scheduler_end_step: a save given up later may keep wrong bytes.
 */
enum PillionStatus pillion_scheduler_overwrite(const struct PillionScheduler *scheduler,
                                               struct PillionItemsU32 blocks);

/**
 * Gives up every unfinished save: to be called when a load failed and blocks may have been computed upon it.
 */
enum PillionStatus pillion_scheduler_void_saves(const struct PillionScheduler *scheduler);

/**
 * Ends the log's lease, if it has one: the engine will not load.
 */
enum PillionStatus pillion_scheduler_release(const struct PillionScheduler *scheduler, int64_t log);

/**
 * Closes a log when its request is over. Loads and saves that were promised go on.
 */
enum PillionStatus pillion_scheduler_close(const struct PillionScheduler *scheduler, int64_t log);

/**
 * Says that the weights may have changed for the `count`th time: unfinished saves are given up, and nothing is served until
 * every worker has called pillion_worker_weights with this count. Equal weights give the old blocks back. Blocks that were
 * computed before, or upon such blocks, must not be saved afterwards. A count that is not above the last one does nothing.
 */
enum PillionStatus pillion_scheduler_weights(const struct PillionScheduler *scheduler,
                                             uint64_t count);

/**
 * Forgets what this engine kept: unfinished saves are given up, and nothing saved before is served to it any more.
 */
enum PillionStatus pillion_scheduler_reset(const struct PillionScheduler *scheduler);

/**
 * Ends the scheduling of a step: all that was posted becomes visible to the sidecar, finished saves are counted, the
 * budget of queries is whole again. To be called before the workers begin that step. `state` may be NULL; its notice
 * is valid until the next call with this handle.
 */
enum PillionStatus pillion_scheduler_end_step(const struct PillionScheduler *scheduler,
                                              struct PillionSchedulerState *state);

/**
 * Says that another engine computes the blocks of this log, or is about to: its queries are unknown (-1) until these are kept, or
 * until that is not worth waiting for: 2 s at most, and 30 s while the other engine has promised them and works. Before the log's first query. Of no effect on a sidecar of an older release.
 */
enum PillionStatus pillion_scheduler_await(const struct PillionScheduler *scheduler,
                                           int64_t log);

/**
 * Says that another engine will load the blocks of this log: what is saved of it from now on stays until that has loaded it, for a
 * while. Of no effect on a sidecar of an older release.
 */
enum PillionStatus pillion_scheduler_hand_over(const struct PillionScheduler *scheduler,
                                               int64_t log);

/**
 * Says that this engine is about to compute the blocks of this log: an engine that awaits them waits until this log is closed, 30 s
 * at most, while this engine calls, or begins or ends a step, at least every 5 s. 64 logs of an engine count at once. What is saved
 * of it is handed over. As soon as the request has come, after open and before the log's first append. Of no effect on a sidecar of
 * an older release.
 */
enum PillionStatus pillion_scheduler_promise(const struct PillionScheduler *scheduler,
                                             int64_t log);

/**
 * Shows a rank's KV memory to the sidecar, or leaves that to the background while none is there. Fails where the
 * sidecar refuses, and the text says why.
 */
enum PillionStatus pillion_worker_connect(const struct PillionWorkerOptions *options,
                                          struct PillionWorker **worker);

/**
 * Leaves the sidecar and frees the handle; NULL is allowed. Loads in progress end by themselves, and may write until then:
 * poll their ends first where the memory is to be freed.
 */
void pillion_worker_free(struct PillionWorker *worker);

/**
 * What is known of the session; its texts are valid until the next call with this handle.
 */
enum PillionStatus pillion_worker_state(const struct PillionWorker *worker,
                                        struct PillionWorkerState *state);

/**
 * Step `step` of run `run` begins: blocks are as the scheduler meant them, loads of the step may be written. On a GPU,
 * once `stream` gets there. Steps are numbered by the scheduler from 1 on and never go back.
 */
enum PillionStatus pillion_worker_start(const struct PillionWorker *worker,
                                        const struct PillionRun *run,
                                        uint64_t step,
                                        uint64_t stream);

/**
 * States, in answer to the `count`th pillion_scheduler_weights, which weights this rank holds: `live` is a digest of 16 bytes
 * as in PillionWorkerOptions. None: they are not known, and its blocks are from now on shared with nobody. To be called before
 * pillion_worker_start of the first step that the scheduler posted after its call; loads fail until all workers have.
 */
enum PillionStatus pillion_worker_weights(const struct PillionWorker *worker,
                                          uint64_t count,
                                          struct PillionItemsU8 live);

/**
 * The KV of step `step` is written; on a GPU, once `stream` gets there. Not to be called for a step computed upon blocks
 * that were not loaded, until the scheduler voided its saves. `wake`: a load or save waits for this step, so wake a
 * sleeping sidecar.
 */
enum PillionStatus pillion_worker_done(const struct PillionWorker *worker,
                                       uint64_t step,
                                       bool wake,
                                       uint64_t stream);

/**
 * Carries out this rank's part of a load, after pillion_worker_start of its step. A synchronous one has ended when the
 * call returns, or, on a GPU, `stream` waits for it: with `by_cuts` not at once, but where pillion_worker_wait_cut says.
 * An asynchronous one goes on; pillion_worker_poll tells its end. `loaded.failed` is valid until the next call with this
 * handle.
 */
enum PillionStatus pillion_worker_load(const struct PillionWorker *worker,
                                       struct PillionItemsU8 plan,
                                       uint64_t stream,
                                       bool by_cuts,
                                       struct PillionLoaded *loaded);

/**
 * On a GPU: `stream` waits for cut `cut` (counted from 0) of every synchronous load of the step, and for those before
 * it. To be called for the last cut, at the latest before the step ends.
 */
enum PillionStatus pillion_worker_wait_cut(const struct PillionWorker *worker,
                                           uint32_t cut,
                                           uint64_t stream);

/**
 * Tells the end of one asynchronous load, each once. `loaded.failed` is valid until the next call with this handle.
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
