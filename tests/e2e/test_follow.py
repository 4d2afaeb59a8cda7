"""A router follows two pods with vLLM's own servers: an unknown conversation goes to the pod with its blocks."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import engine, metrics, model, prompts, sidecar, tokenizer, vllm_server
from testkit.ports import free_port
from testkit.server import Server, fetch
from testkit.waiting import wait_for

pytestmark = pytest.mark.xdist_group("follow")

PODS = ("a", "b")
CONVERSATIONS = 6
PROMPT_TOKENS = 640
OUTPUT_TOKENS = 8
WATCHDOG_S = 60
ARGUMENTS = ("--block-size", str(engine.BLOCK_TOKENS), "--enable-prompt-tokens-details", "--max-num-seqs", "4")


def _text(number: int) -> str:
    """A prompt of one byte for each token."""
    return "".join(chr(97 + token % 26) for token in prompts.prompt(PROMPT_TOKENS, seed=5000 + number))


def _ask(url: str, shape: Path, number: int) -> tuple[list[int], int]:
    """The tokens of an answer, and the cached tokens of its prompt."""
    fields = {"model": str(shape), "prompt": _text(number), "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    body = json.dumps(fields | {"return_token_ids": True, "ignore_eos": True}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=WATCHDOG_S) as answer:
        said: dict[str, Any] = json.load(answer)
    details = said["usage"]["prompt_tokens_details"] or {}
    return list(said["choices"][0]["token_ids"]), int(details.get("cached_tokens") or 0)


@contextlib.contextmanager
def _router(peers: list[str], log: Path) -> Iterator[str]:
    """The URL of a router with all pods and their engines known to it."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sidecar.find_binary(), "route", "--listen", url.removeprefix("http://"), "--mesh-plaintext", *peers]
    router = Server([*command, "--min-remote-tokens", "64"], log, f"{url}/health")
    try:
        router.wait_ready()
        wait_for(lambda: json.loads(fetch(f"{url}/health") or "{}").get("decode_up") == len(PODS), "engines", WATCHDOG_S)
        yield url
    finally:
        router.kill()


def _located(url: str) -> int:
    """The number of prompts found by their blocks."""
    return metrics.sample(fetch(f"{url}/metrics") or "", 'pillion_route_located_total{result="held"}')


def test_a_new_router_sends_a_conversation_to_the_pod_with_its_blocks(tmp_path: Path) -> None:
    """After a restart of the router every prompt is found where it went, without a block between pods, and has the same
    answer."""
    shape = model.write(tmp_path / "model", model.TINY)
    tokenizer.write(shape)
    mesh, urls = ([f"127.0.0.1:{free_port()}" for _ in PODS] for _ in range(2))
    keepers: list[sidecar.Sidecar] = []
    with contextlib.ExitStack() as stack:
        for name, listen, url in zip(PODS, mesh, urls, strict=True):
            (tmp_path / name).mkdir()
            peers = [option for peer in mesh for option in ("--peer", peer)]
            more = ("--mesh-listen", listen, "--node-id", name, "--mesh-plaintext", *peers)
            keeper = sidecar.Sidecar(tmp_path / name, more=(*more, "--engine-url", f"http://{url}=both"))
            stack.callback(keeper.pool.unlink, missing_ok=True)
            stack.callback(keeper.kill)
            keeper.wait_ready()
            keepers.append(keeper)
        engines = [
            vllm_server.start(shape, keeper.socket, f"http://{url}", tmp_path / f"{name}.log", ARGUMENTS)
            for keeper, url, name in zip(keepers, urls, PODS, strict=True)
        ]
        for server in engines:
            stack.callback(server.kill)
        for server in engines:
            server.wait_ready(vllm_server.START_WATCHDOG_S)
        followed = [option for peer in mesh for option in ("--mesh-peer", peer)]
        with _router(followed, tmp_path / "first.log") as url:
            first = [_ask(url, shape, number)[0] for number in range(CONVERSATIONS)]
        blocks = CONVERSATIONS * (PROMPT_TOKENS // engine.BLOCK_TOKENS)
        keepers[0].wait_for(lambda: sum(each.metrics()["pillion_blocks"] for each in keepers) >= blocks, "saved blocks")
        with _router(followed, tmp_path / "second.log") as url:
            wait_for(lambda: bool(_ask(url, shape, 0) and _located(url)), "a prompt found by the mesh", WATCHDOG_S)
            again = [_ask(url, shape, number) for number in range(1, CONVERSATIONS)]
            assert _located(url) >= CONVERSATIONS
        pages = [each.metrics() for each in keepers]
    # A pod that starts fetches blocks, too, before any request.
    asked = [page["pillion_mesh_fetched_blocks_total"] - page["pillion_mesh_prefetched_blocks_total"] for page in pages]
    assert [tokens for tokens, _ in again] == first[1:]
    found = sum(cached for _, cached in again) / ((CONVERSATIONS - 1) * prompts.hit_tokens(PROMPT_TOKENS))
    print(f"found share {found:.4f} of one pod that has all")
    assert found >= 0.98 and asked == [0, 0]
