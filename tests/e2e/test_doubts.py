"""Wrong blocks of an engine with a transient fault: the next engine finds them, no engine is barred, and hits come back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from testkit import asking, engine, prompts, sidecar, weights
from testkit.asking import again, ask, keep, whole

GOOD = [asking.prompt(seed) for seed in (400, 401, 402)]
BAD = asking.prompt(403)
# An engine with a fault computes the beginning of this prompt, and a healthy one the rest.
MIXED = asking.prompt(404)
MIXED_TOKENS = prompts.STEP_TOKENS // 4
# Another prompt with that beginning.
BESIDE = MIXED[:MIXED_TOKENS] + asking.prompt(405)
# Every second hit is checked.
OFTEN = {"pillion.check_every": 1}
SHORT, LONG = OFTEN | {"pillion.check_per_mille": 0}, OFTEN | {"pillion.check_per_mille": 1000}


def keep_wrong(keeper: sidecar.Sidecar, options: engine.Options, log: Path) -> None:
    """An engine keeps good prompts, a wrong one, and one with a wrong beginning. Its own weights are right at the end."""
    with engine.running(options, log) as running:
        for prompt in GOOD:
            keep(keeper, running, prompt)
        running.alter(weights.scale_norms)
        keep(keeper, running, BAD)
        keep(keeper, running, MIXED[:MIXED_TOKENS])
        running.alter(weights.unscale_norms)
        before = keeper.metrics()["pillion_saved_blocks_total"]
        rest = 0
        for prompt in (MIXED, BESIDE):
            ask(running, prompt)
            rest += prompts.stored_blocks(len(prompt), 0) - prompts.stored_blocks(MIXED_TOKENS, 0)
        keeper.wait_metric("pillion_saved_blocks_total", before + rest)
        running.exit()


def test_wrong_blocks_go_and_bar_nobody(options: engine.Options, tmp_path: Path) -> None:
    """A check of a hit's end finds wrong blocks at its beginning only if the check is long. One contradiction is a doubt, and
    good prompts end it."""
    options = dataclasses.replace(options, batched_tokens=prompts.STEP_TOKENS)
    *good, bad, mixed, beside = asking.right(options, tmp_path / "plain.log", *GOOD, BAD, MIXED, BESIDE)
    with sidecar.serving(tmp_path) as keeper:

        def checked(checks: int, differing: int) -> None:
            keeper.wait_metric("pillion_checks_total", checks)
            assert keeper.metrics()["pillion_checks_differing_total"] == differing

        connected = dataclasses.replace(options, socket=keeper.socket, extra=SHORT)
        keep_wrong(keeper, connected, tmp_path / "faulty.log")
        with engine.running(connected, tmp_path / "short.log") as running:
            answer, hits = ask(running, MIXED)
            assert answer != mixed and hits > 0, "a short check is computed upon what it should find"
            checked(1, 0)
            running.exit()
        with engine.running(dataclasses.replace(connected, extra=LONG), tmp_path / "long.log") as running:
            assert ask(running, GOOD[0])[0] == good[0]
            checked(2, 0)
            assert whole(ask(running, GOOD[1])[1])
            assert ask(running, MIXED) == (mixed, 0)
            checked(3, 1)
            running.exit()
        with engine.running(connected, tmp_path / "healthy.log") as running:
            answer, hits = ask(running, BAD)
            assert answer != bad and hits > 0, "the first hit is believed"
            checked(4, 2)
            # The engine's own cache has forgotten the loaded blocks.
            assert ask(running, BAD) == (bad, 0)
            # In doubt the engine loads nothing, and computes two witnesses.
            for number, prompt in enumerate(GOOD[:2]):
                assert again(running, prompt) == (good[number], 0)
                checked(5 + number, 2)
            assert again(running, BAD) == (bad, 0)
            keeper.wait_for(lambda: whole(again(running, BAD)[1]), "hits of the mended prompt")
            assert running.states() == ["serving"]
            running.exit()
        with engine.running(connected, tmp_path / "next.log") as running:
            for prompt, answer in zip([*GOOD, BAD], [*good, bad], strict=True):
                found, hits = ask(running, prompt)
                assert found == answer and whole(hits)
            # The beginning is kept again, and the blocks upon the wrong one are gone.
            assert ask(running, MIXED) == (mixed, 0)
            assert again(running, BESIDE)[0] == beside
            running.exit()
    assert "STAYS OUT" not in (tmp_path / "healthy.log").read_text()
