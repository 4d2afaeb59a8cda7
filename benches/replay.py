"""The share of real traces' prompt tokens found without a model: vLLM's scheduler, the connector, a real sidecar.

The requests are those of `gpu/trace`, at their times, `speed` times as fast. Time is that of a model of 8 billion parameters on
an H200, 10 ms a step and 33.6 us a token. Blocks are small and copied in real time. The worker computes nothing. Prompts of
agents have an eighth of their length.

    benches/run replay [--trace NAME]... [--room BLOCKS]... [--pillion KEY=VALUE]...

The last line is one JSON object: by trace and room, in blocks of 16 tokens, the share of the prompts' tokens not computed by
vLLM, and the sidecar's counts.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benches import harness, hooks, rig
from benches.gpu import models, trace
from pillion.connector import PillionConnector
from pillion.scheduler import Scheduler as SchedulerRole
from pillion.vllm_compat import KVConnectorRole
from testkit import metrics
from testkit.sidecar import Sidecar
from testkit.waiting import wait_for

ROOMS = (20_320, 40_640, 80_000)
# Changes of the sizes of `gpu/trace`.
TRACES: dict[str, dict[str, int]] = {
    "conversation": {},
    "synthetic": {"one_in": 4},
    "agents": {"one_in": 8, "seconds": 15_000, "id_tokens": 64},
}
DEVICE_BLOCKS = 15_000
BLOCK_TOKENS = 16
HEAD = 64
BLOCK_BYTES = 2 * BLOCK_TOKENS * HEAD * 2
# With the slot's header, 128 bytes. A pool has whole segments, of 4 MiB or more: up to 2 % more or less room than asked for.
SLOT_BYTES = BLOCK_BYTES + 128
SEGMENT_BYTES = 4 << 20
STEP_S, TOKEN_S, IDLE_S = 0.010, 33.6e-6, 0.001
# While nothing can be computed, loads are waited for.
POLL_S = 0.0002
WATCHDOG_S = 60
LAYER = "model.layers.0.self_attn.attn"
COUNTERS = (
    "evicted_blocks", "unreachable_blocks", "saved_blocks", "saves_leaving_blocks", "saves_lost_to_reuse", "loaded_blocks",
    "checks_differing",
)  # fmt: skip


@dataclasses.dataclass
class Flight:
    """A scheduled step with its output still to come."""

    output: SchedulerOutput
    ends_at: float
    # Requests that get a token from it.
    sampled: set[str]


class Engine:
    """vLLM's scheduler and the connector's two roles, in a time of their own."""

    def __init__(self, directory: Path, socket: Path, settings: dict[str, str]) -> None:
        model = models.write(directory / "model", models.TINY)
        extra = {"pillion.socket": str(socket), "pillion.model_id": "replay", "pillion.query_timeout_us": rig.BUDGET_US}
        extra |= {f"pillion.{key}": value for key, value in settings.items()}
        sizes = trace.SIZES["full"]
        longest = sizes["prompt_max"] + sizes["output_max"] + 64
        config = VllmConfig(
            model_config=ModelConfig(str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest),
            device_config=DeviceConfig("cpu"),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True, prefix_caching_hash_algo=hooks.HASH),
            scheduler_config=SchedulerConfig(
                max_num_seqs=256,
                max_num_batched_tokens=sizes["batched_tokens"],
                max_model_len=longest,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=True,
            ),
            kv_transfer_config=KVTransferConfig(**hooks.transfer(extra), kv_load_failure_policy="recompute"),
        )
        # vLLM turns it off on a CPU.
        config.scheduler_config.async_scheduling = True
        config.cache_config.num_gpu_blocks = DEVICE_BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=HEAD, dtype=torch.bfloat16)
        size = DEVICE_BLOCKS * BLOCK_BYTES
        tensor = KVCacheTensor(size, [LAYER], size, BLOCK_BYTES)
        cache = KVCacheConfig(DEVICE_BLOCKS, [tensor], [KVCacheGroupSpec([LAYER], spec)])
        self._kv = torch.zeros((DEVICE_BLOCKS, 1, BLOCK_TOKENS, 2 * HEAD), dtype=torch.bfloat16)
        self._worker = PillionConnector(config, KVConnectorRole.WORKER, cache)
        self._worker.register_kv_caches({LAYER: self._kv})
        self._scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self._hasher = hooks.hasher(BLOCK_TOKENS)
        self.now = 0.0
        self._flights: collections.deque[Flight] = collections.deque()
        self.steps = 0
        # By request: its found tokens, and the time of its first token.
        self.found: dict[str, int] = {}
        self.first: dict[str, float] = {}
        wait_for(self._bound, "namespace", WATCHDOG_S, rig.POLL_S)

    def _bound(self) -> bool:
        output = self._scheduler.schedule()
        self._run(output)
        self._scheduler.update_from_output(output, ModelRunnerOutput(req_ids=[], req_id_to_index={}))
        connector = self._scheduler.connector
        assert isinstance(connector, PillionConnector) and isinstance(connector._scheduler, SchedulerRole)
        return connector._scheduler.state == "serving"

    @property
    def busy(self) -> bool:
        """True if a request is in flight."""
        return bool(self._scheduler.has_requests() or self._flights)

    def add(self, name: str, arrival: trace.Arrival) -> None:
        """Adds a request at its time."""
        params = SamplingParams(max_tokens=max(2, arrival.output), temperature=0, ignore_eos=True)
        params.update_from_generation_config({}, None)
        self._scheduler.add_request(Request(name, arrival.prompt, params, None, block_hasher=self._hasher))

    def step(self) -> None:
        """Schedules one step, and takes in the output of the one before."""
        if self._scheduler.has_requests():
            output = self._scheduler.schedule()
            self.steps += 1
            begins = max(self.now, self._flights[-1].ends_at if self._flights else 0.0)
            tokens = output.total_num_scheduled_tokens
            lasts = STEP_S + tokens * TOKEN_S if tokens else IDLE_S
            if not tokens:
                time.sleep(POLL_S)
            requests = self._scheduler.requests
            sampled = {name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk}
            self._flights.append(Flight(output, begins + lasts, sampled))
        if len(self._flights) > 1 or not self._scheduler.has_requests():
            self._end(self._flights.popleft())

    def _end(self, flight: Flight) -> None:
        self.now = max(self.now, flight.ends_at)
        names = list(flight.output.num_scheduled_tokens)
        ended = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if name in flight.sampled else [] for name in names],
            kv_connector_output=self._run(flight.output),
        )
        for outputs in self._scheduler.update_from_output(flight.output, ended).values():
            for one in outputs.outputs:
                if one.prefill_stats is not None:
                    self.found[one.request_id] = one.prefill_stats.num_cached_tokens
                    self.first.setdefault(one.request_id, self.now)

    def _run(self, output: SchedulerOutput) -> KVConnectorOutput:
        assert output.kv_connector_metadata is not None
        return hooks.run_worker(self._worker, output.kv_connector_metadata, output, [LAYER], self._kv)

    def shutdown(self) -> None:
        """Disconnects both roles."""
        self._scheduler.shutdown()
        self._worker.shutdown()


def replay(arrivals: list[trace.Arrival], keeper: Sidecar, directory: Path, settings: dict[str, str]) -> dict[str, Any]:
    """Plays every request at its time."""
    engine = Engine(directory, keeper.socket, settings)
    added = 0
    while added < len(arrivals) or engine.busy:
        if not engine.busy:
            engine.now = max(engine.now, arrivals[added].due)
        while added < len(arrivals) and arrivals[added].due <= engine.now:
            engine.add(str(added), arrivals[added])
            added += 1
        engine.step()
    ttft = [(engine.first[str(number)] - one.due) * 1e3 for number, one in enumerate(arrivals)]
    found = sum(engine.found.values()) / sum(len(one.prompt) for one in arrivals)
    counted = metrics.totals(keeper.get("/metrics") or "")
    engine.shutdown()
    return {
        "found": round(found, 4),
        "ttft_mean_ms": round(statistics.fmean(ttft), 1),
        "steps": engine.steps,
        "blocks": counted["pillion_blocks"],
        **{name: counted[f"pillion_{name}_total"] for name in COUNTERS},
    }


def dram(room: int) -> str:
    """The size of a pool with about so many slots."""
    return f"{round(room * SLOT_BYTES / SEGMENT_BYTES) * SEGMENT_BYTES >> 20}MiB"


def main() -> None:
    """Prints one JSON line last."""
    parser = harness.parser(__doc__)
    parser.add_argument("--trace", choices=TRACES, action="append", help="repeatable (default: all)")
    parser.add_argument("--room", type=int, action="append", metavar="BLOCKS", help="repeatable (default: 20320, 40640, 80000)")
    parser.add_argument("--pillion", action="append", default=[], metavar="KEY=VALUE", help="as keep_copies=no; repeatable")
    options = parser.parse_args()
    settings = dict(option.partition("=")[::2] for option in options.pillion)
    report: dict[str, Any] = {"pillion": settings}
    for name in options.trace or TRACES:
        arrivals = trace.arrivals(name, trace.SIZES["full"] | TRACES[name], models.TINY["vocab_size"])
        rooms: dict[str, Any] = {}
        for room in options.room or ROOMS:
            with tempfile.TemporaryDirectory() as directory, rig.sidecar(dram(room)) as keeper:
                rooms[str(room)] = replay(arrivals, keeper, Path(directory), settings)
            harness.say(f"{name}, {room} blocks: {json.dumps(rooms[str(room)])}")
        report[name] = {"requests": len(arrivals), "rooms": rooms}
    harness.report(report)


if __name__ == "__main__":
    main()
