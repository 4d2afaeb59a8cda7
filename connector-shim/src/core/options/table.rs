//! The options in the order of docs/options.md.

use shm_protocol::layout::{
    AWAIT_MS, LOAD_PREFERENCE_MAX, LOAD_WAIT_MS, LOAD_WAIT_MS_MAX, PROMISED_WAIT_MS_MAX, QUERY_WAIT_MS_MAX,
};

use super::{DefaultValue, EngineOption, Values};

const fn whole_number(most: u32, unit: &'static str, zero: &'static str) -> Values {
    Values::Count { most, unit, zero }
}

/// Every option.
pub const OPTIONS: [EngineOption; 24] = [
    EngineOption {
        name: "socket",
        default: DefaultValue::AsServe,
        values: Values::Text,
        meaning: "Path of the sidecar's socket, its `--socket`. Both have the same default.",
    },
    EngineOption {
        name: "mode",
        default: DefaultValue::Text("read_write"),
        values: Values::OneOf(&["read_write", "save_only", "load_only"]),
        meaning: "Whether this engine loads blocks (`load_only`), saves blocks (`save_only`), or both.",
    },
    EngineOption {
        name: "load",
        default: DefaultValue::Text("auto"),
        values: Values::OneOf(&["auto", "sync", "async"]),
        meaning: "`sync`: the step waits for its blocks. `async`: the request waits between steps, and others \
                  run. `auto`: `sync` when nothing else runs or the copy is predicted to be short. On a CPU \
                  engine, and with `pillion.copy` = `engine`, loads are always `async`.",
    },
    EngineOption {
        name: "sync_ms",
        default: DefaultValue::Absent,
        values: whole_number(10_000, "milliseconds", "0 (none)"),
        meaning: "The longest predicted copy for which `auto` lets a step wait although other requests run. \
                  The default is 2 if `kv_role` is `kv_consumer`, otherwise 100. Lower it if decode latency \
                  matters more than the first token.",
    },
    EngineOption {
        name: "layout",
        default: DefaultValue::Text("auto"),
        values: Values::OneOf(&["auto", "none", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]),
        meaning: "The KV cache layout to request from vLLM. `none` requests none. `auto` requests `BLNHC` on a \
                  GPU, and none on a CPU engine. Change it only if an attention backend needs another layout.",
    },
    EngineOption {
        name: "copy",
        default: DefaultValue::Text("auto"),
        values: Values::OneOf(&["auto", "engine", "sidecar"]),
        meaning: "The process that writes loaded blocks into engine memory. `auto` is `sidecar` on a GPU and \
                  `engine` on a CPU engine, where a copy by a frozen sidecar could not be revoked. Set \
                  `engine` if the sidecar does not see the GPU; it is slower.",
    },
    EngineOption {
        name: "checkpoint_tokens",
        default: DefaultValue::Count(16_384),
        values: whole_number(1_048_576, "tokens", "0 (none)"),
        meaning: "For models with several cache groups: blocks of a window are saved where requests are likely \
                  to continue, and before every multiple of this number of tokens. Lower it if prompts branch \
                  at other places.",
    },
    EngineOption {
        name: "keep_copies",
        default: DefaultValue::Text("yes"),
        values: Values::OneOf(&["yes", "no"]),
        meaning: "Whether copies of blocks in the engine's own cache stay as long as any others. `no`: they go \
                  first, and blocks are saved again before the engine reuses them. More is found while the \
                  engine lives, and less after its end. Only models with full attention in one cache group.",
    },
    EngineOption {
        name: "model_id",
        default: DefaultValue::Absent,
        values: Values::Text,
        meaning: "A name that stands for the weight files. Set it if they cannot be digested (remote weights), \
                  or if equal models lie at different paths. The loaded weights are sampled as well.",
    },
    EngineOption {
        name: "salt",
        default: DefaultValue::Absent,
        values: Values::Text,
        meaning: "An additional fact: engines with different salts share nothing.",
    },
    EngineOption {
        name: "namespace",
        default: DefaultValue::Absent,
        values: Values::Namespace,
        meaning: "The namespace that this engine must belong to. An engine whose facts make another one is \
                  refused, with every difference named, and serves without the cache.",
    },
    EngineOption {
        name: "query_timeout_us",
        default: DefaultValue::Count(2_000),
        values: whole_number(10_000_000, "microseconds", "0"),
        meaning: "The longest that one `schedule()` call waits for answers to its queries. Later answers count in \
                  a later call.",
    },
    EngineOption {
        name: "check_every",
        default: DefaultValue::Count(1_000),
        values: whole_number(1_000_000, "hits", "0 (nothing is checked)"),
        meaning: "One of this number of hits in a namespace is also computed and compared: the standing check. \
                  Lower it to find differences sooner, at the cost of computing more.",
    },
    EngineOption {
        name: "check_per_mille",
        default: DefaultValue::Count(2),
        values: whole_number(1_000, "tokens", "0 (none)"),
        meaning: "Tokens that checks of whole hits may compute again for 1,000 loaded ones. Such a check sees \
                  a wrong block at any place; other checks compute the end of a hit alone.",
    },
    EngineOption {
        name: "hasher",
        default: DefaultValue::Text("native"),
        values: Values::OneOf(&["native", "vllm"]),
        meaning: "The code that hashes the blocks of a new prompt: `native`, or vLLM's Python, which takes \
                  longer. vLLM's own code checks the first, the last and one other hash of each native chain.",
    },
    EngineOption {
        name: "wait_max_ms",
        default: DefaultValue::Count(LOAD_WAIT_MS),
        values: whole_number(LOAD_WAIT_MS_MAX, "milliseconds", "0"),
        meaning: "The longest that a request waits for blocks from disks and peers while they come faster than \
                  this engine computes them. Until the engine's rate is known it is 2,000 at most.",
    },
    EngineOption {
        name: "load_preference",
        default: DefaultValue::Number("1.0"),
        values: Values::Number { most: LOAD_PREFERENCE_MAX / 1000 },
        meaning: "Blocks are waited for if they come within this number of times the time of computing them. \
                  Raise it if GPU time costs more than waiting.",
    },
    EngineOption {
        name: "miss_wait_ms",
        default: DefaultValue::Count(0),
        values: whole_number(QUERY_WAIT_MS_MAX, "milliseconds", "0 (off)"),
        meaning: "The longest that a request waits for blocks that another pod may still be computing. Set it \
                  if pods often get equal prompts at the same time.",
    },
    EngineOption {
        name: "handover_wait_ms",
        default: DefaultValue::Count(PROMISED_WAIT_MS_MAX),
        values: whole_number(PROMISED_WAIT_MS_MAX, "milliseconds", "0"),
        meaning: "The longest that a request waits for an engine that has promised its prompt and is still \
                  running.",
    },
    EngineOption {
        name: "promise_wait_ms",
        default: DefaultValue::Count(AWAIT_MS),
        values: whole_number(QUERY_WAIT_MS_MAX, "milliseconds", "0"),
        meaning: "The longest that a request waits for the first or the next block of its prompt, if another \
                  engine should compute the prompt and has not promised it.",
    },
    EngineOption {
        name: "strict_tokens",
        default: DefaultValue::Absent,
        values: whole_number(1_048_576, "tokens", "0"),
        meaning: "The most tokens that this engine computes of a prompt that another engine should compute. A \
                  request with more tokens left ends with an error. The default is no limit. Requires \
                  `kv_load_failure_policy` = `fail`.",
    },
    EngineOption {
        name: "record_every",
        default: DefaultValue::Count(100),
        values: whole_number(1_000_000, "requests", "0 (none)"),
        meaning: "One of this number of requests is recorded: what it asked for, what was found, and what it \
                  waited for.",
    },
    EngineOption {
        name: "record_slow_ms",
        default: DefaultValue::Count(1_000),
        values: whole_number(3_600_000, "milliseconds", "0 (every request)"),
        meaning: "Every request that waits at least this long before it is computed is recorded.",
    },
    EngineOption {
        name: "record_otlp",
        default: DefaultValue::Absent,
        values: Values::Url,
        meaning: "The URL to which records are also sent by OTLP over HTTP, such as \
                  `http://collector:4318/v1/traces`.",
    },
];
