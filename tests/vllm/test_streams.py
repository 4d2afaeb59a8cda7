"""A prompt of three times the pool comes from a disk: its blocks go on to the engine in parts, and leave the pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    RELEASES,
    RESET,
    SETTLE,
    Act,
    Stage,
    block_count,
    expect_right,
    generate,
    hit_tokens,
    metrics,
    peers,
    pillion,
    prompt_of,
    right_answers,
    send,
    wait_saved,
)

from testkit import sidecar

# Both releases and both schedulers load beside the steps in the same way.
pytestmark = [
    pytest.mark.parametrize("stage", ["async-scheduler"], indirect=True),
    pytest.mark.parametrize("release", [RELEASES[-1]], indirect=True),
]

PAGE = 4096
# One segment of 2 MiB, and the header.
DRAM = "4MiB"
POOL_BLOCKS = (2 << 20) // BLOCK_BYTES
PROMPT = prompt_of(3 * POOL_BLOCKS * BLOCK_TOKENS + 5, 71)
STORED = block_count([PROMPT], 1)
HIT = hit_tokens(len(PROMPT))
# The engine learns its rate by the steps of a prompt. The sidecar looks at it each 100 ms.
LEARN: list[Act] = [{"do": "slow_steps", "with": {"seconds": 0.05}}, generate([prompt_of(3000, 72)], 1), SETTLE, RESET]
ENGINE = {"max_model_len": 4096, "blocks": 200, "batched_tokens": 256}
# Steps without this delay are shorter than the prompt's parts.
NO_DELAY: Act = {"do": "slow_steps", "with": {"seconds": 0}}
# The prompt comes within some such steps.
KILLED_AT = [1, 2, 3, 4] * 3
# However fast this engine computes, it prefers to load.
EXTRA = {"pillion.copy": "sidecar", "pillion.load_preference": 100}


class Disk:
    """The folder of a disk with the prompt's blocks, and its pages with the second half of them."""

    def __init__(self, stage: Stage) -> None:
        self.folder = stage.directory / "disk"
        self.folder.mkdir()
        with sidecar.serving(stage.directory, anonymous=True, ssd=(f"{self.folder}:64MiB:create",)) as keeper:
            connector = pillion(keeper.socket, "async", **EXTRA)
            kept = 0
            for prompt in (PROMPT[: len(PROMPT) // 2], PROMPT):
                before, blocks = self._pages(), block_count([prompt], 1)
                acts = [generate([prompt], 1), wait_saved(blocks - kept)]
                stage.play(acts, connector, metrics=metrics(keeper), **ENGINE)
                keeper.wait_metric("pillion_ssd_written_blocks_total", blocks)
                kept = blocks
        self._late = [place for place, page in self._pages().items() if before.get(place) != page]

    def _pages(self) -> dict[tuple[Path, int], bytes]:
        files = ((path, path.read_bytes()) for path in self.folder.rglob("*") if path.is_file())
        return {(path, at): content[at : at + PAGE] for path, content in files for at in range(0, len(content), PAGE)}

    def damage(self) -> None:
        """Changes a byte in each page with a part of the second half."""
        for path, at in self._late:
            with path.open("r+b") as file:
                file.seek(at + PAGE // 2)
                byte = file.read(1)[0]
                file.seek(at + PAGE // 2)
                file.write(bytes([byte ^ 0xFF]))
        os.sync()


@contextlib.contextmanager
def small(stage: Stage, disk: Disk) -> Iterator[sidecar.Sidecar]:
    """A sidecar over the disk, with memory for a third of the prompt."""
    with sidecar.serving(stage.directory, DRAM, anonymous=True, ssd=(f"{disk.folder}:64MiB:create",)) as keeper:
        keeper.wait_metric("pillion_ssd_recovered_blocks_total", STORED)
        yield keeper


def test_a_prompt_of_three_pools_comes_from_a_disk(stage: Stage) -> None:
    """Every position read by attention is right, and no load fails."""
    with small(stage, Disk(stage)) as keeper:
        acts = [*LEARN, generate([PROMPT], 1), RESET, generate([PROMPT], 1)]
        (results,) = stage.play(acts, pillion(keeper.socket, "async", **EXTRA), metrics=metrics(keeper), **ENGINE)
        for result in (results[-3], results[-1]):
            expect_right(result, right_answers([PROMPT], 1), "a prompt of three pools")
            assert (result["hits"], result["failed_blocks"]) == (HIT, 0)
        counts = keeper.metrics()
        assert counts["pillion_query_streamed_answers_total"] == 2
        assert counts["pillion_loaded_bytes_total"] == 2 * (HIT // BLOCK_TOKENS) * BLOCK_BYTES
        assert (counts["pillion_load_failures_total"], counts["pillion_leases"]) == (0, 0)


def test_a_disk_that_fails_half_way_leaves_the_rest_to_the_engine(stage: Stage) -> None:
    """The engine uses the first half, computes the rest, and reads no wrong byte."""
    disk = Disk(stage)
    with small(stage, disk) as keeper:
        disk.damage()
        acts = [*LEARN, generate([PROMPT], 1)]
        (results,) = stage.play(acts, pillion(keeper.socket, "async", **EXTRA), metrics=metrics(keeper), **ENGINE)
        expect_right(results[-1], right_answers([PROMPT], 1), "a disk that fails half way")
        counts = keeper.metrics()
        assert counts["pillion_query_streamed_answers_total"] == 1
        # Whole parts came, up to the middle.
        loaded = counts["pillion_loaded_bytes_total"] // BLOCK_BYTES
        assert POOL_BLOCKS < loaded <= STORED // 2
        assert counts["pillion_load_failures_total"] > 0 and results[-1]["failed_blocks"] == HIT // BLOCK_TOKENS - loaded
        assert counts["pillion_leases"] == 0


@contextlib.contextmanager
def beside_a_peer(stage: Stage) -> Iterator[tuple[sidecar.Sidecar, sidecar.Sidecar]]:
    """A sidecar with memory for a third of the prompt, behind its peer that has all of it."""
    here, there = peers()
    (stage.directory / "there").mkdir(exist_ok=True)
    with sidecar.serving(stage.directory / "there", anonymous=True, more=there) as peer:
        connector = pillion(peer.socket, "async", **EXTRA)
        acts = [generate([PROMPT], 1), wait_saved(STORED)]
        stage.play(acts, connector, metrics=metrics(peer), **ENGINE)
        with sidecar.serving(stage.directory, DRAM, anonymous=True, more=here) as keeper:
            keeper.wait_metric("pillion_mesh_peers", 1)
            keeper.wait_metric("pillion_mesh_peer_keys", STORED)
            yield keeper, peer


def test_a_prompt_of_three_pools_comes_from_a_peer(stage: Stage) -> None:
    """Every position read by attention is right, and no load fails."""
    with beside_a_peer(stage) as (keeper, _):
        acts = [*LEARN, generate([PROMPT], 1)]
        (results,) = stage.play(acts, pillion(keeper.socket, "async", **EXTRA), metrics=metrics(keeper), **ENGINE)
        expect_right(results[-1], right_answers([PROMPT], 1), "a prompt of three pools at a peer")
        assert (results[-1]["hits"], results[-1]["failed_blocks"]) == (HIT, 0)
        assert keeper.metrics()["pillion_query_streamed_answers_total"] == 1


@pytest.mark.parametrize("killed", ["sidecar", "peer"])
def test_a_kill_within_the_prompt_costs_the_rest_of_it(stage: Stage, killed: str) -> None:
    """The engine computes what did not come. More moments are tried, until parts have come and others have not."""
    disk = Disk(stage) if killed == "sidecar" else None
    for step in KILLED_AT:
        with small(stage, disk) if disk else beside_a_peer(stage) as which:
            keeper, victim = (which, which) if isinstance(which, sidecar.Sidecar) else which
            acts = [*LEARN, NO_DELAY, generate([PROMPT], 1, at={str(step): [send(victim, "SIGKILL")]})]
            (results,) = stage.play(acts, pillion(keeper.socket, "async", **EXTRA), metrics=metrics(keeper), **ENGINE)
            expect_right(results[-1], right_answers([PROMPT], 1), f"killed before step {step}")
            victim.kill()
        if 0 < results[-1]["failed_blocks"] < HIT // BLOCK_TOKENS:
            return
    pytest.fail("nothing was killed within the prompt")
