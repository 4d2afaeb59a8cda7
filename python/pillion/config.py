"""`kv_connector_extra_config`: the keys that begin with `pillion.`, checked at start."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "pillion."
MODES = ("read_write", "save_only", "load_only")
LOADS = ("auto", "sync", "async")
COPIERS = ("auto", "engine", "sidecar")
HASHERS = ("native", "vllm")
# vLLM's own names; `auto` leaves the choice to Pillion, `none` to vLLM.
LAYOUTS = ("auto", "none", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
QUERY_TIMEOUT_US_MAX = 10_000_000
# The longest that a query may be pending: `QUERY_WAIT_MS_MAX` of the protocol.
MISS_WAIT_MS_MAX = 2_000
CHECK_EVERY_MAX = 1_000_000
NAMESPACE = re.compile(r"[0-9a-f]{32}")


class ConfigError(ValueError):
    """An option that Pillion does not know. The text names the valid ones."""


@dataclass(frozen=True)
class Config:
    """Options of one engine, defaults filled in."""

    socket: str
    mode: str = "read_write"
    load: str = "auto"
    layout: str = "auto"
    copy: str = "auto"
    hasher: str = "native"
    model_id: str | None = None
    # Keeps engines apart that name images differently, and whatever else users tell apart that no fact does.
    salt: str | None = None
    query_timeout_us: int = 2000
    namespace: str | None = None
    miss_wait_ms: int = 0
    check_every: int = 1000

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


def parse(extra: Mapping[str, Any]) -> Config:
    """Reads the options; anything unknown stops the start."""
    ours = {key.removeprefix(PREFIX): value for key, value in extra.items() if key.startswith(PREFIX)}
    known = tuple(Config.__dataclass_fields__)
    for key in ours:
        if key not in known:
            valid = ", ".join(PREFIX + name for name in known)
            raise ConfigError(f"unknown option {PREFIX}{key} in kv_connector_extra_config; valid are {valid}")
    for key, values in (("mode", MODES), ("load", LOADS), ("layout", LAYOUTS), ("copy", COPIERS), ("hasher", HASHERS)):
        if key in ours and ours[key] not in values:
            raise ConfigError(f"{PREFIX}{key} is {ours[key]!r}; valid are {', '.join(values)}")
    for key in ("socket", "model_id", "salt"):
        if key in ours and not (isinstance(ours[key], str) and ours[key]):
            raise ConfigError(f"{PREFIX}{key} is {ours[key]!r}; it must be a text that is not empty")
    namespace = ours.get("namespace", "0" * 32)
    if not (isinstance(namespace, str) and NAMESPACE.fullmatch(namespace)):
        raise ConfigError(
            f"{PREFIX}namespace is {namespace!r}; it must be 32 lower-case hex digits, as the log and /namespaces show them"
        )
    for key, most, what in (
        ("query_timeout_us", QUERY_TIMEOUT_US_MAX, "microseconds, 0"),
        ("miss_wait_ms", MISS_WAIT_MS_MAX, "milliseconds, 0 (off)"),
        ("check_every", CHECK_EVERY_MAX, "hits, 0 (nothing is checked)"),
    ):
        number = ours.get(key, 0)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= most:
            raise ConfigError(f"{PREFIX}{key} is {number!r}; it must be a whole number of {what} to {most}")
    ours.setdefault("socket", default_socket())
    return Config(**ours)
