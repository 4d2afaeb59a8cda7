"""`pillion route` between a client and two real vLLM servers: one computes, the other answers, a client sees one server."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from testkit import metrics, model, prompts, sidecar, tokenizer, vllm_server
from testkit.ports import free_port
from testkit.server import Server, fetch
from testkit.waiting import wait_for

pytestmark = pytest.mark.xdist_group("route")

STREAMS = 52
OUTPUT_TOKENS = 12
BLOCK_TOKENS = 128
# The id and the time of an answer, which differ from stream to stream.
IDS = re.compile(r'"id":"[^"]*","object":"text_completion","created":\d+,')
TEXT = re.compile(r'"text":"((?:[^"\\]|\\.)*)"')
FIRST_TOKENS = "pillion_route_first_tokens_total"
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
# Tokens of an answer that no test waits for.
LONG_ANSWER = 1000
GENERATED = "vllm:generation_tokens_total"
FOUND = "vllm:external_prefix_cache_hits_total"


@dataclass
class Stream:
    """A stream of events, without the parts that differ from time to time: the number of tokens in an event, ids and times."""

    texts: list[str]
    # The forms of all events but the last, and of the stream's end: their bytes without texts.
    forms: set[str]
    end: list[str]

    @classmethod
    def of(cls, raw: str) -> Stream:
        """The stream in an answer's bytes."""
        forms = [TEXT.sub('"text":', IDS.sub("", event)) for event in raw.split("\n\n")]
        # The last event with a text, the end marker, and an empty part.
        return cls([json.loads(f'"{text}"') for text in TEXT.findall(raw)], set(forms[:-3]), forms[-3:])

    def is_like(self, other: Stream) -> bool:
        """True if a client cannot tell them apart. A busy machine may send all tokens in the last event."""
        forms = self.forms | other.forms
        return ("".join(self.texts), self.end) == ("".join(other.texts), other.end) and len(forms) <= 1


