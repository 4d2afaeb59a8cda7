"""One engine computes prompts, another answers: D's tokens are a lone engine's, and D computes a tail.

HANDOVER_SETUP is `one` sidecar for both; `two` sidecars of a mesh, each beside its engine on a host of its own; or `engine`:
one sidecar, and engines that copy for themselves. The last ones load nothing before all of a prompt is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

import network
import pods
from testkit import engine, handover, memory, model, prompts, sidecar, threads
from testkit.handover import OUTPUT_TOKENS, PATIENCE_S, Pair
from testkit.transfer import TO_ANSWER, TO_COMPUTE

SETUP = os.environ.get("HANDOVER_SETUP", "one")
# One start of three engines serves all tests of this module. One test at a time has hosts.
pytestmark = pytest.mark.xdist_group("hosts" if SETUP == "two" else "handover")

# Steps of P.
CHUNK = prompts.STEP_TOKENS
PROMPTS = int(os.environ.get("HANDOVERS", "16"))
# The delay of a step by a frozen sidecar, at most.
QUERY_MS = 200
DRAM = "32MiB"
LOST = "pillion_handover_lost_total"
# Shorter than any wait between the processes: such a pause is no fault.
PAUSE_S = 0.05
# The longest time that P keeps a block for its save (policy/held.rs). A busy machine may pause a process as long.
HELD_S = 1.0


@dataclasses.dataclass(frozen=True)
class Place:
    """The sidecar and the host of an engine: `prefix` are the words before its command there."""

    keeper: sidecar.Sidecar
    prefix: tuple[str, ...] = ()


def _one_host(stack: contextlib.ExitStack, directory: Path) -> list[Place]:
    return [Place(stack.enter_context(sidecar.serving(directory, DRAM)))] * 2


def _two_hosts(stack: contextlib.ExitStack, directory: Path) -> list[Place]:
    hosts = stack.enter_context(network.hosts("p", "d"))
    stack.callback(network.Etcd(directory).kill)
    places = []
    for host in hosts:
        (directory / host.name).mkdir()
        keeper = pods.start_sidecar(host, directory / host.name, dram=DRAM)
        stack.callback(keeper.pool.unlink, missing_ok=True)
        stack.callback(keeper.kill)
        stack.callback(keeper.finish)
        places.append(Place(keeper, host.prefix))
    for place in places:
        place.keeper.wait_metric("pillion_mesh_peers", 1)
    return places


SETUPS = {"one": _one_host, "two": _two_hosts, "engine": _one_host}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Engines in float32: where D computes a tail and a lone engine all, rounding must not choose another token."""
    directory = tmp_path_factory.mktemp("handover")
    lone = engine.Options(model.write(directory / "model", model.TINY), dtype="float32", batched_tokens=CHUNK)
    copy: Literal["engine", "sidecar"] = "engine" if SETUP == "engine" else "sidecar"
    cached = dataclasses.replace(lone, copy=copy, extra={"pillion.query_timeout_us": QUERY_MS * 1000})
    with contextlib.ExitStack() as stack:
        places = SETUPS[SETUP](stack, directory)
        named = {
            name: dataclasses.replace(cached, socket=place.keeper.socket, prefix=place.prefix)
            for name, place in zip("pd", places, strict=True)
        }
        p, d, alone = handover.start(stack, directory, {**named, "lone": lone})
        of_p, of_d = (place.keeper for place in places)
        yield Pair(p, d, alone, of_p, counts=d.metrics(), beside_d=None if of_d is of_p else of_d)


