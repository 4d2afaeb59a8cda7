"""The cost of the connector for the engine: a step with saves of 1,024 blocks, and a step without saves.

Real vLLM objects (configuration, requests, scheduler output), the real connector in both roles, a real sidecar. No model runs:
every hook of a step is called in vLLM's order and timed together. After the saving step all blocks are read back from the
sidecar into cleared memory and compared byte for byte.

Beside it, in turns, an engine with followed KV events, and one with another sidecar if the command line names one.

    benches/run save [--binary PILLION]
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from benches import harness, hooks, rig
from pillion import _shim
from pillion.connector import PillionConnector
from pillion.scheduler import Scheduler as SchedulerRole
from pillion.vllm_compat import KVConnectorRole
from testkit import model as random_model
from testkit.waiting import wait_for

BLOCK_TOKENS = 16
LAYERS = 2
NAMES = [f"layer.{layer}" for layer in range(LAYERS)]
PAGE_SHAPE = (1, BLOCK_TOKENS, 32)  # heads, tokens, content: 1 KiB a layer
SAVE_REQUESTS, SAVE_BLOCKS = 8, 128
RUNNING, LONG, SHORT = 256, 512, 64
ROUNDS = 61
IDLE_ROUNDS = 400
DRAM = "1GiB"
WATCHDOG_S = 120


def main() -> None:
    """Prints one JSON line last."""
    binary = rig.binary(__doc__)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for kind in ("plain", "events", *(["binary"] if binary else [])):
            sidecar = stack.enter_context(rig.sidecar(DRAM, binary=binary if kind == "binary" else None))
            engine = Engine(Path(directory), str(sidecar.socket), RUNNING * (LONG + 4), kind == "events")
            stack.callback(engine.shutdown)
            wait_for(engine.bound, "namespace", WATCHDOG_S, rig.POLL_S)
            engines[kind] = engine
        harness.report(measure(engines) | {"running": RUNNING, "blocks_each": LONG, "byte_exact": True})


def measure(engines: dict[str, Engine]) -> dict[str, object]:
    """Steps of each engine in turns."""
    saves = harness.turns(ROUNDS, {kind: partial(save_round, engine) for kind, engine in engines.items()})
    plain = sorted(wall for wall, _ in saves["plain"])
    result: dict[str, object] = {
        "save1024_us": harness.median(plain),
        "save1024_us_min_max": [round(plain[0], 1), round(plain[-1], 1)],
        **rig.compared("save1024_cpu", {kind: [cpu for _, cpu in samples] for kind, samples in saves.items()}),
        "events_told1024_cpu_us": harness.median(engines["events"].told_us),
    }
    for name, length in (("idle_step_short", SHORT), ("idle_step", LONG)):
        turns = zip(*(idle_steps(engine, length) for engine in engines.values()), strict=True)
        steps = dict(zip(engines, map(list, zip(*turns, strict=True)), strict=True))
        plain = sorted(steps["plain"])
        result[f"{name}_us"] = harness.median(plain)
        result[f"{name}_p99_us"] = harness.percentile(plain, 0.99)
        result |= rig.compared(name, steps)
    return result


class Engine:
    """Both roles of the connector and the KV memory, without a model."""

    def __init__(self, directory: Path, socket: str, blocks: int, events: bool) -> None:
        path = directory / "model"
        random_model.write(path)
        extra = {
            "pillion.socket": socket,
            "pillion.load": "sync",
            "pillion.query_timeout_us": 1_000_000,
            "pillion.check_every": 0,
            "pillion.record_every": 0,
            "pillion.record_slow_ms": 3_600_000,
        }
        config = EngineArgs(
            model=str(path),
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            prefix_caching_hash_algo=hooks.HASH,
            kv_transfer_config=hooks.transfer(extra),
            kv_events_config={"enable_kv_cache_events": True, "publisher": "null"} if events else None,
        ).create_engine_config()
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
        size = blocks * LAYERS * spec.page_size_bytes
        tensor = KVCacheTensor(size, NAMES, blocks * spec.page_size_bytes, spec.page_size_bytes)
        kv_config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(NAMES, spec)])
        storage = torch.zeros((LAYERS, blocks, *PAGE_SHAPE), dtype=torch.bfloat16)
        self.kv = storage
        # Requests with a running load.
        self.awaited: set[str] = set()
        self.worker = PillionConnector(config, KVConnectorRole.WORKER, kv_config)
        self.worker.register_kv_caches({name: storage[layer] for layer, name in enumerate(NAMES)})
        self.scheduler = PillionConnector(config, KVConnectorRole.SCHEDULER, kv_config)
        # Whether its KV events are followed, the round's events, and CPU microseconds of those after each round's step.
        self.events, self.told, self.told_us = events, list[Any](), list[float]()
        self._hasher = hooks.hasher(BLOCK_TOKENS)

    def request(self, name: str, blocks: int, seed: int, extra_tokens: int = 1) -> Request:
        """A request of whole blocks and some tokens more."""
        tokens = [(seed * 7919 + i) % 50_000 for i in range(blocks * BLOCK_TOKENS + extra_tokens)]
        return Request(name, tokens, SamplingParams(), None, block_hasher=self._hasher)

    def step(self, output: SchedulerOutput) -> None:
        """Every hook of both roles, in vLLM's order."""
        meta = self.scheduler.build_connector_meta(output)
        done = hooks.run_worker(self.worker, meta, output, NAMES, self.kv)
        self.awaited -= done.finished_recving or set()
        # Loads are ended here, without a model runner.
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done.kv_connector_worker_meta))
        self.told += self.scheduler.take_events()

    def match(self, request: Request) -> int:
        """External tokens of a request without blocks in the engine's own cache."""
        tokens, is_awaited = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert tokens is not None
        if is_awaited:
            self.awaited.add(request.request_id)
        return tokens

    def loaded(self) -> bool:
        """Plays a step; true if every load has ended."""
        self.step(output([], CachedRequestData.make_empty(), {}))
        return not self.awaited

    def allocate(self, request: Request, ids: list[int], external: int) -> None:
        """vLLM's allocation of `ids` for a request."""
        blocks = SimpleNamespace(get_block_ids=lambda: (ids,))
        self.scheduler.update_state_after_alloc(request, blocks, external)

    def bound(self) -> bool:
        """True if the sidecar has bound the engine to its namespace; ranks join in a step."""
        self.step(output([], CachedRequestData.make_empty(), {}))
        assert isinstance(self.scheduler._scheduler, SchedulerRole)
        return self.scheduler._scheduler.state == "serving"

    def saved(self) -> bool:
        """True if every save has ended."""
        assert isinstance(self.scheduler._scheduler, SchedulerRole)
        policy = self.scheduler._scheduler._policy
        assert isinstance(policy, _shim.Policy)
        [session] = policy.sessions()
        session.end_step()
        return session.saving == 0

    def follow(self, blocks: int) -> None:
        """Waits for the events of `blocks` more saved blocks, in this call or in the steps before it."""
        spent = 0.0

        def all_told() -> bool:
            nonlocal spent
            began, known = time.thread_time(), len(self.told)
            self.told += self.scheduler.take_events()
            spent += (time.thread_time() - began) * 1e6 if len(self.told) > known else 0.0
            return sum(len(event.block_hashes) for event in self.told) >= blocks

        if self.events:
            wait_for(all_told, "events", WATCHDOG_S, rig.POLL_S)
            self.told.clear()
            self.told_us.append(spent)

    def shutdown(self) -> None:
        """Disconnects both roles."""
        self.scheduler.shutdown()
        self.worker.shutdown()


