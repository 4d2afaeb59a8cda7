"""Kinds of KV caches beside full attention, under vLLM's own schedulers: MLA's latents, an indexer's keys, and windows.

vLLM's CPU build runs no model of the first two with prefix caching. Here vLLM describes their caches, and a scripted worker
fills them.
"""

from __future__ import annotations

from typing import Any

import pytest
from stage import (
    BLOCK_TOKENS,
    RESET,
    SETTLE,
    Act,
    Stage,
    by_load,
    generate,
    hit_tokens,
    metrics,
    prompt_of,
    right_answers,
    spoil,
)

from testkit import sidecar

# DeepSeek V3's layers keep latents; V3.2's keep the keys of a sparse indexer beside them, in the same group. The windows are of
# some blocks, and of the last block alone.
KINDS: dict[str, dict[str, Any]] = {
    "mla": {"kind": "mla"},
    "indexer": {"kind": "indexer"},
    "window": {"kind": "window", "window": 100},
    "narrow-window": {"kind": "window", "window": 33},
    # Two groups with windows and one with full attention.
    "set": {"kind": "set", "window": 100},
    # DeepSeek V4's layers: latents for several tokens each, and the tokens that are not compressed yet, in five groups.
    "compressed": {"kind": "compressed", "window": 16, "blocks": 1024},
}
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
PROMPTS = [prompt_of(500, 101), prompt_of(300, 102)]
HITS = sum(hit_tokens(len(prompt)) for prompt in PROMPTS)
# Bytes of a token's latents, and of a rank's part of a state.
LATENT_BYTES, STATE_BYTES = 2 * 576, 2 * (3 * 32 + 4 * 40)


@EACH
@pytest.mark.supports("windows", "all-windows", "latents", "compressed")
def test_a_kept_prefix_is_found_and_every_byte_is_right(stage: Stage, kind: dict[str, Any]) -> None:
    """Both ways to load find it; damaged bytes in the pool are noticed."""
    right = right_answers(PROMPTS, 40)
    with sidecar.serving(stage.directory) as keeper:
        damage: Act = {"do": "damage_pool", "with": {"path": str(keeper.pool)}}
        acts = [generate(PROMPTS, 40), SETTLE, RESET, generate(PROMPTS, 40), RESET, damage, generate(PROMPTS, 1)]
        connectors = by_load(keeper)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper), **kind):
            cold, _, _, warm, _, damaged, spoiled = results
            assert (cold["value"], cold["wrong"], cold["hits"]) == (right, 0, 0)
            assert (warm["value"], warm["wrong"], warm["hits"]) == (right, 0, HITS)
            assert damaged["value"] > 0 and spoiled["hits"] == HITS and spoiled["wrong"] > 0


@EACH
def test_a_failed_load_is_computed_again(stage: Stage, kind: dict[str, Any]) -> None:
    """It is computed from the first missing block on; with windows, whose earlier blocks are gone, from the beginning."""
    right = right_answers(PROMPTS, 8)
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate(PROMPTS, 8), SETTLE, RESET, spoil(2), generate(PROMPTS, 8), RESET, generate(PROMPTS, 8)]
        (results,) = stage.play(acts, *by_load(keeper, "async"), metrics=metrics(keeper), **kind)
        *_, failed, _, warm = results
        assert failed["failed_requests" if "window" in kind else "failed_blocks"] > 0
        assert (failed["value"], failed["wrong"]) == (right, 0)
        assert (warm["value"], warm["wrong"], warm["hits"]) == (right, 0, HITS)


@pytest.mark.supports("latents", "states", "ranks")
def test_ranks_keep_equal_bytes_once(stage: Stage) -> None:
    """Two ranks hold the same latents, and a part of each state: Kimi Linear. Both load; wrong bytes are noticed."""
    right = right_answers(PROMPTS, 8)
    with sidecar.serving(stage.directory) as keeper:
        damage: Act = {"do": "damage_pool", "with": {"path": str(keeper.pool)}}
        acts = [generate(PROMPTS, 8), SETTLE, RESET, generate(PROMPTS, 8), RESET, damage, generate(PROMPTS, 1)]
        (connector,) = by_load(keeper, "auto")
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), kind="latents-states", ranks=2)
        cold, _, _, warm, _, damaged, spoiled = results
        assert (cold["value"], cold["wrong"], cold["hits"]) == (right, 0, 0)
        assert (warm["value"], warm["wrong"], warm["hits"]) == (right, 0, HITS)
        assert damaged["value"] > 0 and spoiled["hits"] == HITS and spoiled["wrong"] > 0
        kept = {each["facts"]["group_kind"]: each["block_bytes"] for each in keeper.namespaces()}
        assert kept == {"state": 2 * STATE_BYTES, "full": BLOCK_TOKENS * LATENT_BYTES}
