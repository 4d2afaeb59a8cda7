"""Requests that arrive together and load synchronously on a GPU begin one after the other, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pillion import _shim, pacing, vllm_compat
from pillion.config import Config, ConfigError
from pillion.scheduler import Scheduler

BLOCK_TOKENS = 16
# 10 ms at 40 GB/s are 190 of these.
BLOCK_BYTES = 2 << 20


class Session:
    """Everything that is asked for is there."""

    generation = 1
    saving = 0
    # Not bound: nothing is checked.
    namespace = 0
    connected = True

    def __init__(self, *arguments: Any) -> None:
        self.loads: list[bool] = []
        *_, self.part_blocks, self.whole_blocks, _, _, _ = arguments
        # Blocks of every answer are still on their way.
        self.early = False
        # What is answered in place of all.
        self.hits: int | None = None
        self.lingered: list[int] = []

    def open(self, fold: bytes | None) -> int:
        """A key log."""
        return 0

    def append(self, log: int, hashes: list[bytes], start: int) -> int:
        """All of them."""
        return len(hashes)

    def query(self, log: int, start: int, count: int) -> int:
        """All of them, or as many as are said."""
        return count if self.hits is None else self.hits

    def linger(self, log: int, start: int, count: int, within_us: int) -> int:
        """Nothing comes."""
        self.lingered.append(within_us)
        return -1

    def await_producer(self, log: int) -> None:
        """Nothing."""

    def release(self, log: int) -> None:
        """Nothing."""

    def arriving(self, log: int) -> bool:
        """Whether an answer names blocks that are on their way."""
        return self.early

    def sources(self, log: int, start: int, count: int) -> list[int]:
        """All in memory."""
        return [count, 0, 0]

    def load(self, log: int, start: int, block_ids: list[int], step: int, sync: bool) -> list[bytes]:
        """A plan, or one for each part of what is on its way."""
        self.loads.append(sync)
        return [b"plan"] * (-(-len(block_ids) // self.part_blocks) if self.early else 1)

    def close(self, log: int) -> None:
        """Nothing."""

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
        lora_request=None,
        skip_reading_prefix_cache=False,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        kv_transfer_params=None,
        num_preemptions=0,
        block_hashes=[bytes(16)] * (tokens // BLOCK_TOKENS),
        found=found_blocks * BLOCK_TOKENS,
    )


def made(
    monkeypatch: pytest.MonkeyPatch,
    on_gpu: bool,
    load: str = "auto",
    policy: str = "recompute",
    role: str = "kv_both",
    steps: int = 2,
    **more: Any,
) -> Scheduler:
    """A scheduler of an engine that exists in these answers alone, with so many steps in flight."""
    answers = {
        "on_gpu": on_gpu,
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": BLOCK_BYTES,
        "groups": bytes(16),
        "lora_form": "",
        "steps_in_flight": steps,
        "tokens_per_step": 1,
        "window": 0,
        "world_size": 1,
        "zeroes_blocks": False,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(vllm_compat, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(_shim, "SchedulerSession", Session)
    vllm_config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e", kv_role=role, kv_load_failure_policy=policy),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor"),
    )
    kv_cache_config: Any = SimpleNamespace(num_blocks=1 << 16)
    return Scheduler(Config(socket="/s", load=load, **more), vllm_config, kv_cache_config)


class Vllm:
    """What vLLM's scheduler does with requests that wait."""

    # Steps from the one that begins a load in the background to the one that hears of its end.
    LOAD_STEPS = 2

    def __init__(self, connector: Scheduler, waiting: list[Any]) -> None:
        self.connector = connector
        self.waiting = waiting
        self.loading: list[tuple[int, Any]] = []
        self.step = 0

    def schedule(self) -> tuple[list[str], list[str]]:
        """Who is computed in this step, and whose load begins in the background. Those that are put off stay in `waiting`."""
        computed: list[str] = []
        background: list[str] = []
        for ready, asked in list(self.loading):
            if ready <= self.step:
                self.loading.remove((ready, asked))
                asked.num_computed_tokens = asked.found
                self.connector.allocated(asked, None, 0)
                computed.append(asked.request_id)
        for asked in list(self.waiting):
            tokens, later = self.connector.match(asked, 0)
            if tokens is None:
                continue
            # Leave something to compute: what is found counts as far as the request says.
            found = min(tokens, asked.found)
            blocks: Any = SimpleNamespace(get_block_ids=lambda found=found: (list(range(1, 1 + found // BLOCK_TOKENS)),))
            self.connector.allocated(asked, blocks, found)
            self.waiting.remove(asked)
            if later:
                self.loading.append((self.step + self.LOAD_STEPS, asked))
            (background if later else computed).append(asked.request_id)
        output: Any = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(computed, 1),
            new_block_ids_to_zero=None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=[], req_ids=[], resumed_req_ids=set(), num_computed_tokens=[]),
        )
        self.connector.step(output)
        self.step += 1
        return computed, background

    def all_steps(self) -> list[tuple[list[str], list[str]]]:
        """Steps until nobody waits."""
        steps = []
        while self.waiting or self.loading:
            steps.append(self.schedule())
        return steps


def conversations(number: int, found_blocks: int, new_tokens: int) -> list[Any]:
    """So many at once."""
    return [request(each, found_blocks, new_tokens) for each in range(number)]


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
    vllm = Vllm(made(monkeypatch, on_gpu=True), conversations(8, found_blocks, new_tokens))
    steps = vllm.all_steps()
    assert all((len(computed) - 1) * new_tokens <= pacing.STEP_NEW_TOKENS for computed, _ in steps)
    assert len(steps[0][0]) == together
    assert all(len(background) <= 1 for _, background in steps)
    assert sorted(name for computed, _ in steps for name in computed) == [f"r{number}" for number in range(8)]


def test_a_full_step_begins_the_next_load_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(made(monkeypatch, on_gpu=True), conversations(6, 300, 1024))
    assert vllm.all_steps() == [
        (["r0"], ["r1"]),
        (["r2"], []),
        # What came back fills its step: nothing is loaded synchronously beside it.
        (["r1"], ["r3"]),
        (["r4"], []),
        (["r3"], ["r5"]),
        ([], []),
        (["r5"], []),
    ]


def test_only_so_many_loads_hold_blocks_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(made(monkeypatch, on_gpu=True), conversations(12, 300, 1024))
    vllm.LOAD_STEPS = 100
    began = [name for _ in range(12) for name in vllm.schedule()[1]]
    assert len(began) == pacing.BACKGROUND_LOADS
    # A request that is given up counts no more.
    vllm.connector.finished(vllm.loading.pop()[1])
    vllm.waiting += [request(20, 300, 1024), request(21, 300, 1024)]
    assert vllm.schedule() == (["r20"], ["r21"])


def test_a_user_who_wants_synchronous_loads_gets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(made(monkeypatch, on_gpu=True, load="sync"), conversations(3, 300, 1024))
    assert vllm.all_steps() == [(["r0"], []), (["r1"], []), (["r2"], [])]


@pytest.mark.parametrize(("on_gpu", "load"), [(False, "sync"), (True, "async")])
def test_nobody_is_put_off_elsewhere(monkeypatch: pytest.MonkeyPatch, on_gpu: bool, load: str) -> None:
    vllm = Vllm(made(monkeypatch, on_gpu, load), conversations(8, 300, 1024))
    assert sum(map(len, vllm.schedule())) == 8


def test_what_is_on_its_way_is_loaded_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = made(monkeypatch, on_gpu=True)
    session: Any = connector._session
    session.early = True
    vllm = Vllm(connector, conversations(1, 4, 16))
    assert vllm.schedule() == ([], ["r0"])
    assert session.loads == [False]


@pytest.mark.parametrize(
    ("policy", "load", "part_blocks"), [("recompute", "auto", 8), ("fail", "auto", 0), ("recompute", "sync", 0)]
)
def test_answers_come_early_only_where_a_load_may_fail(
    monkeypatch: pytest.MonkeyPatch, policy: str, load: str, part_blocks: int
) -> None:
    session: Any = made(monkeypatch, True, load, policy)._session
    assert session.part_blocks == part_blocks


@pytest.mark.parametrize(
    ("role", "sync_ms", "longest_ms"), [("kv_both", None, 100), ("kv_consumer", None, 2), ("kv_consumer", 5, 5)]
)
def test_an_engine_that_answers_what_others_compute_waits_for_short_copies_alone(
    monkeypatch: pytest.MonkeyPatch, role: str, sync_ms: int | None, longest_ms: int
) -> None:
    """Beside other requests; alone it delays nobody."""
    choice = made(monkeypatch, on_gpu=True, role=role, sync_ms=sync_ms)._pacing
    longest = longest_ms * pacing.BYTES_PER_MS // BLOCK_BYTES
    assert choice.synchronous(longest, alone=False) is True
    assert choice.synchronous(longest + 1, alone=False) is False
    assert choice.synchronous(longest + 1, alone=True) is True


def awaited(number: int, found_blocks: int, new_tokens: int) -> Any:
    """A request whose prompt another engine computes."""
    made = request(number, found_blocks, new_tokens)
    made.kv_transfer_params = {"do_remote_prefill": True}
    return made


def test_an_idle_step_waits_once_for_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = made(monkeypatch, on_gpu=True)
    session: Any = connector._session
    session.hits = -1
    requests = [awaited(number, 4, 16) for number in range(2)]
    for _ in range(2):
        assert [connector.match(each, 0) for each in requests] == [(None, False)] * 2
        connector._pacing.end_step(idle=True)
    assert session.lingered == [pacing.LINGER_US] * 2
    connector._pacing.begin()
    connector.match(requests[0], 0)
    connector._pacing.end_step(idle=False)
    connector.match(requests[0], 0)
    connector.match(request(2, 4, 16), 0)
    assert len(session.lingered) == 2, "others wait for the step, or nobody computes for it"


@pytest.mark.parametrize(
    ("on_gpu", "load", "role", "blocks"),
    [
        (True, "auto", "kv_both", 152),
        (True, "auto", "kv_consumer", 38),
        (True, "async", "kv_both", 0),
        (False, "auto", "kv_both", 0),
    ],
)
def test_short_prompts_of_another_engine_are_loaded_by_a_step(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, load: str, role: str, blocks: int
) -> None:
    """8 ms of copying at 40 GB/s, or what a step waits for beside others, and not on a CPU."""
    session: Any = made(monkeypatch, on_gpu, load, role=role, steps=1)._session
    assert session.whole_blocks == blocks


def test_a_strict_engine_gives_up_what_was_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = made(monkeypatch, on_gpu=True, policy="fail", strict_tokens=32)
    session: Any = connector._session
    short, long, own = awaited(0, 4, 16), awaited(1, 4, 16), request(2, 4, 16)
    session.hits = 3
    assert connector.match(short, 0) == (48, False), "a block and what is always computed"
    session.hits = 2
    assert connector.match(own, 0) == (32, False)
    assert connector.match(long, 0) == (79, True)
    blocks: Any = SimpleNamespace(get_block_ids=lambda: [[7, 8, 9, 10, 11]])
    connector.allocated(long, blocks, 79)
    assert connector._next.lost == [("r1", [7, 8, 9, 10, 11], False)]
    assert session.loads == []
    late = awaited(3, 4, 16)
    assert connector.match(late, 0) == (79, True)
    session.hits = 5
    found, alone = connector.match(late, 0)
    assert found is not None
    connector.allocated(late, blocks, found)
    assert (found, alone, len(session.loads), len(connector._next.lost)) == (79, False, 1, 1), "what came meanwhile"
    with pytest.raises(ConfigError, match="kv_load_failure_policy"):
        made(monkeypatch, on_gpu=True, strict_tokens=32)
