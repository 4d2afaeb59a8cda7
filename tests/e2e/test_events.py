"""A router with vLLM's KV events knows the sidecar's blocks for an engine, after every kind of change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import asking, engine, pool_file, prompts, sidecar
from testkit.router import DISK, GPU, MEMORY, Router
from testkit.waiting import wait_for

# 168 blocks; a prompt of `asking` has 50.
DRAM = "8MiB"
# The slots of the ring between a sidecar and an engine (shm-protocol/PROTOCOL.md, section 2).
RING_SLOTS = 1024
# Metrics of the changes announced to routers.
CHANGES = ("pillion_saved_blocks_total", "pillion_evicted_blocks_total", "pillion_ssd_written_blocks_total")


@pytest.fixture
def router() -> Iterator[Router]:
    """A router."""
    router = Router()
    yield router
    router.close()


def _kept(keeper: sidecar.Sidecar) -> set[int]:
    """The kept blocks under the names of vLLM's events: the last 8 bytes of a hash of 16."""
    with pool_file.mapped(keeper.pool) as pool:
        return {int.from_bytes(slot.hash[8:16], "big") for slot in pool_file.committed(pool)}


def _agree(keeper: sidecar.Sidecar, running: engine.Engine, router: Router, cleared: int = 0) -> int:
    """Waits until the router, after `cleared` events without a block left, knows the kept blocks; the number of them in
    memory."""

    def agrees() -> bool:
        # An engine publishes in its steps alone.
        running.nudge()
        knows = router.keys(MEMORY) == _kept(keeper) and len(router.keys(DISK)) == keeper.metrics()["pillion_ssd_blocks"]
        return knows and router.cleared == cleared

    keeper.wait_for(agrees, "the router's view to be that of the sidecar")
    return len(_kept(keeper))


def _forgotten(running: engine.Engine, router: Router) -> bool:
    """True if the router knows no block of the sidecar after another step."""
    running.nudge()
    return not router.keys(MEMORY) | router.keys(DISK)


@pytest.mark.supports("events")
def test_a_router_knows_what_is_kept(options: engine.Options, tmp_path: Path, router: Router) -> None:
    """The router follows eviction, a reset, more changes than the ring's slots, and a killed sidecar."""
    disk = tmp_path / "disk"
    disk.mkdir()
    ssd = (f"{disk}:64MiB:create",)
    first = sidecar.Sidecar(tmp_path, DRAM, ssd=ssd)
    second = None
    try:
        first.wait_ready()
        connected = dataclasses.replace(options, socket=first.socket, multiprocess=True, batched_tokens=prompts.STEP_TOKENS)
        followed = dataclasses.replace(connected, arguments=router.arguments())
        with engine.running(followed, tmp_path / "followed.log") as running:
            asking.keep(first, running, asking.prompt(800))
            # The engine steps on by itself until its saves have ended.
            first.wait_for(lambda: router.keys(MEMORY) == _kept(first), "events of the last saves of an idle engine")
            blocks = prompts.stored_blocks(asking.PROMPT_TOKENS, asking.OUTPUT_TOKENS)
            assert len(router.keys(MEMORY)) == blocks
            # The events have the tokens and parents of vLLM's events for its own blocks.
            assert router.described[MEMORY, 0] == {key: router.described[GPU, 0][key] for key in router.keys(MEMORY)}
            for seed in range(801, 805):
                asking.keep(first, running, asking.prompt(seed))
            assert _agree(first, running, router) < 5 * blocks, "nothing was evicted"
            assert router.described[DISK, 0].keys() <= router.described[GPU, 0].keys()
            # vLLM tells routers that all blocks are gone, the sidecar's blocks too.
            assert running.reset_prefix_cache()
            assert _agree(first, running, router, 1) > 0
            # Another engine's blocks, while this one does not step.
            before = first.metrics()
            with engine.running(dataclasses.replace(connected, multiprocess=False), tmp_path / "other.log") as other:
                for seed in range(810, 818):
                    asking.keep(first, other, asking.prompt(seed))
                other.exit()

            def changes() -> int:
                after = first.metrics()
                return sum(after[name] - before[name] for name in CHANGES)

            first.wait_for(lambda: changes() > RING_SLOTS, "more changes than the ring has room for")
            assert _agree(first, running, router, 1) > 0
            first.wait_summed()
            first.kill()
            wait_for(lambda: _forgotten(running, router), "the router to forget the blocks of a sidecar that is gone")
            second = sidecar.Sidecar(tmp_path, DRAM, pool=first.pool, log=tmp_path / "second.log", ssd=ssd)
            second.wait_ready()
            second.wait_metric("pillion_adopted_blocks_total", 1)
            assert _agree(second, running, router, 1) > 0
            running.exit()
        second.finish()
    finally:
        for keeper in (first, second):
            if keeper is not None:
                keeper.kill()
        first.pool.unlink(missing_ok=True)
