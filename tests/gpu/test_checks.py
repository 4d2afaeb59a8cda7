"""Standing checks of right KV on a GPU, short and long: no engine is contradicted because it computes in other batches.

For each mode one engine keeps prompts. Two others ask for them in chunks of 256 tokens, one with short checks and one with long
ones. `CHECKS=1000` asks for longer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import gpu_options
import pytest
import torch
from gpu_options import Mode

from testkit import checking, engine, prompts, sidecar
from testkit.pool_file import damaged

# Comparisons of each engine.
CHECKS = int(os.environ.get("CHECKS", "60"))
MODES = [
    Mode(1, graphs=False),
    Mode(2, graphs=True),
    Mode(1, graphs=False, tensor_parallel=2),
    Mode(2, graphs=False, tensor_parallel=2),
]
FORMS = {"short": checking.SHORT, "long": checking.LONG}
LENGTHS = (200, 333, 500, 900, 1500)
PROMPTS = [prompts.prompt(LENGTHS[seed % len(LENGTHS)], 600 + seed) for seed in range(40)]
ANSWER_TOKENS = 4
BLOCKS = sum(prompts.stored_blocks(len(prompt), ANSWER_TOKENS) for prompt in PROMPTS)
# Prompts are kept by many steps: a contradiction removes all blocks of a step.
KEPT_BATCH, ASKED_BATCH = 2048, 256
# A key of the first head has as many.
DAMAGED_VALUES = gpu_options.SHAPE.head_dim
DRAM = "2GiB"


def counts(keeper: sidecar.Sidecar) -> list[int]:
    """Checks, then three numbers expected to stay 0: differing checks, removed blocks, barred engines."""
    metrics = keeper.metrics()
    names = ("checks_total", "checks_differing_total", "removed_blocks_total", "barred_engines")
    return [metrics[f"pillion_{name}"] for name in names]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_right_kv_is_never_said_to_differ(mode: Mode, gpu_model: Path, tmp_path: Path) -> None:
    """Nothing differs and nothing is removed. The negative control: damaged blocks are found by both forms."""
    if torch.cuda.device_count() < mode.tensor_parallel:
        pytest.skip(f"SKIPPED: this machine has {torch.cuda.device_count()} GPU, this needs {mode.tensor_parallel}")
    chance = random.Random(mode.tensor_parallel)
    with sidecar.serving(tmp_path, DRAM) as keeper, contextlib.ExitStack() as stack:
        options = gpu_options.options(gpu_model, mode, keeper.socket, batched_tokens=KEPT_BATCH)

        def begin(name: str, **more: Any) -> engine.Engine:
            extra = options.extra | FORMS.get(name, {})
            started = engine.Engine(dataclasses.replace(options, extra=extra, **more), tmp_path / f"{name}.log")
            stack.callback(started.kill)
            return started

        keeps = begin("keeps")
        asking = {form: begin(form, batched_tokens=ASKED_BATCH, max_requests=checking.BATCH_MAX) for form in FORMS}
        for running in (keeps, *asking.values()):
            running.wait_started().wait_served()
        keeps.generate(PROMPTS, max_tokens=ANSWER_TOKENS)
        keeper.wait_metric("pillion_saved_blocks_total", BLOCKS)
        keeps.exit()
        for form, running in asking.items():
            before, asked, whole = counts(keeper)[0], 0, 0
            while (checks := counts(keeper)[0] - before) < CHECKS:
                whole += checking.ask_all(running, keeper, PROMPTS, chance)
                asked += len(PROMPTS)
            print(f"{mode}, {form}: {checks} checks of {asked} hits, {whole} computed as a whole", flush=True)
            assert (whole > 0) == (form == "long")
            assert counts(keeper)[1:] == [0, 0, 0]
        part = checking.largest(keeper)
        print(f"{mode}: differences of at most {part} of the limit", flush=True)
        assert 0 < part < 1
        with damaged(keeper.pool, ranks=mode.tensor_parallel, values=DAMAGED_VALUES) as blocks:
            assert blocks >= BLOCKS
            for running in asking.values():
                differing = counts(keeper)[1]
                checking.ask_all(running, keeper, PROMPTS, chance)
                keeper.wait_metric("pillion_checks_differing_total", differing + 1)
        assert keeper.metrics()["pillion_removed_blocks_total"] > 0
