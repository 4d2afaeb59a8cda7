"""`kv_connector_extra_config`: the keys that begin with `pillion.`, checked at start. docs/options.md is made of `Config`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

PREFIX = "pillion."
# With this share of common letters a key counts as misspelt; `lmcache.mode` and `pillion.mode` have 0.5.
NEARLY = 0.8
# vLLM's own names; `auto` leaves the choice to Pillion, `none` to vLLM.
LAYOUTS = ("auto", "none", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
# The longest that a query may be pending: `QUERY_WAIT_MS_MAX` of the protocol.
MISS_WAIT_MS_MAX = 2_000
# The longest that one may be pending for what is promised: `PROMISED_WAIT_MS_MAX`.
HANDOVER_WAIT_MS_MAX = 30_000
# How long one is pending for a prompt that nobody has promised: `AWAIT_MS`.
PROMISE_WAIT_MS = 1_000


class ConfigError(ValueError):
    """An option that Pillion does not know. The text names the valid ones."""


@dataclass(frozen=True)
class Values:
    """What an option may be: in words, and as a test."""

    rule: str
    admit: Callable[[Any], bool]


def _one_of(*words: str) -> Values:
    return Values(f"one of {', '.join(words)}", words.__contains__)


def _count(most: int, unit: str, zero: str = "0") -> Values:
    def admit(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most

    return Values(f"a whole number of {unit}, {zero} to {most}", admit)


def _is_namespace(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"https?://[^/\s]+/\S*", value) is not None


TEXT = Values("a text that is not empty", lambda value: isinstance(value, str) and value != "")
URL = Values("an http or https URL with its path", _is_url)
NAMESPACE = Values("32 lower-case hex digits, as the log shows them", _is_namespace)


def _told(values: Values, meaning: str) -> dict[str, Any]:
    return {"values": values, "meaning": meaning}


@dataclass(frozen=True)
class Config:
    """Options of one engine, defaults filled in."""

    socket: str = field(metadata=_told(TEXT, "Path of the sidecar's socket, its `--socket`. Both have the same default."))
    mode: str = field(
        default="read_write",
        metadata=_told(
            _one_of("read_write", "save_only", "load_only"),
            ("Whether this engine loads blocks (`load_only`), saves blocks (`save_only`), or both."),
        ),
    )
    load: str = field(
        default="auto",
        metadata=_told(
            _one_of("auto", "sync", "async"),
            "`sync`: the step waits for its blocks. `async`: the request waits between steps, and others run. `auto`: `sync` "
            "when nothing else runs or the copy is predicted to be short. On a CPU engine, and with `pillion.copy` = "
            "`engine`, loads are always `async`.",
        ),
    )
    sync_ms: int | None = field(
        default=None,
        metadata=_told(
            _count(10_000, "milliseconds", "0 (none)"),
            "The longest predicted copy for which `auto` lets a step wait although other requests run. The default is 2 if "
            "`kv_role` is `kv_consumer`, otherwise 100. Lower it if decode latency matters more than the first token.",
        ),
    )
    layout: str = field(
        default="auto",
        metadata=_told(
            _one_of(*LAYOUTS),
            "The KV cache layout to request from vLLM. `none` requests none. `auto` requests `BLNHC` on a GPU, and none on a "
            "CPU engine. Change it only if an attention backend needs another layout.",
        ),
    )
    copy: str = field(
        default="auto",
        metadata=_told(
            _one_of("auto", "engine", "sidecar"),
            "The process that writes loaded blocks into engine memory. `auto` is `sidecar` on a GPU and `engine` on a CPU "
            "engine, where a copy by a frozen sidecar could not be revoked. Set `engine` if the sidecar does not see the GPU; "
            "it is slower.",
        ),
    )
    checkpoint_tokens: int = field(
        default=16_384,
        metadata=_told(
            _count(1 << 20, "tokens", "0 (none)"),
            "For models with several cache groups: blocks of a window are saved where requests are likely to continue, and "
            "before every multiple of this number of tokens. Lower it if prompts branch at other places.",
        ),
    )
    model_id: str | None = field(
        default=None,
        metadata=_told(
            TEXT,
            "A name that stands for the weight files. Set it if they cannot be digested (remote weights), or if equal models "
            "lie at different paths. The loaded weights are sampled as well.",
        ),
    )
    salt: str | None = field(
        default=None, metadata=_told(TEXT, "An additional fact: engines with different salts share nothing.")
    )
    namespace: str | None = field(
        default=None,
        metadata=_told(
            NAMESPACE,
            "The namespace that this engine must belong to. An engine whose facts make another one is refused, with every "
            "difference named, and serves without the cache.",
        ),
    )
    query_timeout_us: int = field(
        default=2000,
        metadata=_told(
            _count(10_000_000, "microseconds"),
            (
                "The longest that all queries of one `schedule()` call together may wait. Raise it if queries time out "
                "although the sidecar has enough CPU."
            ),
        ),
    )
    check_every: int = field(
        default=1000,
        metadata=_told(
            _count(1_000_000, "hits", "0 (nothing is checked)"),
            "One of this number of hits in a namespace is also computed and compared: the standing check. Lower it to find "
            "differences sooner, at the cost of computing more.",
        ),
    )
    check_per_mille: int = field(
        default=2,
        metadata=_told(
            _count(1000, "tokens", "0 (none)"),
            "Tokens that checks of whole hits may compute again for 1,000 loaded ones. Such a check sees a wrong block at any "
            "place; other checks compute the end of a hit alone.",
        ),
    )
    hasher: str = field(
        default="native",
        metadata=_told(
            _one_of("native", "vllm"),
            "The code that hashes the blocks of a new prompt: `native`, or vLLM's Python, which takes longer. vLLM's own code "
            "checks the first, the last and one other hash of each native chain.",
        ),
    )
    miss_wait_ms: int = field(
        default=0,
        metadata=_told(
            _count(MISS_WAIT_MS_MAX, "milliseconds", "0 (off)"),
            "The longest that a request waits for blocks that another pod may still be computing. Set it if pods often get "
            "equal prompts at the same time.",
        ),
    )
    handover_wait_ms: int = field(
        default=HANDOVER_WAIT_MS_MAX,
        metadata=_told(
            _count(HANDOVER_WAIT_MS_MAX, "milliseconds"),
            "The longest that a request waits for an engine that has promised its prompt and is still running.",
        ),
    )
    promise_wait_ms: int = field(
        default=PROMISE_WAIT_MS,
        metadata=_told(
            _count(MISS_WAIT_MS_MAX, "milliseconds"),
            "The longest that a request waits for the first or the next block of its prompt, if another engine should compute "
            "the prompt and has not promised it.",
        ),
    )
    strict_tokens: int | None = field(
        default=None,
        metadata=_told(
            _count(1 << 20, "tokens"),
            "The most tokens that this engine computes of a prompt that another engine should compute. A request with more "
            "tokens left ends with an error. The default is no limit. Requires `kv_load_failure_policy` = `fail`.",
        ),
    )
    record_every: int = field(
        default=100,
        metadata=_told(
            _count(1_000_000, "requests", "0 (none)"),
            "One of this number of requests is recorded: what it asked for, what was found, and what it waited for.",
        ),
    )
    record_slow_ms: int = field(
        default=1000,
        metadata=_told(
            _count(3_600_000, "milliseconds", "0 (every request)"),
            "Every request that waits at least this long before it is computed is recorded.",
        ),
    )
    record_otlp: str | None = field(
        default=None,
        metadata=_told(
            URL, ("The URL to which records are also sent by OTLP over HTTP, such as `http://collector:4318/v1/traces`.")
        ),
    )

    @property
    def loads(self) -> bool:
        """Whether blocks may be taken from the cache."""
        return self.mode != "save_only"

    @property
    def saves(self) -> bool:
        """Whether blocks may be put into the cache."""
        return self.mode != "load_only"

    def copier(self, on_gpu: bool) -> str:
        """Who writes loaded blocks. A host copy of a frozen sidecar could be neither awaited nor revoked, a GPU's can."""
        if self.copy != "auto":
            return self.copy
        return "sidecar" if on_gpu else "engine"

    @property
    def required_layout(self) -> str | None:
        """The KV cache layout that the user names, None if the choice is Pillion's or vLLM's."""
        return None if self.layout in ("auto", "none") else self.layout


