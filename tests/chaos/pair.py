"""Two engines, a sidecar and a router: each is killed and frozen while clients ask the router.

No engine has KV of any prompt before, so every answer is a hand-over. At the end an engine without a connector gives the right
answers. Before the first fault a negative control shows that the test notices wrong KV.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import random
import signal
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos.campaign import say
from chaos.figures import Span
from testkit import engine, pool_file, prompts, sidecar, vllm_server
from testkit.ports import free_port
from testkit.server import Server
from testkit.waiting import wait_for

VICTIMS = ("p", "d", "sidecar", "router")
ENGINES = ("p", "d")
KINDS = ("freeze", "kill")
# A fault of one of these may cost a client an error.
MAY_FAIL = ("d", "router")
ORDERS = ("at-once", "prefill-first", "by-load")
CLIENTS, PROMPT_TOKENS, STEP_TOKENS, OUTPUT_TOKENS = 2, 640, 256, 8
UNDISTURBED_ANSWERS, ANSWERS_BETWEEN = 10, 2
DRAM = "64MiB"
DTYPE_BYTES = 4
# Prompts of the negative control; fewer than fill the pool.
DAMAGED_PROMPTS = 4
LOADED = 'pillion_handover_released_total{reason="loaded"}'
# The latest moment of a strike after the request, and the length of a freeze. An engine waits 2 s for a load's bytes: host
# memory cannot be taken back from a sidecar that was frozen for longer during a copy.
STRIKE_S, FROZEN_S = 0.4, 1.5
# A request without an end by then is lost.
PATIENCE_S = 60
# The longest delay of an answer by the death of a process, in milliseconds.
LATE_MS = 300


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: its kind, and the process struck."""

    kind: str
    victim: str

    def __str__(self) -> str:
        return f"{self.victim}-{self.kind}"

    @property
    def ends_engine(self) -> bool:
        """True if an engine has to be started before the next fault."""
        return self.kind == "kill" and self.victim in ENGINES


@dataclasses.dataclass
class Request:
    """A client's request, and its end: tokens, or an error."""

    prompt: list[int]
    asked: float
    ended: float = 0.0
    tokens: list[int] | None = None
    error: str = ""


@dataclasses.dataclass
class Figures:
    """Sums over a campaign.

    `failed` counts errors while D or the router was struck, `failed_unstruck` errors at any other time. A request without an
    end is `lost`. `undisturbed_wait_ms` is the median of answers before the first fault, `recomputed_wait_ms` the longest where
    both engines compute the prompts of all clients, as they do behind a fault. By fault, `max_added_wait_ms` is the longest
    wait of an answer beyond these two together, `answers` the number of answers, and `late` the number that waited `LATE_MS`
    longer still. Answers without a fault are under `none`; some of them are late too, as with vLLM alone on two cores. An
    answer with a freeze among several faults counts for the freeze. `handed_over` is the number of blocks that D loaded.
    `damage_noticed` counts wrong answers of the negative control, whose prompts no client sent.
    """

    seed: int
    rounds: int = 0
    requests: int = 0
    wrong_tokens: int = 0
    lost: int = 0
    failed: int = 0
    failed_unstruck: int = 0
    undisturbed_wait_ms: float = 0.0
    recomputed_wait_ms: float = 0.0
    max_added_wait_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    answers: dict[str, int] = dataclasses.field(default_factory=dict)
    late: dict[str, int] = dataclasses.field(default_factory=dict)
    handed_over: int = 0
    damage_noticed: int = 0

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps({"pair": dataclasses.asdict(self)})

    def passed(self) -> bool:
        """True if no client saw a wrong token, a lost request or an error without a reason, and the control noticed wrong
        KV."""
        return bool(self.damage_noticed) and not (self.wrong_tokens or self.lost or self.failed_unstruck)


