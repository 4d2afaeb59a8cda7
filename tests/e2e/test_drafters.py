"""Drafters with KV in the model's cache group: it is kept with the model's, over a restart.

With EAGLE vLLM takes each hit of its own cache to be a block shorter, which Pillion does not load again for each request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit import drafter, engine, model, prompts, sidecar

PROMPT = prompts.prompt(700, seed=31)
WHOLE = prompts.hit_tokens(len(PROMPT))
OUTPUT_TOKENS = 8
# Tokens of vLLM's own hits.
LOCAL = {"draft_model": WHOLE, "eagle": WHOLE - engine.BLOCK_TOKENS}


def ask(running: engine.Engine) -> tuple[dict[str, Any], int]:
    """The answer to the prompt, and the tokens of it from the sidecar."""
    before = running.metrics()["external_hits"]
    (answer,) = running.generate([PROMPT], max_tokens=OUTPUT_TOKENS)
    return answer, running.metrics()["external_hits"] - before


@pytest.mark.supports("eagle")
@pytest.mark.parametrize("method", LOCAL)
def test_a_drafter_s_kv_outlives_the_engine(method: str, tmp_path: Path) -> None:
    """In float32, so that steps of several sizes choose the same tokens."""
    speculative = drafter.write(tmp_path / "drafter", method)
    target = model.write(tmp_path / "model", drafter.TARGET)
    with sidecar.serving(tmp_path) as keeper:
        options = engine.Options(
            target, keeper.socket, dtype="float32", batched_tokens=256, arguments={"speculative_config": speculative}
        )
        with engine.running(options, tmp_path / "first.log") as first:
            (cold, _), (local, loaded) = ask(first), ask(first)
            assert (local["tokens"], local["cached_tokens"], loaded) == (cold["tokens"], LOCAL[method], 0)
            keeper.wait_metric("pillion_saved_blocks_total", WHOLE // engine.BLOCK_TOKENS)
            first.kill()
        with engine.running(options, tmp_path / "second.log") as second:
            warm, loaded = ask(second)
            assert (warm["tokens"], loaded) == (cold["tokens"], WHOLE)
            again, loaded = ask(second)
            assert (again["tokens"], again["cached_tokens"], loaded) == (cold["tokens"], LOCAL[method], 0)
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0
    for log in ("first.log", "second.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()
