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
        # The engine's blocks are numbered from 1 on, as the pool's.
        self.blocks = self.pool.get_new_blocks(TAIL)
        for block in self.blocks[:WHOLE] if caching else []:
            block.set_block_hash(bytes([block.block_id]) * 36, BLOCK_TOKENS)

    def end(self, transfer: Any) -> None:
        """The request is over, and vLLM frees its blocks."""
        request = self.engine.arrive(WHOLE * BLOCK_TOKENS + 5, transfer=transfer)
        self.engine.compute(request)
        self.engine.session.read = {block.block_id for block in self.blocks}
        request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        self.engine.role.finished(request)
        self.pool.free_blocks(reversed(self.blocks))

    def step(self) -> None:
        """A step of nothing."""
        self.engine.decode()

    def free(self) -> int:
        """Blocks that are vLLM's."""
        return int(self.pool.get_num_free_blocks())


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Prefill:
    """With a prefix cache."""
    return Prefill(monkeypatch)


def test_a_tail_is_not_reused_before_it_is_saved(prefill: Prefill) -> None:
    """Nor longer."""
    prefill.end(TO_DECODE)
    prefill.step()
    [next_block] = prefill.pool.get_new_blocks(1)
    assert next_block.block_id not in range(1, TAIL + 1)
    prefill.engine.session.read.clear()
    prefill.step()
    [next_block] = prefill.pool.get_new_blocks(1)
    assert next_block.block_id == TAIL, "vLLM's first choice"


def test_what_nobody_goes_on_with_is_reused(prefill: Prefill) -> None:
    """Its save is given up where its block is overwritten."""
    prefill.end(None)
    assert prefill.pool.get_new_blocks(1)[0].block_id == TAIL


def test_without_a_prefix_cache_every_block_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reuses all of them at once."""
    prefill = Prefill(monkeypatch, caching=False)
    prefill.end(TO_DECODE)
    assert prefill.free() == 15 - TAIL
    prefill.engine.session.read = {1, TAIL}
    prefill.step()
    assert prefill.free() == 15 - 2


def test_a_save_without_an_end_holds_nothing_for_long(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a sidecar that stands still."""
    prefill.end(TO_DECODE)
    prefill.step()
    assert prefill.free() == 15 - 1
    later = time.monotonic() + held.HELD_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    prefill.step()
    assert prefill.free() == 15


def test_vllm_can_reset_its_pool(prefill: Prefill) -> None:
    """It does so only while no block is in use."""
    prefill.end(TO_DECODE)
    assert prefill.pool.reset_prefix_cache() is True
    prefill.step()
    assert prefill.free() == 15, "each is given back once"
