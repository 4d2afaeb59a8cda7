"""Hundreds of seeded random plays on an engine with few blocks: no answer and no kept block is ever wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest
from stage import RELEASES, Stage, by_load, metrics

from testkit import sidecar

# Plays of each test, more of them in `make test-long`; no two tests play the same seed.
PLAYS = int(os.environ.get("PLAYS", "4"))
# Few plays may load nothing: new weights void what was saved, and what vLLM's cache keeps beyond them is not saved again.
SPARE = range(1_000_000, 1_000_016)
STEPS = 60
CHANCES = {"arrive": 0.4, "abort": 0.06, "reset": 0.03, "replace_weights": 0.02}
# A frozen sidecar costs an engine whose loads it copies two seconds a load, the deadline.
FREEZE = {"engine": 0.03, "sidecar": 0.002}
# Every other hit is checked: what is kept must be what the engine computes.
SETTINGS = {"pillion.query_timeout_us": 20_000, "pillion.check_every": 1}


PATHS = [("sync", "engine", "full"), ("async", "engine", "full"), ("auto", "sidecar", "full"), ("async", "sidecar", "full")]
# With windows vLLM frees blocks while requests run. Every load is asynchronous there.
PATHS += [("sync", "engine", "window"), ("auto", "sidecar", "window")]
# Windows beside full attention, in groups that have their blocks of one pool.
PATHS += [("auto", "engine", "set"), ("auto", "sidecar", "set"), ("auto", "engine", "set-of-sizes")]
# Blocks of the engine are few enough that it preempts.
KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full", "blocks": 24},
    "window": {"kind": "window", "window": 50, "blocks": 24},
    "set": {"kind": "set", "window": 50, "blocks": 48},
    "set-of-sizes": {"kind": "set", "window": 50, "larger": 2, "blocks": 34},
}


def _seeds(stage: Stage, path: tuple[str, str, str]) -> list[int]:
    """PILLION_SEED=n plays one alone, to look at a failure again."""
    if "PILLION_SEED" in os.environ:
        return [int(os.environ["PILLION_SEED"])]
    number = (RELEASES.index(stage.release) * 2 + stage.async_scheduling) * len(PATHS) + PATHS.index(path)
    return list(range(number * PLAYS, (number + 1) * PLAYS))


@pytest.mark.parametrize(("load", "copy", "kind"), PATHS)
def test_random_plays(stage: Stage, load: str, copy: str, kind: str) -> None:
    """Preemption, reuse, aborts at every moment, new weights, failed loads and a freezing sidecar, in any order."""
    seeds = _seeds(stage, (load, copy, kind))
    alone = "PILLION_SEED" in os.environ
    spare = [] if alone else list(SPARE)
    chances = CHANCES | {"freeze": FREEZE[copy]}
    if load == "async" or kind != "full":
        # vLLM cannot undo a synchronous load.
        chances["spoil"] = 0.1
    # Smaller than what the plays save: the sidecar evicts too.
    with sidecar.serving(stage.directory, dram="8MiB") as keeper:
        storm = {"seeds": seeds, "spare": spare, "steps": STEPS, "chances": chances, "pid": keeper.pid}
        (connector,) = by_load(keeper, load, **SETTINGS, **{"pillion.copy": copy})
        acts = [{"do": "storm", "with": storm}]
        ((result,),) = stage.play(acts, connector, metrics=metrics(keeper), max_model_len=320, **KINDS[kind])
        assert result["value"] == {"seeds": len(seeds)}
        found = keeper.metrics()
        assert found["pillion_checks_differing_total"] == 0
        if not alone:
            assert result["preemptions"] > 0 and result["hits"] > 0
            # The standing check computes a part of a hit again, and does not look at sets.
            assert (found["pillion_checks_total"] > 0) == (KINDS[kind]["kind"] != "set")
