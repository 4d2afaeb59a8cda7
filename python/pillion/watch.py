"""Watches vLLM for changes of the inputs of KV: its weights, its adapters, or its own prefix cache.

vLLM tells a connector of a reset only on request, and of new weights never. Both come from outside, through a few methods of
the engine core's class, and so between two steps; no step goes through them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from pillion.scheduler import Scheduler

# Methods of vLLM's workers without an effect on weights. Any other method may change them, as may any function sent there.
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
# Between these the weights are partly old and partly new. vLLM ends an update with a failed chunk, too.
UPDATE_BEGINS = ("start_weight_update", "start_draft_weight_update")
UPDATE_CHUNK = "update_weights"
UPDATE_ENDS = "finish_weight_update"


_watchers: weakref.WeakSet[Scheduler] = weakref.WeakSet()
_watched: set[type] = set()


def engine_core(core: type, watcher: Scheduler) -> None:
    """Calls `watcher` around the methods of engine cores of this class, and of derived classes, while `watcher` lives."""
    _watchers.add(watcher)
    if core not in _watched:
        _watched.add(core)
        for name, around in AROUND.items():
            if hasattr(core, name):
                setattr(core, name, _within(getattr(core, name), around))


def _within(call: Any, around: Callable[..., contextlib.AbstractContextManager[None]]) -> Any:
    @functools.wraps(call)
    def watched(core: Any, *args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return call(core, *args, **kwargs)

    return watched


@contextlib.contextmanager
def _around_add_lora(lora_request: LoRARequest) -> Iterator[None]:
    for watcher in _watchers:
        watcher.adapter_loads(lora_request)
    yield


@contextlib.contextmanager
def _around_remove_lora(lora_id: int) -> Iterator[None]:
    yield
    for watcher in _watchers:
        watcher.adapter_removed(lora_id)


def _around_rpc(method: Any, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if isinstance(method, str) and method in READS else _weights_may_change(method)


@contextlib.contextmanager
def _weights_may_change(method: Any) -> Iterator[None]:
    """Reports before the call, since KV memory may go and no save may read it then, and after it, successful or not."""
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


AROUND: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
    "collective_rpc": _around_rpc,
    # A sleep takes the weights away, and waking brings some back. Nothing is scheduled between.
    "sleep": lambda *_, **__: _weights_may_change("sleep"),
    "wake_up": lambda *_, **__: _weights_may_change("wake_up"),
    "add_lora": _around_add_lora,
    "remove_lora": _around_remove_lora,
}
