"""The block hashes of a new prompt, made by native code: vLLM's own bytes, in a fraction of the time.

vLLM hashes a prompt block by block in Python before anything else of the request begins. Of each prompt's blocks the first,
the last and one between them, another one each time, are hashed by vLLM too, each upon the native hash before it; where they
differ, or anything fails, vLLM hashes alone from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pillion import _shim, vllm_compat

Hasher = Callable[[Any], list[bytes]]
# Fewer blocks, such as those that fill while a request decodes, are not worth it: checking two of three takes 10 us.
WORTH_BLOCKS = 8
logger = vllm_compat.init_logger("vllm.pillion")


class NativeHasher:
    """Called as vLLM calls its own: with a request, for the hashes of its full blocks that have none yet."""

    def __init__(self, vllms: Hasher, algorithm: str, block_tokens: int, first_parent: bytes) -> None:
        self._vllms = vllms
        self._algorithm = algorithm
        self._block_tokens = block_tokens
        self._first_parent = first_parent
        self._sound = True
        # Prompts hashed so far, which choose the block between.
        self._turn = 0

    def __call__(self, request: Any) -> list[bytes]:
        """The new hashes, in order."""
        start = len(request.block_hashes)
        end = request.num_tokens // self._block_tokens
        if not self._sound or end - start < WORTH_BLOCKS or vllm_compat.has_extra_keys(request):
            return self._vllms(request)
        try:
            made = self._make(request, start, end)
            if self._agrees(request, start, made):
                return made
            why = "its hashes differ from those of vLLM"
        except Exception as error:
            why = repr(error)
        self._sound = False
        logger.error("pillion: the native hasher is off, so vLLM hashes prompts itself, which takes longer: %s", why)
        return self._vllms(request)

    def _make(self, request: Any, start: int, end: int) -> list[bytes]:
        hashed = request.block_hashes
        chain = _shim.Chain(self._algorithm, hashed[-1] if hashed else self._first_parent, self._block_tokens, "tagged")
        chain.append(request.all_token_ids[start * self._block_tokens : end * self._block_tokens], None)
        return chain.hashes(0)

    def _agrees(self, request: Any, start: int, made: list[bytes]) -> bool:
        hashed = list(request.block_hashes)
        self._turn += 1
        places = (0, 1 + self._turn % (len(made) - 2), len(made) - 1)
        return all(
            self._vllms(_Part(request, hashed + made[:place], (start + place + 1) * self._block_tokens)) == [made[place]]
            for place in places
        )


class _Part:
    """A request with so many blocks hashed, and so many tokens."""

    def __init__(self, request: Any, block_hashes: list[bytes], num_tokens: int) -> None:
        self._request = request
        self.block_hashes = block_hashes
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def install(algorithm: str) -> None:
    """Lets the engine that is being built, and it alone, hash prompts natively."""
    vllm_compat.wrap_next_block_hasher(lambda vllms, *block: NativeHasher(vllms, algorithm, *block))
