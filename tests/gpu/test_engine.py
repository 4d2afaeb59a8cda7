"""Real vLLM on a GPU: KV outlives the engine, in eager mode and with CUDA graphs, under both model runners.

Each mode starts two engines: the first is killed when the sidecar has all its blocks, the second answers from them. Tokens and
logprobs are compared bit for bit with the local prefix hits of the first engine, in the same batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_options
import pytest
import torch
from gpu_options import SHAPE, Mode

from testkit import engine, pool_file, prompts, sidecar

OUTPUT_TOKENS = 8
BLOCK_BYTES = engine.BLOCK_TOKENS * SHAPE.kv_bytes_per_token()
SINGLE = prompts.prompt(700, seed=1)
# One token is left to compute: a step for full graphs.
WHOLE_BLOCKS = prompts.prompt(64 * engine.BLOCK_TOKENS + 1, seed=2)
LONG = prompts.prompt(2990, seed=3)
# With its answer less than a block, so none of it is kept.
UNKEPT = prompts.prompt(engine.BLOCK_TOKENS - OUTPUT_TOKENS, seed=4)
PROMPTS = {"single": SINGLE, "whole-blocks": WHOLE_BLOCKS, "long": LONG}
DRAM = "1GiB"
# Every runner with graphs and without, every way to load, both layouts; engines that copy for themselves, by option or by
# necessity; and an engine of two GPUs.
MODES = [
    Mode(1, graphs=False, load="sync"),
    Mode(1, graphs=True, load="auto"),
    Mode(2, graphs=False, load="async", layout="none"),
    Mode(2, graphs=True, load="sync"),
    Mode(1, graphs=True, load="sync", layout="none", copy="engine"),
    Mode(2, graphs=False, load="async", copy="engine"),
    Mode(2, graphs=True, load="auto", copy="auto"),
    Mode(2, graphs=False, tensor_parallel=2),
]
LAYOUTS = {"auto": "KV cache layout BLNHC", "none": "KV cache layout LBNHC"}


@dataclasses.dataclass
class Restarted:
    """A sidecar, the engine started after the first one was killed, and the answers of the first one."""

    mode: Mode
    directory: Path
    sidecar: sidecar.Sidecar
    engine: engine.Engine
    local: dict[str, dict[str, Any]]
    # The first engine's answer to `UNKEPT`.
    unkept: dict[str, Any]
    # The number of blocks filled by the first engine.
    stored: int

    @contextlib.contextmanager
    def hits(self, tokens: int) -> Iterator[None]:
        """The block takes exactly so many tokens from the sidecar, and their bytes."""
        hits, loaded = self.engine.metrics()["external_hits"], self._loaded_bytes()
        yield
        expected = tokens // engine.BLOCK_TOKENS * BLOCK_BYTES
        self.sidecar.wait_metric("pillion_loaded_bytes_total", loaded + expected)
        assert self.engine.metrics()["external_hits"] - hits == tokens
        assert self._loaded_bytes() - loaded == expected

    def _loaded_bytes(self) -> int:
        return self.sidecar.metrics()["pillion_loaded_bytes_total"]

    def forget_locally(self) -> None:
        """Empties the engine's own prefix cache, once its last step has freed its blocks."""
        self.sidecar.wait_for(self.engine.reset_prefix_cache, "reset of the engine's own cache")

    def ask_from_sidecar(self, tokens: list[int]) -> dict[str, Any]:
        """One prompt alone, none of it in the engine's own cache."""
        self.forget_locally()
        with self.hits(prompts.hit_tokens(len(tokens))):
            return ask(self.engine, tokens)


def ask(running: engine.Engine, tokens: list[int]) -> dict[str, Any]:
    """One prompt alone: batches of one shape give comparable bits."""
    return running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]


def _first_life(
    options: engine.Options, keeper: sidecar.Sidecar, log: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, Any], int]:
    """An engine that is killed once all blocks are saved: its local hits, its answer to `UNKEPT`, the number of blocks
    filled."""
    with engine.running(options, log) as first:
        unkept = ask(first, UNKEPT)
        cold, local = ({name: ask(first, tokens) for name, tokens in PROMPTS.items()} for _ in range(2))
        assert first.metrics()["external_hits"] == 0
        asked = [(tokens, answers[name]["tokens"]) for answers in (cold, local) for name, tokens in PROMPTS.items()]
        stored = prompts.different_blocks(asked)
        keeper.wait_metric("pillion_saved_bytes_total", stored * BLOCK_BYTES)
        first.kill()
    for name, tokens in PROMPTS.items():
        assert local[name]["cached_tokens"] == prompts.hit_tokens(len(tokens))
    return local, unkept, stored


