"""Prefill here, decode there: what `kv_transfer_params` ask of a request, and what a router is told at its end.

Routers say `do_remote_decode` to the engine that computes a prompt, and hand what that answers to the engine that goes on with
it. The blocks travel by their keys: of the answer this connector reads `do_remote_prefill`, and how many tokens were saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pillion import vllm_compat

if TYPE_CHECKING:
    from vllm.v1.request import Request


def awaits(request: Request) -> bool:
    """Whether another engine has computed the request's prompt, or is about to."""
    return _asks(request, "do_remote_prefill")


def hands_over(request: Request) -> bool:
    """Whether another engine goes on with the request."""
    return _asks(request, "do_remote_decode")


def tokens(request: Request, prompt: int) -> int:
    """How many of an awaited request's tokens the other engine saves, as far as is known: those of its prompt, or fewer."""
    told = vllm_compat.transfer_params(request).get("pillion")
    saved = told.get("tokens") if isinstance(told, dict) else None
    return min(saved, prompt) if type(saved) is int and saved > 0 else prompt


def _asks(request: Request, name: str) -> bool:
    # A client's own words, where no router drops them.
    return vllm_compat.transfer_params(request).get(name) is True


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
