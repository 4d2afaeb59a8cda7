"""The worker role on a GPU with a played session and a played forward: its waits, and its behaviour without hooks."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import specs
import torch

from pillion import _shim, vllm_compat
from pillion.geometry import GeometryError
from pillion.groups import ALONE
from pillion.memory import GroupMemory
from pillion.metadata import PillionMetadata, StepOutput
from pillion.worker import Worker
from testkit.engine_config import engine_config

LAYERS = [f"layer.{index}" for index in range(4)]
CUTS = 2
WHOLE, CUT_BY_CUT = False, True
# The flag of a plan with a waiting step, and the place of the flags in a plan.
LOAD_SYNC, FLAGS = 1, 28


class Session:
    """Records the worker's calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.loading = 0

    namespace = ""

    def join(self, run: bytes) -> None:
        """Ignored."""

    def take_notices(self) -> list[str]:
        """No notices."""
        return []

    def start(self, step: int, stream: int) -> None:
        """A step begins."""
        self.calls.append(("start", step))

    def done(self, step: int, wake: bool, stream: int) -> None:
        """A step ends."""
        self.calls.append(("done", step))

    def load(self, plan: bytes, stream: int, by_cuts: bool) -> list[int] | None:
        """Begins a load."""
        self.calls.append(("load", by_cuts))
        self.loading += by_cuts
        return [] if plan[FLAGS] == LOAD_SYNC else None

    def wait_cut(self, cut: int, stream: int) -> None:
        """Enqueues a wait."""
        self.calls.append(("wait", cut))
        if cut == CUTS - 1:
            self.loading = 0


def plan(*blocks: int, flags: int = LOAD_SYNC) -> bytes:
    """A plan in the form of connector-shim/src/core/plan.rs."""
    return struct.pack("<QQQII", 77, 1, 5, len(blocks), flags) + b"".join(
        struct.pack("<QQQ", block, 4096, 3) for block in blocks
    )


# Full attention in all layers.
ONE_GROUP: Any = SimpleNamespace(num_blocks=4, kv_cache_groups=[SimpleNamespace(layer_names=["layer"], kv_cache_spec=None)])


class Rank:
    """One rank and the forwards of its steps."""

    def __init__(self) -> None:
        self.session = Session()
        nothing: Any = None
        self.worker = Worker(engine_config(), nothing, ONE_GROUP)
        played: Any = self.session
        (memory,) = self.worker._parts
        memory.session = played
        memory.waits = _shim.LayerWaits(LAYERS, [2, 2], True, lambda: vllm_compat.hook_mode(self.context))
        self.context: Any = None
        self.step_number = 0
        self.fills_tail = False

    def step(self, mode: str, hooks: list[str], *plans: tuple[bytes, bool]) -> list[tuple[Any, ...]]:
        """Plays one step; the worker's calls of its session."""
        self.session.calls = []
        self.step_number += 1
        self.context = SimpleNamespace(attn_metadata={}, ubatch_slices=None, cudagraph_runtime_mode=SimpleNamespace(name=mode))
        loads = [(f"request {number}", plan, sync) for number, (plan, sync) in enumerate(plans)]
        self.worker.begin_step(PillionMetadata(b"", self.step_number, loads=loads, fills_tail=self.fills_tail))
        self.worker.load(self.context)
        for layer in hooks:
            self.worker.reach_layer(layer)
        self.worker.end_step()
        return self.session.calls


def test_the_first_load_is_waited_for_as_a_whole_the_next_cut_by_cut() -> None:
    """The first forward proves the hooks."""
    rank = Rank()
    assert rank.step("NONE", LAYERS, (plan(5), True)) == [("start", 1), ("load", WHOLE), ("done", 1)]
    waits = [("wait", 0), ("wait", 1)]
    assert rank.step("NONE", LAYERS, (plan(5), True)) == [("start", 2), ("load", CUT_BY_CUT), *waits, ("done", 2)]
    assert rank.step("NONE", LAYERS) == [("start", 3), ("done", 3)]


