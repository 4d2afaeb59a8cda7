"""Several conversations in few KV blocks: the engine takes blocks back all the time, and saves must be quicker.

Blocks of ended requests are saved again before the engine reuses them where copies are not kept beside them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from testkit import engine, prompts, sidecar

CONVERSATIONS = 6
TURNS = 6
OPENING_TOKENS = 100
QUESTION_TOKENS = 40
OUTPUT_TOKENS = 24
# The last turn needs 14 blocks of every conversation: three fit at a time, and none stays until its next turn.
FEW_BLOCKS = 48
LOST_PERCENT_MAX = 5
# A sidecar without a core for a while loses more: one of so many plays is to lose as few.
PLAYS_MAX = 3


@pytest.mark.parametrize("keep_copies", ["yes", "no"])
def test_few_saves_are_lost(options: engine.Options, plain: engine.Engine, tmp_path: Path, keep_copies: str) -> None:
    """Every turn finds the turns before it in the cache; next to no block is reused before it is saved."""
    lost_percents: list[float] = []
    while len(lost_percents) < PLAYS_MAX:
        own = dataclasses.replace(options, extra={"pillion.keep_copies": keep_copies})
        lost_percents.append(_lost_percent(own, plain, tmp_path, seed=1_000 * len(lost_percents)))
        if lost_percents[-1] < LOST_PERCENT_MAX:
            return
    raise AssertionError(f"percent of the saves that were lost to reuse, by play: {lost_percents}")


def _lost_percent(options: engine.Options, plain: engine.Engine, directory: Path, seed: int) -> float:
    """The percentage of saves of conversations of this seed that are lost to reuse. Every answer is right, and some tokens
    hit."""
    assert plain.reset_prefix_cache()
    talks = [prompts.prompt(OPENING_TOKENS, seed=seed + 400 + number) for number in range(CONVERSATIONS)]
    with sidecar.serving(directory) as keeper:
        few = dataclasses.replace(options, socket=keeper.socket, blocks=FEW_BLOCKS, max_requests=CONVERSATIONS)
        with engine.running(few, directory / f"engine-{seed}.log") as running:
            for turn in range(TURNS):
                answers = running.generate(talks, max_tokens=OUTPUT_TOKENS)
                right = [plain.generate([talk], max_tokens=OUTPUT_TOKENS)[0] for talk in talks]
                assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in right]
                for number, (talk, answer) in enumerate(zip(talks, answers, strict=True)):
                    question = prompts.prompt(QUESTION_TOKENS, seed=seed + 500 + turn * CONVERSATIONS + number)
                    talk += [*answer["tokens"], *question]
            hits = running.metrics()["external_hits"]
            running.exit()
        metrics = keeper.metrics()
    posted, lost = metrics["pillion_saves_posted_blocks_total"], metrics["pillion_saves_lost_to_reuse_total"]
    saved = metrics["pillion_saved_blocks_total"]
    lost_percent = 100 * lost / posted
    print(f"saves: {posted} posted, {saved} saved, {lost} lost to reuse ({lost_percent:.1f} %); {hits} tokens hit")
    assert hits > 0
    assert saved > 0
    assert (metrics["pillion_saves_leaving_blocks_total"] > 0) == (options.extra["pillion.keep_copies"] == "no")
    return lost_percent
