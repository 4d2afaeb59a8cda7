"""KV with a scale for each token and head, under Triton attention: a restarted engine's very first request is a hit, and right.

vLLM sets the scales of all blocks to 1 when it first computes a layer. Its own start does so in all of these modes. The
connector has it done before the first load, so no start can overwrite loaded scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_options
import pytest
from gpu_options import Mode

from testkit import engine, prompts, sidecar

OUTPUT_TOKENS = 8
# The first is also the restarted engine's first prompt.
PROMPTS = [prompts.prompt(700, seed=11), prompts.prompt(64 * engine.BLOCK_TOKENS + 1, seed=12)]
CASES = [
    ("fp8_per_token_head", Mode(1, graphs=False, load="sync")),
    ("int8_per_token_head", Mode(1, graphs=False, load="sync")),
    ("int4_per_token_head", Mode(1, graphs=False, load="sync")),
    ("fp8_per_token_head", Mode(1, graphs=False, load="async", layout="none")),
    ("fp8_per_token_head", Mode(1, graphs=True)),
    ("fp8_per_token_head", Mode(2, graphs=False)),
    ("fp8_per_token_head", Mode(2, graphs=True)),
]


@dataclasses.dataclass
class Kept:
    """A sidecar with the blocks of a killed engine, and that engine's own local hits."""

    mode: Mode
    directory: Path
    sidecar: sidecar.Sidecar
    options: engine.Options
    local: list[dict[str, Any]]


def ask(running: engine.Engine, tokens: list[int]) -> dict[str, Any]:
    """One prompt alone."""
    return running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]


@pytest.fixture(scope="class", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def kept(request: pytest.FixtureRequest, gpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """The sidecar after the first engine."""
    quantization, mode = request.param
    directory = tmp_path_factory.mktemp("per-token-head")
    with sidecar.serving(directory, "1GiB") as keeper:
        options = gpu_options.options(gpu_model, mode, keeper.socket)
        quantized = {"kv_cache_dtype": quantization, "attention_backend": "TRITON_ATTN"}
        options = dataclasses.replace(options, arguments=options.arguments | quantized)
        with engine.running(options, directory / "first.log") as first:
            cold, local = ([ask(first, tokens) for tokens in PROMPTS] for _ in range(2))
            assert first.metrics()["external_hits"] == 0
            asked = [(tokens, answer["tokens"]) for tokens, answer in zip(PROMPTS * 2, cold + local, strict=True)]
            keeper.wait_metric("pillion_saved_blocks_total", prompts.different_blocks(asked))
            first.kill()
        assert "STAYS OUT" not in (directory / "first.log").read_text()
        yield Kept(mode, directory, keeper, options, local)


def ask_whole_hit(running: engine.Engine, tokens: list[int]) -> dict[str, Any]:
    """The answer to a prompt that is loaded from the sidecar alone."""
    before = running.metrics()["external_hits"]
    answer = ask(running, tokens)
    assert running.metrics()["external_hits"] - before == prompts.hit_tokens(len(tokens))
    return answer


@pytest.mark.supports("per-token-head")
class TestPerTokenHead:
    """The tests of one case, in this order: the control's answer may save blocks behind its wrong tokens."""

    def test_the_first_request_and_later_ones(self, kept: Kept) -> None:
        """Tokens and logprobs as by the first engine's local hits, bit for bit."""
        with engine.running(kept.options, kept.directory / "second.log") as second:
            for number in (0, 1, 0):
                answer, local = ask_whole_hit(second, PROMPTS[number]), kept.local[number]
                assert answer["tokens"] == local["tokens"]
                assert answer["logprobs"] == local["logprobs"]
                kept.sidecar.wait_for(second.reset_prefix_cache, "reset of the engine's own cache")
            second.exit()