@pytest.fixture(scope="class", params=MODES, ids=str)
def restarted(request: pytest.FixtureRequest, gpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    """The second engine of a mode."""
    mode = request.param
    if torch.cuda.device_count() < mode.tensor_parallel:
        pytest.skip(f"SKIPPED: this machine has {torch.cuda.device_count()} GPU, this needs {mode.tensor_parallel}")
    directory = tmp_path_factory.mktemp(str(mode))
    with sidecar.serving(directory, DRAM, gpu=mode.copy == "sidecar") as keeper:
        options = gpu_options.options(gpu_model, mode, keeper.socket)
        local, unkept, stored = _first_life(options, keeper, directory / "first.log")
        with engine.running(options, directory / "second.log") as second:
            yield Restarted(mode, directory, keeper, second, local, unkept, stored)
            second.exit()


@pytest.mark.supports("full", "loads", "async-scheduling", "graphs", "engine-copies", "ranks")
class TestRestart:
    """The tests of one mode, in this order; each begins with an empty local cache."""

    def test_the_layout_is_the_one_asked_for(self, restarted: Restarted) -> None:
        """`auto` makes a block one run; FlashAttention's own choice does not."""
        log = (restarted.directory / "second.log").read_text()
        assert LAYOUTS[restarted.mode.layout] in log
        assert ("in 1 runs" in log) == (restarted.mode.layout == "auto")
        assert "STAYS OUT" not in log
        # The sidecar has no GPU, and the engine left the choice open.
        assert ("the engine copies its blocks itself" in log) == (restarted.mode.copy == "auto")

    def test_each_block_saved_once(self, restarted: Restarted) -> None:
        """Prefill and decode blocks alike; the local hits of the first engine saved nothing twice."""
        assert restarted.sidecar.metrics()["pillion_saved_bytes_total"] == restarted.stored * BLOCK_BYTES

    def test_both_engines_round_alike(self, restarted: Restarted) -> None:
        """Compares answers without any KV of the first engine. If compiled code rounds otherwise, the next tests compare the
        rounding of two processes."""
        again = ask(restarted.engine, UNKEPT)
        assert again["tokens"] == restarted.unkept["tokens"]
        assert again["logprobs"] == restarted.unkept["logprobs"]

    @pytest.mark.parametrize("name", list(PROMPTS))
    def test_warm_equals_local_hit(self, restarted: Restarted, name: str) -> None:
        """A reloaded prefix gives the same tokens and logprobs, bit for bit, several times: as in this engine's later local
        hit, and in the first engine.

        These steps may wait cut by cut: the engine's first steps have proven the hooks.
        """
        for _ in range(3):
            warm = restarted.ask_from_sidecar(PROMPTS[name])
            for answer in (ask(restarted.engine, PROMPTS[name]), restarted.local[name]):
                assert warm["tokens"] == answer["tokens"]
                assert warm["logprobs"] == answer["logprobs"]

    def test_requests_together(self, restarted: Restarted) -> None:
        """Several loads in one step, beside decoding requests: all are answered, and every block is loaded."""
        restarted.forget_locally()
        with restarted.hits(sum(prompts.hit_tokens(len(tokens)) for tokens in PROMPTS.values())):
            answers = restarted.engine.generate(list(PROMPTS.values()), max_tokens=OUTPUT_TOKENS, space_steps=2)
        assert [answer["finish_reason"] for answer in answers] == ["length"] * len(PROMPTS)

    def test_damage_is_noticed(self, restarted: Restarted) -> None:
        """The negative control: one wrong K value in every loaded block changes the answer."""
        with pool_file.damaged(restarted.sidecar.pool) as blocks:
            assert blocks >= restarted.stored
            damaged = restarted.ask_from_sidecar(SINGLE)
        assert damaged["logprobs"] != restarted.local["single"]["logprobs"]
        mended = restarted.ask_from_sidecar(SINGLE)
        assert mended["logprobs"] == restarted.local["single"]["logprobs"]

    def test_every_load_ended_well(self, restarted: Restarted) -> None:
        """No load failed, was rescued or taken back. Last."""
        assert restarted.sidecar.metrics()["pillion_load_failures_total"] == 0
        for name in ("first.log", "second.log"):
            log = (restarted.directory / name).read_text()
            assert "could not be loaded" not in log
            assert "did not call the hooks" not in log
