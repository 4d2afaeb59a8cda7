"""Other weights under one name are always noticed, also by a sidecar that never met an engine with the first ones."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from testkit import asking, engine, prompts, sidecar, weights
from testkit.asking import CHECKING, again, ask, keep, whole

PROMPT = asking.prompt(341)
BLOCKS = prompts.stored_blocks(len(PROMPT), 0)


def test_other_weights_over_restarts(options: engine.Options, tmp_path: Path) -> None:
    """One sidecar has the pool file of a killed one, another its disk alone. The weights differ in one tensor, and in an ulp of
    every element."""
    right = {}
    extra = {"pillion.model_id": "tiny"} | CHECKING
    named = dataclasses.replace(options, batched_tokens=prompts.STEP_TOKENS, extra=extra)
    kinds = {"old": named}
    for change in (weights.one_tensor, weights.an_ulp):
        changed = weights.changed(options.model, tmp_path / change.__name__, change)
        kinds[change.__name__] = dataclasses.replace(named, model=changed)
    for name, kind in kinds.items():
        [right[name]] = asking.right(kind, tmp_path / f"plain-{name}.log", PROMPT)
    assert right["one_tensor"] != right["old"] != right["an_ulp"], "the weights differ where it shows"

    disk = tmp_path / "disk"
    disk.mkdir()
    with contextlib.ExitStack() as stack:

        def served(pool: Path | None) -> sidecar.Sidecar:
            started = sidecar.Sidecar(tmp_path, pool=pool, ssd=(f"{disk}:64MiB:create",))
            stack.callback(started.pool.unlink, missing_ok=True)
            stack.callback(started.kill)
            started.wait_ready()
            return started

        def started(name: str) -> engine.Engine:
            connected = dataclasses.replace(kinds[name], socket=first.socket)
            return stack.enter_context(engine.running(connected, tmp_path / f"{name}.log"))

        first = served(None)
        old = started("old")
        assert keep(first, old, PROMPT)[0] == right["old"]
        first.wait_metric("pillion_ssd_written_blocks_total", BLOCKS)
        first.wait_summed()
        first.kill()

        second = served(first.pool)
        second.wait_metric("pillion_adopted_blocks_total", BLOCKS)
        one = started("one_tensor")
        assert keep(second, one, PROMPT)[0] == right["one_tensor"]
        tokens, hits = again(one, PROMPT)
        assert tokens == right["one_tensor"]
        assert whole(hits), f"blocks of its own: {hits} hits"
        second.wait_metric("pillion_sessions", 4)
        old.wait_served()
        tokens, hits = again(old, PROMPT)
        assert tokens == right["old"]
        assert whole(hits), f"over a restart with its pool file: {hits} hits"
        second.wait_metric("pillion_ssd_written_blocks_total", BLOCKS)
        second.kill()

        third = served(None)
        third.wait_metric("pillion_ssd_recovered_blocks_total", 2 * BLOCKS)
        fine = started("an_ulp")
        assert ask(fine, PROMPT) == (right["an_ulp"], 0)
        third.wait_metric("pillion_sessions", 6)
        for name, running in (("old", old), ("one_tensor", one)):
            running.wait_served()
            tokens, hits = again(running, PROMPT)
            assert tokens == right[name]
            assert whole(hits), f"{name}, from its disk: {hits} hits"
        for running in (old, one, fine):
            running.exit()
        third.terminate()