def _lengths() -> list[int]:
    return [100 + (2900 * at) // max(1, PROMPTS - 1) for at in range(PROMPTS)]


@pytest.mark.supports("handover")
def test_p_first(pair: Pair) -> None:
    """D computes the last token of every prompt alone: the tail behind the last whole block is handed over too."""
    for length in _lengths():
        tokens = pair.prompt(length)
        transfer = pair.compute(tokens)
        assert (transfer["do_remote_prefill"], transfer["pillion"]) == (True, {"tokens": length})
        answer = pair.answer(tokens, transfer)
        assert answer["tokens"] == pair.right(tokens)
        assert answer["computed"] == 1
    assert pair.exhausted() == 0


def test_both_at_once(pair: Pair, record_property: Callable[[str, object], None]) -> None:
    """D asks before P has begun. If a busy machine made P slower than D waits, D computes: the sidecar counts that."""
    # Milliseconds of each hand-over that the sidecar timed, and the blocks of P's last step, which are copied out and in.
    handed_over, timed = 0, []
    for length in _lengths()[::2]:
        tokens = pair.prompt(length)
        before, (counted, seconds) = pair.exhausted(), handover.durations(pair.keeper)
        pair.ask(pair.d, tokens, OUTPUT_TOKENS, TO_ANSWER)
        pair.compute(tokens)
        answer = pair.answered()
        assert answer["tokens"] == pair.right(tokens)
        if pair.exhausted() == before:
            assert answer["computed"] == 1
            handed_over += 1
        now, seconds_now = handover.durations(pair.keeper)
        if now == counted + 1:
            timed.append((1e3 * (seconds_now - seconds), -(-(length % CHUNK or CHUNK) // engine.BLOCK_TOKENS)))
    assert handed_over > 0
    figures = f"{SETUP}: {handed_over} of {len(_lengths()[::2])} handed over"
    if timed:
        [namespace] = [known for known in pair.keeper.namespaces() if known["engines"]]
        block_ms = 2 * memory.copy_ms(namespace["block_bytes"])
        beyond_ms = statistics.median(ms - blocks * block_ms for ms, blocks in timed)
        figures += f", p50 {beyond_ms:.2f} ms from P's last step to D's last block beyond the bytes"
    record_property("figures", figures)


def test_a_tail_outlives_its_request_at_p(pair: Pair) -> None:
    """P goes on with other prompts at once, and vLLM would reuse the block of the tail first. The sidecar saves the tail
    late."""
    lost = [keeper.metrics()[LOST] for keeper in pair.keepers]
    several = {pair.number + 1 + at: pair.prompt(CHUNK + 20) for at in range(8)}
    for tokens in several.values():
        pair.ask(pair.p, tokens, 1, TO_COMPUTE)
    told: dict[int, Any] = {}
    # From P's first answer on.
    late_s = 0.0
    while len(told) < len(several):
        began = time.monotonic()
        if late_s < HELD_S / 2:
            with threads.frozen(pair.keeper.pid):
                time.sleep(PAUSE_S)
        frozen_s = time.monotonic() - began
        told |= {answer["answered"]: answer["transfer"] for answer in pair.p.answered(PATIENCE_S)}
        late_s += frozen_s if told else 0
    for number, tokens in several.items():
        answer = pair.answer(tokens, told[number])
        assert answer["tokens"] == pair.right(tokens)
        assert answer["computed"] == 1
    assert [keeper.metrics()[LOST] for keeper in pair.keepers] == lost


def test_what_p_alone_has_is_handed_over(pair: Pair) -> None:
    """P computes the request in one step: the sidecar has evicted its prefix, and P's own memory still has it."""
    prefix = pair.prompt(640)
    saved = pair.keeper.metrics()["pillion_saved_blocks_total"]
    pair.p.generate([prefix], max_tokens=1, logprobs=0)
    pair.keeper.wait_metric("pillion_saved_blocks_total", saved + prompts.stored_blocks(len(prefix), 1))
    [namespace] = pair.keeper.namespaces()
    pair.keeper.ctl("evict", namespace["namespace"])
    pair.keeper.wait_for(lambda: pair.keeper.metrics()["pillion_blocks"] == 0, "a pool without blocks")
    tokens = prefix + pair.prompt(CHUNK // 4)
    answer = pair.answer(tokens, pair.compute(tokens))
    assert answer["tokens"] == pair.right(tokens)
    assert answer["computed"] == 1


def test_what_is_handed_over_survives_pressure(pair: Pair) -> None:
    """P computes more than its sidecar's pool holds before D asks."""
    tokens = pair.prompt(1600)
    transfer = pair.compute(tokens)
    evicted = pair.keeper.metrics()["pillion_evicted_blocks_total"]
    blocks = pair.keeper.metrics()["pillion_blocks"]
    others = 0
    while pair.keeper.metrics()["pillion_evicted_blocks_total"] < evicted + blocks:
        pair.p.generate([pair.prompt(3900)], max_tokens=1, logprobs=0)
        others += 1
        assert others < 100
    answer = pair.answer(tokens, transfer)
    assert answer["tokens"] == pair.right(tokens)
    assert answer["computed"] == 1


def test_without_a_producer_d_computes(pair: Pair) -> None:
    """No engine computes this prompt."""
    tokens = pair.prompt(300)
    before = pair.exhausted()
    answer = pair.answer(tokens, TO_ANSWER)
    assert answer["tokens"] == pair.right(tokens) and pair.exhausted() == before + 1


def test_a_strict_engine_ends_what_was_not_handed_over(pair: Pair, tmp_path: Path) -> None:
    """The request ends with an error before D computes any of it; D answers prompts that were handed over."""
    extra = {"pillion.strict_tokens": engine.BLOCK_TOKENS}
    options = dataclasses.replace(pair.d.options, failure_policy="fail", extra=extra)
    strict = engine.Engine(options, tmp_path / "strict.log")
    try:
        strict.wait_started().wait_served()
        for handed_over in (True, False, True):
            tokens = pair.prompt(900)
            transfer = pair.compute(tokens) if handed_over else TO_ANSWER
            pair.ask(strict, tokens, OUTPUT_TOKENS, transfer)
            [answer] = strict.answered(PATIENCE_S)
            right = pair.right(tokens) if handed_over else []
            assert (answer["finish_reason"], answer["tokens"]) == ("length" if handed_over else "error", right)
    finally:
        strict.kill()


@contextlib.contextmanager
def _paused(pid: int, after_s: float) -> Iterator[Future[float]]:
    """Freezes the process once for `PAUSE_S`, `after_s` after the block has begun; the future holds the seconds of the
    freeze."""

    def pause() -> float:
        time.sleep(after_s)
        began = time.monotonic()
        with threads.frozen(pid):
            time.sleep(PAUSE_S)
        return time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(pause)
        yield pausing
        pausing.result()


@pytest.mark.parametrize("p_first", [True, False])
@pytest.mark.parametrize("victim", ["p", "sidecar"])
def test_a_pause_loses_nothing(pair: Pair, victim: str, p_first: bool, record_property: Callable[[str, object], None]) -> None:
    """A seed draws the moment within the hand-over, and one of two sidecars. If a busy machine made D's wait too short, D
    computes. If it made the pause as long as P keeps a block, blocks may be lost, but every token is right."""
    chance = random.Random(f"{victim} {p_first}")
    pids = pair.p.processes()[:1] if victim == "p" else [keeper.pid for keeper in pair.keepers]
    lost, handed_over = [keeper.metrics()[LOST] for keeper in pair.keepers], 0
    for length in _lengths()[::4]:
        tokens = pair.prompt(length)
        started = time.monotonic()
        right = pair.right(tokens)
        lasts_s = time.monotonic() - started
        before = pair.exhausted()
        with _paused(chance.choice(pids), chance.uniform(0, lasts_s)) as pause:
            if p_first:
                answer = pair.answer(tokens, pair.compute(tokens))
            else:
                pair.ask(pair.d, tokens, OUTPUT_TOKENS, TO_ANSWER)
                pair.compute(tokens)
                answer = pair.answered()
        assert answer["tokens"] == right
        if pause.result() >= HELD_S:
            lost = [keeper.metrics()[LOST] for keeper in pair.keepers]
            continue
        if pair.exhausted() == before:
            assert answer["computed"] <= engine.BLOCK_TOKENS + 1
            handed_over += 1
    assert handed_over > 0
    record_property("figures", f"{SETUP}: {handed_over} of {len(_lengths()[::4])} handed over")
    assert [keeper.metrics()[LOST] for keeper in pair.keepers] == lost


@pytest.mark.parametrize("victim", ["p", "sidecar"])
def test_d_s_requests_end_whoever_is_frozen(pair: Pair, victim: str) -> None:
    """D answers rightly during the freeze; afterwards all goes on. Each of two sidecars is frozen in turn."""
    victims = [pair.p.processes()] if victim == "p" else [[keeper.pid] for keeper in pair.keepers]
    for frozen, length in itertools.product(victims, (400, 1200)):
        tokens = pair.prompt(length)
        pair.ask(pair.d, tokens, OUTPUT_TOKENS, TO_ANSWER)
        pair.ask(pair.p, tokens, 1, TO_COMPUTE)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            answer = pair.answered()
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        assert answer["tokens"] == pair.right(tokens)
        assert len(pair.p.answered(PATIENCE_S)) == 1
    tokens = pair.prompt(400)
    answer = pair.answer(tokens, pair.compute(tokens))
    assert answer["tokens"] == pair.right(tokens)
    assert answer["computed"] == 1


def test_d_s_requests_end_where_p_dies(pair: Pair, tmp_path: Path) -> None:
    """D's requests end with right answers. The last test: P is dead."""
    tokens = pair.prompt(2000)
    pair.ask(pair.d, tokens, OUTPUT_TOKENS, TO_ANSWER)
    pair.ask(pair.p, tokens, 1, TO_COMPUTE)
    pair.p.kill()
    assert pair.answered()["tokens"] == pair.right(tokens)
    tokens = pair.prompt(500)
    for keeper in pair.keepers:
        keeper.freeze()
        keeper.kill()
    assert pair.answer(tokens, TO_ANSWER)["tokens"] == pair.right(tokens)
