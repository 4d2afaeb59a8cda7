"""vLLM's own scheduler, of whichever vLLM is on the path, over a scripted worker, one step in flight.

Runs as a program: reads scenarios from its standard input, a JSON list a line, and answers each line with a JSON list
of reports. One process plays them all, since importing vLLM costs more than most of them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import importlib
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from pillion import _shim, groups
from scripted import storm
from scripted.configuration import build_cache_config, build_config, config_of_rank
from scripted.worker import StepFailed
from testkit import metrics, plan, pool_file, threads, waiting
from testkit.child import Parent
from testkit.server import fetch

# An unbound engine takes steps for so long before it goes on: on a busy machine binding takes seconds.
BIND_S = 10
# The end of an engine waits so long for its last records: tests look at them, and a user would not wait so long.
RECORDS_CLOSE_S = 60
# A scripted step takes microseconds and a transfer some milliseconds: an idle step waits as a real one would.
IDLE_STEP_S = 0.001
# Watchdog: no scenario needs nearly as many steps.
STEPS_MAX = 20_000
# A load with its end so many steps after its beginning is late.
LATE_STEPS = 3
# The states of threads after obeying a signal; a zombie's are gone.
GONE_STATES = {"SIGSTOP": {"T"}, "SIGKILL": {"Z", "X"}}
# How a block of a save ends, as the shim counts it.
SAVE_ENDS = ("blocks_committed", "blocks_present", "blocks_cancelled", "blocks_dropped")
# A key of no block.
PROBE = b"\xff" * 16


wait_for = functools.partial(waiting.wait_for, poll_s=IDLE_STEP_S)


def use_cpu_platform() -> None:
    """A source tree alone has no distribution to tell vLLM its platform."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()


def import_vllm() -> None:
    """Imports what every engine needs. An engine seeks its model among the objects of the collector: these are set aside."""
    importlib.import_module("scripted.worker")
    for name in ("model_executor.models.llama", "v1.core.sched.async_scheduler", "v1.engine.core"):
        importlib.import_module(f"vllm.{name}")
    from vllm.model_executor.models import registry

    # vLLM looks at a model in a process of its own, which imports vLLM again: only a GPU needs that.
    registry._run_in_subprocess = lambda inspect: inspect()
    gc.collect()
    gc.freeze()


def wait_for_records() -> None:
    """Has engines of this process wait for their records when they end."""
    import pillion.records

    pillion.records.CLOSE_S = RECORDS_CLOSE_S


class Executor:
    """Calls the workers."""

    def __init__(self, workers: list[Any]) -> None:
        self._workers = workers

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """The answer of each worker."""
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self._workers]


