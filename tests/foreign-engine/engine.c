/*
 * An engine in C, as small as possible: it derives block keys from tokens, loads blocks from one sidecar, and saves them to
 * another under the same keys. It computes nothing, and is scheduler and worker in one.
 *
 *   engine keys HASH_ALGORITHM NONE_HASH EXTRA_KEYS BLOCK_TOKENS < REQUEST
 *     prints the hash of every full block of a request; see print_keys().
 *   engine carry FACTS NAMESPACE TOKENS FROM TO DUMP engine|sidecar FAULT [PROOF]
 *     prints the hashes of the blocks of TOKENS (a file of numbers), loads the blocks from the sidecar at FROM into memory of
 *     its own, writes their bytes to DUMP, and saves them to the sidecar at TO. FACTS is a file of name=value lines, which
 *     must make NAMESPACE. `engine` or `sidecar` writes loaded blocks into the engine's memory. FAULT is `none`; `spoil`:
 *     before the save every value of the first layer gets the other sign; or `short`: the engine's blocks have the first
 *     layer alone, in spite of FACTS. With `handover` it awaits the loaded blocks, and promises the saved ones first and
 *     hands them over. Before a save, the first block of PROOF (TOKENS of another prompt) is compared with the block at TO.
 *   engine copy FACTS NAMESPACE TOKENS FROM TO DUMP
 *     does the same by pillion_engine_*, without a key, plan or step: loads TOKENS but the last one from FROM, proves
 *     itself to TO by their first block, and saves them there. Prints the number of loaded tokens, whether it proved itself,
 *     and the number of kept blocks.
 *   engine gather PAGE_FORM SHARDS < BLOCKS > KV
 *     reads blocks with the cache's order of bytes and pages of one size, and writes K and then V: [layers, shards and their
 *     heads, blocks and their tokens, dim].
 */
#define _GNU_SOURCE
#include "pillion.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { TOKENS_MAX = 1 << 16, FACTS_MAX = 256, LAYERS_MAX = 64, EXTRA_MAX = 256, LINE_BYTES = 1 << 16 };
/* For tests alone: a serving engine gives up after 2 ms. */
enum { QUERY_BUDGET_US = 10000000, WATCHDOG_MS = 60000 };
/* The sign, in the upper byte of a bfloat16. */
enum { SIGN_BIT = 0x80 };

typedef struct {
    const char *name_space;
    PillionFact facts[FACTS_MAX];
    size_t count;
} Facts;

/* KV memory: all blocks of a layer side by side, then the next layer's blocks. An engine places its pages
 * freely; the namespace's facts describe the inside of one. */
typedef struct {
    int descriptor;
    uint8_t *bytes;
    uint32_t blocks, layers;
    uint64_t page_bytes;
} Memory;

/* A prompt, by the hashes of its blocks. */
typedef struct {
    PillionKeys *keys;
    PillionItemsHash hashes;
} Request;

/* A connected engine of one rank. */
typedef struct {
    PillionScheduler *scheduler;
    PillionWorker *worker;
    PillionRun run;
    uint64_t step;
} Engine;

static void die(const char *what, const char *why) {
    fprintf(stderr, "engine: %s: %s\n", what, why);
    exit(1);
}

static void check(PillionStatus status, const char *what) {
    if (status != PILLION_STATUS_OK) die(what, pillion_error_text());
}

static void sleep_ms(void) { nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); }

/* --- input --- */

static PillionItemsU32 read_tokens(FILE *file) {
    static uint32_t tokens[TOKENS_MAX];
    size_t count = 0;
    while (count < TOKENS_MAX && fscanf(file, "%u", &tokens[count]) == 1) count++;
    return (PillionItemsU32){tokens, count};
}

static PillionItemsU64 read_wide_tokens(FILE *file) {
    static uint64_t tokens[TOKENS_MAX];
    size_t count = 0;
    while (count < TOKENS_MAX && fscanf(file, "%" SCNu64, &tokens[count]) == 1) count++;
    return (PillionItemsU64){tokens, count};
}