def plan(rounds: int, seed: int) -> list[Fault]:
    """`rounds` faults: every fault of every victim once before one comes again. Ends of engines come last, first of P, then of
    D."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < rounds:
        deck = [Fault(kind, victim) for kind, victim in itertools.product(KINDS, VICTIMS)]
        chance.shuffle(deck)
        faults += sorted(deck, key=lambda fault: fault.ends_engine and 1 + ENGINES.index(fault.victim))
    return faults[:rounds]


def ends_with_engines(faults: list[Fault]) -> bool:
    """True if only the ends of P and then D are left: D answers without P, and no engine has to start, which is slow."""
    return faults == [Fault("kill", victim) for victim in ENGINES]


def _prolonged(fault: Fault, span: Span, end: float) -> tuple[Fault, Span]:
    """The end of an engine affects all requests until another engine is there: until `end`, when no client asks any more."""
    return fault, dataclasses.replace(span, end=end)


def ask(url: str, model: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of a server's answer."""
    fields = {"model": str(model), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body = json.dumps(fields | {"return_token_ids": True, "ignore_eos": True}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


class Clients:
    """Clients of the router, each with one request at a time."""

    def __init__(self, url: str, model: Path, seeds: Iterator[int]) -> None:
        self.ended: list[Request] = []
        self.open: dict[int, Request] = {}
        self._url, self._model, self._seeds = url, model, seeds
        self._stop, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets every request end or be lost, and sends no more."""
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """No client sends a request within this block."""
        self._go.clear()
        self.wait_ended(list(self.open.values()))
        yield
        self._go.set()

    def answered(self) -> int:
        """The number of requests answered with tokens."""
        return sum(request.tokens is not None for request in self.ended)

    def wait_answered(self, more: int) -> None:
        """Waits for `more` further answers."""
        goal = self.answered() + more
        wait_for(lambda: self.answered() >= goal, f"{more} answers", 2 * PATIENCE_S)

    def wait_ended(self, requests: list[Request]) -> None:
        """Waits until these requests have ended, or are lost."""
        wait_for(lambda: all(request.ended for request in requests), "ends of requests", 2 * PATIENCE_S)

    def _run(self, number: int) -> None:
        while self._go.wait() and not self._stop.is_set():
            request = Request(prompts.prompt(PROMPT_TOKENS, next(self._seeds)), time.monotonic())
            self.open[number] = request
            try:
                request.tokens = ask(self._url, self._model, request.prompt, OUTPUT_TOKENS)
            except (OSError, http.client.HTTPException, ValueError) as error:
                request.error = repr(error)
                # A server that refuses does so at once; the pause keeps the client from asking again at once.
                time.sleep(0.1)
            request.ended = time.monotonic()
            self.ended.append(request)


def count_wrong(lone: engine.Engine, asked: list[list[int]], answers: Sequence[list[int] | None]) -> int:
    """The number of answers with other tokens than those of an engine without a connector."""
    right = lone.generate(asked, max_tokens=OUTPUT_TOKENS, logprobs=0)
    return sum(tokens != other["tokens"] for tokens, other in zip(answers, right, strict=True))


class Campaign:
    """The running processes, and the faults against them."""

    def __init__(self, directory: Path, model: Path, seed: int) -> None:
        self._directory, self._model, self._seed = directory, model, seed
        self._chance = random.Random(seed)
        # Seeds of prompts: each is used once, so no prompt has KV before.
        self._seeds = itertools.count(1_000_000 * seed)
        self._urls = {name: f"http://127.0.0.1:{free_port()}" for name in ("p", "d", "router")}
        self._pool = sidecar.new_pool()
        self._running: dict[str, Server] = {}
        self._starts = itertools.count()
        self._handed_over = 0

    def run(self, faults: list[Fault]) -> Figures:
        """Plays every fault; the figures of the clients' answers."""
        found = Figures(self._seed)
        spans: list[tuple[Fault, Span]] = []
        with self._processes() as lone:
            found.damage_noticed = self._answer_from_damage(lone)
            found.recomputed_wait_ms = round(1e3 * self._recompute(), 1)
            clients = Clients(self._urls["router"], self._model, self._seeds)
            clients.wait_answered(UNDISTURBED_ANSWERS)
            undisturbed = statistics.median(request.ended - request.asked for request in clients.ended)
            for number, fault in enumerate(faults):
                if number and faults[number - 1].ends_engine and not ends_with_engines(faults[number - 1 :]):
                    spans[-1] = _prolonged(*spans[-1], self._replace(faults[number - 1].victim, clients))
                clients.wait_answered(ANSWERS_BETWEEN)
                time.sleep(self._chance.uniform(0, STRIKE_S))
                spans.append((fault, self._strike(fault, clients)))
                span = spans[-1][1]
                say(f"{number + 1}: {fault}, {span.end - span.start:.2f} s")
            clients.stop()
            if faults[-1].ends_engine:
                spans[-1] = _prolonged(*spans[-1], time.monotonic())
            self._count("sidecar")
            found.rounds, found.requests = len(faults), len(clients.ended)
            found.undisturbed_wait_ms = round(1e3 * undisturbed, 1)
            found.handed_over = self._handed_over
            self._judge(clients.ended, spans, lone, found)
        return found

    def run_damaged(self) -> Figures:
        """The figures of the negative control alone, as if clients had asked for its answers."""
        with self._processes() as lone:
            return Figures(self._seed, requests=DAMAGED_PROMPTS, wrong_tokens=self._answer_from_damage(lone))

    def _answer_from_damage(self, lone: engine.Engine) -> int:
        """The negative control: the number of wrong answers after P's blocks are damaged before D loads them."""
        made = [prompts.prompt(PROMPT_TOKENS, next(self._seeds)) for _ in range(DAMAGED_PROMPTS)]
        for prompt in made:
            ask(self._urls["p"], self._model, prompt, max_tokens=1)
        keeper, blocks = self._running["sidecar"], DAMAGED_PROMPTS * prompts.stored_blocks(PROMPT_TOKENS, 1)
        assert isinstance(keeper, sidecar.Sidecar)
        keeper.wait_metric("pillion_blocks", blocks)
        with pool_file.damaged(self._pool, value_bytes=DTYPE_BYTES) as damaged:
            assert damaged >= blocks
            answers = [ask(self._urls["router"], self._model, prompt, OUTPUT_TOKENS) for prompt in made]
        # `handed_over` counts blocks of prompts from clients: the control's blocks are subtracted.
        self._handed_over -= keeper.sample(LOADED)
        return count_wrong(lone, made, answers)

    def _recompute(self) -> float:
        """The longest wait for an answer where both engines compute the prompts of all clients."""

        def timed(name: str, prompt: list[int]) -> float:
            asked = time.monotonic()
            ask(self._urls[name], self._model, prompt, OUTPUT_TOKENS)
            return time.monotonic() - asked

        waits: list[float] = []
        with ThreadPoolExecutor(CLIENTS * len(ENGINES)) as clients:
            for _ in range(UNDISTURBED_ANSWERS // CLIENTS):
                made = [prompts.prompt(PROMPT_TOKENS, next(self._seeds)) for _ in range(CLIENTS)]
                waits += clients.map(lambda each: timed(*each), itertools.product(ENGINES, made))
        return max(waits)

    def _strike(self, fault: Fault, clients: Clients) -> Span:
        """Plays a fault. Afterwards every process runs again, except an engine that ended."""
        victim, start = self._running[fault.victim], time.monotonic()
        if fault.kind == "kill":
            self._count(fault.victim)
            victim.kill()
            if not fault.ends_engine:
                self._start(fault.victim)
                self._running[fault.victim].wait_ready()
            clients.wait_ended(list(clients.open.values()))
        else:
            victim.signal(signal.SIGSTOP)
            if fault.victim == "p":
                # D gives up waiting for P, also for requests that arrive during the freeze.
                clients.wait_answered(2 * CLIENTS)
            else:
                time.sleep(FROZEN_S)
            victim.signal(signal.SIGCONT)
            clients.wait_ended(list(clients.open.values()))
        return Span(start, time.monotonic())

    def _replace(self, name: str, clients: Clients) -> float:
        """Starts an engine where one ended, and waits until the router asks it; returns when the last client had its answer."""
        with clients.resting():
            rested = time.monotonic()
            self._start(name)
            self._running[name].wait_ready(vllm_server.START_WATCHDOG_S)
            self._running["router"].wait_ready()
        return rested

    def _judge(self, ended: list[Request], spans: list[tuple[Fault, Span]], lone: engine.Engine, found: Figures) -> None:
        work_ms = found.undisturbed_wait_ms + found.recomputed_wait_ms
        for request in ended:
            around = [fault for fault, span in spans if span.overlaps(request.asked, request.ended)]
            if request.tokens is None:
                found.lost += request.ended - request.asked >= PATIENCE_S
                excused = any(fault.victim in MAY_FAIL for fault in around)
                found.failed += excused
                found.failed_unstruck += not excused
                say(f"{', '.join(map(str, around))}: {request.error}")
                continue
            added = round(1e3 * (request.ended - request.asked) - work_ms, 1)
            faults = [fault for fault in around if fault.kind == "freeze"] or around
            for name in set(map(str, faults)) or {"none"}:
                found.max_added_wait_ms[name] = max(added, found.max_added_wait_ms.get(name, added))
                found.answers[name] = found.answers.get(name, 0) + 1
                found.late[name] = found.late.get(name, 0) + (added > LATE_MS)
        answers = [request for request in ended if request.tokens is not None]
        found.wrong_tokens = count_wrong(lone, [one.prompt for one in answers], [one.tokens for one in answers])

    # --- processes ---

    @contextlib.contextmanager
    def _processes(self) -> Iterator[engine.Engine]:
        """Runs all processes; yields the engine without a connector, whose answers are right."""
        options = engine.Options(model=self._model, dtype="float32", batched_tokens=STEP_TOKENS)
        with contextlib.ExitStack() as stack:
            stack.callback(self._pool.unlink, missing_ok=True)
            stack.callback(self._kill_all)
            for name in ("sidecar", *ENGINES):
                self._start(name)
            lone = stack.enter_context(engine.running(options, self._directory / "lone.log"))
            for name in ("sidecar", *ENGINES):
                self._running[name].wait_ready(vllm_server.START_WATCHDOG_S)
            self._start("router")
            self._running["router"].wait_ready()
            yield lone

    def _kill_all(self) -> None:
        for process in self._running.values():
            process.kill()

    def _start(self, name: str) -> None:
        number = next(self._starts)
        log = self._directory / f"{name}-{number}.log"
        if name == "sidecar":
            self._running[name] = sidecar.Sidecar(self._directory, DRAM, self._pool, log=log)
        elif name == "router":
            order = ORDERS[number % len(ORDERS)]
            command = [sidecar.find_binary(), "route", "--prefill", self._urls["p"], "--decode", self._urls["d"]]
            arguments = [*command, "--order", order, "--listen", self._urls[name].removeprefix("http://")]
            self._running[name] = Server(arguments, log, f"{self._urls[name]}/health")
        else:
            steps = ("--max-num-batched-tokens", str(STEP_TOKENS), "--block-size", str(engine.BLOCK_TOKENS))
            socket = self._directory / "pillion.sock"
            self._running[name] = vllm_server.start(self._model, socket, self._urls[name], log, steps)

    def _count(self, name: str) -> None:
        """Adds the counts of a sidecar before it ends."""
        keeper = self._running[name]
        if isinstance(keeper, sidecar.Sidecar):
            self._handed_over += keeper.sample(LOADED)
