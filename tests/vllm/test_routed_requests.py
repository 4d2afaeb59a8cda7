"""vLLM accepts each request from `pillion route` if it accepts the client's request: at both engines, with any field."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from testkit import sidecar
from testkit.ports import free_port
from testkit.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KINDS = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [1, 2, 3]},
    CHAT: {"messages": [{"role": "user", "content": "a question"}]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# A value for each field but those of the bases.
VALUES: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [5],
    "bad_words": ["a"],
    "cache_salt": "salt",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": True,
    "documents": [{"title": "a", "text": "b"}],
    "ec_transfer_params": {"a": 1},
    "echo": True,
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {"do_remote_prefill": True},
    "length_penalty": 1.1,
    "logit_bias": {"5": 1},
    "logprob_token_ids": [5],
    # For a chat this is a boolean.
    "logprobs": 1,
    "max_completion_tokens": 9,
    "max_tokens": 9,
    "media_io_kwargs": {"image": {}},
    "min_p": 0.1,
    "min_tokens": 5,
    "mm_payload": "none",
    "mm_processor_kwargs": {"a": 1},
    "model": "m",
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt_embeds": "AA==",
    "prompt_logprobs": 1,
    "reasoning_effort": "low",
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
    "repetition_penalty": 1.1,
    "request_id": "r",
    "response_format": {"type": "json_object"},
    "return_mm_kwargs": False,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 1,
    "seed": 3,
    "session_id": "s",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["a"],
    "stop_token_ids": [5],
    "stream": True,
    "stream_interval": 2,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a"},
    "suffix": "a",
    "temperature": 0.5,
    "thinking_token_budget": 5,
    "tool_choice": "required",
    "tools": [TOOL],
    "top_k": 3,
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncate_prompt_tokens": 3,
    "truncation_side": "left",
    "use_beam_search": True,
    "user": "u",
    "vllm_xargs": {"a": 1},
    "watermarking": False,
}
# Fields that vLLM accepts only together with others.
WITH: dict[str, dict[str, Any]] = {
    "continue_final_message": {"add_generation_prompt": False},
    "logprob_token_ids": {"logprobs": 1},
    "min_tokens": {"max_tokens": 9},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "top_logprobs": {"logprobs": 1},
}


class Engine(http.server.ThreadingHTTPServer):
    """Records the paths and bodies of its requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as a prefill engine."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answers one prompt."""
        body = self.rfile.read(int(self.headers["content-length"]))
        cast(Engine, self.server).asked.append((self.path, json.loads(body)))
        answer = json.dumps({"kv_transfer_params": {"do_remote_prefill": True}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, str]]:
    """The prefill engine, the decode engine, and the router in front of them."""
    computes, answers = Engine(), Engine()
    url = f"http://127.0.0.1:{free_port()}"
    arguments = ["route", "--prefill", computes.url, "--decode", answers.url, "--min-remote-tokens", "0"]
    command: list[object] = [sidecar.find_binary(), *arguments, "--listen", url.removeprefix("http://")]
    router = Server(command, Path(tmp_path_factory.mktemp("routed")) / "route.log", f"{url}/health")
    router.wait_ready()
    yield computes, answers, url
    router.finish()
    computes.shutdown()
    answers.shutdown()


def _check(path: str, body: dict[str, Any]) -> None:
    """Checks a request as vLLM's server does."""
    request = KINDS[path](**body)
    made = request.to_beam_search_params if request.use_beam_search else request.to_sampling_params
    made(body.get("max_completion_tokens") or body.get("max_tokens") or 16, {})


@pytest.mark.parametrize("path", KINDS)
def test_each_field_may_be_there(routed: tuple[Engine, Engine, str], path: str) -> None:
    """Alone, or with its companions. A field missing here needs a value above."""
    computes, answers, url = routed
    for name in KINDS[path].model_fields:
        body = BASES[path] | {name: BASES[path].get(name) or VALUES[name]} | WITH.get(name, {})
        _check(path, json.loads(json.dumps(body)))
        before = len(computes.asked), len(answers.asked)
        request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=60).close()
        sent = computes.asked[before[0] :], answers.asked[before[1] :]
        assert len(sent[1]) == 1, name
        # The prefill engine may be asked after the decode engine has answered: then this has a request of the previous path.
        for asked, made in sent[0] + sent[1]:
            _check(asked, made)