/* The texts live as long as the process. */
static void read_facts(const char *path, Facts *facts) {
    static char line[LINE_BYTES];
    FILE *file = fopen(path, "r");
    if (!file) die("facts", path);
    while (facts->count < FACTS_MAX && fgets(line, sizeof line, file)) {
        char *value = strchr(line, '=');
        if (!value) die("a fact without '='", line);
        line[strcspn(line, "\n")] = 0;
        *value++ = 0;
        facts->facts[facts->count++] = (PillionFact){.name = strdup(line), .value = strdup(value)};
    }
    fclose(file);
}

static const char *fact(const Facts *facts, const char *name) {
    for (size_t i = 0; i < facts->count; i++)
        if (!strcmp(facts->facts[i].name, name)) return facts->facts[i].value;
    die("no such fact", name);
    return NULL;
}

static uint32_t number(const char *text) { return (uint32_t)strtoul(text, NULL, 10); }

/* --- memory --- */

static Memory new_memory(const Facts *facts, uint32_t blocks, bool one_layer) {
    Memory memory = {.blocks = blocks, .page_bytes = number(fact(facts, "page_bytes"))};
    /* The number of layers, and then a digest of their names. */
    memory.layers = number(fact(facts, "layers"));
    if (memory.layers < 1 || memory.layers > LAYERS_MAX) die("layers", fact(facts, "layers"));
    if (one_layer) memory.layers = 1;
    size_t size = memory.layers * memory.page_bytes * blocks;
    memory.descriptor = memfd_create("kv", MFD_CLOEXEC);
    if (memory.descriptor < 0 || ftruncate(memory.descriptor, (off_t)size)) die("memory", "memfd_create");
    memory.bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory.descriptor, 0);
    if (memory.bytes == MAP_FAILED) die("memory", "mmap");
    return memory;
}

static uint64_t page_offset(const Memory *memory, uint32_t layer, uint32_t block) {
    return ((uint64_t)layer * memory->blocks + block) * memory->page_bytes;
}

/* --- a session --- */

static Engine connect_engine(const char *socket, const char *name, const Facts *facts, const Memory *memory, bool sidecar) {
    Engine engine = {0};
    PillionRegion regions[LAYERS_MAX];
    uint64_t page = memory->page_bytes;
    for (uint32_t layer = 0; layer < memory->layers; layer++)
        regions[layer] = (PillionRegion){.offset = page_offset(memory, layer, 0), .stride = page, .bytes = page};
    PillionWorkerOptions rank = {
        .socket = socket,
        .engine = name,
        .world_size = 1,
        .shards = 1,
        .blocks = memory->blocks,
        .sidecar_copies = sidecar,
        .regions = {regions, memory->layers},
        .facts = {facts->facts, facts->count},
        .expects = facts->name_space,
        .descriptors = {&memory->descriptor, 1},
    };
    check(pillion_worker_connect(&rank, &engine.worker), "worker");
    if (getrandom(engine.run.bytes, sizeof engine.run.bytes, 0) != sizeof engine.run.bytes) die("run", "getrandom");
    PillionSchedulerOptions scheduler = {
        .socket = socket,
        .engine = name,
        .world_size = 1,
        .run = engine.run,
        .query_budget_us = QUERY_BUDGET_US,
        .sidecar_copies = sidecar,
    };
    check(pillion_scheduler_connect(&scheduler, &engine.scheduler), "scheduler");
    PillionWorkerState state;
    check(pillion_worker_state(engine.worker, &state), "state");
    if (!state.connected) die(socket, state.notice ? state.notice : "no sidecar");
    return engine;
}

static void disconnect(Engine *engine) {
    PillionWorkerState state;
    check(pillion_worker_state(engine->worker, &state), "state");
    printf("namespace %s\n", state.namespace_id);
    pillion_scheduler_free(engine->scheduler);
    pillion_worker_free(engine->worker);
}

/* The request is for one engine, or one engine computes it and another answers. */
typedef enum { ALONE, AWAITS, PROMISES } Handover;