def output(new: list[NewRequestData], cached: CachedRequestData, scheduled: dict[str, int]) -> SchedulerOutput:
    """One step of vLLM's scheduler."""
    total = sum(scheduled.values())
    return SchedulerOutput(new, cached, scheduled, total, {}, {}, [], set(), [])


def new_request(request: Request, ids: list[int], computed: int) -> NewRequestData:
    """vLLM's data of a request in its first step."""
    return NewRequestData(request.request_id, None, [], None, None, (ids,), computed, None)


def save_round(engine: Engine, round: int) -> tuple[float, float]:
    """Microseconds of every hook of a step with new requests that save 1,024 blocks: of the clock, and of the CPU."""
    # The bits of finite numbers: blocks of others are not kept.
    engine.kv.copy_(torch.randint(0, 30_000, engine.kv.shape, dtype=torch.int16).view(torch.bfloat16))
    requests = [engine.request(f"s{round}.{i}", SAVE_BLOCKS, round * 100 + i) for i in range(SAVE_REQUESTS)]
    tables = [list(range(1 + i * (SAVE_BLOCKS + 1), (i + 1) * (SAVE_BLOCKS + 1) + 1)) for i in range(SAVE_REQUESTS)]
    new = [new_request(request, ids, 0) for request, ids in zip(requests, tables, strict=True)]
    step = output(new, CachedRequestData.make_empty(), {r.request_id: r.num_tokens for r in requests})
    began, cpu = time.perf_counter(), time.thread_time()
    for request, ids in zip(requests, tables, strict=True):
        assert engine.match(request) == 0, "a round's prompts are its own"
        engine.allocate(request, ids, 0)
    engine.step(step)
    cpu, spent = (time.thread_time() - cpu) * 1e6, (time.perf_counter() - began) * 1e6
    wait_for(engine.saved, "end of saves", WATCHDOG_S, rig.POLL_S)
    engine.follow(SAVE_REQUESTS * SAVE_BLOCKS)
    for request in requests:
        engine.scheduler.request_finished(request, [])
    read_back(engine, round, tables)
    return spent, cpu


