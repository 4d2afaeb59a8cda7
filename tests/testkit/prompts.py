"""Prompts as token ids, and the arithmetic of blocks for the tests' assertions."""

from __future__ import annotations

import random
from collections.abc import Iterable

from testkit import model
from testkit.engine import BLOCK_TOKENS

BLOCK_BYTES = BLOCK_TOKENS * model.TINY.kv_bytes_per_token()
# The step size of engines in comparisons of tokens of longer prompts: on a CPU without instructions for bfloat16, steps of
# other lengths may round to other tokens.
STEP_TOKENS = 256


def prompt(tokens: int, seed: int, vocab: int = model.TINY.vocab) -> list[int]:
    """Random token ids; another seed is another prompt from its first block on."""
    generator = random.Random(seed)
    return [generator.randrange(3, vocab) for _ in range(tokens)]


def hit_tokens(prompt_tokens: int) -> int:
    """The longest hit of a prompt: whole blocks, and at least one token left to compute."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def stored_blocks(prompt_tokens: int, output_tokens: int) -> int:
    """Full blocks after an answer; the last output token's KV is never computed."""
    return (prompt_tokens + output_tokens - 1) // BLOCK_TOKENS


def different_blocks(asked: Iterable[tuple[list[int], list[int]]], block_tokens: int = BLOCK_TOKENS) -> int:
    """Different full blocks of prompts and their answers: where the first answer to a prompt was computed and the second began
    with a hit, rounding may make their tokens differ."""
    return len(
        {
            tuple(tokens[:end])
            for prompt, answer in asked
            for tokens in [prompt + answer[:-1]]
            for end in ends(tokens, block_tokens)
        }
    )


def ends(tokens: list[int], block_tokens: int = BLOCK_TOKENS) -> range:
    """The ends of blocks."""
    return range(block_tokens, len(tokens) + 1, block_tokens)