# Fields of a request with a text as its prompt, by API; `generate` takes the text's bytes as tokens.
APIS: dict[str, Callable[[str], dict[str, object]]] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": OUTPUT_TOKENS, "return_token_ids": True, "temperature": 0},
    "/v1/chat/completions": lambda text: {
        "messages": _user(text),
        "max_tokens": OUTPUT_TOKENS,
        "return_token_ids": True,
        "temperature": 0,
    },
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": OUTPUT_TOKENS, "temperature": 0},
    "/v1/messages": lambda text: {"messages": _user(text), "max_tokens": OUTPUT_TOKENS, "temperature": 0},
    "/inference/v1/generate": lambda text: {
        "token_ids": list(text.encode()),
        "sampling_params": {"max_tokens": OUTPUT_TOKENS, "temperature": 0},
    },
}
PROMPTS = "pillion_route_prompts_total"
ORDERS = ("at-once", "prefill-first")
SAID = {"text", "content", "delta", "token_ids"}
CACHED = {"cached_tokens", "cache_read_input_tokens"}


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _leaves(value: object, names: set[str], name: str = "") -> Iterator[object]:
    """Values of these names, in order."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, names, key)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, names, name)
    elif name in names and value is not None:
        yield value


@dataclass
class Answered:
    """An answer of an API: its texts, its tokens, and its number of cached tokens."""

    text: str
    tokens: list[int]
    cached: int | None

    @classmethod
    def of(cls, raw: str) -> Answered:
        """The answer in these bytes, or in a stream of events of any number of tokens."""
        lines = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: {")]
        values = [json.loads(line) for line in lines or [raw]]
        said, cached = list(_leaves(values, SAID)), [leaf for leaf in _leaves(values, CACHED) if isinstance(leaf, int)]
        text = "".join(leaf for leaf in said if isinstance(leaf, str))
        return cls(text, [leaf for leaf in said if isinstance(leaf, int)], cached[-1] if cached else None)

    @property
    def said(self) -> tuple[str, list[int]]:
        """Its texts and tokens."""
        return self.text, self.tokens


# As /v1/completions takes one.
Prompt = list[int] | str | list[list[int] | str]


@dataclass
class Servers:
    """Two engines and the router in front of them, by their addresses."""

    computes: Server
    computes_url: str
    answers_url: str
    route_url: str
    # The address of a router that passes first tokens on.
    first_token_url: str
    answers: Server
    model: Path
    # Routers with one order alone.
    order_urls: dict[str, str]

    def open(self, url: str, prompt: Prompt, **fields: object) -> http.client.HTTPResponse:
        """A stream of an answer."""
        asked = {"model": str(self.model), "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True}
        return self.post(url, "/v1/completions", asked | fields)

    def post(self, url: str, path: str, asked: dict[str, object]) -> http.client.HTTPResponse:
        """An answer."""
        request = urllib.request.Request(f"{url}{path}", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=120))

    def ask(self, url: str, tokens: list[int]) -> list[int]:
        """The tokens of a stream; their number in one event differs from time to time."""
        with self.open(url, tokens, return_token_ids=True) as answer:
            lines = answer.read().decode().split("\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()]

    def stream(self, url: str, prompt: Prompt) -> Stream:
        """A whole stream."""
        with self.open(url, prompt) as answer:
            return Stream.of(answer.read().decode())

    def chat(self, url: str, text: str, stream: bool) -> tuple[str, list[str]]:
        """The text of a chat's answer, and why it ended."""
        asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": OUTPUT_TOKENS}
        with self.post(url, "/v1/chat/completions", {"model": str(self.model), "stream": stream} | asked) as answer:
            raw = answer.read().decode()
        lines = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: {")] if stream else [raw]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        text = "".join(choice["delta" if stream else "message"]["content"] or "" for choice in choices)
        return text, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]

    def answer(self, url: str, path: str, text: str, stream: bool) -> Answered:
        """An answer of any API."""
        asked = {"model": str(self.model), "stream": stream} | APIS[path](text)
        if stream and path not in ("/v1/responses", "/v1/messages"):
            asked["stream_options"] = {"include_usage": True}
        with self.post(url, path, asked) as answer:
            return Answered.of(answer.read().decode())

    def found(self) -> float:
        """Tokens loaded by the decode engine."""
        return metrics.totals(fetch(f"{self.answers_url}/metrics") or "").get(FOUND, 0)

    def total(self, *names: str) -> int:
        """Samples of these names, summed over both engines."""
        pages = [metrics.totals(fetch(f"{url}/metrics") or "") for url in (self.computes_url, self.answers_url)]
        return sum(page[name] for page in pages for name in names)

    def busy(self) -> int:
        """Requests that either engine runs, or has waiting."""
        return self.total(*HELD)

    def routed(self, name: str, url: str | None = None) -> dict[str, float]:
        """A router's counters of a name, by their label."""
        page = fetch(f"{url or self.route_url}/metrics") or ""
        lines = [line for line in page.split("\n") if line.startswith(f"{name}{{")]
        return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


