"""Real vLLM engines: one per `Engine`, driven by hand."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from testkit.child import Child, python, python_path
from testkit.fork_server import ForkServer
from testkit.waiting import Failed, allow, outlasted, wait_for

# Watchdogs only: no test asserts on them. Two spawned ranks take about 35 s to start on two idle cores.
START_WATCHDOG_S = 300
COMMAND_WATCHDOG_S = 300
BLOCK_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of an engine. `load` and `copy` only matter with a connector (`socket` set)."""

    model: Path
    socket: Path | None = None
    load: Literal["auto", "sync", "async"] = "auto"
    copy: Literal["auto", "engine", "sidecar"] = "engine"
    multiprocess: bool = False
    tensor_parallel: int = 1
    # True if its processes are started as new programs, as by the CPU build and `vllm serve`, and not forked.
    spawned: bool = False
    failure_policy: Literal["recompute", "fail"] = "recompute"
    blocks: int | None = None
    batched_tokens: int | None = None
    max_requests: int | None = None
    local_prefix_cache: bool = True
    kv_bytes: int = 64 << 20
    omp_threads: int = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    # The module of the connector.
    connector: str = "pillion.connector"
    # The engine's id for the connector; vLLM makes one up.
    engine_id: str | None = None
    # More keys of the connector, arguments of `vllm.LLM`, and variables of the environment.
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    # A file for the duration of every schedule() call; see timed_scheduler.py.
    schedule_times: Path | None = None
    # The words before the engine's command; see mounts.py.
    prefix: tuple[str, ...] = ()

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": self.kv_bytes,
            "tensor_parallel_size": self.tensor_parallel,
            "dtype": self.dtype,
        }
        optional = {
            # vLLM refuses blocks for less than one whole request; it keeps one block for itself.
            "max_model_len": (self.blocks - 2) * BLOCK_TOKENS if self.blocks else None,
            "num_gpu_blocks_override": self.blocks,
            "max_num_batched_tokens": self.batched_tokens,
            "max_num_seqs": self.max_requests,
            "scheduler_cls": "testkit.timed_scheduler.TimedScheduler" if self.schedule_times else None,
        }
        arguments |= {name: value for name, value in optional.items() if value is not None}
        if self.socket is not None:
            arguments["kv_transfer_config"] = self.transfer_config()
        return arguments | self.arguments

    def transfer_config(self) -> dict[str, Any]:
        """vLLM's `kv_transfer_config` of Pillion alone."""
        return {
            "kv_connector": "PillionConnector",
            "kv_connector_module_path": self.connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": self.failure_policy,
            **({"engine_id": self.engine_id} if self.engine_id else {}),
            "kv_connector_extra_config": {
                "pillion.socket": str(self.socket),
                "pillion.load": self.load,
                "pillion.copy": self.copy,
                # A test that counts hits must not lose one to the default of 2 ms.
                "pillion.query_timeout_us": HIT_BUDGET_US,
                # The standing check, where it is not tested, must not shorten a hit.
                "pillion.check_every": 0,
                **self.extra,
            },
        }

    def environment(self) -> dict[str, str]:
        """The engine's environment: offline, equal hashes in all processes, few threads."""
        return {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": str(self.omp_threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if self.multiprocess else "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "PILLION_TEST_SCHEDULE_TIMES": str(self.schedule_times or ""),
            **self.variables,
        }


# The process to copy for drivers, once there is one: it imports vLLM.
_server: list[ForkServer] = []
SERVER_OMP_THREADS = 1
DRIVER = "testkit.engine_driver"
# A process that has called a GPU's driver must not be copied.
GPU_DRIVER = Path("/dev/nvidiactl")
# A test that needs a hit must not miss it while the sidecar waits for a core.
HIT_BUDGET_US = 10_000_000
# Less than a block: an engine steps for it, without a query or a save.
NUDGE = list(range(3, 11))
# `Engine.states` of a served engine, and of one whose ranks have not stated their weights yet.
SERVED, UNBOUND = ["serving"], ["unbound"]


