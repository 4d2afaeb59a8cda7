"""Checks of right KV, short and long: an engine with ever other batches and steps is never reported to differ.

`CHECKS=2500` asks for longer.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Literal

import pytest

from testkit import checking, engine, model, prompts, sidecar

# Comparisons of each engine.
CHECKS = int(os.environ.get("CHECKS", "60"))
LENGTHS = (80, 200, 333, 500, 900)
PROMPTS = [prompts.prompt(LENGTHS[seed % len(LENGTHS)], 600 + seed) for seed in range(20)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_right_kv_is_never_said_to_differ(dtype: Literal["bfloat16", "float32"], ranks: int, tmp_path: Path) -> None:
    """One engine keeps, another one computes its hits or their ends: alone or together, whole or in chunks of 256 tokens."""
    chance = random.Random(ranks)
    with sidecar.serving(tmp_path) as keeper:
        options = engine.Options(
            model.write(tmp_path / "model"), keeper.socket, dtype=dtype, tensor_parallel=ranks, extra=checking.LONG
        )
        with engine.running(options, tmp_path / "keeps.log") as keeps:
            keeps.generate(PROMPTS, max_tokens=4)
            blocks = sum(prompts.stored_blocks(len(prompt), 0) for prompt in PROMPTS)
            keeper.wait_metric("pillion_saved_blocks_total", blocks)
            keeps.exit()
        asks_otherwise = dict(vars(options), batched_tokens=256, max_requests=8)
        with engine.running(engine.Options(**asks_otherwise), tmp_path / "asks.log") as asks:
            while keeper.metrics().get("pillion_checks_total", 0) < CHECKS:
                checking.ask_all(asks, keeper, PROMPTS, chance)
            asks.exit()
        metrics = keeper.metrics()
        assert metrics["pillion_checks_differing_total"] == 0
        part = checking.largest(keeper)
        # Some processors compute bfloat16 alike for every cut of a prompt.
        assert 0 <= part < 1 and (part > 0 or dtype == "bfloat16")
        print(f"{dtype}, {ranks} ranks: {metrics['pillion_checks_total']} checks, at most {part} of the limit")
