"""The forms of docs/prefill-decode.md have the meaning of the page, through vLLM's own parsing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from pillion import handover

PAGE = Path(__file__).resolve().parents[2] / "docs/prefill-decode.md"


def _asked(body: dict[str, Any]) -> tuple[bool, bool]:
    """True if the request is to be handed over, and true if it awaits a hand-over."""
    kind = ChatCompletionRequest if "messages" in body else CompletionRequest
    sampling = kind(**body).to_sampling_params(body["max_tokens"], {})
    # In the form of vLLM's Request.
    request: Any = SimpleNamespace(kv_transfer_params=(sampling.extra_args or {}).get("kv_transfer_params"))
    return handover.hands_over(request), handover.awaits_prompt(request)


def test_each_form_is_understood() -> None:
    """The page has three requests in this order: to P, to D with P's answer, and to D where both are asked at once."""
    forms = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    assert [_asked(form) for form in forms] == [(True, False), (False, True), (False, True)]
    answered: Any = SimpleNamespace(status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"), kv_transfer_params=None)
    assert handover.answer_router(answered, "P", 1760, None) == forms[1]["kv_transfer_params"]
    for form in forms:
        del form["kv_transfer_params"]
        assert _asked(form) == (False, False)
