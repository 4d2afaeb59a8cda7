"""Prefill here, decode there: what `kv_transfer_params` ask of a request, and what a router is told at its end.

Routers say `do_remote_decode` to the engine that computes a prompt, and hand what that answers to the engine that goes on with
it. The blocks travel by their keys: of the answer this connector reads `do_remote_prefill`, and how many tokens were saved.

A prompt's **tail** is what follows its last whole block. Its block is handed over too, by a key of its own: the engine that
goes on then computes one token, as each of its decoding requests does, and no step of it takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pillion import _shim, vllm_compat

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Parts of a prompt that are saved in one step: each can be loaded while the next is copied. 4,096 saves may be unfinished.
PARTS_MAX = 64


def awaits(request: Request) -> bool:
    """Whether another engine has computed the request's prompt, or is about to."""
    return _asks(request, "do_remote_prefill")


def hands_over(request: Request) -> bool:
    """Whether another engine goes on with the request."""
    return _asks(request, "do_remote_decode")


def tokens(request: Request) -> int:
    """How many of an awaited request's tokens the other engine saves, as far as is known: those of its prompt, or fewer."""
    told = request.kv_transfer_params.get("pillion")
    saved = told.get("tokens") if isinstance(told, dict) else None
    prompt: int = request.num_prompt_tokens
    return min(saved, prompt) if type(saved) is int and saved > 0 else prompt


def tail(request: Request, keys: list[bytes], block_tokens: int, algorithm: str) -> tuple[int, bytes] | None:
    """The place of the block in which ends what is handed over of a request, if it is partly full, and its key.

    `keys` are those of the whole blocks.

    None without a whole block before it, where a hash depends on more than tokens, and where another engine's is of no use.
    """
    end, last = request.num_prompt_tokens, request.num_prompt_tokens - 1
    if awaits(request):
        end = tokens(request)
        if end < last or last % block_tokens == 0:
            return None
    place = end // block_tokens
    if not 0 < place <= len(keys) or end % block_tokens == 0 or vllm_compat.has_extra_keys(request):
        return None
    try:
        chain = _shim.Chain(algorithm, request.block_hashes[place - 1], block_tokens, "tagged", keys[place - 1])
        chain.append(request.all_token_ids[place * block_tokens : end], None)
        key = chain.tail(None)
    except _shim.ShimError:
        # Hashes of an algorithm that is not known here.
        return None
    return None if key is None else (place, key)


def _asks(request: Request, name: str) -> bool:
    # A client's own words, where no router drops them.
    params = request.kv_transfer_params
    return isinstance(params, dict) and params.get(name) is True


def parts(first: int, end: int, part_blocks: int) -> Iterator[tuple[int, int]]:
    """The ranges in which blocks are saved for another engine."""
    size = max(part_blocks, -(-(end - first) // PARTS_MAX), 1)
    for begin in range(first, end, size):
        yield begin, min(end, begin + size)


def answer(request: Request, engine_id: str, tokens: int) -> dict[str, Any] | None:
    """What a router hands on of a request of which `tokens` were saved; None if it was not computed."""
    if not vllm_compat.answered(request):
        return None
    return {
        # Whoever is told that nothing comes does not wait for it.
        "do_remote_prefill": tokens > 0,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": [],
        "remote_host": None,
        "remote_port": None,
        "pillion": {"tokens": tokens},
    }