static int64_t open_log(const Engine *engine, PillionItemsHash hashes, Handover handover) {
    int64_t log;
    uint32_t length;
    check(pillion_scheduler_open(engine->scheduler, &log), "open");
    if (handover == AWAITS) check(pillion_scheduler_await(engine->scheduler, log), "await");
    if (handover == PROMISES) check(pillion_scheduler_promise(engine->scheduler, log), "promise");
    check(pillion_scheduler_append(engine->scheduler, log, 0, hashes, &length), "append");
    if (length != hashes.count) die("append", "no room");
    return log;
}

/* Ids of a request's blocks from `start` on. Block 0 of the memory stays empty: it is never saved. */
static PillionItemsU32 block_ids(uint32_t start, uint32_t count) {
    static uint32_t ids[TOKENS_MAX];
    for (uint32_t i = 0; i < count; i++) ids[i] = 1 + start + i;
    return (PillionItemsU32){ids, count};
}

/* The number of kept blocks out of `count`. The sidecar answers after the worker's first step, so the
 * query is sent again after one. */
static int64_t query(Engine *engine, int64_t log, uint32_t start, uint32_t count) {
    for (;;) {
        int64_t hits;
        check(pillion_scheduler_query(engine->scheduler, log, start, count, &hits), "query");
        if (hits >= 0) return hits;
        uint64_t step = ++engine->step;
        check(pillion_scheduler_end_step(engine->scheduler, NULL), "end of step");
        check(pillion_worker_start(engine->worker, &engine->run, step, 0), "start");
        check(pillion_worker_done(engine->worker, step, true, 0), "done");
        sleep_ms();
    }
}

/* Plays a step that loads a log's blocks from `start` on. An asynchronous load would end some steps later. */
static void load(Engine *engine, int64_t log, uint32_t start, PillionItemsU32 ids, bool sync) {
    PillionItemsU8 plan;
    PillionLoaded loaded;
    int64_t count = (int64_t)ids.count, hits = query(engine, log, start, (uint32_t)count);
    uint64_t step = ++engine->step;
    printf("hits %lld\n", (long long)hits);
    if (hits != count) die("query", "not all blocks are kept");
    check(pillion_scheduler_load(engine->scheduler, log, start, ids, step, sync, &plan), "load");
    if (!plan.count) die("load", "the lease is lost");
    /* Valid until the scheduler's next call; with workers in other processes it travels with the step. */
    uint8_t *copy = malloc(plan.count);
    memcpy(copy, plan.items, plan.count);
    check(pillion_scheduler_end_step(engine->scheduler, NULL), "end of step");
    check(pillion_worker_start(engine->worker, &engine->run, step, 0), "start");
    check(pillion_worker_load(engine->worker, (PillionItemsU8){copy, plan.count}, 0, false, &loaded), "load");
    check(pillion_worker_done(engine->worker, step, true, 0), "done");
    free(copy);
    uint64_t op = loaded.op;
    for (int turn = 0; !loaded.ended; turn++) {
        if (turn == WATCHDOG_MS) die("load", "no end");
        sleep_ms();
        check(pillion_worker_poll(engine->worker, &loaded), "poll");
    }
    if (loaded.op != op || loaded.failed.count) die("load", "another load, or blocks failed");
}

/* Plays the step of a save: it is accepted and ends. A real engine would go on computing meanwhile. */
static PillionSchedulerState end_save(Engine *engine, uint64_t step) {
    PillionSchedulerState state;
    check(pillion_scheduler_end_step(engine->scheduler, &state), "end of step");
    check(pillion_worker_start(engine->worker, &engine->run, step, 0), "start");
    check(pillion_worker_done(engine->worker, step, true, 0), "done");
    check(pillion_scheduler_accept(engine->scheduler, step), "accept");
    for (int turn = 0; state.saving; turn++) {
        if (turn == WATCHDOG_MS) die("save", "no end");
        sleep_ms();
        check(pillion_scheduler_end_step(engine->scheduler, &state), "end of step");
    }
    return state;
}

/* Saves the first `count` blocks of a request. */
static void save(Engine *engine, const Request *request, uint32_t count, Handover handover) {
    bool posted;
    int64_t log = open_log(engine, request->hashes, handover);
    uint64_t step = ++engine->step;
    check(pillion_scheduler_save(engine->scheduler, log, 0, block_ids(0, count), step, &posted), "save");
    if (!posted) die("save", "dropped");
    PillionSchedulerState state = end_save(engine, step);
    if (state.blocks_unproven) die("save", state.notice ? state.notice : "not kept");
}

