"""A sidecar is killed; the next one serves the blocks of the same pool file, to an engine that kept running and to a new
one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from testkit import engine, prompts, sidecar

TOKENS = prompts.prompt(700, seed=11)
OUTPUT_TOKENS = 8
STORED = prompts.stored_blocks(len(TOKENS), OUTPUT_TOKENS)
HIT = prompts.hit_tokens(len(TOKENS))


def _saved_and_killed(keeper: sidecar.Sidecar, running: engine.Engine) -> list[int]:
    """Asks once, waits until every block is kept, and kills the sidecar; the answer."""
    answer = running.generate([TOKENS], max_tokens=OUTPUT_TOKENS)[0]["tokens"]
    keeper.wait_metric("pillion_saved_blocks_total", STORED)
    keeper.wait_summed()
    keeper.kill()
    return list(answer)


def _restarted(directory: Path, pool: Path) -> sidecar.Sidecar:
    restarted = sidecar.Sidecar(directory, pool=pool)
    restarted.wait_ready()
    restarted.wait_metric("pillion_adopted_blocks_total", STORED)
    assert restarted.metrics()["pillion_adopted_blocks_total"] == STORED
    return restarted


@pytest.mark.supports("pool-file")
def test_adopted_blocks_answer(options: engine.Options, plain: engine.Engine, tmp_path: Path) -> None:
    """Blocks kept by an earlier sidecar give the same tokens as vLLM alone."""
    assert plain.reset_prefix_cache()
    right = plain.generate([TOKENS], max_tokens=OUTPUT_TOKENS)[0]["tokens"]
    first = sidecar.Sidecar(tmp_path)
    living = [first]
    try:
        first.wait_ready()
        connected = dataclasses.replace(options, socket=first.socket, batched_tokens=prompts.STEP_TOKENS)
        with engine.running(connected, tmp_path / "stays.log") as stays:
            assert _saved_and_killed(first, stays) == right
            second = _restarted(tmp_path, first.pool)
            living.append(second)
            # The scheduler and the rank.
            second.wait_metric("pillion_sessions", 2)
            stays.wait_served()
            assert stays.reset_prefix_cache()
            warm = stays.generate([TOKENS], max_tokens=OUTPUT_TOKENS)[0]["tokens"]
            assert warm == right
            assert stays.metrics()["external_hits"] == HIT
            assert second.metrics()["pillion_query_hit_blocks_total"] > 0
            stays.exit()
        second.kill()
        third = _restarted(tmp_path, first.pool)
        living.append(third)
        with engine.running(connected, tmp_path / "comes.log") as comes:
            warm = comes.generate([TOKENS], max_tokens=OUTPUT_TOKENS)[0]["tokens"]
            assert warm == right
            assert comes.metrics()["external_hits"] == HIT
            comes.exit()
        third.wait_metric("pillion_loaded_blocks_total", HIT // engine.BLOCK_TOKENS)
        third.terminate()
    finally:
        for process in living:
            process.kill()
        first.pool.unlink(missing_ok=True)
