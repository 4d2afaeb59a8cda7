"""Prefill in one engine, decode in another: the request's `kv_transfer_params`, and those in its answer to the router.

Routers send `do_remote_decode` to the engine of the prompt, and pass the params of its answer to the engine of the decode. The
blocks travel by their keys: this connector reads `do_remote_prefill` and the count of saved tokens from these params.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pillion import vllm_compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def awaits_prompt(request: Request) -> bool:
    """True if another engine has computed the request's prompt, or will soon."""
    return _asks(request, "do_remote_prefill")


def hands_over(request: Request) -> bool:
    """True if another engine goes on with the request."""
    return _asks(request, "do_remote_decode")


def count_awaited(request: Request, prompt: int) -> int:
    """The count of an awaited request's tokens saved by the other engine: all of its prompt, or fewer if the params say so."""
    saved = _own_params(request).get("tokens")
    return min(saved, prompt) if type(saved) is int and saved > 0 else prompt


def hints_of(request: Request) -> tuple[str | None, str | None]:
    """The client's hints as JSON: the params for Pillion, and vLLM's envelope. The policy refuses an empty text."""
    try:
        own, envelope = vllm_compat.transfer_params(request).get("pillion"), vllm_compat.hint_envelope(request)
        return json.dumps(own) if own else None, json.dumps(envelope) if envelope else None
    except (TypeError, ValueError, RecursionError):
        return "", None


def _own_params(request: Request) -> dict[str, Any]:
    own = vllm_compat.transfer_params(request).get("pillion")
    return own if isinstance(own, dict) else {}


def _asks(request: Request, name: str) -> bool:
    # A client may send these params itself, without a router to drop them.
    return vllm_compat.transfer_params(request).get(name) is True


def answer_router(request: Request, engine_id: str, tokens: int, vllm_config: VllmConfig) -> dict[str, Any] | None:
    """The params for the router of a request with `tokens` saved; None if the request was not computed."""
    if not vllm_compat.was_answered(request):
        return None
    asked = _own_params(request).get("sampling") is True
    return {
        # Without saved tokens the next engine does not wait.
        "do_remote_prefill": tokens > 0,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": [],
        "remote_host": None,
        "remote_port": None,
        "pillion": {"tokens": tokens} | ({"sampling": vllm_compat.state_sampling(vllm_config)} if asked else {}),
    }