/* Proves the engine: compares `block` of the memory with the kept first block of a request. No save is
 * kept before that. */
static void prove(Engine *engine, const Request *kept, uint32_t block) {
    int64_t log = open_log(engine, kept->hashes, ALONE);
    if (query(engine, log, 0, 1) != 1) die("prove", "its first block is not kept");
    uint64_t step = ++engine->step;
    check(pillion_scheduler_check(engine->scheduler, log, 0, (PillionItemsU32){&block, 1}, step, NULL), "check");
    PillionSchedulerState state = end_save(engine, step);
    if (state.blocks_differing || state.blocks_checked != 1) die("prove", state.notice ? state.notice : "no verdict");
}

/* --- commands --- */

static void print_hashes(PillionItemsHash hashes) {
    for (size_t i = 0; i < hashes.count; i++) {
        for (size_t at = 0; at < sizeof hashes.items[i].bytes; at++) printf("%02x", hashes.items[i].bytes[at]);
        printf("\n");
    }
}

/* Writes the first blocks with the cache's order of bytes: their pages, layer after layer. */
static void dump(const Memory *memory, uint32_t count, const char *path) {
    FILE *file = fopen(path, "wb");
    if (!file) die("dump", path);
    for (uint32_t block = 1; block <= count; block++)
        for (uint32_t layer = 0; layer < memory->layers; layer++)
            fwrite(memory->bytes + page_offset(memory, layer, block), memory->page_bytes, 1, file);
    if (fclose(file)) die("dump", path);
}

static Request new_request(const Facts *facts, const char *path) {
    Request request;
    FILE *prompt = fopen(path, "r");
    if (!prompt) die("tokens", path);
    PillionItemsU32 tokens = read_tokens(prompt);
    uint32_t block_tokens = number(fact(facts, "block_tokens"));
    check(pillion_keys_new(fact(facts, "hash_algorithm"), fact(facts, "none_hash"), fact(facts, "extra_keys"), block_tokens,
                           &request.keys),
          "keys");
    check(pillion_keys_append(request.keys, tokens, (PillionItemsExtraKey){0}, &request.hashes), "keys");
    fclose(prompt);
    if (!request.hashes.count) die("tokens", "less than a block");
    return request;
}

static void carry(char **arguments, const char *proof_path) {
    static Facts facts;
    const char *fault = arguments[7];
    read_facts(arguments[0], &facts);
    facts.name_space = arguments[1];
    Request request = new_request(&facts, arguments[2]), proof = {0};
    PillionItemsHash hashes = request.hashes;
    print_hashes(hashes);
    uint32_t count = (uint32_t)hashes.count, half = count / 2;
    /* The last block is for the proof. */
    Memory memory = new_memory(&facts, 2 + count, !strcmp(fault, "short"));
    bool sidecar = !strcmp(arguments[6], "sidecar"), hands_over = !strcmp(fault, "handover");

    Engine from = connect_engine(arguments[3], "foreign-from", &facts, &memory, sidecar);
    int64_t log = open_log(&from, hashes, hands_over ? AWAITS : ALONE);
    load(&from, log, 0, block_ids(0, half), true);
    load(&from, log, half, block_ids(half, count - half), false);
    check(pillion_scheduler_close(from.scheduler, log), "close");
    if (proof_path) {
        proof = new_request(&facts, proof_path);
        load(&from, open_log(&from, proof.hashes, ALONE), 0, block_ids(count, 1), true);
    }
    disconnect(&from);
    dump(&memory, count, arguments[5]);
    for (uint32_t block = 1; !strcmp(fault, "spoil") && block < memory.blocks; block++)
        for (uint64_t at = 1; at < memory.page_bytes; at += 2) memory.bytes[page_offset(&memory, 0, block) + at] ^= SIGN_BIT;

    Engine to = connect_engine(arguments[4], "foreign-to", &facts, &memory, sidecar);
    if (proof_path) prove(&to, &proof, 1 + count);
    save(&to, &request, count, hands_over ? PROMISES : ALONE);
    disconnect(&to);
    pillion_keys_free(request.keys);
    pillion_keys_free(proof.keys);
}

