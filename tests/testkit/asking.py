"""Asks an engine one prompt: the answer's tokens, and how many of the prompt's tokens were loaded from the cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from testkit import engine, prompts, sidecar

OUTPUT_TOKENS = 8
# So long that the part of an engine's first hit left for its check is less than a twentieth.
PROMPT_TOKENS = 1600
# For an engine that checks its first hit.
CHECKING = {"pillion.check_every": 1000}
# The least share of a whole hit.
SHARE = 0.95

Answer = tuple[list[int], int]


def prompt(seed: int) -> list[int]:
    """A prompt of `PROMPT_TOKENS` tokens."""
    return prompts.prompt(PROMPT_TOKENS, seed)


def whole(hits: int) -> bool:
    """True if the hit is as long as a hit of such a prompt can be."""
    return hits >= SHARE * prompts.hit_tokens(PROMPT_TOKENS)


def ask(running: engine.Engine, asked: list[int], **more: Any) -> Answer:
    """One answer; `more` as for `Engine.generate`."""
    before = running.metrics()["external_hits"]
    [answer] = running.generate([asked], max_tokens=OUTPUT_TOKENS, **more)
    return list(answer["tokens"]), running.metrics()["external_hits"] - before


def again(running: engine.Engine, asked: list[int], **more: Any) -> Answer:
    """As `ask`, with nothing in the engine's own cache."""
    assert running.reset_prefix_cache()
    return ask(running, asked, **more)


def keep(keeper: sidecar.Sidecar, running: engine.Engine, asked: list[int], **more: Any) -> Answer:
    """As `ask`, for a prompt without kept blocks; all of its blocks are kept afterwards."""
    before = keeper.metrics()["pillion_saved_blocks_total"]
    answer = ask(running, asked, **more)
    assert answer[1] == 0, "a hit on a prompt without kept blocks"
    keeper.wait_metric("pillion_saved_blocks_total", before + prompts.stored_blocks(len(asked), 0))
    return answer


def right(options: engine.Options, log: Path, *asked: list[int], **more: Any) -> list[list[int]]:
    """The answers of vLLM without a connector."""
    with engine.running(dataclasses.replace(options, socket=None), log) as plain:
        answers = [ask(plain, one, **more)[0] for one in asked]
        plain.exit()
    return answers
