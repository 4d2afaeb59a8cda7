"""MLA on a GPU, as DeepSeek V3 has it, with few layers: the latents outlive the engine. Those of all ranks are kept once.

The first engine is killed once its blocks are kept. The second answers from them, bit for bit as the first did from its own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gpu_options
import pytest
import torch
from gpu_options import Mode

from testkit import engine, pool_file, prompts, random_model, sidecar

# A block size for all of vLLM's MLA backends.
BLOCK_TOKENS = 64
BLOCK_BYTES = BLOCK_TOKENS * random_model.latent_bytes_per_token(random_model.DEEPSEEK_V3)
OUTPUT_TOKENS = 8
PROMPTS = [prompts.prompt(tokens, seed=tokens) for tokens in (700, 32 * BLOCK_TOKENS + 1, 2990)]
HITS = [(len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS]
# vLLM's own choice, also with graphs and the engine's own copies; a backend for every GPU; and two ranks.
CASES = [
    (Mode(1, graphs=False), None),
    (Mode(2, graphs=True, copy="engine"), None),
    (Mode(1, graphs=False), "TRITON_MLA"),
    (Mode(1, graphs=False, tensor_parallel=2), None),
    (Mode(1, graphs=False, tensor_parallel=2), "TRITON_MLA"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights."""
    return random_model.write(tmp_path_factory.mktemp("model"), random_model.DEEPSEEK_V3)


def ask(running: engine.Engine) -> list[dict[str, Any]]:
    """Each prompt alone."""
    return [running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0] for tokens in PROMPTS]


def bits(answers: list[dict[str, Any]]) -> list[Any]:
    """The compared parts of answers."""
    return [(answer["tokens"], answer["logprobs"], answer["cached_tokens"]) for answer in answers]


@pytest.mark.supports("latents")
@pytest.mark.parametrize(("mode", "backend"), CASES, ids=lambda case: str(case or "default"))
def test_latents(mode: Mode, backend: str | None, model: Path, tmp_path: Path) -> None:
    """Over a restart; wrong bytes in every kept block show."""
    if torch.cuda.device_count() < mode.tensor_parallel:
        pytest.skip(f"SKIPPED: this machine has {torch.cuda.device_count()} GPU, this needs {mode.tensor_parallel}")
    with sidecar.serving(tmp_path, "1GiB", gpu=mode.copy == "sidecar") as keeper:
        options = gpu_options.options(model, mode, keeper.socket)
        more: dict[str, Any] = {"block_size": BLOCK_TOKENS} | ({"attention_backend": backend} if backend else {})
        options = dataclasses.replace(options, arguments=options.arguments | more)
        with engine.running(options, tmp_path / "first.log") as first:
            cold, local = ask(first), ask(first)
            assert [answer["cached_tokens"] for answer in local] == HITS and first.metrics()["external_hits"] == 0
            asked = zip(PROMPTS * 2, cold + local, strict=True)
            stored = prompts.different_blocks([(tokens, answer["tokens"]) for tokens, answer in asked], BLOCK_TOKENS)
            # One rank saves: both hold equal latents.
            keeper.wait_metric("pillion_saved_bytes_total", stored * BLOCK_BYTES)
            assert keeper.metrics()["pillion_saved_bytes_total"] == stored * BLOCK_BYTES
            first.kill()
        with engine.running(options, tmp_path / "second.log") as second:
            for loaded in range(1, 3):
                warm = ask(second)
                assert second.metrics()["external_hits"] == loaded * sum(HITS)
                assert bits(warm) == bits(local)
                keeper.wait_for(second.reset_prefix_cache, "reset of the engine's own cache")
            with pool_file.damaged(keeper.pool):
                damaged = ask(second)
            assert any(wrong["logprobs"] != right["logprobs"] for wrong, right in zip(damaged, local, strict=True))
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0
    for log in ("first.log", "second.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()