@pytest.mark.parametrize(("mode", "hooks"), [("FULL", []), ("PIECEWISE", LAYERS)])
def test_other_kinds_of_forwards_wait_for_the_whole(mode: str, hooks: list[str]) -> None:
    """Full graphs always do, piecewise ones until they have proven their own hooks."""
    rank = Rank()
    rank.step("NONE", LAYERS)
    assert ("load", WHOLE) in rank.step(mode, hooks, (plan(5), True))
    assert ("load", CUT_BY_CUT) in rank.step("NONE", LAYERS, (plan(5), True))


def test_asynchronous_loads_are_not_waited_for() -> None:
    """They are not, alone or beside synchronous ones."""
    rank = Rank()
    rank.step("NONE", LAYERS)
    assert rank.step("NONE", LAYERS, (plan(5, flags=0), False)) == [("start", 2), ("load", WHOLE), ("done", 2)]
    both = rank.step("NONE", LAYERS, (plan(5, flags=0), False), (plan(6), True))
    assert both == [("start", 3), ("load", WHOLE), ("load", CUT_BY_CUT), ("wait", 0), ("wait", 1), ("done", 3)]


def test_a_block_that_the_step_goes_on_in_is_waited_for_before_the_forward() -> None:
    """A layer writes the KV of its tokens before its hook: a later copy would overwrite it."""
    rank = Rank()
    rank.step("NONE", LAYERS)
    rank.fills_tail = True
    assert rank.step("NONE", LAYERS, (plan(5), True)) == [("start", 2), ("load", WHOLE), ("done", 2)]
    rank.fills_tail = False
    assert ("load", CUT_BY_CUT) in rank.step("NONE", LAYERS, (plan(5), True))


def test_hooks_that_stay_away_fail_the_load_and_end_the_overlap() -> None:
    """Blocks that the step may have read too early are computed again."""
    rank = Rank()
    rank.step("NONE", LAYERS)
    calls = rank.step("NONE", [], (plan(5, 9), True), (plan(7), True))
    assert calls == [("start", 2), ("load", CUT_BY_CUT), ("load", CUT_BY_CUT), ("wait", 0), ("wait", 1), ("done", 2)]
    assert rank.worker.take_failed_blocks() == {5, 7, 9}
    assert ("load", WHOLE) in rank.step("NONE", LAYERS, (plan(5), True))
    assert rank.worker.take_failed_blocks() == set()


def test_a_forward_that_raised_is_not_taken_for_one_without_hooks() -> None:
    """vLLM ends such a step as any other. The next one waits for its remaining loads, and later ones still wait layer by
    layer."""
    rank = Rank()
    rank.step("NONE", LAYERS)

    def fails() -> None:
        try:
            rank.worker.begin_step(PillionMetadata(b"", 2, loads=[("request", plan(5, 9), True)]))
            rank.worker.load(rank.context)
            raise torch.OutOfMemoryError
        finally:
            rank.worker.end_step()

    with pytest.raises(torch.OutOfMemoryError):
        fails()
    assert rank.worker.take_failed_blocks() == set()
    rank.step_number = 2
    assert rank.step("NONE", LAYERS) == [("wait", 0), ("wait", 1), ("start", 3), ("done", 3)]
    assert ("load", CUT_BY_CUT) in rank.step("NONE", LAYERS, (plan(5), True))


def test_a_step_names_itself_in_its_output_where_it_is_asked_to() -> None:
    """The scheduler role learns from it that vLLM took the output."""
    rank = Rank()
    assert rank.worker.step_output() is None
    rank.worker.begin_step(PillionMetadata(b"", 1, asks=True))
    assert rank.worker.step_output() == StepOutput(b"", 1)
    rank.worker.begin_step(PillionMetadata(b"", 2, idle=True))
    assert rank.worker.step_output() is None


def test_blocks_of_a_plan() -> None:
    """They are read as the shim wrote them."""
    assert _shim.plan_blocks(plan(3, 1, (1 << 32) - 1)) == [3, 1, (1 << 32) - 1]


# --- the connector's roles ---


