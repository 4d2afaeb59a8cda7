"""Copies are ordered against compute: thousands of steps, every loaded word compared.

`PILLION_TEST_NO_FENCES=1` stores the fences without waiting for the work: the first tests must fail then, and the last ones
prove it.
"""

from __future__ import annotations

import os
from pathlib import Path

import bare_engine
import bare_pair
import pytest
from bare_rank import Found

from testkit import sidecar

ROUNDS = int(os.environ.get("PILLION_TEST_ROUNDS", "2000"))
SEED = int(os.environ.get("PILLION_TEST_SEED", "1"))
FENCED = os.environ.get("PILLION_TEST_NO_FENCES") != "1"
CONTROL_ROUNDS = 300
# The kernels of the controls spin for some 25 ms before they write: every copy that does not wait has run by then.
HELD_CYCLES = (50_000_000, 50_000_000)
# The step of an engine that copies for itself: half a gigabyte of new blocks a second.
ENGINE_STEP_S = 0.006
# Less than the run saves, so it evicts; three times the blocks of prompts that may be asked again.
DRAM = "1GiB"


def run(
    directory: Path, block_outermost: bool, fenced: bool, rounds: int, copier: str = "sidecar"
) -> tuple[Found, dict[str, int]]:
    """One engine's run; with its own copies beside a sidecar without a GPU."""
    with sidecar.serving(directory, DRAM, gpu=copier == "sidecar") as keeper:
        step_s = ENGINE_STEP_S if copier == "engine" else 0.0
        spin_cycles = bare_engine.SPIN_CYCLES if fenced else HELD_CYCLES
        options = bare_engine.Options(
            keeper.socket, SEED, block_outermost, fenced, copier=copier, step_s=step_s, spin_cycles=spin_cycles
        )
        engine = bare_engine.Engine(options)
        try:
            found = engine.run(rounds)
        finally:
            engine.end()
        return found, keeper.metrics()


def hand_over(
    directory: Path, block_outermost: bool, fenced: bool, rounds: int
) -> tuple[Found, bare_pair.Reader, dict[str, int]]:
    """Prompts written by one engine and awaited by another, on one GPU."""
    spin_cycles = bare_engine.SPIN_CYCLES if fenced else HELD_CYCLES
    with sidecar.serving(directory, DRAM) as keeper:
        options = bare_engine.Options(keeper.socket, SEED, block_outermost, fenced, spin_cycles=spin_cycles)
        writer = bare_pair.Writer(options)
        reader = bare_pair.Reader(bare_engine.Options(keeper.socket, SEED + 1, block_outermost, part_blocks=2))
        try:
            for _ in range(rounds):
                writer.play(1)
                reader.wait_for(writer.promised)
                reader.play(1)
            while not reader.idle:
                writer.play(1)
                reader.play(1)
            found = reader.rest()
        finally:
            writer.end()
            reader.end()
        return found, reader, keeper.metrics()


@pytest.mark.parametrize("block_outermost", [True, False], ids=["one-run", "a-run-per-layer"])
def test_every_word_that_is_handed_over_is_right(tmp_path: Path, block_outermost: bool) -> None:
    """Both engines at once, in parts; the writer needs its blocks again right after its step."""
    found, reader, metrics = hand_over(tmp_path, block_outermost, FENCED, ROUNDS)
    lost = metrics["pillion_handover_lost_total"]
    print(
        f"{reader.asked} blocks asked, {reader.found_blocks} found, {reader.answered_early} early, {lost} lost: {found}",
        flush=True,
    )
    assert found.wrong_words == 0, f"seed {SEED}: wrong bytes, first in step {found.first_wrong_step}"
    assert found.loaded_async > reader.asked // 2 and reader.answered_early > ROUNDS // 20
    assert lost > 0, "no block was reused while it was handed over: nothing was tested"


@pytest.mark.parametrize("copier", ["sidecar", "engine"])
@pytest.mark.parametrize("block_outermost", [True, False], ids=["one-run", "a-run-per-layer"])
def test_every_loaded_word_is_right(tmp_path: Path, block_outermost: bool, copier: str) -> None:
    """Saves while blocks are overwritten, loads before and beside compute, whole and cut by cut."""
    found, metrics = run(tmp_path, block_outermost, FENCED, ROUNDS, copier)
    counters = {name: metrics[name] for name in metrics if name.startswith(("pillion_saves", "pillion_saved", "pillion_load"))}
    print(f"seed {SEED}, {ROUNDS} rounds: {found}\n{counters}", flush=True)
    assert found.wrong_words == 0, f"seed {SEED}: wrong bytes, first in step {found.first_wrong_step}"
    assert found.failed == 0
    assert min(found.loaded_sync, found.loaded_by_cuts, found.loaded_async) > ROUNDS // 20
    assert metrics["pillion_saves_lost_to_reuse_total"] > 0, "no block was reused while it was saved: nothing was tested"


def test_without_fences_it_would_fail(tmp_path: Path) -> None:
    """The negative control: sidecar and engine do not wait for the GPU."""
    found, _ = run(tmp_path, True, False, CONTROL_ROUNDS)
    print(f"without fences: {found}", flush=True)
    assert found.wrong_words > 0


def test_without_fences_a_hand_over_would_be_wrong(tmp_path: Path) -> None:
    """The negative control: blocks are copied and handed over before they are written."""
    found, _, _ = hand_over(tmp_path, True, False, CONTROL_ROUNDS)
    print(f"without fences: {found}", flush=True)
    assert found.wrong_words > 0
