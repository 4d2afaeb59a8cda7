"""Prompts of one xxhash: each is answered with KV of its own, in each engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from testkit import asking, collisions, engine, prompts, sidecar
from testkit.asking import CHECKING, again, ask

BLOCKS = 12
PROMPT_TOKENS = BLOCKS * collisions.BLOCK_TOKENS + 5
BEHIND = prompts.prompt(PROMPT_TOKENS - collisions.BLOCK_TOKENS, seed=31)
# A check computes a block of the hit.
HIT = (BLOCKS - 1) * collisions.BLOCK_TOKENS


def test_prompts_of_one_hash_do_not_share(options: engine.Options, tmp_path: Path) -> None:
    """The second prompt misses, and no block of it is kept where vLLM's own cache confuses it with the first."""
    first, second, third = ([*block, *BEHIND] for block in (*collisions.pair(1), collisions.pair(2)[0]))
    large = {"block_size": collisions.BLOCK_TOKENS, "prefix_caching_hash_algo": "xxhash_cbor"}
    options = dataclasses.replace(options, batched_tokens=prompts.STEP_TOKENS, arguments=large, extra=CHECKING)
    right = asking.right(options, tmp_path / "plain.log", first)
    right += asking.right(options, tmp_path / "another.log", second, third)
    assert right[0] != right[1], "the blocks differ where it shows"

    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, socket=keeper.socket)

        def kept(prompts_kept: int) -> None:
            keeper.wait_metric("pillion_blocks", prompts_kept * BLOCKS)
            assert keeper.metrics()["pillion_blocks"] == prompts_kept * BLOCKS

        with engine.running(connected, tmp_path / "one.log") as running:
            assert ask(running, first) == (right[0], 0)
            kept(1)
            # vLLM's own cache gives this prompt the KV of the first.
            assert ask(running, second)[0] != right[1]
            assert ask(running, third) == (right[2], 0)
            kept(2)
            running.exit()
        with engine.running(connected, tmp_path / "other.log") as running:
            assert ask(running, second) == (right[1], 0)
            kept(3)
            for tokens, answer in ((first, right[0]), (second, right[1])):
                found, hits = again(running, tokens)
                assert found == answer
                assert hits >= HIT
            assert running.states() == ["serving"]
            running.exit()