class ScriptedEngine:
    """Scheduler and worker, with the next step scheduled before the last one's output is seen."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine import core
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.structured_output import StructuredOutputManager

        from scripted.worker import ScriptedWorker

        config = build_config(scenario)
        cache_config = build_cache_config(scenario, config)
        config.kv_transfer_config.engine_id = scenario["engine_id"]
        # vLLM turns it off where it runs on a CPU.
        config.scheduler_config.async_scheduling = scenario["async_scheduling"]
        hash_function = get_hash_fn_by_name("xxhash_cbor")
        init_none_hash(hash_function)
        # First, as in vLLM. A scenario may look at the first rank alone.
        ranks = range(scenario.get("ranks", 1))
        self._workers = [ScriptedWorker(config_of_rank(config, rank), cache_config) for rank in ranks]
        self._aggregator = KVOutputAggregator(len(ranks))
        self.worker = self._workers[0]
        kind = AsyncScheduler if scenario["async_scheduling"] else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=generate_scheduler_kv_cache_config([cache_config]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=scenario["block_tokens"] * scenario.get("larger", 1),
            hash_block_size=cache_config.hash_block_size or scenario["block_tokens"],
            log_stats=True,
        )
        # Behind its scheduler, as in vLLM: the connector may have put another in its place.
        self._hasher = core.get_request_block_hasher(self.scheduler.hash_block_size, hash_function)
        # For calls of vLLM from outside; of its parts only the workers are there.
        self._core = EngineCore.__new__(EngineCore)
        self._core.model_executor = Executor(self._workers)
        # vLLM's numbers of the groups that Pillion keeps.
        self._kept = [group.number for group, _ in groups.split_groups(cache_config)]
        self._depth = config.max_concurrent_batches
        assert self._depth == 1 + scenario["async_scheduling"]
        self._in_flight: collections.deque[tuple[Any, Any, float]] = collections.deque()
        self._metrics: str | None = scenario.get("metrics")
        before = self._metric if self._metrics else lambda _: 0
        self._saved_before, self._posted_before = before("saved_bytes_total"), before("saves_posted_blocks_total")
        self._requests = 0
        self._names: list[str] = []
        self._answers: dict[str, list[int]] = {}
        self._plans_to_spoil, self._spoil_from, self._leases_to_lose = 0, 0, 0
        self._fault = ""
        self.failed_steps = self.freezes = 0
        self.ended_by_faults: set[str] = set()
        self._step_s = 0.0
        self._damage = contextlib.ExitStack()
        self._events: dict[tuple[int, str], list[dict[str, Any]]] = {}
        # Asynchronous loads of each request, told to the worker less reported as ended.
        self._loading: collections.Counter[str] = collections.Counter()
        # The blocks of these loads.
        self._load_blocks: collections.defaultdict[str, set[int]] = collections.defaultdict(set)
        # In which step the last of each began.
        self._loads_begun: dict[str, int] = {}
        self._began = 0
        self.hits = self.preemptions = self.steps = self.failed_blocks = self.failed_requests = self.late_loads = 0
        # Hit tokens by the place of the hit: vLLM's counts, and the counts for Pillion's metrics.
        self.found: collections.Counter[str] = collections.Counter()
        self.told: collections.Counter[str] = collections.Counter()
        # The time of vLLM's first look at each request, and requests not looked at.
        self._looked_at: dict[str, float] = {}
        self._new: list[str] = []
        self._waits: dict[str, list[list[float]]] = {}
        self._put_lose_leases()
        if self._metrics:
            wait_for(self._connected, "connection of both roles to the sidecar")

    def _connected(self) -> bool:
        """Whether both sessions are there: on a busy machine the first attempt may have taken too long."""
        roles = [_pillions(worker.connector)._worker for worker in self._workers]
        workers = [part.session for role in roles for part in role._parts]
        schedulers = self._sessions()
        for worker in workers:
            worker.start(0)
        for scheduler in schedulers:
            scheduler.end_step()
        return all(session.connected for session in workers + schedulers)

    def _sessions(self) -> list[Any]:
        """The scheduler role's session of each cache group; none where another connector is tried."""
        role = _pillions(self.scheduler.connector)._scheduler
        # A policy has none after its internal error.
        sessions: list[Any] = role._policy.sessions() or []
        return sessions

    @property
    def _foreign(self) -> set[str]:
        """Requests with an unfinished asynchronous load of another connector."""
        connectors = getattr(self.worker.connector, "_connectors", ())
        found: set[str] = next((one.begun for one in connectors if hasattr(one, "begun")), set())
        return found

    def counts(self) -> dict[str, int]:
        """The counts for tests, so far."""
        names = ("hits", "failed_blocks", "failed_requests", "late_loads", "preemptions", "steps", "failed_steps", "freezes")
        of_worker = {name: getattr(self.worker, name) for name in ("crossings", "null_blocks", "wrong_loaded")}
        wrong = sum(worker.wrong.total() for worker in self._workers)
        return {name: getattr(self, name) for name in names} | of_worker | {"wrong": wrong}

    def generate(
        self,
        prompts: list[list[int]],
        output_tokens: int,
        at: dict[str, list[dict[str, Any]]] | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> list[list[int]]:
        """Answer the prompts; an aborted one keeps its tokens. `at`: acts by moments; `transfer`: a router's word."""
        self._names, self._answers = [], {}
        self._bind()
        for prompt in prompts:
            self.add(prompt, output_tokens, transfer)
        for when, acts in (at or {}).items():
            step, _, moment = when.partition(":")
            self._events[int(step), moment] = acts
        self._began = self.steps
        self.finish()
        assert not self._events, f"the answers took {self.steps - self._began} steps; nothing happened at {self._events}"
        return [self._answers[name] for name in self._names]

    def finish(self) -> None:
        """Steps until there is nothing left to do."""
        while self.scheduler.has_requests() or self._in_flight:
            self.step()
        assert not +self._loading, f"loads that were never reported as ended: {self._loading}"

    def _bind(self) -> None:
        """Steps without work, for the ranks to state their weights, while an acting sidecar does not know them: the acts of
        `at` happen in a served engine."""
        if not self._metrics:
            return
        ends_at = time.monotonic() + BIND_S

        def unbound() -> bool:
            with contextlib.suppress(_shim.ShimError):
                return any(it.connected and not it.namespace for it in self._sessions())
            # Its policy has met an internal error.
            return False

        while unbound() and time.monotonic() < ends_at:
            scheduled = self.scheduler.schedule()
            self._finish_step(scheduled, self._execute(scheduled), time.monotonic())
            time.sleep(IDLE_STEP_S)

    def _happen(self, moment: str) -> None:
        for act in self._events.pop((self.steps - self._began, moment), []):
            getattr(self, act["do"])(**act.get("with", {}))

    def waits(self) -> dict[str, list[list[float]]]:
        """How long requests waited until they were scheduled, and until their first output: the least and the most seconds,
        since the connector is asked between vLLM's queue and the end of its first look."""
        return self._waits

    def add(self, prompt: list[int], output_tokens: int, transfer: dict[str, Any] | None = None, priority: int = 0) -> str:
        """One more request, of the running `generate` if one runs."""
        name = self._add(prompt, output_tokens, transfer, priority)
        self._names.append(name)
        self._answers[name] = []
        self._new.append(name)
        return name

    def answer(self, name: str) -> list[int]:
        """The tokens of a request's answer so far."""
        return self._answers[name]

    def plan(self, moment: str, act: dict[str, Any]) -> None:
        """Something to happen in the next step, if it has such a moment."""
        self._events.setdefault((self.steps - self._began, moment), []).append(act)

    def forget_events(self) -> None:
        """Forgets planned acts."""
        self._events.clear()
        self._fault = ""

    def storm(self, **more: Any) -> dict[str, Any]:
        """Random plays: see `storm.py`."""
        return storm.play(self, **more)

    def abort(self, index: int) -> None:
        """The client of a request is gone; nothing if the request has ended."""
        self.abort_named(self._names[index])

    def spoil_plans(self, count: int, first_block: int = 0) -> None:
        """The next loads fail from a block on: their plans name wrong generations of the slots."""
        self._plans_to_spoil, self._spoil_from = count, first_block

    def slow_steps(self, seconds: float) -> None:
        """Every step from now on takes so long, as a real one does: the sidecar acts on it before its output is seen."""
        self._step_s = seconds

    def lose_leases(self, count: int) -> None:
        """The leases of the next loads end between the answer of vLLM's question and the load."""
        self._leases_to_lose = count

    def _put_lose_leases(self) -> None:
        """Puts `lose_leases` between the connector's answer and vLLM's call after allocating blocks."""
        connector = self.scheduler.connector
        allocated = connector.update_state_after_alloc

        def lose_and_go_on(request: Any, blocks: Any, external_tokens: int) -> None:
            if external_tokens and self._leases_to_lose:
                self._leases_to_lose -= 1
                # In a set the lease of one group: its load has failed as a whole then.
                role, sessions = _pillions(connector)._scheduler, self._sessions()
                group = self._leases_to_lose % len(sessions)
                sessions[group].release(role._policy.log(role._numbers[request.request_id], group))
            allocated(request, blocks, external_tokens)

        connector.update_state_after_alloc = lose_and_go_on

    def break_policy(self, method: str, after: int) -> None:
        """The policy panics before a call, after so many others of the same method."""
        role = _pillions(self.scheduler.connector)._scheduler
        role._policy = BrokenPolicy(role._policy, method, after)

    def break_slots(self, path: str, word: str) -> int:
        """A wrong header of every committed slot, until `mend_pool`."""
        return self._damage.enter_context(pool_file.broken(Path(path), word))

    def damage_pool(self, path: str) -> int:
        """Wrong bytes in every committed block, until `mend_pool`."""
        return self._damage.enter_context(pool_file.damaged(Path(path)))

    def mend_pool(self) -> None:
        """Undoes `damage_pool` and `break_slots`."""
        self._damage.close()

    def signal(self, pid: int, name: str) -> None:
        """Freezes (SIGSTOP), thaws (SIGCONT) or kills (SIGKILL) a process, and waits until it is done."""
        os.kill(pid, getattr(signal, name))
        self.freezes += name == "SIGSTOP"
        if name != "SIGCONT":
            wait_for(lambda: threads.states(pid) <= GONE_STATES[name], f"{name} of {pid}")

    def tell(self, address: str, text: str) -> None:
        """Has the holder of the sidecar's threads do something, and waits until it is done."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
            holder.settimeout(waiting.WATCHDOG_S)
            holder.connect(address)
            holder.send(text.encode())
            reply = holder.recv(1 << 16).decode()
        assert reply == "done", reply

    def turn(self) -> None:
        """Waits until the sidecar's data thread has done everything due at the time of this call.

        It reads rings before fences, and publishes its metrics last. The first query may be counted with an earlier
        one without a waiting caller, by a turn begun before; behind it no other is left. Once the metrics count the second, a
        turn has seen the fences stored before and begun the copies waiting for them.
        """
        for _ in range(2):
            before = self._metric("queries_total")
            for session in self._sessions():
                self._probe(session)
            wait_for(lambda: self._metric("queries_total") > before, "count of a query")  # noqa: B023

    def _probe(self, session: Any) -> None:
        """Puts a query, and waits until the sidecar has answered it."""
        log = session.open()
        session.append(log, [PROBE], 0)

        def answered() -> bool:
            # A new budget; a sidecar frozen before is asked again once its heartbeat has moved.
            session.end_step()
            numbers = session.stats()
            session.query(log, 0, 1)
            ended = session.stats()
            return all(ended[name] == numbers[name] for name in ("queries_timed_out", "queries_not_asked"))

        wait_for(answered, "sign of life of the sidecar")
        session.close(log)
        session.end_step()

    def settle(self) -> None:
        """Waits until the sidecar has seen everything, every save has ended, and no load is open."""
        self.turn()
        sessions = self._sessions()

        def settled() -> bool:
            ended = 0
            for session in sessions:
                session.end_step()
                numbers = session.stats()
                ended += sum(numbers[name] for name in SAVE_ENDS)
            return bool(ended == self._metric("saves_posted_blocks_total") - self._posted_before)

        wait_for(settled, "end of all saves")
        wait_for(lambda: self._metric("leases") == 0, "end of all leases")

    def wait_filled(self, path: str) -> None:
        """Waits until every slot being filled holds the content of some block of this engine."""

        def filled() -> bool:
            held = pool_file.filling(Path(path))
            return bool(held) and self.worker.blocks() >= set(held)

        wait_for(filled, "whole copy of this engine's blocks")

    def wait_released(self) -> None:
        """Waits until the sidecar holds no lease: its copies for loads have ended."""
        wait_for(lambda: self._metric("leases") == 0, "end of all leases")

    def new_weights(self, weights: int | None = None) -> None:
        """The engine's weights are replaced, without a word to anybody."""
        self.worker.new_weights(weights)

    def call(self, method: str, args: list[Any] | None = None) -> None:
        """Has every worker do something, as users of vLLM do."""
        self._core.collective_rpc(method, args=tuple(args or ()))

    def sleep(self) -> None:
        """vLLM's sleep: aborts everything, resets every cache, discards the KV memory."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.finish()
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.worker.sleep()
        self.worker.wake_up()

    def _add(self, prompt: list[int], output_tokens: int, transfer: dict[str, Any] | None, priority: int) -> str:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        name = f"request-{self._requests}"
        self._requests += 1
        extra = {"kv_transfer_params": dict(transfer)} if transfer else None
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_tokens, extra_args=extra)
        sampling.update_from_generation_config({}, None)
        self.scheduler.add_request(Request(name, prompt, sampling, None, priority=priority, block_hasher=self._hasher))
        return name

    def abort_named(self, name: str) -> None:
        """As `abort`."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One turn of vLLM's loop: schedules and executes a step, looks at the output of the oldest in flight."""
        self._happen("")
        assert self.steps - self._began < STEPS_MAX, f"no end after {STEPS_MAX} steps"
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            scheduled_at = time.monotonic()
            self._looked_at |= dict.fromkeys(self._new, scheduled_at)
            self._new.clear()
            if not scheduled.total_num_scheduled_tokens:
                time.sleep(IDLE_STEP_S)
            self._spoil(scheduled.kv_connector_metadata)
            self._begin_loads(scheduled.kv_connector_metadata)
            self._happen("scheduled")
            fault = ""
            if scheduled.total_num_scheduled_tokens:
                fault, self._fault = self._fault, ""
            try:
                output = self._execute(scheduled, fault)
            except StepFailed:
                self._recover()
                return
            # Also without a delay it lets other threads run, such as those of the sidecar.
            time.sleep(self._step_s)
            self._end_loads(output.kv_connector_output)
            self.preemptions += len(scheduled.preempted_req_ids or ())
            self._in_flight.append((scheduled, output, scheduled_at))
            if fault == "refuse":
                self._recover()
        if self._in_flight and (len(self._in_flight) >= self._depth or not self.scheduler.has_requests()):
            self._happen("executed")
            self._finish_step(*self._in_flight.popleft())
            if self._depth == 1 and self.scheduler.num_spec_tokens:
                # As EngineCore.post_step does it; an asynchronous scheduler leaves drafts to the worker.
                from vllm.v1.outputs import DraftTokenIds

                drafts = self.worker.drafts
                self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
        self.steps += 1

    def _execute(self, scheduled: Any, fault: str = "") -> Any:
        """The step at every rank, each with a copy of its own, and what vLLM's scheduler gets of their outputs."""
        steps = [scheduled, *(copy.deepcopy(scheduled) for _ in self._workers[1:])]
        outputs = [copy.copy(worker.execute(step, fault)) for worker, step in zip(self._workers, steps, strict=True)]
        return self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]

    def fail_step(self, fault: str) -> None:
        """The next step with tokens fails: see `ScriptedWorker.execute`."""
        self._fault = fault

    def _recover(self) -> None:
        """As vLLM's fault tolerance does (EngineCoreSentinel.on_fault): ends every request, and goes on without the output of
        the steps in flight."""
        from vllm.v1.request import RequestStatus

        self.failed_steps += 1
        self.ended_by_faults.update(self.scheduler.requests)
        # vLLM frees blocks by the number of taken outputs, and does not count the ones dropped here: without room it would
        # stand still.
        self.scheduler.processed_step_seq = self.scheduler.sched_step_seq
        self.scheduler._drain_deferred_frees()
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        for _, output, _ in self._in_flight:
            # The ends of loads reported by these steps are reported again.
            self._loading.update(output.kv_connector_output.finished_recving or () if output.kv_connector_output else ())
        self._in_flight.clear()
        self.steps += 1

    def _spoil(self, metadata: Any) -> None:
        """Spoils one group's load of a set, now of this group and now of another."""
        groups = _groups(metadata)
        for name, _, _ in list(groups[0].loads if groups else ()):
            if not self._plans_to_spoil:
                return
            self._plans_to_spoil -= 1
            loads = groups[self._plans_to_spoil % len(groups)].loads
            for index, (other, planned, sync) in enumerate(loads):
                if other == name:
                    loads[index] = (name, plan.outdated(planned, self._spoil_from), sync)

    def _begin_loads(self, metadata: Any) -> None:
        # The loads of a set's groups are one.
        planned = [load for group in _groups(metadata) for load in group.loads + group.lost]
        for group, its in zip(self._kept, _groups(metadata), strict=False):
            for name, load, sync in its.loads:
                blocks = _shim.plan_blocks(load)
                self._note_load(group, name, blocks)
                if not sync:
                    self._load_blocks[name].update(blocks)
        begun = {name for name, _, sync in planned if not sync}
        self._loading.update(begun)
        self._loads_begun |= dict.fromkeys(begun, self.steps)

    def _note_load(self, group: int, name: str, blocks: list[int]) -> None:
        request, table = self.scheduler.requests[name], self.scheduler.kv_cache_manager.get_block_ids(name)[group]
        for block in blocks:
            # A hit may end within the last block.
            end = min((table.index(block) + 1) * self.worker.block_tokens[group], request.num_computed_tokens)
            self.worker.take_load(group, block, list(request.all_token_ids[:end]))

    def _end_loads(self, output: Any) -> None:
        if output is None:
            return
        self.failed_blocks += len(output.invalid_block_ids)
        self.failed_requests += len(output.failed_recving)
        self.worker.fail_load(output.invalid_block_ids)
        for name in output.finished_recving or ():
            if name in self._foreign:
                # Another connector's load.
                self._foreign.discard(name)
                continue
            self._loading[name] -= 1
            blocks = self._load_blocks.pop(name, set())
            if name in output.failed_recving:
                self.worker.fail_load(blocks)
            self.late_loads += self.steps - self._loads_begun.pop(name, self.steps) >= LATE_STEPS
            assert self._loading[name] >= 0, f"the load of {name} was reported as ended twice"

    def _finish_step(self, scheduled: Any, output: Any, scheduled_at: float) -> None:
        finishes_at = time.monotonic()
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self._answers[one.request_id] += one.new_token_ids
                if len(one.events or ()) > 1:
                    queued, computed = one.events[0].timestamp, one.events[-1].timestamp
                    looked = self._looked_at[one.request_id]
                    until_output = [finishes_at - looked, time.monotonic() - queued]
                    self._waits[one.request_id] = [[computed - looked, scheduled_at - queued], until_output]
            stats = outputs.scheduler_stats
            if stats is not None and stats.connector_prefix_cache_stats is not None:
                self.hits += stats.connector_prefix_cache_stats.hits
                found = stats.connector_prefix_cache_stats.hits_by_source
                self.found.update({source.value: tokens for source, tokens in found.items()})
            if stats is not None and stats.kv_connector_stats:
                self.told.update(stats.kv_connector_stats["hit_tokens"])

    def wait_saved(self, saved_bytes: int) -> None:
        """Wait until the sidecar has committed so many bytes since this engine's start."""
        saved = saved_bytes + self._saved_before
        wait_for(lambda: self._metric("saved_bytes_total") >= saved, f"commit of {saved_bytes} bytes")

    def _metric(self, name: str) -> int:
        assert self._metrics, "the scenario names no metrics"
        page = fetch(self._metrics)
        assert page is not None, f"{self._metrics} does not answer"
        return metrics.totals(page)[f"pillion_{name}"]

    def reset(self, reset_connector: bool = False, reset_running_requests: bool = False) -> bool:
        """vLLM's prefix cache reset."""
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector))


