"""Requests that arrive together and load synchronously on a GPU begin one after the other, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pillion import _shim, scheduler, vllm_compat
from pillion.config import Config
from pillion.scheduler import Scheduler

BLOCK_TOKENS = 16
# 10 ms at 40 GB/s are 190 of these.
BLOCK_BYTES = 2 << 20


class Session:
    """Everything that is asked for is there."""

    generation = 1
    saving = 0

    def __init__(self, *arguments: Any) -> None:
        self.loads: list[bool] = []

    def open(self) -> int:
        """A key log."""
        return 0

    def append(self, log: int, hashes: list[bytes], start: int) -> int:
        """All of them."""
        return len(hashes)

    def query(self, log: int, start: int, count: int) -> int:
        """All of them."""
        return count

    def load(self, log: int, start: int, block_ids: list[int], step: int, sync: bool) -> bytes:
        """A plan."""
        self.loads.append(sync)
        return b"plan"

    def end_step(self) -> None:
        """Nothing."""

    def take_notices(self) -> list[str]:
        """None."""
        return []


def request(number: int, found_blocks: int, new_tokens: int) -> Any:
    """Its first blocks are kept, the rest is new."""
    tokens = found_blocks * BLOCK_TOKENS + new_tokens
    return SimpleNamespace(
        request_id=f"r{number}",
        skip_reading_prefix_cache=False,
        num_tokens=tokens,
        block_hashes=[bytes(16)] * (tokens // BLOCK_TOKENS),
        found=found_blocks * BLOCK_TOKENS,
    )


def made(monkeypatch: pytest.MonkeyPatch, on_gpu: bool, load: str = "auto") -> Scheduler:
    """A scheduler of an engine that exists in these answers alone."""
    answers = {
        "on_gpu": on_gpu,
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": BLOCK_BYTES,
        "steps_in_flight": 2,
        "tokens_per_step": 1,
        "world_size": 1,
        "zeroes_blocks": False,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(vllm_compat, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(_shim, "SchedulerSession", Session)
    vllm_config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="e"))
    kv_cache_config: Any = SimpleNamespace(num_blocks=1 << 16)
    return Scheduler(Config(socket="/s", load=load), vllm_config, kv_cache_config)


def schedule(made: Scheduler, waiting: list[Any]) -> list[str]:
    """One schedule() of vLLM's: who begins. Those that are put off stay in `waiting`."""
    begun = []
    for asked in list(waiting):
        tokens, later = made.match(asked, 0)
        if tokens is None:
            continue
        # Leave something to compute: what is found counts as far as the request says.
        found = min(tokens, asked.found)
        blocks: Any = SimpleNamespace(get_block_ids=lambda found=found: (list(range(1, 1 + found // BLOCK_TOKENS)),))
        made.allocated(asked, blocks, found)
        waiting.remove(asked)
        begun.append(asked.request_id)
        assert not later or made._config.load == "async"
    nothing: Any = SimpleNamespace(
        num_scheduled_tokens={},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[], req_ids=[], resumed_req_ids=set(), num_computed_tokens=[]),
    )
    made.step(nothing)
    return begun


@pytest.mark.parametrize(
    ("found_blocks", "new_tokens", "together"),
    [
        # A turn of a conversation: its new tokens fill the step.
        (300, 1024, 1),
        # 400 MB each: the copy does.
        (200, 16, 1),
        # Little of both: several.
        (40, 16, 5),
        (4, 100, 6),
    ],
)
def test_a_step_takes_in_only_so_much(
    monkeypatch: pytest.MonkeyPatch, found_blocks: int, new_tokens: int, together: int
) -> None:
    made_scheduler = made(monkeypatch, on_gpu=True)
    waiting = [request(number, found_blocks, new_tokens) for number in range(8)]
    order = list(iter(lambda: schedule(made_scheduler, waiting), []))
    assert len(order[0]) == together
    assert [name for begun in order for name in begun] == [f"r{number}" for number in range(8)], "everyone begins, in order"
    assert made_scheduler._session.loads == [True] * 8


@pytest.mark.parametrize(("on_gpu", "load"), [(False, "sync"), (True, "async")])
def test_nobody_is_put_off_elsewhere(monkeypatch: pytest.MonkeyPatch, on_gpu: bool, load: str) -> None:
    made_scheduler = made(monkeypatch, on_gpu, load)
    waiting = [request(number, 300, 1024) for number in range(8)]
    assert len(schedule(made_scheduler, waiting)) == 8


def test_the_limits_are_what_the_text_says() -> None:
    assert (scheduler.STEP_NEW_TOKENS, scheduler.STEP_COPY_MS) == (512, 10.0)