/* --- a waiting engine --- */

static PillionEngine *join(const char *socket, const char *name, const Facts *facts, const Memory *memory) {
    PillionEngine *engine;
    PillionEngineOptions options = {
        .socket = socket,
        .name = name,
        .facts = {facts->facts, facts->count},
        .expects = facts->name_space,
        .shards = 1,
        .descriptor = memory->descriptor,
        .blocks = memory->blocks,
        .block_bytes = memory->layers * memory->page_bytes,
        .piece_bytes = memory->page_bytes,
    };
    check(pillion_engine_join(&options, &engine), "join");
    return engine;
}

/* Writes the KV of `tokens`, blocks of `from`, for a request with its memory `to`. */
static void compute(PillionEngine *engine, uint64_t request, PillionItemsU32 tokens, const Memory *to, const Memory *from) {
    PillionHeldTokens blocks;
    check(pillion_engine_reserve(engine, request, tokens, &blocks), "reserve");
    for (size_t i = 0; i < blocks.blocks.count; i++)
        for (uint32_t layer = 0; layer < to->layers; layer++)
            memcpy(to->bytes + page_offset(to, layer, blocks.blocks.items[i]),
                   from->bytes + page_offset(from, layer, (uint32_t)i + 1), to->page_bytes);
}

static void copy(char **arguments) {
    static Facts facts;
    read_facts(arguments[0], &facts);
    facts.name_space = arguments[1];
    FILE *prompt = fopen(arguments[2], "r");
    if (!prompt) die("tokens", arguments[2]);
    PillionItemsU32 tokens = read_tokens(prompt);
    fclose(prompt);
    uint32_t block_tokens = number(fact(&facts, "block_tokens")), count = (uint32_t)tokens.count / block_tokens + 2;
    Memory source = new_memory(&facts, count, false), target = new_memory(&facts, count + 1, false);
    PillionHeldTokens held;
    PillionProofBegin proof;
    uint64_t request, kept;

    PillionEngine *from = join(arguments[3], "copies-from", &facts, &source);
    check(pillion_engine_load(from, tokens, &request), "load");
    check(pillion_engine_held(from, request, &held), "held");
    printf("held %u\n", held.tokens);
    tokens.count = held.tokens;
    for (size_t i = 0; i < held.blocks.count; i++)
        if (held.blocks.items[i] != i + 1) die("held", "an empty memory gives its first blocks");
    dump(&source, (uint32_t)held.blocks.count, arguments[5]);
    pillion_engine_free(from);

    PillionEngine *to = join(arguments[4], "copies-to", &facts, &target);
    check(pillion_engine_begin_proof(to, tokens, &proof), "begin of a proof");
    if (proof.request) {
        compute(to, proof.request, (PillionItemsU32){tokens.items, block_tokens}, &target, &source);
        check(pillion_engine_end_proof(to, proof.request, &proof.proven), "proof");
    }
    /* A promise of one token loads nothing. */
    check(pillion_engine_promise(to, (PillionItemsU32){tokens.items, tokens.count > 0}, &request), "promise");
    compute(to, request, tokens, &target, &source);
    check(pillion_engine_save(to, request, &kept), "save");
    check(pillion_engine_end(to, request), "end");
    PillionHintOutcome outcome;
    check(pillion_engine_hint(to, tokens, "{\"action\": \"pin\", \"seconds\": 60}", &outcome), "hint");
    if (kept && outcome != PILLION_HINT_OUTCOME_DONE) die("hint", "the kept blocks are there");
    if (pillion_engine_hint(to, tokens, "{\"action\": \"keep\"}", &outcome) != PILLION_STATUS_ARGUMENT)
        die("hint", "there is no such action");
    printf("proven %d\nkept %llu\n", proof.proven, (unsigned long long)kept);
    pillion_engine_free(to);
}

