"""Models with states: prompts of several blocks, and their answers."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testkit import engine, pool_file, prompts, sidecar, windows

# A prompt of about a block, which may give no hit, and prompts of some blocks.
PROMPTS = [prompts.prompt(tokens, seed=tokens) for tokens in (300, 700, 1300)]
OUTPUT_TOKENS = 8


def ask(running: engine.Engine, asked: list[list[int]] = PROMPTS) -> list[dict[str, Any]]:
    """Each prompt alone: batches of one shape give comparable bits."""
    return [running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0] for tokens in asked]


def all_of(answers: list[dict[str, Any]], name: str) -> list[Any]:
    """One field of each answer."""
    return [answer[name] for answer in answers]


@dataclasses.dataclass
class Answers:
    """The answers of an engine that computed the asked prompts, and its later ones with local hits of `hits` tokens."""

    asked: list[list[int]]
    cold: list[dict[str, Any]]
    local: list[dict[str, Any]]
    hits: list[int]


def compute(running: engine.Engine, keeper: sidecar.Sidecar, asked: list[list[int]] = PROMPTS) -> Answers:
    """Has the engine compute the prompts, and waits until its saves are kept."""
    cold, local = ask(running, asked), ask(running, asked)
    hits = all_of(local, "cached_tokens")
    assert hits == sorted(set(hits)) and hits[-1] > 0 and running.metrics()["external_hits"] == 0
    windows.wait_until_quiet(keeper)
    return Answers(asked, cold, local, hits)


def load(running: engine.Engine, keeper: sidecar.Sidecar, answers: Answers, layer_bytes: int) -> None:
    """The engine hits all kept states, right to the bit. The negative control: with a layer of another state, `layer_bytes` of
    it, the answer differs."""
    warm = ask(running, answers.asked)
    assert all_of(warm, "cached_tokens") == answers.hits
    assert running.metrics()["external_hits"] == sum(answers.hits)
    assert all_of(warm, "tokens") == all_of(answers.cold, "tokens")
    pairs = zip(all_of(warm, "logprobs"), all_of(answers.local, "logprobs"), strict=True)
    differ = [[at for at, (one, other) in enumerate(zip(*pair, strict=True)) if one != other] for pair in pairs]
    assert not any(differ), f"logprobs of these tokens differ, by prompt: {differ}"
    windows.forget(running, keeper)
    with exchanged(keeper, layer_bytes) as kept:
        assert kept > 1
        damaged = ask(running, answers.asked)
    assert all_of(damaged, "cached_tokens") == answers.hits
    assert damaged[-1]["logprobs"] != answers.local[-1]["logprobs"]


def namespaces(keeper: sidecar.Sidecar, kind: str = "state") -> list[str]:
    """The namespaces of the groups of a kind."""
    found = keeper.namespaces()
    return [str(each["namespace"]) for each in found if each["facts"]["group_kind"] == kind]


@contextmanager
def exchanged(keeper: sidecar.Sidecar, layer_bytes: int, kind: str = "state") -> Iterator[int]:
    """Exchanges the first layers of states, or of blocks of another kind, while the block runs. Yields their number."""
    names = {bytes.fromhex(name) for name in namespaces(keeper, kind)}
    with pool_file.mapped(Path(keeper.pool)) as pool:
        places = [slot.offset for slot in pool_file.committed(pool) if slot.namespace in names]
        _exchange(pool, places, layer_bytes)
        try:
            yield len(places)
        finally:
            _exchange(pool, places, layer_bytes)


def _exchange(pool: mmap.mmap, places: list[int], count: int) -> None:
    held = [pool[place : place + count] for place in places]
    for place, content in zip(places, reversed(held), strict=True):
        pool[place : place + count] = content
