"""Disaggregated prefill: first tokens at an engine D of prompts computed by an engine P, on one GPU or two.

Both are vLLM engines in processes of their own, at the same time. The KV goes from P to D through Pillion's sidecar, or with
`--rival nixl` through vLLM's NixlConnector. This process is the router: it hands P's answer to D, or asks both at once. With
`--trace` both engines send the records of their requests here, and each length has the timeline of its last prompt. With
`--size running=32` prompts are then handed over beside so many ordinary requests of both, one by one and as many at once.

A round asks P alone, P and then D, and both at once, each for a new prompt of one length, right after a short request that
wakes both GPUs; every other round goes backwards. `added_first_ms` is the median over the rounds of `pd_first_ms` beyond P
alone and D's own step, which ends with the first token; `added_at_once_ms` that of `pd_at_once_ms`. `planted_seen_ms` is how
much later that is where the router held D's request back for `PLANTED_MS`. A length is not `ok` if this is not seen, or if the
quarters of `p_alone_ms` are too far apart. `handed_over_ms` is the time from the end of P's last step until D has loaded all.
`acceptance` is the wait of copied parts for P's output.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benches import harness
from benches.gpu import rig
from benches.gpu.engine import Answer, Engine
from benches.gpu.ttft import ONE_TOKEN, OUTPUT_TOKENS, UNCHECKED
from testkit import collector, handover, memory, metrics
from testkit.sidecar import Sidecar
from testkit.transfer import TO_ANSWER, TO_COMPUTE

WARM_UPS = 2
# Less than a block: such a prompt is never found.
WAKE_TOKENS = 8
# The sleep of vLLM's server after a step in which no request could go on.
PAUSE_S = 0.001
# Steps of other sizes round differently: P computes a block's rest for its own answer, D one token.
EQUAL_LEAST = 0.75
# A delay that the router makes, and the largest error of its measured length.
PLANTED_MS, PLANTED_ERROR_MS = 1.0, 0.5
# Answers from spoiled KV, and the share that must be wrong: in some answers the few tokens stay the same.
SPOILED, WRONG_SEEN_LEAST = 8, 0.5
LENGTHS = ("short_tokens", "middle_tokens", "long_tokens")
# The answer of a request beside the measured ones: some seconds.
BESIDE_TOKENS = 240
# How often as many prompts at once as requests run beside them.
TOGETHER_ROUNDS = 4
# How long whole parts of a hand-over waited until P went on with their step.
ACCEPTANCE = "pillion_handover_duration_seconds"
PART = "acceptance"
# The parts of a record, in their order in `pillion.records`. The router does without that module, because it imports vLLM.
PARTS = ("query", "producer", "waiting", "copy", "ready")

FULL = {"short_tokens": 512, "middle_tokens": 1_790, "long_tokens": 7_070}
SIZES = {
    "full": FULL | {"prompts": 40, "batched_tokens": 2_048, "kv_mib": 8 * 1024, "host_gib": 16, "running": 0},
    "quick": FULL | {"prompts": 3, "batched_tokens": 2_048, "kv_mib": 4 * 1024, "host_gib": 8, "running": 0},
    "tiny": {"short_tokens": 100, "middle_tokens": 350, "long_tokens": 700}
    | {"prompts": 2, "batched_tokens": 256, "kv_mib": 24, "host_gib": 1, "running": 0},
}


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments. Two engines may share the GPU: neither may insist on more than its half being free."""
    return {
        "kv_cache_memory_bytes": sizes["kv_mib"] << 20,
        "gpu_memory_utilization": 0.4,
        "max_model_len": sizes["long_tokens"] + 256,
        "max_num_batched_tokens": sizes["batched_tokens"],
        "max_num_seqs": 64,
    }


# === An engine ===