@pytest.mark.parametrize(
    ("copy", "sleep_mode", "refuses", "tried", "stays_out"),
    [
        ("auto", False, (), ["sidecar"], None),
        ("auto", False, ("sidecar",), ["sidecar", "engine"], None),
        ("auto", False, ("sidecar", "engine"), ["sidecar", "engine"], "no sidecar"),
        ("auto", True, ("sidecar",), ["sidecar"], "no sidecar"),
        ("sidecar", False, ("sidecar",), ["sidecar"], "no sidecar"),
        ("engine", False, (), ["engine"], None),
    ],
)
def test_who_copies_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    copy: str,
    sleep_mode: bool,
    refuses: tuple[str, ...],
    tried: list[str],
    stays_out: str | None,
) -> None:
    """If the sidecar cannot copy, the engine does, provided that `copy` left the choice open and its memory stays in place."""
    said: list[str] = []
    monkeypatch.setattr("pillion.memory.logger.warning", lambda text, *parts: said.append(text % parts))
    config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleep_mode))
    memory = GroupMemory(engine_config(copy=copy), config, ONE_GROUP, ALONE)
    asked: list[str] = []

    def connect(geometry: Any, descriptors: list[int], pointers: list[int], cuts: list[int], copier: str) -> None:
        assert (descriptors, pointers, cuts) == ([], [4096], [8])
        asked.append(copier)
        if copier in refuses:
            raise _shim.ShimError(f"no {copier}")

    monkeypatch.setattr(memory, "_connect", connect)
    geometry: Any = SimpleNamespace(cuts=[8])
    if stays_out:
        with pytest.raises(GeometryError, match=stays_out):
            memory._connect_gpu(geometry, [4096])
    else:
        memory._connect_gpu(geometry, [4096])
    assert asked == tried
    fell = tried == ["sidecar", "engine"] and not stays_out
    assert [("no sidecar" in text, "the engine copies its blocks itself" in text) for text in said] == [(True, True)] * fell


@pytest.mark.refuses("early-sleep", "run without --enable-sleep-mode")
def test_an_engine_that_sleeps_does_not_copy(remedy: str) -> None:
    """Its KV memory is freed during its own copies."""
    config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    memory = GroupMemory(engine_config(copy="engine"), config, ONE_GROUP, ALONE)
    geometry: Any = SimpleNamespace(cuts=[8])
    with pytest.raises(GeometryError, match=remedy):
        memory._connect_gpu(geometry, [4096])


def test_memory_of_another_device_is_refused_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU engine with KV in other memory."""
    said: list[str] = []
    monkeypatch.setattr("pillion.memory.logger.error", lambda text, *parts: said.append(text % parts))
    monkeypatch.setattr(vllm_compat, "on_gpu", lambda: True)
    nothing: Any = None
    memory = GroupMemory(engine_config(), nothing, ONE_GROUP, ALONE)
    memory.register({"layer": torch.zeros(4, 2, 2, 2)})
    assert memory.session is None
    assert "PILLION STAYS OUT" in said[0]
    assert "cpu" in said[0]


def test_a_device_without_room_is_no_end_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has given all memory to its KV cache; the bytes written by the self-test until then are cleared."""
    said: list[str] = []
    monkeypatch.setattr("pillion.memory.logger.error", lambda text, *parts: said.append(text % parts))

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore of it")

    monkeypatch.setattr(torch, "equal", full)
    monkeypatch.setattr(vllm_compat, "list_heads", lambda *_: {})
    nothing: Any = None
    kv = {name: torch.zeros(2, 10, 16, 2, 64, dtype=torch.bfloat16) for name in specs.LAYERS}
    memory = GroupMemory(engine_config(), nothing, specs.kv_cache_config(specs.full_attention()), ALONE)
    memory.register(kv)
    assert memory.session is None
    assert memory.out_reason == "torch: CUDA out of memory. (if memory is short, lower --gpu-memory-utilization)"
    assert said == [f"PILLION STAYS OUT: {memory.out_reason}. vLLM runs as if no connector were configured."]
    assert not any(tensor.any() for tensor in kv.values())
