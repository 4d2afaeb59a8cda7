"""Blocks waiting for their saves, of vLLM's own block pool; the blocks still to be read by the sidecar are played."""

from __future__ import annotations

from typing import Any

import played
import pytest
from played import BLOCK_TOKENS
from vllm.v1.core.block_pool import BlockPool

from pillion.connector import PillionConnector

TO_DECODE = {"do_remote_decode": True}
WHOLE = 3
TAIL = WHOLE + 1


class Policy(played.Policy):
    """Holds the blocks still to be read by the sidecar."""

    def __init__(self, *arguments: Any, **facts: Any) -> None:
        super().__init__(*arguments, **facts)
        self.read: set[int] = set()
        self.kept: list[int] = []

    def end_request(self, number: int, *_end: Any) -> tuple[int | None, list[int]]:
        """The blocks to hold, of a request continued by another engine."""
        hands_over = self.told("follow_request")[number - 1][3]
        return (0, [block for block in sorted(self.read) if block not in self.kept]) if hands_over else (None, [])

    def held(self, blocks: list[int]) -> None:
        """Records the blocks that the engine holds."""
        self.kept += blocks

    def begin_step(self, *_: Any) -> tuple[list[int], list[int], bool, int]:
        """Releases blocks saved by now."""
        released = [block for block in self.kept if block not in self.read]
        self.kept = [block for block in self.kept if block in self.read]
        return [], released, False, 0

    def release_held(self) -> list[int]:
        """Releases all held blocks."""
        released, self.kept = self.kept, []
        return released


class Prefill:
    """An engine with a computed prompt of three blocks and a tail, and with their saves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caching: bool = True) -> None:
        self.role, self.policy = played.scheduler(monkeypatch, made=Policy)
        self.pool = BlockPool(16, caching, BLOCK_TOKENS)
        self.connector: Any = PillionConnector.__new__(PillionConnector)
        self.connector._scheduler, self.connector._worker = self.role, None
        self.connector.bind_gpu_block_pool(self.pool)
        self.blocks = self.pool.get_new_blocks(TAIL)
        for block in self.blocks[:WHOLE] if caching else []:
            block.set_block_hash(bytes([block.block_id]) * 36, BLOCK_TOKENS)

    def compute(self, name: str, transfer: Any) -> Any:
        """A request with these blocks, all still to be read by the sidecar."""
        request = played.request(name, WHOLE * BLOCK_TOKENS + 5, kv_transfer_params=transfer)
        self.role.announced(request)
        self.policy.read = {block.block_id for block in self.blocks}
        return request

    def finish(self, request: Any) -> None:
        """The request is over."""
        played.finish(self.role, request)

    def free_blocks(self) -> None:
        """Frees the blocks, as vLLM does after a finished or preempted request."""
        self.pool.free_blocks(reversed(self.blocks))

    def end(self, transfer: Any) -> None:
        """Computes and ends a request; its blocks belong to vLLM, except the held ones."""
        self.finish(self.compute("one", transfer))
        self.free_blocks()

    def step(self) -> None:
        """Plays an empty step."""
        played.step(self.role)

    def free(self) -> int:
        """The number of unused blocks of the pool."""
        return int(self.pool.get_num_free_blocks())


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Prefill:
    """An engine with a prefix cache."""
    return Prefill(monkeypatch)


def test_a_tail_is_not_reused_before_it_is_saved(prefill: Prefill) -> None:
    """The block of the tail is vLLM's again in the step after its save."""
    prefill.end(TO_DECODE)
    prefill.step()
    [next_block] = prefill.pool.get_new_blocks(1)
    assert next_block.block_id not in range(1, TAIL + 1)
    prefill.policy.read.clear()
    prefill.step()
    [next_block] = prefill.pool.get_new_blocks(1)
    assert next_block.block_id == TAIL, "vLLM's first choice"


def test_what_nobody_goes_on_with_is_reused(prefill: Prefill) -> None:
    """The save of such a request is given up where its block is overwritten."""
    prefill.end(None)
    assert prefill.pool.get_new_blocks(1)[0].block_id == TAIL


def test_without_a_prefix_cache_every_block_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reuses all blocks of a request at once there."""
    prefill = Prefill(monkeypatch, caching=False)
    prefill.end(TO_DECODE)
    assert prefill.free() == 15 - TAIL
    prefill.policy.read = {1, TAIL}
    prefill.step()
    assert prefill.free() == 15 - 2


def test_vllm_can_reset_its_pool(prefill: Prefill) -> None:
    """vLLM resets a pool only while no block is in use, so held ones are given back before."""
    prefill.end(TO_DECODE)
    assert prefill.pool.reset_prefix_cache() is True
    prefill.step()
    assert prefill.free() == 15, "each is given back once"


def test_a_block_that_is_vllm_s_already_is_not_held(prefill: Prefill) -> None:
    """A preempted request has no blocks at its end, and vLLM gives out no block in use."""
    request = prefill.compute("one", TO_DECODE)
    prefill.free_blocks()
    prefill.finish(request)
    assert len(prefill.pool.get_new_blocks(15)) == 15


def test_a_block_is_held_once(prefill: Prefill) -> None:
    """A preempted request may name, at its end, a block held since the end of another request."""
    preempted, other = prefill.compute("one", TO_DECODE), prefill.compute("two", TO_DECODE)
    prefill.finish(other)
    prefill.free_blocks()
    prefill.finish(preempted)
    prefill.policy.read.clear()
    prefill.step()
    assert prefill.free() == 15