def read_back(engine: Engine, round: int, tables: list[list[int]]) -> None:
    """Loads the saved blocks into cleared memory and compares every byte."""
    kept = [ids[:SAVE_BLOCKS] for ids in tables]
    expected = engine.kv.view(torch.int16)[:, [block for ids in kept for block in ids]].clone()
    engine.kv.zero_()
    requests = []
    for i, ids in enumerate(tables):
        request = engine.request(f"r{round}.{i}", SAVE_BLOCKS, round * 100 + i)
        hit = engine.match(request)
        assert hit == SAVE_BLOCKS * BLOCK_TOKENS, f"{hit} tokens of {SAVE_BLOCKS} blocks came back"
        engine.allocate(request, ids, hit)
        requests.append(request)
    # On a CPU no step waits for a load.
    wait_for(engine.loaded, "end of loads", WATCHDOG_S, rig.POLL_S)
    got = engine.kv.view(torch.int16)[:, [block for ids in kept for block in ids]]
    assert torch.equal(got, expected), "blocks differ from what was saved"
    for request in requests:
        engine.scheduler.request_finished(request, [])
    wait_for(engine.saved, "end of saves", WATCHDOG_S, rig.POLL_S)


def idle_steps(engine: Engine, length: int) -> Iterator[float]:
    """Microseconds of every hook of decode steps without a full block, `RUNNING` requests of `length` blocks."""
    requests = [engine.request(f"i{length}.{i}", length, 10_000 + length * 1000 + i) for i in range(RUNNING)]
    tables = [list(range(1 + i * (length + 1), (i + 1) * (length + 1) + 1)) for i in range(RUNNING)]
    new = []
    for request, ids in zip(requests, tables, strict=True):
        engine.match(request)
        engine.allocate(request, ids, 0)
        new.append(new_request(request, ids, 0))
    engine.step(output(new, CachedRequestData.make_empty(), {r.request_id: r.num_tokens for r in requests}))
    wait_for(engine.saved, "end of saves", WATCHDOG_S, rig.POLL_S)
    names = [request.request_id for request in requests]
    for request in requests:
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids(1)
    left = IDLE_ROUNDS
    while left:
        cached = CachedRequestData(names, set(), [], {}, [None] * RUNNING, [0] * RUNNING, [1] * RUNNING)
        step = output([], cached, dict.fromkeys(names, 1))
        filling = (requests[0].num_computed_tokens + 1) % BLOCK_TOKENS == 0
        began = time.perf_counter()
        engine.step(step)
        took = (time.perf_counter() - began) * 1e6
        if not filling:
            left -= 1
            yield took
        advance(requests, tables)
    for request in requests:
        engine.scheduler.request_finished(request, [])
    wait_for(engine.saved, "end of saves", WATCHDOG_S, rig.POLL_S)


def advance(requests: list[Request], tables: list[list[int]]) -> None:
    """Adds one decoded token to each request; a request at the end of its last block starts it again."""
    for request, _ids in zip(requests, tables, strict=True):
        if request.num_computed_tokens % BLOCK_TOKENS == BLOCK_TOKENS - 2:
            request.num_computed_tokens -= BLOCK_TOKENS - 3
        else:
            request.num_computed_tokens += 1


if __name__ == "__main__":
    main()
