"""Sees vLLM change, or possibly change, what KV is computed with: its weights, its adapters, or its own prefix cache.

vLLM tells a connector of a reset only if asked to, and of new weights never. Both come from outside, through a few methods
of the engine core's class, and so between two steps; no step goes through them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

# Methods of vLLM's workers that change no weights. Whatever else is called there may, and so may any function sent there.
READS = frozenset(
    {
        "check_health",
        "checkpoint_prepare",
        "compute_weight_checksums",
        "execute_dummy_batch",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
    }
)
# Between these the weights are partly old and partly new. vLLM ends an update whose chunk fails, too.
UPDATE_BEGINS = ("start_weight_update", "start_draft_weight_update")
UPDATE_CHUNK = "update_weights"
UPDATE_ENDS = "finish_weight_update"


class Watcher(Protocol):
    """Who is told."""

    # Whether an update of the weights has begun and not ended.
    updating: bool

    def weights_may_have_changed(self) -> None:
        """KV computed from now on may be other KV of the same tokens."""

    def adapter_loads(self, request: LoRARequest) -> None:
        """Ranks are about to load an adapter."""

    def adapter_removed(self, number: int) -> None:
        """Ranks no longer hold an adapter."""


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_watched: set[type] = set()


def resets(pool: Any, told: Callable[[], None]) -> None:
    """Calls `told` after every reset of a block pool of vLLM's, also of one that vLLM could not carry out."""
    reset = pool.reset_prefix_cache

    @functools.wraps(reset)
    def reset_and_tell() -> bool:
        try:
            return bool(reset())
        finally:
            told()

    pool.reset_prefix_cache = reset_and_tell


def engine_core(core: type, watcher: Watcher) -> None:
    """Has `watcher` told of what is called on engine cores of this class, and of those derived from it, while it lives."""
    _watchers.add(watcher)
    if core not in _watched:
        _watched.add(core)
        for name, around in AROUND.items():
            if hasattr(core, name):
                setattr(core, name, around(getattr(core, name)))


def _around_rpc(call: Any) -> Any:
    @functools.wraps(call)
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(method, str) and method in READS:
            return call(core, method, *args, **kwargs)
        with _weights_may_change(method):
            return call(core, method, *args, **kwargs)

    return collective_rpc


def _around_sleep(call: Any) -> Any:
    """A sleep takes the weights away, and waking brings some back. Nothing is scheduled between."""

    @functools.wraps(call)
    def sleep_or_wake(core: Any, *args: Any, **kwargs: Any) -> Any:
        with _weights_may_change(call.__name__):
            return call(core, *args, **kwargs)

    return sleep_or_wake


def _around_add_lora(call: Any) -> Any:
    @functools.wraps(call)
    def add_lora(core: Any, lora_request: LoRARequest) -> Any:
        for watcher in _watchers:
            watcher.adapter_loads(lora_request)
        return call(core, lora_request)

    return add_lora


def _around_remove_lora(call: Any) -> Any:
    @functools.wraps(call)
    def remove_lora(core: Any, lora_id: int) -> Any:
        removed = call(core, lora_id)
        for watcher in _watchers:
            watcher.adapter_removed(lora_id)
        return removed

    return remove_lora


AROUND = {
    "collective_rpc": _around_rpc,
    "sleep": _around_sleep,
    "wake_up": _around_sleep,
    "add_lora": _around_add_lora,
    "remove_lora": _around_remove_lora,
}


@contextlib.contextmanager
def _weights_may_change(method: Any) -> Iterator[None]:
    """Tells before, since KV memory may go and no save may read it any more, and after, well or not."""
    watchers = list(_watchers)
    updating = [watcher.updating for watcher in watchers]
    for watcher in watchers:
        watcher.updating |= method in UPDATE_BEGINS
        watcher.weights_may_have_changed()
    try:
        yield
    except BaseException:
        for watcher, before in zip(watchers, updating, strict=True):
            watcher.updating = before and method != UPDATE_CHUNK
        raise
    else:
        for watcher in watchers:
            watcher.updating &= method != UPDATE_ENDS
    finally:
        for watcher in watchers:
            watcher.weights_may_have_changed()