def default_socket() -> str:
    """Where the sidecar listens unless told otherwise: the same rule as `pillion serve`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() != 0 and runtime:
        return os.path.join(runtime, "pillion", "pillion.sock")
    return "/run/pillion/pillion.sock"


def _is_nearly_ours(key: str, known: Iterable[str]) -> bool:
    """Whether a key without Pillion's prefix can only be a misspelt one: `pilion.mode`, `Pillion.mode`, `pillion_mode`."""
    options = [PREFIX + name for name in known]
    return bool(difflib.get_close_matches(key.lower(), options, n=1, cutoff=NEARLY))


def parse(extra: Mapping[str, Any]) -> Config:
    """Reads the options; an unknown or nearly right key of Pillion stops the start."""
    ours = {key.removeprefix(PREFIX): value for key, value in extra.items() if key.startswith(PREFIX)}
    known: dict[str, Values] = {option.name: option.metadata["values"] for option in fields(Config)}
    misspelt = [key for key in extra if not key.startswith(PREFIX) and _is_nearly_ours(key, known)]
    for key in [*misspelt, *(PREFIX + name for name in ours if name not in known)]:
        valid = ", ".join(PREFIX + name for name in known)
        raise ConfigError(f"unknown option {key} in kv_connector_extra_config: use one of {valid}")
    for key, value in ours.items():
        if not known[key].admit(value):
            raise ConfigError(f"{PREFIX}{key} is {value!r}; it must be {known[key].rule}")
    ours.setdefault("socket", default_socket())
    return Config(**ours)
