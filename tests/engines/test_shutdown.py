"""vLLM's own server at SIGTERM: the manifests rely on its --shutdown-timeout."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

from testkit import model, prompts, sidecar, tokenizer, vllm_server
from testkit.ports import free_port

OUTPUT_TOKENS = 400


def test_an_answer_under_way_is_whole_after_sigterm(tmp_path: Path) -> None:
    """With the option the answer is whole. By vLLM's default its stream ends with an error."""
    shape = model.write(tmp_path / "model", model.TINY)
    tokenizer.write(shape)
    url = f"http://127.0.0.1:{free_port()}"
    with sidecar.serving(tmp_path, dram="128MiB") as keeper:
        server = vllm_server.start(shape, keeper.socket, url, tmp_path / "vllm.log", ("--shutdown-timeout=60",))
        try:
            server.wait_ready(vllm_server.START_WATCHDOG_S)
            asked = {"model": str(shape), "prompt": prompts.prompt(300, 1), "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            body = json.dumps(asked | {"stream": True}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                first = answer.readline()
                # As in a container: its first process alone gets the signal.
                os.kill(server.pid, signal.SIGTERM)
                events = [json.loads(line[6:]) for line in (first, *answer) if line.startswith(b"data: {")]
            assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
            server.wait_exit()
        finally:
            server.kill()
