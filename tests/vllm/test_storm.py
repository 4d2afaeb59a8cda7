"""Hundreds of seeded random plays on an engine with few blocks: no answer and no kept block is ever wrong."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage import RELEASES, SCHEDULERS, Player, Stage, by_load, metrics

from testkit import sidecar

# Plays of each test; no two tests play the same seed. `make test-long` has more of them, and both tests with every release and
# scheduler: otherwise each of the two has half of these, so every path is played in all of them.
PLAYS, IS_LONG = int(os.environ.get("PLAYS", "4")), bool({"PLAYS", "PILLION_SEED"} & os.environ.keys())
# Seeds of an engine. It plays more of them than it must, until it has loaded: new weights void saved blocks, and vLLM's cache
# keeps blocks beyond a change without saving them again.
SEEDS = 1_000
STEPS = 60
# Steps of several cache groups, of all tests together, and the number after which another engine goes on.
SET_STEPS, SET_STEPS_OF_ENGINE = int(os.environ.get("SET_STEPS", "100000")), 4_000
CHANCES = {"arrive": 0.4, "abort": 0.06, "reset": 0.03, "replace_weights": 0.02}
# The chance in plays with failing steps: a failed step ends every request.
FAIL = 0.06
# With copies by the sidecar, a freeze costs an engine two seconds a load, the deadline.
FREEZE = {"engine": 0.03, "sidecar": 0.002}
# Plays of several groups have more steps, so fewer of them freeze it.
FREEZE_OF_SETS = {"engine": 0.005, "sidecar": 0.0004}
# Every other hit is checked: kept blocks must equal the engine's computed ones.
SETTINGS = {"pillion.query_timeout_us": 20_000, "pillion.check_every": 1}
# Checked blocks may be gone before the comparison: then more is played.
ROUNDS_MAX = 4


PATHS = [
    ("sync", "engine", "full"),
    ("async", "engine", "full"),
    ("auto", "sidecar", "full"),
    ("async", "sidecar", "full-drafts"),
]
# Copies of blocks in the engine's own cache go first, and are made again.
PATHS += [("async", "engine", "full-once"), ("auto", "sidecar", "full-once-drafts")]
# With windows vLLM frees blocks while requests run. Every load is asynchronous there.
PATHS += [("sync", "engine", "window"), ("auto", "sidecar", "window-drafts")]
# Windows beside full attention, in groups with blocks of one pool.
PATHS += [("auto", "engine", "set-drafts"), ("auto", "sidecar", "set"), ("auto", "engine", "set-of-sizes")]
# A drafter's KV beside windows: vLLM drops a block of its own hits.
PATHS += [("auto", "engine", "set-eagle")]
# States, windows and scratch beside full attention.
PATHS += [("auto", "engine", "mixed"), ("auto", "engine", "mixed-drafts")]
# Compressed latents, in groups of five block sizes.
PATHS += [("auto", "sidecar", "compressed")]
# The same, with hits within blocks.
PATHS += [("auto", "engine", "mixed-within"), ("auto", "sidecar", "mixed-within-mtp")]
# With a drafter's KV vLLM makes the last state of a prompt a block, or a unit, earlier.
PATHS += [("auto", "engine", "mixed-mtp")]
# So few blocks that the engine preempts.
KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full", "blocks": 24},
    "full-once": {"kind": "full", "blocks": 40},
    "window": {"kind": "window", "window": 50, "blocks": 24},
    "set": {"kind": "set", "window": 50, "blocks": 48},
    "set-of-sizes": {"kind": "set", "window": 50, "larger": 2, "blocks": 34},
    "mixed": {"kind": "mixed", "window": 50, "blocks": 40},
    "mixed-within": {"kind": "mixed", "window": 50, "blocks": 100, "match_tokens": 8},
    "compressed": {"kind": "compressed", "window": 16, "blocks": 420},
}
# A step computes drafts, too. The KV of rejected ones lies in the blocks until the next step.
KINDS |= {f"{kind}-drafts": KINDS[kind] | {"drafts": 3} for kind in ("full", "full-once", "window", "set", "mixed")}
KINDS["set-eagle"] = KINDS["set-drafts"] | {"drafter": "eagle"}
KINDS |= {f"{kind}-mtp": KINDS[kind] | {"drafts": 3, "drafter": "mtp"} for kind in ("mixed", "mixed-within")}
SETS = ("set", "mixed", "compressed")
SET_TESTS = sum(KINDS[kind]["kind"] in SETS for _, _, kind in PATHS) * len(RELEASES) * len(SCHEDULERS) // (1 if IS_LONG else 2)
ALONE = "PILLION_SEED" in os.environ
# The counts of an engine's plays.
COUNTED = ("steps", "hits", "preemptions", "crossings", "null_blocks", "failed_steps", "freezes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Chooses the paths, releases and schedulers of a test."""
    fails = metafunc.function is test_random_plays_with_steps_that_fail
    cases = [
        (*path, release, scheduler)
        for at, path in enumerate(PATHS)
        for of, release in enumerate(RELEASES)
        for by, scheduler in enumerate(SCHEDULERS)
        if IS_LONG or (at + of + by) % 2 == fails
    ]
    metafunc.parametrize(("load", "copy", "kind", "release", "scheduler"), cases)


