"""Comparison of two answers to one prompt."""

from __future__ import annotations

from typing import Any

# In bfloat16 the logprobs of two candidates are equal, or some multiple of 0.06 apart. A step of another number of tokens, as
# after a shorter hit, may round one of them to its neighbour: of 40 prompts 5 begin with two candidates as close.
CLOSE = 0.15


def alike(answer: dict[str, Any], right: dict[str, Any]) -> bool:
    """True if the tokens are equal, up to one as likely in the right answer as its own choice."""
    for got, expected, row in zip(answer["tokens"], right["tokens"], right["logprobs"], strict=True):
        if got != expected:
            return bool(row[str(expected)] - row.get(str(got), float("-inf")) < CLOSE)
    return True
