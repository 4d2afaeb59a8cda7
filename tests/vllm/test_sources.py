"""Sources of hits: Pillion's counts of tokens are vLLM's, also for requests asked again until there is room for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage import RESET, Stage, block_count, generate, hit_tokens, metrics, peers, pillion, prompt_of, right_answers, wait_saved

from testkit import sidecar

# Both schedulers of vLLM share the code for counts of hits.
pytestmark = pytest.mark.parametrize("stage", ["async-scheduler"], indirect=True)

PROMPTS = [prompt_of(tokens, seed) for seed, tokens in enumerate((700, 333, 470, 290))]
STORED = block_count(PROMPTS, 1)
HIT = sum(hit_tokens(len(prompt)) for prompt in PROMPTS)
ASK = generate(PROMPTS, 1)
# Blocks of 32 tokens: one prompt after the other fits.
BLOCKS = 30


@contextlib.contextmanager
def kept(stage: Stage, **more: Any) -> Iterator[sidecar.Sidecar]:
    """A sidecar with every block of the prompts saved."""
    with sidecar.serving(stage.directory, anonymous=True, **more) as keeper:
        stage.play([ASK, wait_saved(STORED)], pillion(keeper.socket, "auto"), metrics=metrics(keeper))
        yield keeper


def expect_found(stage: Stage, started: Callable[[], contextlib.AbstractContextManager[sidecar.Sidecar]], first: str) -> None:
    """The prompts are found at `first`, and then in memory, by both counts. If `first` was too slow for a query, which waits
    for 2 s, another sidecar is tried."""
    for _ in range(2):
        with started() as keeper:
            (results,) = stage.play([ASK, RESET, ASK], pillion(keeper.socket, "auto"), metrics=metrics(keeper), blocks=BLOCKS)
            was_in_time = keeper.metrics()["pillion_query_waits_timed_out_total"] == 0
        if was_in_time:
            break
    for result, source in ((results[0], first), (results[2], "host")):
        assert result["value"] == right_answers(PROMPTS, 1) and result["wrong"] == 0
        assert (result["found"], result["told"]) == ({source: HIT}, {source: HIT})


def test_hits_of_a_disk(stage: Stage) -> None:
    """A sidecar finds the blocks written by the one before; blocks read from the disk are in memory for the next request."""
    disk = stage.directory / "disk"
    disk.mkdir()
    with kept(stage, ssd=(f"{disk}:64MiB:create",)) as keeper:
        keeper.wait_metric("pillion_ssd_written_blocks_total", STORED)

    @contextlib.contextmanager
    def started() -> Iterator[sidecar.Sidecar]:
        with sidecar.serving(stage.directory, anonymous=True, ssd=(f"{disk}:64MiB:create",)) as keeper:
            keeper.wait_metric("pillion_ssd_recovered_blocks_total", STORED)
            yield keeper

    expect_found(stage, started, "disk")


def test_hits_of_a_peer(stage: Stage) -> None:
    """The same for another pod's sidecar."""
    here, there = peers()
    (stage.directory / "there").mkdir()

    @contextlib.contextmanager
    def started() -> Iterator[sidecar.Sidecar]:
        with sidecar.serving(stage.directory / "there", anonymous=True, more=there) as keeper:
            keeper.wait_metric("pillion_mesh_peers", 1)
            keeper.wait_metric("pillion_mesh_peer_keys", STORED)
            yield keeper

    with kept(stage, more=here):
        expect_found(stage, started, "p2p")