def _driver(options: Options) -> Child:
    """A driver process: a copy of the process that imported vLLM, where copying is possible."""
    # Variables that libraries read when they are imported; the others come with the engine's role, and so does its log.
    environment = {"OMP_NUM_THREADS": str(options.omp_threads), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if options.omp_threads != SERVER_OMP_THREADS or options.prefix or GPU_DRIVER.exists():
        return Child([*options.prefix, *python(DRIVER)], Path(os.devnull), environment)
    if not _server:
        _server.append(ForkServer(python("testkit.fork_server", DRIVER), python_path() | environment))
    return Child.copied(_server[0])


@atexit.register
def _end_server() -> None:
    for server in _server:
        server.kill()


class Engine:
    """One vLLM engine: the driver process and the processes that vLLM starts below it."""

    def __init__(self, options: Options, log: Path) -> None:
        self.options = options
        self.log = log
        log.touch()
        self._driver = _driver(options)
        self._driver.log = log
        self._answered: list[dict[str, Any]] = []
        role = {"arguments": options.llm_arguments(), "environment": options.environment(), "spawned": options.spawned}
        self._driver.tell({**role, "log": str(log)})

    def wait_started(self) -> Engine:
        """Waits until this engine can be used, and returns it."""
        self._read_answer(START_WATCHDOG_S, "started engine")
        return self

    def generate(self, prompts: list[list[int]], max_tokens: int = 8, logprobs: int = 5, **more: Any) -> list[dict[str, Any]]:
        """One answer per prompt: tokens, logprobs, cached_tokens, ttft_s, token_s (when each came), finish_reason, aborted."""
        sampling = {"max_tokens": max_tokens, "logprobs": logprobs}
        answers = self.command("generate", prompts=prompts, sampling=sampling, **more)
        assert len(answers) == len(prompts)
        return list(answers)

    def metrics(self) -> dict[str, int]:
        """vLLM's own counters; see engine_driver.COUNTERS."""
        return dict(self.command("metrics"))

    def states(self) -> list[str]:
        """The engine's states of its last step, by vLLM's metrics."""
        return list(self.command("states"))

    def nudge(self, **more: Any) -> None:
        """Has it step, without a query or a save; `more` as for `generate`."""
        self.generate([NUDGE], max_tokens=1, logprobs=0, **more)

    def wait_served(self) -> None:
        """Has an engine with a connector step until its sidecar serves it. Its ranks state their weights in a step, and a query
        waits 200 ms for that. On a busy machine that may be too short: a test that counts hits waits here."""
        if self.options.socket is not None:
            self._step_until(lambda: self.states() == SERVED, "service by the sidecar")

    def reset_prefix_cache(self, reset_connector: bool = False, until_served: bool = True) -> bool:
        """The result of vLLM's reset_prefix_cache; see `_asking_ranks`."""
        with self._asking_ranks(until_served):
            return bool(self.command("reset_prefix_cache", reset_connector=reset_connector))

    def rpc(self, method: str, until_served: bool = True, **arguments: Any) -> None:
        """Calls a method of every rank through vLLM; see `_asking_ranks`."""
        with self._asking_ranks(until_served):
            self.command("rpc", method=method, arguments=arguments)

    @contextlib.contextmanager
    def _asking_ranks(self, until_served: bool) -> Iterator[None]:
        """The block makes the ranks state their weights again. Afterwards an engine that was served steps until they have, or
        until its sidecar is gone. With `until_served` false it does not step."""
        was_served = until_served and self.states() == SERVED
        yield
        if was_served:
            self._step_until(lambda: self.states() != UNBOUND, "word of every rank")

    def _step_until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            self.nudge()
            return condition()

        wait_for(holds, what, COMMAND_WATCHDOG_S, failed=self.failed)

    def sleep(self, level: int) -> None:
        """vLLM's sleep. It aborts all requests."""
        self.command("sleep", level=level)

    def wake_up(self) -> None:
        """Ends a sleep, and waits for service by the sidecar."""
        self.command("wake_up")
        self.wait_served()

    def alter(self, function: Callable[[Any], None]) -> None:
        """Changes the model of an engine of one process with a function of a module, without vLLM's knowledge."""
        self.command("alter", function=f"{function.__module__}:{function.__qualname__}")

    def command(self, name: str, **arguments: Any) -> Any:
        """Sends one command and returns its result."""
        self._send(name, **arguments)
        return self._read_answer(COMMAND_WATCHDOG_S, f"answer to {name!r}")

    def _send(self, name: str, **arguments: Any) -> None:
        self._driver.tell({"command": name, **arguments})

    def ask(
        self, number: int, prompt: list[int], max_tokens: int, logprobs: int = 0, transfer: dict[str, Any] | None = None
    ) -> None:
        """Adds a request to those in flight; `answered` returns its answer. `transfer`: its kv_transfer_params."""
        more = {"extra_args": {"kv_transfer_params": transfer}} if transfer else {}
        self._send("ask", number=number, prompt=prompt, sampling={"max_tokens": max_tokens, "logprobs": logprobs, **more})

    def answered(self, patience_s: float) -> list[dict[str, Any]]:
        """The answers of `ask` since the last call, each with its number as `answered`; waits `patience_s` for the first."""
        if not self._answered and (line := self._driver.line_within(patience_s)) is not None:
            self._note(json.loads(line))
        answered, self._answered = self._answered, []
        return answered

    def processes(self) -> list[int]:
        """The processes of this engine: those that vLLM started below the driver, or the driver itself."""
        return _descendants(self._driver.pid) or [self._driver.pid]

    def failed(self, reason: str) -> Failed:
        """An error with the end of the engine's log."""
        return self._driver.failed(reason)

    def crash(self) -> None:
        """Kills every process of the engine at once; its earlier answers can still be read."""
        self._driver.kill()

    def kill(self) -> None:
        """Kills every process of the engine at once, as a crash would."""
        self._driver.close()

    def exit(self) -> None:
        """Ends the engine as a user would; its exit must be clean."""
        self.command("exit")
        self._driver.wait_exit()

    def _read_answer(self, watchdog_s: float, what: str) -> Any:
        deadline = time.monotonic() + allow(watchdog_s)
        while (line := self._driver.line_within(max(0, deadline - time.monotonic()))) is not None:
            answer = json.loads(line)
            if not self._note(answer):
                return answer["result"]
        raise self.failed(outlasted(what, watchdog_s))

    def _note(self, line: dict[str, Any]) -> bool:
        """Keeps an answer of `ask` and returns true; false for other lines. An error line raises."""
        if "error" in line:
            raise self.failed(line["error"])
        if "answered" in line:
            self._answered.append(line)
        return "answered" in line


def _descendants(pid: int) -> list[int]:
    """Processes below this one, vLLM's by their titles: not the tracker of multiprocessing's resources."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end once it is listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, (task / "children").read_text().split())
    below = [below for child in children for below in _descendants(child)]
    return [child for child in children if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"VLLM::")] + below


@contextlib.contextmanager
def running(options: Options, log: Path, until_served: bool = True) -> Iterator[Engine]:
    """A started engine, killed at the block's end in any case. Its sidecar serves it, unless `until_served` is false."""
    engine = Engine(options, log)
    try:
        engine.wait_started()
        if until_served:
            engine.wait_served()
        yield engine
    finally:
        engine.kill()
