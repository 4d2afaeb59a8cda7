"""A failed load: the engine must live, and every request must get its answer.

The fault comes between the connector's answer for a kept prompt and the load of it. `frozen`: the process with the blocks is
frozen until the round's end. `killed`: it is killed. `reported`: the copies of vLLM's OffloadingConnector, which keeps blocks
in the engine's own process, report failures to it. An answer is right if it equals the answer of the computed prompt, or of a
reload.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches.gpu import rig
from benches.gpu.engine import Answer, Engine
from benches.gpu.ttft import engine_settings
from testkit.waiting import Failed

OUTPUT_TOKENS = 8
# A longer step hangs: then the frozen process is thawed, so the mode comes to its end.
HANG_S = 40.0
SERVERS = {"pillion": "serve", "pegaflow": "pegaflow._server"}

SIZES = {
    "full": {"prompts": 4, "prompt_tokens": 4_096, "rounds": 5, "kv_mib": 6 * 1024, "host_gib": 8},
    "quick": {"prompts": 2, "prompt_tokens": 2_048, "rounds": 2, "kv_mib": 4 * 1024, "host_gib": 4},
    "tiny": {"prompts": 3, "prompt_tokens": 512, "rounds": 2, "kv_mib": 24, "host_gib": 1},
}


def measure(engine: Engine, sizes: dict[str, int], options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Right answers first, then the rounds, until the engine ends."""
    prompts = [engine.prompt(sizes["prompt_tokens"], seed) for seed in range(sizes["prompts"])]
    cold = [engine.ask(prompt, OUTPUT_TOKENS) for prompt in prompts]
    engine.rest()
    engine.reset()
    warm = [engine.ask(prompt, OUTPUT_TOKENS) for prompt in prompts]
    if not all(answer.cached_tokens for answer in warm):
        raise Failed(f"{options.mode} gave back nothing of what it was to keep")
    right = [(before.tokens, after.tokens) for before, after in zip(cold, warm, strict=True)]
    faults = ["reported"] * sizes["rounds"]
    if options.mode in SERVERS:
        faults = ["frozen"] * sizes["rounds"] + ["killed"]
    rounds: list[dict[str, Any]] = []
    for fault in faults:
        engine.reset()
        rounds.append({"fault": fault} | _round(engine, prompts, right, _Fault(fault, options.mode)))
        engine.say(str(rounds[-1]))
        if rounds[-1]["ended"]:
            break
    return {"rounds": rounds}


def _round(engine: Engine, prompts: list[list[int]], right: list[tuple[list[int], list[int]]], fault: _Fault) -> dict[str, Any]:
    """All prompts, one after the other, the fault at the first hit."""
    answers: list[Answer] = []
    longest, ended = 0.0, ""
    engine.on_hit(fault.begin)
    try:
        for prompt in prompts:
            began = time.monotonic()
            answers.append(engine.ask(prompt, OUTPUT_TOKENS))
            longest = max(longest, time.monotonic() - began)
    except Exception as error:  # any error ends the engine
        ended = f"{type(error).__name__}: {error}".strip()[:200]
    finally:
        fault.end()
        engine.on_hit(None)
    equal = sum(answer.tokens in pair for answer, pair in zip(answers, right, strict=False))
    return {
        "ended": ended,
        "right": equal,
        "wrong": len(answers) - equal,
        "unanswered": len(prompts) - len(answers),
        "longest_s": round(longest, 2),
        "hung": fault.hung,
        "struck": fault.struck,
    }


@dataclasses.dataclass
class _Fault:
    """One fault of the process with a mode's blocks."""

    kind: str
    mode: str
    struck: bool = False
    hung: bool = False
    _undo: Callable[[], None] | None = None
    _watchdog: threading.Timer | None = None

    def begin(self) -> None:
        """Strikes, once."""
        if self.struck:
            return
        self.struck = True
        if self.kind == "reported":
            self._undo = _report_failures()
            return
        _signal(self.mode, signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP)
        if self.kind == "frozen":
            self._undo = lambda: _signal(self.mode, signal.SIGCONT)
            self._watchdog = threading.Timer(HANG_S, self._give_up)
            self._watchdog.start()

    def _give_up(self) -> None:
        self.hung = True
        _signal(self.mode, signal.SIGCONT)

    def end(self) -> None:
        """Thaws a frozen server."""
        if self._watchdog:
            self._watchdog.cancel()
        if self._undo:
            self._undo()


def _signal(mode: str, number: int) -> None:
    """Sends a signal to the server of a mode, a child of this process's parent, and to the server's descendants."""
    family = [pid for pid in _children(os.getppid()) if SERVERS[mode] in _words(pid)]
    if not family:
        raise Failed(f"no server of {mode} is running")
    for pid in family:
        family += _children(pid)
        os.kill(pid, number)


def _children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def _report_failures() -> Callable[[], None]:
    """Makes the copies of vLLM's OffloadingConnector report failures from now on; returns the function that ends that."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().connector_worker.worker
    finished = worker.get_finished
    worker.get_finished = lambda: [dataclasses.replace(result, success=False) for result in finished()]
    return lambda: delattr(worker, "get_finished")


def compare(raw: dict[str, Any], _reference: dict[str, Any]) -> dict[str, Any]:
    """The end of the engine, if it ended, and the ends of its requests, over all rounds."""
    rounds = raw["rounds"]
    total = {key: sum(each[key] for each in rounds) for key in ("right", "wrong", "unanswered", "hung")}
    ended = next((f"{each['fault']}: {each['ended']}" for each in rounds if each["ended"]), None)
    whole = not ended and not any(total[key] for key in ("wrong", "unanswered", "hung"))
    longest = max(each["longest_s"] for each in rounds)
    result = {"rounds": len(rounds), "ended": ended, **total, "longest_s": longest, "facts": raw["facts"]}
    return result | {"ok": whole and all(each["struck"] for each in rounds)}


RIVALS = ("offloading", "pegaflow")
BENCH = rig.Bench("failures", str(__doc__), SIZES, engine_settings, measure, compare, ("check_every=0",), RIVALS, kills=True)

if __name__ == "__main__":
    rig.main(BENCH)
