"""An engine's KV outlives the engine: saved by one, killed, loaded by the next, in every mode.

Each mode starts two engines; the tests of a mode share the second one. Tokens are compared with vLLM
without a connector, logprobs bit for bit with vLLM's own local prefix hit of the same length.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import engine, pool_file, prompts, sidecar

SINGLE = prompts.prompt(700, seed=1)
TOGETHER = [prompts.prompt(tokens, seed=2 + tokens) for tokens in (65, 333, 352)]
# The first 320 tokens of LONG are a prompt of their own: the engine finds them in its own cache.
LONG = prompts.prompt(700, seed=7)
LOCAL_PART = LONG[:320]
OUTPUT_TOKENS = 8
ALL_PROMPTS = [SINGLE, *TOGETHER, LONG]
STORED_BLOCKS = sum(prompts.stored_blocks(len(p), OUTPUT_TOKENS) for p in ALL_PROMPTS)


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to run the engine and to move the bytes."""

    copy: str
    multiprocess: bool = False
    tensor_parallel: int = 1
    spawned: bool = False
    batched_tokens: int | None = None

    def __str__(self) -> str:
        processes = f"tp{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        processes = processes or ("spawned" if self.spawned else "processes" if self.multiprocess else "one-process")
        chunked = "-chunked" if self.batched_tokens else ""
        return f"{self.copy}-{processes}{chunked}"


# Either copy: in one process, also with prompts cut into chunks of 256 tokens; with vLLM's real process split, forked and
# spawned; with two ranks.
MODES = [
    Mode("engine"),
    Mode("sidecar", batched_tokens=256),
    Mode("engine", multiprocess=True, spawned=True),
    Mode("sidecar", multiprocess=True),
    Mode("sidecar", multiprocess=True, tensor_parallel=2),
]


@dataclasses.dataclass
class Restarted:
    """A sidecar, the engine started after the first one was killed, and the answers of the first one."""

    directory: Path
    mode: Mode
    sidecar: sidecar.Sidecar
    engine: engine.Engine
    cold: dict[str, Any]
    cold_together: list[dict[str, Any]]
    cold_long: dict[str, Any]
    local: dict[str, Any]
    local_long: dict[str, Any]

    @contextlib.contextmanager
    def moves(self, hit_tokens: int) -> Iterator[None]:
        """The block takes exactly so many tokens from the sidecar, and their bytes."""
        hits, loaded = self._moved()
        yield
        expected = hit_tokens // engine.BLOCK_TOKENS * prompts.BLOCK_BYTES
        # The engine goes on before the sidecar has counted its report.
        self.sidecar.wait_metric("pillion_loaded_bytes_total", loaded + expected)
        hits_after, loaded_after = self._moved()
        assert hits_after - hits == hit_tokens
        assert loaded_after - loaded == expected

    def _moved(self) -> tuple[int, int]:
        loaded = self.sidecar.metrics()["pillion_loaded_bytes_total"]
        return self.engine.metrics()["external_hits"], loaded

    def forget_locally(self) -> None:
        """Empties the engine's own prefix cache, so only the sidecar can hit."""
        assert self.engine.reset_prefix_cache()

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        """One prompt alone: batches of one shape give comparable bits."""
        return self.engine.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]


def _connected(options: engine.Options, mode: Mode, socket: Path) -> engine.Options:
    return dataclasses.replace(options, socket=socket, **dataclasses.asdict(mode))


def _first_life(options: engine.Options, keeper: sidecar.Sidecar, log: Path) -> dict[str, Any]:
    """Runs the first engine until all blocks are saved, and kills it; its answers."""
    with engine.running(options, log) as first:

        def ask(tokens: list[int]) -> dict[str, Any]:
            return first.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]

        answers: dict[str, Any] = {"cold": ask(SINGLE), "cold_long": ask(LONG)}
        answers["cold_together"] = first.generate(TOGETHER, max_tokens=OUTPUT_TOKENS)
        answers |= {"local": ask(SINGLE), "local_long": ask(LONG)}
        assert first.metrics()["external_hits"] == 0
        keeper.wait_metric("pillion_saved_bytes_total", STORED_BLOCKS * prompts.BLOCK_BYTES)
        first.kill()
    for name, tokens in (("local", SINGLE), ("local_long", LONG)):
        assert answers[name]["cached_tokens"] == prompts.hit_tokens(len(tokens))
    return answers