@pytest.fixture
def stage(release: str, scheduler: str, player_of: Callable[[str], Player], tmp_path: Path) -> Stage:
    """Runs the test with this release and scheduler."""
    return Stage(player_of(release), SCHEDULERS[scheduler], tmp_path)


def _first_seed(stage: Stage, path: tuple[str, str, str]) -> int:
    """PILLION_SEED=n plays one seed alone, to look at a failure again."""
    if ALONE:
        return int(os.environ["PILLION_SEED"])
    number = (RELEASES.index(stage.release) * 2 + stage.async_scheduling) * len(PATHS) + PATHS.index(path)
    # No test needs a thousand engines.
    return number * SEEDS * 1000


@pytest.mark.supports("full", "windows", "all-windows", "compressed", "states-drafts", "preemption", "new-weights")
@pytest.mark.supports("async-scheduling")
def test_random_plays(stage: Stage, load: str, copy: str, kind: str) -> None:
    """Preemption, reuse, aborts at every moment, new weights, failed loads and a freezing sidecar, in any order."""
    several = KINDS[kind]["kind"] in SETS
    least = -(-SET_STEPS // SET_TESTS) if several and not ALONE else 0
    total = _play(stage, (load, copy, kind), least, {"freeze": FREEZE_OF_SETS[copy]} if several else {})
    assert copy == "sidecar" or total["freezes"] >= least // 2_000, total


@pytest.mark.supports("failed-steps", "priority", "async-scheduling")
def test_random_plays_with_steps_that_fail(stage: Stage, load: str, copy: str, kind: str) -> None:
    """Steps that are skipped, that raise and that are refused, and preemption by priority: vLLM lists blocks without a step
    that fills them, and computes upon them. Kept blocks are still right."""
    total = _play(stage, (load, copy, kind), 0, {"fail": FAIL}, policy="priority")
    assert ALONE or total["failed_steps"] > 0


def _play(stage: Stage, path: tuple[str, str, str], least: int, more: dict[str, float], **scenario: Any) -> Counter[str]:
    """Plays a path for at least so many steps, with more chances; the counts."""
    load, copy, kind = path
    several = KINDS[kind]["kind"] in SETS
    chances = CHANCES | {"freeze": FREEZE[copy]} | more
    if load == "async" or kind != "full":
        # vLLM cannot undo a synchronous load.
        chances["spoil"] = 0.1
    total: Counter[str] = Counter()
    rounds, most = 0, 0 if several or ALONE else ROUNDS_MAX
    first = _first_seed(stage, path)
    # Smaller than the saves of the plays: the sidecar evicts too. Blocks of each size have a segment of their own.
    with sidecar.serving(stage.directory, dram="24MiB" if kind == "compressed" else "8MiB") as keeper:
        copies = "no" if "once" in kind else "yes"
        (connector,) = by_load(keeper, load, **SETTINGS, **{"pillion.copy": copy, "pillion.keep_copies": copies})
        while total["steps"] < max(least, 1) or (rounds < most and not keeper.metrics()["pillion_checks_total"]):
            rounds += 1
            known = [first] if ALONE else list(range(first, first + SEEDS))
            seeds, spare = known[:PLAYS], known[PLAYS:]
            storm = {"seeds": seeds, "spare": spare, "steps": STEPS, "chances": chances, "pid": keeper.pid}
            acts = [{"do": "storm", "with": storm | {"least": min(least - total["steps"], SET_STEPS_OF_ENGINE)}}]
            ((result,),) = stage.play(acts, connector, metrics=metrics(keeper), max_model_len=320, **KINDS[kind], **scenario)
            assert result.pop("value") == {"seeds": len(seeds)}
            total.update({name: result[name] for name in COUNTED})
            first += SEEDS
        found = keeper.metrics()
    assert found["pillion_checks_differing_total"] == 0
    assert ALONE or (found["pillion_saves_leaving_blocks_total"] > 0) == ("once" in kind)
    if ALONE:
        return total
    assert total["preemptions"] > 0 and total["hits"] > 0
    # The standing check computes a part of a hit again, and does not look at sets.
    assert (found["pillion_checks_total"] > 0) != several
    if several:
        # Blocks went from one group to another, and there were null blocks before windows.
        assert total["steps"] >= least and total["crossings"] > least / 10 and total["null_blocks"] > 0, total
    return total