# Beyond all groups of a policy.
NO_GROUP = 99


class BrokenPolicy:
    """A policy with a panic before a call: its lock is poisoned then, so every call fails, but for the last one."""

    def __init__(self, policy: Any, method: str, after: int) -> None:
        self._policy, self._method, self._after = policy, method, after

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._after -= 1
            if self._after == -1:
                with contextlib.suppress(_shim.ShimError):
                    self._policy.take_events(NO_GROUP)
        return getattr(self._policy, name)


def _pillions(connector: Any) -> Any:
    """Pillion's connector, also inside vLLM's MultiConnector."""
    return next((one for one in getattr(connector, "_connectors", ()) if hasattr(one, "_worker")), connector)


def _groups(metadata: Any) -> list[Any]:
    """A step's metadata of each cache group; nothing where another connector made it."""
    for one in getattr(metadata, "metadata", (metadata,)):
        if hasattr(one, "others"):
            return [one, *one.others]
    return []


def play(scenario: dict[str, Any]) -> dict[str, Any]:
    """Run the scenario's acts in order; each is a method's name and its arguments."""
    import vllm

    engine = ScriptedEngine(scenario)
    results = []
    try:
        for act in scenario["acts"]:
            before, sources = engine.counts(), (engine.found.copy(), engine.told.copy())
            value = getattr(engine, act["do"])(**act.get("with", {}))
            changes = {name: count - before[name] for name, count in engine.counts().items()}
            found, told = engine.found - sources[0], engine.told - sources[1]
            results.append({"value": value, "found": found, "told": told} | changes)
    finally:
        engine.mend_pool()
        for worker in engine._workers:
            worker.connector.shutdown()
        engine.scheduler.shutdown()
    return {"vllm": vllm.__version__, "results": results, "steps": engine.steps}


def main() -> None:
    """Plays scenarios until the input ends. vLLM's own prints go to the log."""
    parent = Parent()
    use_cpu_platform()
    import_vllm()
    wait_for_records()
    while (scenarios := parent.hear()) is not None:
        # Engines of before hold the pools of their sidecars in memory.
        gc.collect()
        try:
            reply: Any = [play(scenario) for scenario in scenarios]
        except Exception:
            reply = {"error": traceback.format_exc()}
        parent.tell(reply)


if __name__ == "__main__":
    main()
