"""A model with windows, whose blocks vLLM keeps whole where its hybrid manager is off: what a restarted engine loads is right.

Answers are compared with the first engine's own, logprobs bit for bit with those upon a local hit of the same length.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from testkit import engine, model, pool_file, prompts, sidecar

# Within the window of 64 tokens, a hit that ends in it, and far beyond it.
PROMPTS = [prompts.prompt(tokens, seed=tokens) for tokens in (40, 100, 700)]
OUTPUT_TOKENS = 8
HITS = [prompts.hit_tokens(len(tokens)) for tokens in PROMPTS]


def _ask(running: engine.Engine) -> list[dict[str, Any]]:
    """Each prompt alone: batches of one shape give comparable bits."""
    return [running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0] for tokens in PROMPTS]


def _all(answers: list[dict[str, Any]], name: str) -> list[Any]:
    return [answer[name] for answer in answers]


def test_a_restarted_engine_with_windows(options: engine.Options, tmp_path: Path) -> None:
    """Loads all of it, right to the bit; and the negative control: a wrong key in every block shows."""
    shape = model.write(tmp_path / "windows", model.TINY_WINDOWS)
    arguments = {"disable_hybrid_kv_cache_manager": True}
    stored = sum(prompts.stored_blocks(len(tokens), OUTPUT_TOKENS) for tokens in PROMPTS)
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, model=shape, socket=keeper.socket, arguments=arguments)
        with engine.running(connected, tmp_path / "first.log") as first:
            cold, local = _ask(first), _ask(first)
            assert _all(local, "cached_tokens") == HITS and first.metrics()["external_hits"] == 0
            keeper.wait_metric("pillion_saved_bytes_total", stored * prompts.BLOCK_BYTES)
            first.kill()
        with engine.running(connected, tmp_path / "second.log") as second:
            warm = _ask(second)
            assert second.metrics()["external_hits"] == sum(HITS)
            assert _all(warm, "tokens") == _all(cold, "tokens")
            assert _all(warm, "logprobs") == _all(local, "logprobs")
            assert second.reset_prefix_cache()
            with pool_file.damaged(keeper.pool) as blocks:
                assert blocks >= stored
                damaged = _ask(second)
            assert second.metrics()["external_hits"] == 2 * sum(HITS)
            for wrong, right in zip(damaged, local, strict=True):
                assert wrong["logprobs"] != right["logprobs"]
            second.exit()