@contextlib.contextmanager
def _engine(shape: Path, socket: Path, log: Path) -> Iterator[tuple[Server, str]]:
    """A server, and its address."""
    url = f"http://127.0.0.1:{free_port()}"
    server = vllm_server.start(shape, socket, url, log, ("--enable-prompt-tokens-details", "--enable-scale-out"))
    try:
        yield server, url
    finally:
        server.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One start for all tests of this module; the last test kills the prefill engine."""
    folder = tmp_path_factory.mktemp("route")
    shape = model.write(folder / "model", model.TINY)
    tokenizer.write(shape)
    with contextlib.ExitStack() as stack:
        # Room for all prompts at once: half of it may be kept for an engine that has not loaded its blocks yet.
        keeper = stack.enter_context(sidecar.serving(folder, dram="512MiB"))
        first, computes = stack.enter_context(_engine(shape, keeper.socket, folder / "computes.log"))
        second, answers = stack.enter_context(_engine(shape, keeper.socket, folder / "answers.log"))
        first.wait_ready(vllm_server.START_WATCHDOG_S)
        second.wait_ready(vllm_server.START_WATCHDOG_S)
        command: list[object] = [sidecar.find_binary(), "route", "--prefill", computes, "--decode", answers]
        urls: list[str] = []
        # The tests count ways and freeze engines, so times of a busy machine place no prompt.
        by_kind = ["--decode-prompt-share", "0"]
        for options in (["--first-token=false", *by_kind], by_kind, *(["--order", order, *by_kind] for order in ORDERS)):
            url = f"http://127.0.0.1:{free_port()}"
            arguments = [*command, *options, "--listen", url.removeprefix("http://")]
            router = Server(arguments, folder / f"route{len(urls)}.log", f"{url}/health")
            stack.callback(router.finish)
            router.wait_ready()
            urls.append(url)
        orders = dict(zip(ORDERS, urls[2:], strict=True))
        yield Servers(first, computes, answers, urls[0], urls[1], second, shape, orders)


@pytest.mark.supports("handover")
def test_streams_are_those_of_one_server(servers: Servers) -> None:
    """Most prompts are long enough for two engines. The prefill engine alone gives the right answers."""
    asked = [prompts.prompt(length, 90_000 + at) for at, length in enumerate([100, 300, 700, 1200] * (STREAMS // 4))]
    before = servers.found()
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = list(pool.map(lambda tokens: servers.ask(servers.route_url, tokens), asked))
    far = [tokens for tokens in asked if len(tokens) >= 256]
    assert servers.routed(PROMPTS)["pair"] == len(far)
    # The last token is computed, a check keeps a block back, and D waits for no block that a busy machine saves after a second.
    whole = sum((len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in far)
    assert servers.found() - before >= whole * 3 // 4
    assert all(streams)
    assert streams == [servers.ask(servers.computes_url, tokens) for tokens in asked]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_that_of_one_server(servers: Servers, stream: bool) -> None:
    """Its text is long enough for two engines."""
    text = "".join(chr(97 + token % 26) for token in prompts.prompt(1500, 96_000 + stream))
    before = servers.routed(PROMPTS)["pair"]
    routed = servers.chat(servers.route_url, text, stream)
    assert servers.routed(PROMPTS)["pair"] == before + 1
    assert all(routed)
    assert routed == servers.chat(servers.computes_url, text, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", APIS)
def test_an_answer_of_every_api_is_that_of_one_server(servers: Servers, path: str, stream: bool) -> None:
    """Each order gives the answer of one server. Usage states the cached tokens of the prefill engine: the decode engine has
    the whole prompt from it."""
    for at, (order, url) in enumerate(servers.order_urls.items()):
        seed = 97_000 + 100 * list(APIS).index(path) + 10 * stream + at
        text = "".join(chr(97 + token % 26) for token in prompts.prompt(1000, seed))
        before = sum(servers.routed(PROMPTS, url)[way] for way in ("pair", "held"))
        first, again = (servers.answer(url, path, text, stream) for _ in range(2))
        right = servers.answer(servers.computes_url, path, text, stream)
        # The decode engine may have the second one.
        ways = servers.routed(PROMPTS, url)
        assert ways["pair"] + ways["held"] == before + 2, ways
        assert any(right.said) and first.said == again.said == right.said, order
        assert (first.cached, again.cached) == (0, right.cached), order
        assert right.cached == (len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def _prompt(at: int) -> Prompt:
    """Every third one is a text, of a byte for each token, where the router counts a token for each four; every fifth one
    stands in a list."""
    tokens = prompts.prompt((300 if at % 3 else 1100) + 17 * at, 93_000 + at)
    prompt = tokens if at % 3 else "".join(chr(97 + token % 26) for token in tokens)
    return prompt if at % 5 else [prompt]


def test_a_first_token_of_another_engine_changes_no_byte(servers: Servers) -> None:
    """The streams of 50 prompts, one after the other: but for ids and times, each router's are those of one engine."""
    compared = 0
    for at in range(50):
        prompt = _prompt(at)
        right = servers.stream(servers.answers_url, prompt)
        for url in (servers.route_url, servers.first_token_url):
            routed = servers.stream(url, prompt)
            assert routed.is_like(right), (prompt, routed, right)
        compared += bool(routed.forms and right.forms)
    assert compared
    passed = metrics.totals(fetch(f"{servers.first_token_url}/metrics") or "")[FIRST_TOKENS]
    # Most tokens of this model are no whole letter.
    assert 3 <= passed < 50


