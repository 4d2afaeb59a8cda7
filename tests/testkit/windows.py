"""Models with windows: prompts within and beyond a window, and the hits of a restarted engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testkit import engine, model, pool_file, prompts, random_model, sidecar
from testkit.waiting import wait_for

# Prompts within the window of 64 tokens, with a hit that ends in it, and far beyond it.
PROMPTS = [prompts.prompt(tokens, seed=tokens) for tokens in (40, 100, 700)]
OUTPUT_TOKENS = 8
HITS = [prompts.hit_tokens(len(tokens)) for tokens in PROMPTS]
# The function that writes a model of each family; its windows have cache groups of their own.
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda directory: model.write(directory, model.TINY_WINDOWS),
    "gemma3": lambda directory: random_model.write(directory, random_model.GEMMA3),
    "gpt-oss": lambda directory: random_model.write(directory, random_model.GPT_OSS),
}


@dataclasses.dataclass
class Answers:
    """The answers of an engine that computed the prompts, and its later ones with local hits."""

    cold: list[dict[str, Any]]
    local: list[dict[str, Any]]


def ask(running: engine.Engine) -> list[dict[str, Any]]:
    """Each prompt alone: batches of one shape give comparable bits."""
    return [running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0] for tokens in PROMPTS]


def all_of(answers: list[dict[str, Any]], name: str) -> list[Any]:
    """One field of each answer."""
    return [answer[name] for answer in answers]


def compute(running: engine.Engine, keeper: sidecar.Sidecar, hits: list[int] = HITS, saved: int | None = None) -> Answers:
    """Has the engine compute the prompts, and waits until they are kept: `saved` bytes, if the caller knows the number."""
    answers = Answers(ask(running), ask(running))
    assert all_of(answers.local, "cached_tokens") == hits and running.metrics()["external_hits"] == 0
    if saved is not None:
        keeper.wait_metric("pillion_saved_bytes_total", saved)
    else:
        wait_until_quiet(keeper)
    return answers


def wait_until_quiet(keeper: sidecar.Sidecar) -> None:
    """Waits until no save is left, where the number of kept blocks is unknown: some blocks of a window are not kept, and vLLM
    may reuse others before their saves."""
    counts: list[int] = []

    def is_quiet() -> bool:
        counts.append(keeper.metrics()["pillion_saved_blocks_total"])
        return counts[-1] > 0 and counts[-10:] == [counts[-1]] * 10

    wait_for(is_quiet, "end of saves", poll_s=0.1)


def forget(running: engine.Engine, keeper: sidecar.Sidecar) -> None:
    """Empties the engine's own prefix cache, once its last step has freed its blocks."""
    keeper.wait_for(running.reset_prefix_cache, "reset of the engine's own cache")


def load(running: engine.Engine, keeper: sidecar.Sidecar, answers: Answers, hits: list[int] = HITS) -> None:
    """The engine hits all kept blocks, right to the bit. The negative control: a wrong key in every block changes an answer."""
    warm = ask(running)
    assert running.metrics()["external_hits"] == sum(hits)
    assert all_of(warm, "tokens") == all_of(answers.local, "tokens")
    assert all_of(warm, "logprobs") == all_of(answers.local, "logprobs")
    forget(running, keeper)
    with pool_file.damaged(keeper.pool) as blocks:
        assert blocks > 0
        damaged = ask(running)
    assert running.metrics()["external_hits"] == 2 * sum(hits)
    shown = [wrong["logprobs"] != right["logprobs"] for wrong, right in zip(damaged, answers.local, strict=True)]
    # Attention of some models ignores a wrong key now and then.
    assert any(shown) and (all(shown) or hits != HITS)