@pytest.fixture(scope="class", params=[pytest.param(mode, marks=pytest.mark.xdist_group(str(mode))) for mode in MODES], ids=str)
def restarted(
    request: pytest.FixtureRequest, options: engine.Options, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Restarted]:
    """The second engine of a mode."""
    directory = tmp_path_factory.mktemp(str(request.param))
    with sidecar.serving(directory) as keeper:
        connected = _connected(options, request.param, keeper.socket)
        answers = _first_life(connected, keeper, directory / "first.log")
        with engine.running(connected, directory / "second.log") as second:
            yield Restarted(directory, request.param, keeper, second, **answers)
            second.exit()


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


@pytest.mark.supports("full", "vllm", "loads", "ranks")
class TestRestart:
    """The tests of one mode, in this order; each begins with an empty local cache."""

    def test_each_block_saved_once(self, restarted: Restarted) -> None:
        """Prefill and decode blocks alike; the local hits of the first engine saved nothing twice."""
        metrics = restarted.sidecar.metrics()
        assert metrics["pillion_saved_bytes_total"] == STORED_BLOCKS * prompts.BLOCK_BYTES
        assert metrics["pillion_blocks"] == STORED_BLOCKS
        assert metrics["pillion_saves_lost_to_reuse_total"] == 0

    def test_cold_is_right(self, restarted: Restarted, request: pytest.FixtureRequest) -> None:
        """The connector changes no token of a cold engine."""
        cold = [restarted.cold, *restarted.cold_together, restarted.cold_long]
        if restarted.mode.tensor_parallel == 2:
            right = request.getfixturevalue("right_two_ranks")(ALL_PROMPTS, OUTPUT_TOKENS)
        else:
            plain = request.getfixturevalue("plain")
            assert plain.reset_prefix_cache()
            answers = [plain.generate([tokens], max_tokens=OUTPUT_TOKENS)[0] for tokens in ALL_PROMPTS]
            right = _tokens(answers)
        assert _tokens(cold) == right

    def test_warm_equals_local_hit(self, restarted: Restarted) -> None:
        """Tokens and logprobs of a reloaded prefix, bit for bit."""
        restarted.forget_locally()
        with restarted.moves(prompts.hit_tokens(len(SINGLE))):
            warm = restarted.ask(SINGLE)
        assert warm["tokens"] == restarted.cold["tokens"]
        assert warm["logprobs"] == restarted.local["logprobs"]

    def test_local_hit_and_external_remainder(self, restarted: Restarted) -> None:
        """Blocks in the engine's own cache are not loaded again; the rest is."""
        restarted.forget_locally()
        restarted.ask(LOCAL_PART)
        with restarted.moves(prompts.hit_tokens(len(LONG)) - len(LOCAL_PART)):
            warm = restarted.ask(LONG)
        assert warm["tokens"] == restarted.cold_long["tokens"]
        assert warm["logprobs"] == restarted.local_long["logprobs"]

    def test_requests_together(self, restarted: Restarted) -> None:
        """Several loads in one step."""
        restarted.forget_locally()
        with restarted.moves(sum(prompts.hit_tokens(len(tokens)) for tokens in TOGETHER)):
            warm = restarted.engine.generate(TOGETHER, max_tokens=OUTPUT_TOKENS)
        assert _tokens(warm) == _tokens(restarted.cold_together)

    def test_damage_is_noticed(self, restarted: Restarted) -> None:
        """The negative control: one wrong K value in every loaded block of a rank changes the answer."""
        ranks = restarted.mode.tensor_parallel
        for rank in range(ranks):
            restarted.forget_locally()
            with pool_file.damaged(restarted.sidecar.pool, rank, ranks) as blocks:
                # Answers that were not bit-equal to the first may have added a decode block of their own.
                assert blocks >= STORED_BLOCKS
                with restarted.moves(prompts.hit_tokens(len(SINGLE))):
                    damaged = restarted.ask(SINGLE)
            assert damaged["logprobs"] != restarted.local["logprobs"]
        restarted.forget_locally()
        with restarted.moves(prompts.hit_tokens(len(SINGLE))):
            mended = restarted.ask(SINGLE)
        assert mended["logprobs"] == restarted.local["logprobs"]

    def test_reset_cache(self, restarted: Restarted) -> None:
        """After a reset of everything the weights are the same, so blocks kept before it are found."""
        assert restarted.engine.reset_prefix_cache(reset_connector=True)
        with restarted.moves(prompts.hit_tokens(len(SINGLE))):
            warm = restarted.ask(SINGLE)
        assert warm["logprobs"] == restarted.local["logprobs"]
