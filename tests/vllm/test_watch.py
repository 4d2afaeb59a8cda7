"""Calls of an engine core's methods from outside are noticed. vLLM's own core has these methods: see test_signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest

from pillion import vllm_compat, watch

Call = Callable[[Any], object]


class Watcher:
    """Records its calls, and whether an update goes on."""

    def __init__(self) -> None:
        self.updating = False
        self.told: list[Any] = []

    def weights_may_have_changed(self) -> None:
        """Records the call."""
        self.told.append("weights")

    def adapter_loads(self, request: Any) -> None:
        """Records the call."""
        self.told.append(("loads", request))

    def adapter_removed(self, number: int) -> None:
        """Records the call."""
        self.told.append(("removed", number))


class Failed(Exception):
    """A worker's error."""


def make_core() -> tuple[type, list[Any]]:
    """A class with the methods of vLLM's engine core, and a list of its calls."""
    reached: list[Any] = []

    class Core:
        """Records the calls and answers them."""

        def collective_rpc(
            self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            reached.append((method, timeout, args, kwargs))
            if callable(method):
                method(None)
            if "fail" in args:
                raise Failed
            return ["done"]

        def sleep(self, level: int = 1, mode: str = "abort") -> None:
            reached.append(("sleep", level, mode))

        def wake_up(self, tags: list[str] | None = None) -> bool:
            reached.append(("wake_up", tags))
            return True

        def add_lora(self, lora_request: Any) -> bool:
            reached.append(("add_lora", lora_request))
            return True

        def remove_lora(self, lora_id: int) -> bool:
            reached.append(("remove_lora", lora_id))
            return True

    return Core, reached


@pytest.fixture
def core() -> tuple[Any, Watcher, list[Any]]:
    """An engine core, its watcher, and the core's calls."""
    kind, reached = make_core()
    watcher: Any = Watcher()
    watch.engine_core(kind, watcher)
    return kind(), watcher, reached


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda core: core.collective_rpc("reload_weights"), ["weights", "weights"]),
        (lambda core: core.collective_rpc(method="no_such_method"), ["weights", "weights"]),
        (lambda core: core.collective_rpc(lambda worker: None, 1.0, (2,), {"three": 3}), ["weights", "weights"]),
        (lambda core: core.collective_rpc("check_health"), []),
        (lambda core: core.collective_rpc(method="compute_weight_checksums"), []),
        (lambda core: core.sleep(1), ["weights", "weights"]),
        (lambda core: core.wake_up(tags=["weights"]), ["weights", "weights"]),
        (lambda core: core.add_lora("request"), [("loads", "request")]),
        (lambda core: core.add_lora(lora_request="request"), [("loads", "request")]),
        (lambda core: core.remove_lora(3), [("removed", 3)]),
    ],
)
def test_what_is_told(core: tuple[Any, Watcher, list[Any]], call: Call, told: list[Any]) -> None:
    """Each method may change the weights, except the known harmless ones; every call arrives unchanged, and so does its
    answer."""
    engine, watcher, reached = core
    plain, plainly = make_core()
    # A function equals itself alone.
    assert call(engine) == call(plain()) and str(reached).split(" at 0x")[0] == str(plainly).split(" at 0x")[0]
    assert watcher.told == told and not watcher.updating


def test_told_before_and_after(core: tuple[Any, Watcher, list[Any]]) -> None:
    """It is called before, since the KV memory may go, and after, since only then the new weights are complete. Also after a
    failure."""
    engine, watcher, _ = core
    known_before: list[int] = []

    def look(worker: object) -> None:
        known_before.append(len(watcher.told))

    engine.collective_rpc(look)
    assert (known_before, len(watcher.told)) == ([1], 2)
    with pytest.raises(Failed):
        engine.collective_rpc("anything", args=("fail",))
    assert watcher.told == ["weights"] * 4


def test_an_update_lasts_from_its_begin_to_its_end(core: tuple[Any, Watcher, list[Any]]) -> None:
    """vLLM ends an update with a failed chunk; a failed begin or end changes nothing."""
    engine, watcher, _ = core
    for begin in watch.UPDATE_BEGINS:
        engine.collective_rpc(begin)
        assert watcher.updating
        engine.collective_rpc("update_weights")
        engine.collective_rpc("anything")
        assert watcher.updating
        with pytest.raises(Failed):
            engine.collective_rpc(begin, args=("fail",))
        with pytest.raises(Failed):
            engine.collective_rpc("finish_weight_update", args=("fail",))
        assert watcher.updating
        engine.collective_rpc("finish_weight_update")
        assert not watcher.updating
        with pytest.raises(Failed):
            engine.collective_rpc(begin, args=("fail",))
        assert not watcher.updating
        engine.collective_rpc(begin)
        with pytest.raises(Failed):
            engine.collective_rpc("update_weights", args=("fail",))
        assert not watcher.updating


def test_a_class_is_wrapped_once(core: tuple[Any, Watcher, list[Any]]) -> None:
    """A second engine wraps nothing again; a watcher that has gone gets no call, and vLLM reads its own signatures."""
    engine, watcher, _ = core
    watch.engine_core(type(engine), cast(Any, Watcher()))
    engine.collective_rpc("reload_weights")
    assert watcher.told == ["weights", "weights"]
    plain, _ = make_core()
    for name in watch.AROUND:
        assert inspect.signature(getattr(type(engine), name)) == inspect.signature(getattr(plain, name))


def test_resets_of_one_pool() -> None:
    """The watcher is called after a reset that vLLM refused, too, and for this pool alone."""

    class Pool:
        """A pool with the reset of vLLM's pool."""

        answer: Any = True

        def reset_prefix_cache(self) -> bool:
            """Resets, refuses or raises."""
            if self.answer is None:
                raise Failed
            return bool(self.answer)

    watched, other = Pool(), Pool()
    told: list[object] = []
    vllm_compat.watch_resets(watched, lambda: told.append("begins"), told.append)
    assert watched.reset_prefix_cache() is True
    watched.answer = False
    assert watched.reset_prefix_cache() is False
    watched.answer = None
    with pytest.raises(Failed):
        watched.reset_prefix_cache()
    assert other.reset_prefix_cache() is True
    assert told == ["begins", True, "begins", False, "begins", False]
