"""The keys of `kv_connector_extra_config` with the prefix `pillion.`, checked by `connector-shim/src/core/options.rs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pillion import _shim
from pillion._shim import ConfigError as ConfigError


@dataclass(frozen=True)
class Config:
    """Options of one engine, defaults filled in. docs/options.md has their meanings."""

    socket: str
    mode: str
    load: str
    sync_ms: int | None
    layout: str
    copy: str
    checkpoint_tokens: int
    keep_copies: str
    model_id: str | None
    salt: str | None
    namespace: str | None
    query_timeout_us: int
    check_every: int
    check_per_mille: int
    hasher: str
    wait_max_ms: int
    load_preference: float
    miss_wait_ms: int
    handover_wait_ms: int
    promise_wait_ms: int
    strict_tokens: int | None
    record_every: int
    record_slow_ms: int
    record_otlp: str | None

    def copier(self, on_gpu: bool) -> str:
        """The writer of loaded blocks. A host copy of a frozen sidecar could not be awaited or revoked; a GPU copy can."""
        if self.copy != "auto":
            return self.copy
        return "sidecar" if on_gpu else "engine"


def parse_options(extra: Mapping[str, Any]) -> Config:
    """Reads the options; an unknown or nearly right key of Pillion stops the start."""
    return Config(**_shim.read_options(dict(extra)))