def test_usage_counts_a_first_token_of_another_engine(servers: Servers) -> None:
    """Also the cached tokens are those of the prefill engine, which has computed all of them."""

    def passed() -> float:
        return metrics.totals(fetch(f"{servers.first_token_url}/metrics") or "")[FIRST_TOKENS]

    before = passed()
    for at in range(150, 200):
        with servers.open(servers.first_token_url, _prompt(at), stream_options={"include_usage": True}) as answer:
            routed = answer.read().decode()
        if passed() > before:
            break
    with servers.open(servers.computes_url, _prompt(at), stream_options={"include_usage": True}) as answer:
        right = answer.read().decode()
    usages = [json.loads(raw.split("\n\n")[-3].removeprefix("data: "))["usage"] for raw in (routed, right)]
    assert usages[0].pop("prompt_tokens_details") == {"cached_tokens": 0}
    usages[1].pop("prompt_tokens_details")
    assert usages[0] == usages[1]
    assert "".join(TEXT.findall(routed)) == "".join(TEXT.findall(right))


def test_a_first_token_comes_before_the_other_engine_answers(servers: Servers) -> None:
    """The decode engine is frozen meanwhile."""
    streams = ((prompt, servers.stream(servers.answers_url, prompt)) for prompt in map(_prompt, range(50, 100)))
    prompt, right = next((prompt, right) for prompt, right in streams if right.texts[0].isascii() and right.texts[0])
    servers.answers.signal(signal.SIGSTOP)
    try:
        answer = servers.open(servers.first_token_url, prompt)
        raw = answer.readline() + answer.readline()
    finally:
        servers.answers.signal(signal.SIGCONT)
    assert TEXT.findall(raw.decode()) and raw.endswith(b"\n\n")
    with answer:
        assert Stream.of((raw + answer.read()).decode()).is_like(right)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8])
def test_a_client_that_hangs_up_ends_both_engines_requests(servers: Servers, after_s: float) -> None:
    """The client disconnects while the prompt is computed or its answer streamed. Neither engine goes on: the answer would be
    endless."""
    prompt = prompts.prompt(3000, 94_000 + round(10 * after_s))
    answer = json.dumps(
        {"model": str(servers.model), "prompt": prompt, "max_tokens": LONG_ANSWER, "ignore_eos": True, "stream": True}
    )
    client = http.client.HTTPConnection(servers.route_url.removeprefix("http://"))
    before = servers.total(GENERATED)
    client.request("POST", "/v1/completions", answer, {"Content-Type": "application/json"})
    wait_for(lambda: servers.busy() > 0, "a request at an engine")
    time.sleep(after_s)
    # For a moment, neither engine has the request.
    wait_for(lambda: servers.busy() > 0, "a request at an engine still")
    client.close()
    started = time.monotonic()
    wait_for(lambda: servers.busy() == 0, "engines without requests")
    # Promised is about a second.
    assert time.monotonic() - started < 10
    assert servers.total(GENERATED) - before < LONG_ANSWER


def test_an_engine_that_dies_costs_no_answer(servers: Servers) -> None:
    """The decode engine computes the prompt."""
    prompt = prompts.prompt(900, 95_000)
    right = servers.ask(servers.answers_url, prompt)
    servers.computes.kill()
    assert servers.ask(servers.route_url, prompt) == right
    assert sum(servers.routed("pillion_route_prefill_failures_total").values()) == 1
    assert servers.ask(servers.route_url, prompts.prompt(900, 95_001)) == servers.ask(
        servers.answers_url, prompts.prompt(900, 95_001)
    )