static PillionItemsU8 bytes_of(const char *hex) {
    PillionItemsU8 bytes = {.count = strlen(hex) / 2};
    uint8_t *items = malloc(bytes.count + 1);
    for (size_t i = 0; i < bytes.count; i++) sscanf(hex + 2 * i, "%2hhx", &items[i]);
    bytes.items = items;
    return bytes;
}

/* Lines of block, kind, text (hex digits where bytes are wanted), path and offset, with tabs between, until an empty one. */
static PillionItemsExtraKey read_extra(FILE *file) {
    static PillionExtraKey keys[EXTRA_MAX];
    static char line[LINE_BYTES];
    size_t count = 0;
    while (fgets(line, sizeof line, file) && line[0] != '\n') {
        if (count == EXTRA_MAX) die("extra keys", "too many");
        line[strcspn(line, "\n")] = 0;
        char *rest = strdup(line), *block = strsep(&rest, "\t"), *kind = strsep(&rest, "\t");
        char *text = strsep(&rest, "\t"), *path = strsep(&rest, "\t");
        if (!rest) die("an extra key", line);
        PillionExtraKey key = {.block = number(block), .kind = number(kind), .text = text, .path = path};
        key.offset = strtoll(rest, NULL, 10);
        if (key.kind == PILLION_EXTRA_KIND_PROMPT_EMBEDS) key.bytes = bytes_of(text);
        keys[count++] = key;
    }
    return (PillionItemsExtraKey){keys, count};
}

/* A request: its extra keys, an empty line, its tokens. */
static void print_keys(char **arguments) {
    PillionKeys *keys;
    PillionItemsHash hashes;
    check(pillion_keys_new(arguments[0], arguments[1], arguments[2], number(arguments[3]), &keys), "keys");
    PillionItemsExtraKey extra = read_extra(stdin);
    check(pillion_keys_append64(keys, read_wide_tokens(stdin), extra, &hashes), "keys");
    print_hashes(hashes);
    pillion_keys_free(keys);
}

/* Writes K or V of one head of a layer: `page` is the layer's page in the first block. */
static void gather_head(const PillionPage *page, bool values, uint32_t head, const uint8_t *bytes, size_t blocks, size_t stride) {
    const PillionPlace *place = values ? &page->v : &page->k;
    uint32_t dim = values ? page->values : page->keys, part = page->kernel_block_tokens;
    for (size_t block = 0; block < blocks; block++)
        for (uint32_t token = 0; token < page->tokens; token++)
            for (uint32_t at = 0; at < dim; at++)
                fwrite(bytes + block * stride + page->begin + place->offset + head * place->kv_heads +
                           token / part * place->kernel_blocks + token % part * place->tokens + at * place->elements,
                       page->element_bytes, 1, stdout);
}

static void gather(const char *form, uint32_t shards) {
    PillionPage page;
    check(pillion_page_form(form, 0, &page), "pages");
    size_t stride = shards * page.shard_bytes, blocks = 0;
    uint8_t *bytes = malloc(stride);
    while (bytes && fread(bytes + blocks * stride, stride, 1, stdin) == 1) bytes = realloc(bytes, (++blocks + 1) * stride);
    if (!bytes) die("blocks", "no memory");
    for (int values = 0; values < 2; values++)
        for (uint32_t layer = 0, layers = page.layers; layer < layers; layer++) {
            check(pillion_page_form(form, layer, &page), "pages");
            for (uint32_t shard = 0; shard < shards; shard++)
                for (uint32_t head = 0; head < page.kv_heads; head++)
                    gather_head(&page, values, head, bytes + shard * page.shard_bytes, blocks, stride);
        }
    free(bytes);
}

int main(int count, char **arguments) {
    bool proves = count == 11;
    if (count == 6 && !strcmp(arguments[1], "keys")) print_keys(arguments + 2);
    else if ((count == 10 || proves) && !strcmp(arguments[1], "carry")) carry(arguments + 2, proves ? arguments[10] : NULL);
    else if (count == 8 && !strcmp(arguments[1], "copy")) copy(arguments + 2);
    else if (count == 4 && !strcmp(arguments[1], "gather")) gather(arguments[2], number(arguments[3]));
    else die("usage", "see the head of engine.c");
    return 0;
}
