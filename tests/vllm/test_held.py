"""Blocks that wait for their saves, of vLLM's own block pool; what the sidecar may still read is played."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from played import BLOCK_TOKENS, Engine
from vllm.v1.core.block_pool import BlockPool

from pillion import held
from pillion.connector import PillionConnector

TO_DECODE = {"do_remote_decode": True}
WHOLE = 3
TAIL = WHOLE + 1


class Prefill:
    """An engine that has computed a prompt of three blocks and a tail, and saves them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caching: bool = True) -> None:
        self.engine = Engine(monkeypatch)
        self.pool = BlockPool(16, caching, BLOCK_TOKENS)
        self.connector: Any = PillionConnector.__new__(PillionConnector)
        self.connector._scheduler, self.connector._worker = self.engine.role, None
        self.connector.bind_gpu_block_pool(self.pool)
        self.blocks = self.pool.get_new_blocks(TAIL)
        for block in self.blocks[:WHOLE] if caching else []:
            block.set_block_hash(bytes([block.block_id]) * 36, BLOCK_TOKENS)

    def compute(self, transfer: Any) -> Any:
        """A request whose blocks are these, all of which the sidecar may still read."""
        request = self.engine.arrive(WHOLE * BLOCK_TOKENS + 5, transfer=transfer)
        # The engine's blocks are numbered from here on, as the pool's.
        self.engine._free = 1
        self.engine.compute(request)
        self.engine.session.read = {block.block_id for block in self.blocks}
        return request

    def finish(self, request: Any) -> None:
        """The request is over."""
        request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        self.engine.role.finished(request)

    def free_blocks(self) -> None:
        """As vLLM does behind a request that is over or preempted."""
        self.pool.free_blocks(reversed(self.blocks))

    def end(self, transfer: Any) -> None:
        """A request is computed and over, and its blocks are vLLM's, but for those that are held."""
        self.finish(self.compute(transfer))
        self.free_blocks()

    def step(self) -> None:
        """A step of nothing."""
        self.engine.decode()

    def free(self) -> int:
        """How many blocks of the pool nobody uses."""
        return int(self.pool.get_num_free_blocks())


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Prefill:
    """With a prefix cache."""
    return Prefill(monkeypatch)


def test_a_tail_is_not_reused_before_it_is_saved(prefill: Prefill) -> None:
    """The block of the tail is vLLM's again in the step after its save."""
    prefill.end(TO_DECODE)
    prefill.step()
    [next_block] = prefill.pool.get_new_blocks(1)
    assert next_block.block_id not in range(1, TAIL + 1)
    prefill.engine.session.read.clear()
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
    prefill.engine.session.read = {1, TAIL}
    prefill.step()
    assert prefill.free() == 15 - 2


def test_a_save_without_an_end_holds_nothing_for_long(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that stands still ends no save: the block is vLLM's again after HELD_S."""
    prefill.end(TO_DECODE)
    prefill.step()
    assert prefill.free() == 15 - 1
    later = time.monotonic() + held.HELD_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    prefill.step()
    assert prefill.free() == 15


def test_vllm_can_reset_its_pool(prefill: Prefill) -> None:
    """vLLM resets a pool only while no block is in use, so held ones are given back before."""
    prefill.end(TO_DECODE)
    assert prefill.pool.reset_prefix_cache() is True
    prefill.step()
    assert prefill.free() == 15, "each is given back once"


def test_a_block_that_is_vllm_s_already_is_not_held(prefill: Prefill) -> None:
    """A preempted request that ends has blocks no more, and vLLM gives out none that it finds in use."""
    request = prefill.compute(TO_DECODE)
    prefill.free_blocks()
    prefill.finish(request)
    assert len(prefill.pool.get_new_blocks(15)) == 15


def test_a_block_is_held_once(prefill: Prefill) -> None:
    """A preempted request that ends may name a block that is held since another one ended."""
    preempted, other = prefill.compute(TO_DECODE), prefill.compute(TO_DECODE)
    prefill.finish(other)
    prefill.free_blocks()
    prefill.finish(preempted)
    prefill.engine.session.read.clear()
    prefill.step()
    assert prefill.free() == 15
