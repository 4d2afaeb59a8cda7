"""More KV than memory holds: evicted blocks come back from a disk, also to a sidecar that starts after a kill."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from testkit import engine, pool_file, prompts, sidecar

# 168 blocks.
DRAM = "8MiB"
PROMPTS = [prompts.prompt(700, seed=600 + number) for number in range(14)]
OUTPUT_TOKENS = 8
TOO_SLOW = ("pillion_query_waits_timed_out_total", "pillion_query_waits_slower_total")
PREFILL = "pillion_engine_prefill_tokens_per_second"
STORED = sum(prompts.stored_blocks(len(tokens), OUTPUT_TOKENS) for tokens in PROMPTS)
HIT = sum(prompts.hit_tokens(len(tokens)) for tokens in PROMPTS)


def _ask(running: engine.Engine, tokens: list[int]) -> dict[str, Any]:
    return running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]


def _pass(keeper: sidecar.Sidecar, running: engine.Engine, local: list[dict[str, Any]]) -> bool:
    """Asks all prompts again, with an empty engine cache: every block comes from outside, and each is the right one.

    If the disk was too slow for a query, all are asked once more. Returns true if the first time was the last.
    """
    was_in_time, answers, hits = _asked(keeper, running)
    if not was_in_time:
        _, answers, hits = _asked(keeper, running)
    for answer, right in zip(answers, local, strict=True):
        assert answer["tokens"] == right["tokens"]
        assert answer["logprobs"] == right["logprobs"]
    assert hits == HIT
    return was_in_time


def _asked(keeper: sidecar.Sidecar, running: engine.Engine) -> tuple[bool, list[dict[str, Any]], int]:
    """True if the disk was in time for every query, the answers, and the number of tokens from outside."""
    assert running.reset_prefix_cache()
    before, too_slow = running.metrics()["external_hits"], _too_slow(keeper)
    answers = [_ask(running, tokens) for tokens in PROMPTS]
    assert keeper.metrics()[PREFILL] > 0, "the engine says how fast it computes prompts"
    return _too_slow(keeper) == too_slow, answers, running.metrics()["external_hits"] - before


def _too_slow(keeper: sidecar.Sidecar) -> int:
    """Queries answered without blocks of the disk."""
    figures = keeper.metrics()
    return sum(figures[name] for name in TOO_SLOW)


def _started(directory: Path) -> sidecar.Sidecar:
    """A sidecar over the same disk as the one before, and a new pool."""
    disk = directory / "disk"
    disk.mkdir(exist_ok=True)
    started = sidecar.Sidecar(directory, dram=DRAM, ssd=(f"{disk}:64MiB:create",))
    started.wait_ready()
    return started


@pytest.mark.supports("ssd")
def test_what_memory_gave_up_comes_back(options: engine.Options, plain: engine.Engine, tmp_path: Path) -> None:
    """Same tokens as vLLM alone, same logprobs as its own cache, from a disk; then once more after a SIGKILL."""
    assert plain.reset_prefix_cache()
    right = [_ask(plain, tokens)["tokens"] for tokens in PROMPTS]
    first = _started(tmp_path)
    living = [first]
    try:
        connected = dataclasses.replace(options, socket=first.socket, batched_tokens=prompts.STEP_TOKENS)
        with engine.running(connected, tmp_path / "engine.log") as running:
            local, stored = [], 0
            for tokens, expected in zip(PROMPTS, right, strict=True):
                assert _ask(running, tokens)["tokens"] == expected
                local.append(_ask(running, tokens))
                assert local[-1]["tokens"] == expected
                # A slow disk would otherwise lack the blocks that memory evicts for the next prompts.
                stored += prompts.stored_blocks(len(tokens), OUTPUT_TOKENS)
                first.wait_metric("pillion_ssd_written_blocks_total", stored)
            assert first.metrics()["pillion_blocks"] < STORED * 2 // 3, "memory holds them all: this shows nothing"
            _pass(first, running, local)
            metrics = first.metrics()
            assert metrics["pillion_ssd_promoted_blocks_total"] > STORED // 3
            assert metrics["pillion_ssd_faults_total"] == 0
            came, waits = metrics["pillion_ssd_promoted_blocks_total"], metrics["pillion_query_waits_total"]
            print(f"ssd: {came} of {STORED} blocks came back, {waits} of {len(PROMPTS)} queries waited")

            first.kill()
            second = _started(tmp_path)
            living.append(second)
            second.wait_metric("pillion_ssd_recovered_blocks_total", STORED)
            assert second.metrics()["pillion_blocks"] == 0
            # The scheduler and the rank.
            second.wait_metric("pillion_sessions", 2)
            running.wait_served()
            if _pass(second, running, local):
                # Only the block at each answer's end was computed again.
                assert second.metrics()["pillion_saved_blocks_total"] <= len(PROMPTS)

            # The negative control: one wrong K value in every block from the disk changes the answer.
            assert running.reset_prefix_cache()
            with pool_file.damaged(second.pool) as blocks:
                assert blocks >= prompts.stored_blocks(len(PROMPTS[-1]), 0)
                damaged = _ask(running, PROMPTS[-1])
            assert damaged["logprobs"] != local[-1]["logprobs"]
            running.exit()
        second.terminate()
    finally:
        for process in living:
            process.kill()
            process.pool.unlink(missing_ok=True)
