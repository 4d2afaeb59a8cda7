"""Prompts as token ids, and the arithmetic of blocks that the tests assert on."""

from __future__ import annotations

import random

import model
from engine import BLOCK_TOKENS

BLOCK_BYTES = BLOCK_TOKENS * model.TINY.kv_bytes_per_token()


def prompt(tokens: int, seed: int, vocab: int = model.TINY.vocab) -> list[int]:
    """Random token ids; another seed is another prompt from its first block on."""
    generator = random.Random(seed)
    return [generator.randrange(3, vocab) for _ in range(tokens)]


def hit_tokens(prompt_tokens: int) -> int:
    """The longest hit a prompt can have: whole blocks, and at least one token left to compute."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def stored_blocks(prompt_tokens: int, output_tokens: int) -> int:
    """Full blocks after an answer; the last output token's KV is never computed."""
    return (prompt_tokens + output_tokens - 1) // BLOCK_TOKENS
