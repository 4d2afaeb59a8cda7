"""Pillion's connector in a vLLM with smaller allocations than answers, as for models with a replayed prefix."""

from __future__ import annotations

from typing import Any

from pillion import connector

# Tokens of a block of the scripted engine.
LESS_TOKENS = 32


class PillionConnector(connector.PillionConnector):
    """vLLM gets an answer without the last block of the hit."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A hit of one block is none."""
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not found:
            return found, is_async
        return found - LESS_TOKENS, is_async and found > LESS_TOKENS
