"""Beside another connector (`MultiConnector`), as P and D of vLLM's own recipe are.

P keeps its prompts. D gets them by the other connector, and keeps none.

With two GPUs D has its own. Without NIXL vLLM's ExampleConnector hands prompts over, by files.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import gpu_options
import pytest
import torch
from gpu_options import Mode

from testkit import answers, beside, engine, prompts, sidecar
from testkit.transfer import TO_COMPUTE

MODE = Mode(1, graphs=False)
# ExampleConnector never finds a prompt of whole blocks and one token.
PROMPTS = [prompts.prompt(tokens, seed=tokens) for tokens in (700, 64 * engine.BLOCK_TOKENS + 2, 2990)]
HITS = sum(prompts.hit_tokens(len(tokens)) for tokens in PROMPTS)
# Several blocks of an answer.
OUTPUT_TOKENS = 100
OWN = prompts.prompt(500, seed=5)
ANSWER_WATCHDOG_S = 120


def options(model: Path, keeper: sidecar.Sidecar, other: dict[str, Any], card: int) -> engine.Options:
    """An engine on one of the GPUs."""
    several = beside.options(gpu_options.options(model, MODE, keeper.socket), other)
    return dataclasses.replace(several, prefix=("env", f"CUDA_VISIBLE_DEVICES={card % torch.cuda.device_count()}"))


def ask(running: engine.Engine, tokens: list[int], max_tokens: int, transfer: dict[str, Any] | None) -> dict[str, Any]:
    """The answer to one request alone, with a router's parameters."""
    running.ask(0, tokens, max_tokens, logprobs=5, transfer=transfer)
    [answer] = running.answered(ANSWER_WATCHDOG_S)
    return answer


@pytest.mark.supports("beside-others")
@pytest.mark.parametrize("other", ["nixl", "example"])
def test_p_keeps_its_prompts_and_d_keeps_none_of_them(other: str, gpu_model: Path, tmp_path: Path) -> None:
    """D answers as P does. After a restart P's blocks are hits, and right."""
    if other == "nixl" and not beside.has_nixl():
        pytest.skip("SKIPPED: nixl is not installed")
    handed_over = beside.nixl() if other == "nixl" else beside.example(tmp_path / "files")
    with contextlib.ExitStack() as stack:
        keepers = {}
        for name in "pd":
            (tmp_path / name).mkdir()
            keepers[name] = stack.enter_context(sidecar.serving(tmp_path / name, "1GiB"))
        p, d = (
            stack.enter_context(
                engine.running(
                    options(gpu_model, keepers[name], handed_over, card), tmp_path / f"{name}.log", until_served=False
                )
            )
            for card, name in enumerate("pd")
        )
        beside.wait_served(p, keepers["p"])
        beside.wait_served(d, keepers["d"])
        computed = [ask(p, tokens, 1, TO_COMPUTE if other == "nixl" else None) for tokens in PROMPTS]
        right = [ask(p, tokens, OUTPUT_TOKENS, None) for tokens in PROMPTS]
        before = d.metrics()["external_hits"]
        for tokens, answer, wanted in zip(PROMPTS, computed, right, strict=True):
            # D's first step has other tokens than P's, and rounds otherwise.
            assert answers.alike(ask(d, tokens, OUTPUT_TOKENS, answer["transfer"]), wanted)
        assert d.metrics()["external_hits"] - before >= HITS, "the other connector has brought the prompts"
        keepers["p"].wait_metric("pillion_saved_blocks_total", HITS // engine.BLOCK_TOKENS)
        # D keeps its own prompt. Blocks of the other prompts would have been saved before.
        d.generate([OWN], max_tokens=1)
        own = prompts.stored_blocks(len(OWN), 1)
        keepers["d"].wait_metric("pillion_saved_blocks_total", own)
        assert keepers["d"].metrics()["pillion_saved_blocks_total"] == own
        p.kill()
        # NixlConnector chooses the layout of blocks, and ExampleConnector would bring the prompts before Pillion is asked.
        alone = gpu_options.options(gpu_model, MODE, keepers["p"].socket)
        restarted = options(gpu_model, keepers["p"], handed_over, 0) if other == "nixl" else alone
        with engine.running(restarted, tmp_path / "again.log", until_served=False) as again:
            beside.wait_served(again, keepers["p"])
            warm = [ask(again, tokens, OUTPUT_TOKENS, None)["tokens"] for tokens in PROMPTS]
            assert again.metrics()["external_hits"] == HITS
            assert warm == [answer["tokens"] for answer in right]
            again.exit()
        assert keepers["p"].metrics()["pillion_load_failures_total"] == 0
    for log in ("p.log", "d.log", "again.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()