def serve(engine: Engine, _sizes: dict[str, int], options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Obeys the parent's commands, one at a time, until `end`."""
    options.parent.tell({"block_tokens": engine.block_tokens})
    prompts: list[list[int]] = []
    busy = Busy(engine)
    while True:
        while not select.select([sys.stdin], [], [], 0 if busy.beside else PAUSE_S)[0]:
            busy.step()
        command = options.parent.hear()
        if command is None or "end" in command:
            return {}
        if "make" in command:
            tokens, seed, count = command["make"]
            prompts = [engine.prompt(tokens, seed + number) for number in range(count)]
            # Before the measured time.
            gc.collect()
            options.parent.tell("made")
        elif "spoil" in command:
            engine.spoil_layer()
            options.parent.tell("spoiled")
        elif "beside" in command:
            busy.run(command["beside"])
            options.parent.tell("running")
        else:
            answers = busy.asked(prompts, command["ask"], command["transfer"])
            options.parent.tell([vars(answer) for answer in answers])


class Busy:
    """An engine with ordinary requests beside the measured ones."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wanted = 0
        self.beside: set[str] = set()

    def run(self, requests: int) -> None:
        """Keeps `requests` ordinary requests running from now on, each followed by another one; with 0 the running ones end."""
        self._wanted = requests
        while len(self.beside) < requests:
            self._begin()
        while self.beside and not requests:
            self.step()

    def _begin(self) -> None:
        # A prompt of less than a block is never found, so any will do.
        prompt = self._engine.prompt(WAKE_TOKENS, seed=-1 - len(self.beside))
        self.beside.add(self._engine.add(prompt, BESIDE_TOKENS))

    def step(self) -> dict[str, Answer]:
        """Plays one step; the requests that it ended, without ordinary ones."""
        ended = dict(self._engine.step())
        for request_id in self.beside & ended.keys():
            del ended[request_id]
            self.beside.remove(request_id)
            if self._wanted:
                self._begin()
        return ended

    def asked(self, prompts: list[list[int]], max_tokens: int, transfer: dict[str, Any] | None) -> list[Answer]:
        """The answers to prompts sent at once, with steps as in vLLM's server."""
        ids = [self._engine.add(prompt, max_tokens, transfer=transfer) for prompt in prompts]
        answers: dict[str, Answer] = {}
        while len(answers) < len(ids):
            ended = self.step()
            answers |= ended
            if not ended and self._engine.parked:
                time.sleep(PAUSE_S)
        return [answers[request_id] for request_id in ids]


# === The router ===


class Side(rig.EngineProcess):
    """One of the two engines, as the router sees it."""

    def __init__(self, mode: str, side: str, options: argparse.Namespace) -> None:
        name = f"{mode}-{side}"
        super().__init__("handover", name, options, options.logs / f"handover-{name}.log")
        self.limit_s = options.limit_s

    def do(self, **command: Any) -> Any:
        """Sends a command; its result."""
        self.tell(command)
        return self.hear(self.limit_s)

    def ask(self, max_tokens: int, transfer: dict[str, Any] | None = None) -> Any:
        """The answer to the prompt made last."""
        (answer,) = self.do(ask=max_tokens, transfer=transfer)
        return answer


class Pair:
    """P and D with their requests. Every prompt is another one."""

    def __init__(self, p: Side, d: Side, keeper: Sidecar | None, receivers: list[collector.Collector]) -> None:
        self.p, self.d, self._keeper = p, d, keeper
        # The receivers of P's records and of D's, with `--trace`.
        self._receivers = receivers
        self._seed = 0
        # Milliseconds of each prompt asked at both at once, by the sidecar.
        self.handed_over: list[float] = []
        # The timeline of the last of them.
        self.timeline: dict[str, dict[str, float]] = {}

    def make(self, tokens: int, count: int = 1) -> None:
        """Makes prompts without KV in any engine."""
        for side in (self.p, self.d):
            side.do(make=[tokens, self._seed + 1, count])
        self._seed += count

    def wake(self) -> None:
        """Has both compute a short prompt: a GPU that rested is slow at first."""
        for side in (self.p, self.d):
            side.do(make=[WAKE_TOKENS, -1 - self._seed, 1])
            side.ask(ONE_TOKEN)

    def alone(self) -> tuple[float, Any]:
        """Asks P: the time to its first token, and its answer."""
        answer = self.p.ask(ONE_TOKEN)
        return ms(answer["added"], answer["first"]), answer

    def first(self, planted_ms: float = 0.0) -> tuple[float, Any]:
        """Asks P, and then D with P's answer: the time from P's request to D's first token, and D's answer."""
        computed = self.p.ask(ONE_TOKEN, TO_COMPUTE)
        # vLLM would report these tokens of P as found by D.
        computed["transfer"].pop("remote_prefill_cached_tokens", None)
        time.sleep(planted_ms / 1e3)
        answer = self.d.ask(OUTPUT_TOKENS, computed["transfer"])
        return ms(computed["added"], answer["first"]), answer

    def at_once(self) -> tuple[float, Any]:
        """Asks both at once: the time from the first of the two requests, and D's answer."""
        before = self._durations()
        for receiver in self._receivers:
            receiver.spans.clear()
        self.d.tell({"ask": OUTPUT_TOKENS, "transfer": TO_ANSWER})
        computed = self.p.ask(ONE_TOKEN, TO_COMPUTE)
        (answer,) = self.d.hear(self.d.limit_s)
        count, seconds = (now - then for now, then in zip(self._durations(), before, strict=True))
        if count == 1:
            self.handed_over.append(seconds * 1e3)
        if self._receivers:
            self.timeline = timeline(dict(zip("pd", zip((computed, answer), self._receivers, strict=True), strict=True)))
        return ms(min(computed["added"], answer["added"]), answer["first"]), answer

    def together(self) -> list[int]:
        """Asks both for all prompts at once; the tokens found by D for each."""
        self.d.tell({"ask": OUTPUT_TOKENS, "transfer": TO_ANSWER})
        self.p.do(ask=ONE_TOKEN, transfer=TO_COMPUTE)
        return [answer["cached_tokens"] for answer in self.d.hear(self.d.limit_s)]

    def acceptance(self) -> dict[float, float]:
        """The number of parts whose wait for acceptance was at most so many seconds, by these bounds; 0: the seconds of all."""
        page = (self._keeper.get("/metrics") or "") if self._keeper else ""
        found: dict[float, float] = {}
        for name, labels, value in metrics.SAMPLE.findall(page):
            if f'part="{PART}"' not in labels:
                continue
            if name == f"{ACCEPTANCE}_bucket":
                found[float(labels.partition('le="')[2].partition('"')[0])] = float(value)
            elif name == f"{ACCEPTANCE}_sum":
                found[0.0] = float(value)
        return found

    def _durations(self) -> list[float]:
        """The number of prompts handed over, and the seconds of all."""
        return list(handover.durations(self._keeper)) if self._keeper else [0.0, 0.0]


def ms(begun: float, end: float) -> float:
    """Milliseconds between two times; one clock counts for all processes of a host."""
    return (end - begun) * 1e3


def timeline(sides: dict[str, tuple[dict[str, Any], collector.Collector]]) -> dict[str, dict[str, float]]:
    """When both engines had the request, asked the cache and gave the first token, in milliseconds from the first request on.

    Between the last two: the length of each wait, by its reason.
    """
    begun = min(answer["added"] for answer, _ in sides.values())
    # Spans have the time of day.
    begun_ns = (time.time() - time.perf_counter() + begun) * 1e9
    told: dict[str, dict[str, float]] = {}
    for side, (answer, receiver) in sides.items():
        receiver.wait()
        span, (record,) = receiver.spans[-1], receiver.records().values()
        times = {"added": ms(begun, answer["added"]), "asked": (span.start_time_unix_nano - begun_ns) / 1e6}
        times |= {part: record[f"pillion.{part}_ms"] for part in PARTS} | {"first": ms(begun, answer["first"])}
        told[side] = {name: round(value, 2) for name, value in times.items()}
    return told


def measured(pair: Pair, tokens: int, options: argparse.Namespace, ways: list[str], block_tokens: int) -> dict[str, Any]:
    """The figures of prompts of one length."""
    asks = {"alone": pair.alone, "first": pair.first, "planted": lambda: pair.first(PLANTED_MS), "at_once": pair.at_once}
    computed: list[int] = []
    equal: list[bool] = []

    def act(name: str) -> Callable[[int], tuple[float, float]]:
        def ask(_: int) -> tuple[float, float]:
            """The time to the first token, and D's own step of it."""
            pair.wake()
            pair.make(tokens)
            took, answer = asks[name]()
            if name != "alone":
                computed.append(tokens - answer["cached_tokens"])
                equal.append(answer["tokens"] == pair.p.ask(OUTPUT_TOKENS)["tokens"])
            return took, ms(answer["scheduled"], answer["first"])

        return ask

    acts = {name: act(name) for name in ("alone", *ways)}
    harness.turns(WARM_UPS, acts)
    for figures in (computed, equal, pair.handed_over):
        figures.clear()
    samples = harness.turns(options.sizes["prompts"], acts)
    times = {name: [took for took, _ in taken] for name, taken in samples.items()}
    added = {
        way: harness.median((took - step - alone for (took, step), alone in zip(samples[way], times["alone"], strict=True)), 2)
        for way in ways
    }
    result: dict[str, Any] = {"p_alone_ms": harness.spread(times["alone"])}
    result |= {f"pd_{way}_ms": harness.spread(times[way]) for way in ways}
    result["d_step_ms"] = harness.spread([step for way in ways for _, step in samples[way]])
    result |= {f"added_{way}_ms": added[way] for way in ways}
    result["planted_seen_ms"] = round(added["planted"] - added["first"], 2)
    if pair.handed_over:
        result["handed_over_ms"] = harness.spread(pair.handed_over)
    if pair.timeline:
        result["timeline_ms"] = pair.timeline | {"sidecar": {"handed_over": round(pair.handed_over[-1], 2)}}
    result |= {"computed_max": max(computed), "equal": round(sum(equal) / len(equal), 4)}
    result["ok"] = result["computed_max"] <= block_tokens + 1 and result["equal"] >= EQUAL_LEAST
    if options.scale == "full":
        seen = abs(result["planted_seen_ms"] - PLANTED_MS) <= PLANTED_ERROR_MS
        result["ok"] = result["ok"] and seen and harness.is_steady(times["alone"])
    return result


def waits(before: dict[float, float], after: dict[float, float]) -> dict[str, float | None]:
    """Figures of the waits between two looks: their number, their mean, and the bounds of the sidecar's histogram above half
    and above 99 % of them."""
    parts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    seconds, count = parts.pop(0.0), parts[float("inf")]
    if not count:
        return {"parts": 0}
    within = {f"p{share}_ms": next(bound for bound in parts if parts[bound] * 100 >= share * count) for share in (50, 99)}
    shares = {f"within_{bound * 1e3:g}_ms": round(parts[bound] / count, 4) for bound in (0.0005, 0.002)}
    bounds = {name: round(bound * 1e3, 3) if bound != float("inf") else None for name, bound in within.items()}
    return {"parts": int(count), "mean_ms": round(seconds / count * 1e3, 3)} | bounds | shares


def beside(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """The waits of parts for acceptance while ordinary requests run at both engines: prompts one by one, and at once."""
    running, middle = options.sizes["running"], options.sizes["middle_tokens"]
    for side in (pair.p, pair.d):
        side.do(beside=running)
    result: dict[str, Any] = {"running": running}
    for length in LENGTHS:
        tokens = options.sizes[length]
        pair.handed_over.clear()
        looked = pair.acceptance()
        computed = []
        for _ in range(options.sizes["prompts"]):
            pair.make(tokens)
            computed.append(tokens - pair.at_once()[1]["cached_tokens"])
        result[str(tokens)] = {"acceptance": waits(looked, pair.acceptance()), "computed_max": max(computed)}
        if pair.handed_over:
            result[str(tokens)]["handed_over_ms"] = harness.spread(pair.handed_over)
    looked = pair.acceptance()
    found = []
    for _ in range(TOGETHER_ROUNDS):
        pair.make(middle, running)
        found += pair.together()
    share = round(sum(found) / (len(found) * middle), 4)
    result["together"] = {"tokens": middle, "found": share, "acceptance": waits(looked, pair.acceptance())}
    for side in (pair.p, pair.d):
        side.do(beside=0)
    return result


def copy_ms(shape: dict[str, int], tokens: int, item_bytes: int) -> float:
    """Milliseconds of one copy of the KV of so many tokens within this host's memory, by one thread."""
    token_bytes = 2 * item_bytes * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return round(memory.copy_ms(tokens * token_bytes), 2)


def wrong_seen(pair: Pair, tokens: int) -> float:
    """The share of D's answers that change without one layer of the loaded KV."""
    seen: list[bool] = []
    for _ in range(SPOILED):
        pair.make(tokens)
        _, answer = pair.first()
        pair.d.do(spoil=True)
        spoiled = pair.d.ask(OUTPUT_TOKENS)
        seen.append(spoiled["tokens"] != answer["tokens"] and spoiled["cached_tokens"] > 0)
    return round(sum(seen) / SPOILED, 4)


@contextlib.contextmanager
def transfers(mode: str, options: argparse.Namespace, folder: Path) -> Iterator[tuple[list[dict[str, Any]], Sidecar | None]]:
    """`kv_transfer_config` of P and of D, and the process beside them."""
    if mode == "nixl":
        yield [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}] * 2, None
        return
    gib = options.sizes["host_gib"]
    rig.wait_for_memory(gib)
    with rig.sidecar(folder, options, gib, options.logs / "pillion-serve.log") as keeper:
        p, d = (rig.pillion_transfer(keeper, options) for _ in range(2))
        if options.tiny:
            # On a CPU an engine with its own copies loads nothing before all blocks are kept.
            d["kv_connector_extra_config"]["pillion.copy"] = "sidecar"
        yield [p, d], keeper
        (options.logs / "pillion-metrics.txt").write_text(keeper.get("/metrics") or "")


def run_mode(mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both engines of a mode, one started after the other, and all lengths."""
    # NIXL needs P's answer, so P must have computed the prompt.
    ways = ["first", "planted"] if mode == "nixl" else ["first", "planted", "at_once"]
    with contextlib.ExitStack() as stack:
        configs, keeper = stack.enter_context(transfers(mode, options, folder))
        receivers = [stack.enter_context(collector.collecting()) for _ in configs if options.trace and keeper]
        for config, receiver in zip(configs, receivers, strict=False):
            config["kv_connector_extra_config"] |= {"pillion.record_otlp": receiver.url, "pillion.record_slow_ms": 0}
        sides = [Side(mode, side, options) for side in ("p", "d")]
        for side in sides:
            stack.callback(side.end)
        for side in sides:
            side.hear(rig.IMPORT_WATCHDOG_S)
        for side, transfer in zip(sides, configs, strict=True):
            started = side.do(model=str(options.model_folder), transfer=transfer, reference=None)
        pair = Pair(sides[0], sides[1], keeper, receivers)
        result: dict[str, Any] = {}
        looked = pair.acceptance()
        for length in LENGTHS:
            tokens = options.sizes[length]
            result[str(tokens)] = measured(pair, tokens, options, ways, started["block_tokens"])
            last_step = tokens % options.sizes["batched_tokens"] or options.sizes["batched_tokens"]
            result[str(tokens)]["copy_ms"] = copy_ms(rig.shape(options), last_step, 4 if options.tiny else 2)
            harness.say(f"{mode}: {tokens} tokens: {json.dumps(result[str(tokens)])}")
        result["ok"] = all(figures["ok"] for figures in result.values())
        if keeper:
            result["acceptance"] = waits(looked, pair.acceptance())
        if options.sizes["running"] and keeper:
            result["beside"] = beside(pair, options)
            harness.say(f"{mode}: beside others: {json.dumps(result['beside'])}")
        result["wrong_layer_seen"] = wrong_seen(pair, options.sizes["middle_tokens"])
        result["ok"] = result["ok"] and result["wrong_layer_seen"] >= WRONG_SEEN_LEAST
        result["facts"] = {name: side.do(end=True)["facts"] for name, side in zip("pd", sides, strict=True)}
        return result


def run(_bench: rig.Bench, options: argparse.Namespace, modes: list[str], folder: Path) -> rig.Results:
    """Runs every mode in turn; a failed mode is reported, and the others go on."""
    return rig.each_mode(modes, lambda mode: run_mode(mode, options, folder))


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark alone."""
    rig.cards(parser)
    parser.add_argument("--trace", action="store_true", help="print what both engines' records say of a prompt")


BENCH = rig.Bench("handover", str(__doc__), SIZES, engine_settings, serve, None, UNCHECKED, ("nixl",), options=options)

if __name__ == "__main__":
    rig.main(BENCH, run)
