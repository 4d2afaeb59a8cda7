"""A real vLLM engine in a process of its own, driven by JSON lines.

Commands come on stdin, one answer each goes to the original stdout; all prints of vLLM go to the engine's log. `testkit.engine`
starts it and sends the engine's options in the first line. `ask` alone has no answer of its own: its request is stepped beside
other commands, and a line with `answered` follows at its end.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Ten seconds, spent before the first line is read: a spare driver imports while another engine is at work.
import vllm.envs
import vllm.v1.engine.core
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

from testkit.child import Parent

if current_platform.is_cpu():
    import vllm.v1.worker.cpu_worker

# Set for an engine of one process that separates KV by the standing check alone; see blind.py.
BLIND = "PILLION_TEST_BLIND"
# Counters of vLLM's own (Prometheus) metrics for the tests, by short names.
COUNTERS = {
    "vllm:external_prefix_cache_queries": "external_queries",
    "vllm:external_prefix_cache_hits": "external_hits",
    "vllm:prefix_cache_queries": "local_queries",
    "vllm:prefix_cache_hits": "local_hits",
    "vllm:num_preemptions": "preemptions",
    "vllm:spec_decode_num_draft_tokens": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted_drafts",
}


class Driver:
    """Steps the engine by hand, so first-token times and aborts are seen step by step."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        if current_platform.is_cpu() and (config := Path(arguments["model"]) / "config.json").exists():
            _register(json.loads(config.read_text())["architectures"])
        self._llm = LLM(
            skip_tokenizer_init=True,
            enforce_eager=arguments.pop("enforce_eager", True),
            enable_prefix_caching=arguments.pop("enable_prefix_caching", True),
            prefix_caching_hash_algo=arguments.pop("prefix_caching_hash_algo", "xxhash_cbor"),
            disable_log_stats=False,
            **arguments,
        )
        self._engine = self._llm.llm_engine
        self._next_request = 0
        # Requests of `ask` by vLLM's id: the asker's number and the answer so far.
        self._asked: dict[str, tuple[int, dict[str, Any]]] = {}

    def _add(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        lora: dict[str, Any] | None = None,
        salt: str | None = None,
        priority: int = 0,
    ) -> str:
        request_id = f"request-{self._next_request}"
        self._next_request += 1
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **sampling)
        asked = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        adapter = LoRARequest(**lora) if lora else None
        self._engine.add_request(request_id, asked, params, lora_request=adapter, priority=priority)
        return request_id

    def ask(self, number: int, prompt: list[int], sampling: dict[str, Any]) -> None:
        """Adds a request to those in flight."""
        self._asked[self._add(prompt, sampling)] = (number, _new_answer())

    def squeeze(self, running: list[int], urgent: list[int], sampling: dict[str, Any]) -> None:
        """Answers a prompt; a more urgent one arrives after its first step."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        self._add(running, sampling, priority=1)
        while not any(request.num_computed_tokens for request in scheduler.running):
            self._engine.step()
        self._add(urgent, sampling)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def counter(self, metric: str) -> int:
        """A counter of vLLM's metrics, over its labels."""
        return int(sum(found.value for found in self._llm.get_metrics() if found.name == metric))

    @property
    def asked(self) -> int:
        """Requests of `ask` in flight."""
        return len(self._asked)

    def step(self) -> Iterator[dict[str, Any]]:
        """Plays one step; the answers of `ask` that it ended."""
        for output in self._engine.step():
            number, answer = self._asked[output.request_id]
            self._note(answer, output)
            if output.finished:
                del self._asked[output.request_id]
                yield {"answered": number, **answer}

    def generate(
        self,
        prompts: list[list[int]],
        sampling: dict[str, Any],
        abort_after_steps: dict[str, int] | None = None,
        space_steps: int = 0,
        lora: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> list[dict[str, Any]]:
        """Answers all prompts, in order.

        `abort_after_steps` aborts the prompt of an index after so many steps; `space_steps` adds one prompt every so many steps
        instead of all at once. `lora` has the fields of an adapter's request; `salt` is the requests' cache_salt.
        """
        assert not self._asked, "generate() steps its own requests alone"
        aborts = {int(index): steps for index, steps in (abort_after_steps or {}).items()}
        waiting = list(enumerate(prompts))
        running: dict[str, dict[str, Any]] = {}
        answers: list[dict[str, Any]] = []
        steps = 0
        while waiting or self._engine.has_unfinished_requests():
            while waiting and (not space_steps or steps >= waiting[0][0] * space_steps):
                index, prompt = waiting.pop(0)
                answer = _new_answer()
                answers.append(answer)
                running[self._add(prompt, sampling, lora, salt)] = answer
            ids = list(running)
            for index in [i for i, after in aborts.items() if after <= steps and i < len(ids)]:
                self._engine.abort_request([ids[index]])
                running[ids[index]]["aborted"] = True
                del aborts[index]
            for output in self._engine.step() if self._engine.has_unfinished_requests() else []:
                self._note(running[output.request_id], output)
            steps += 1
        for answer in answers:
            del answer["start"]
        return answers

    @staticmethod
    def _note(answer: dict[str, Any], output: Any) -> None:
        completion = output.outputs[0]
        answer["token_s"] += [time.perf_counter() - answer["start"]] * (len(completion.token_ids) - len(answer["token_s"]))
        if completion.token_ids and answer["ttft_s"] is None:
            answer["ttft_s"] = answer["token_s"][0]
        if not output.finished:
            return
        answer["tokens"] = list(completion.token_ids)
        answer["cached_tokens"] = output.num_cached_tokens
        answer["finish_reason"] = completion.finish_reason
        answer["transfer"] = output.kv_transfer_params
        # repr of a float is exact in JSON: bit-equality survives the way to the test.
        answer["logprobs"] = [
            {str(token): entry.logprob for token, entry in position.items()} for position in completion.logprobs or []
        ]

    def metrics(self) -> dict[str, int]:
        """vLLM's own counters, since the start of this engine."""
        found = dict.fromkeys(COUNTERS.values(), 0)
        for metric in self._llm.get_metrics():
            if metric.name in COUNTERS:
                found[COUNTERS[metric.name]] += int(metric.value)
        return found

    def states(self) -> list[str]:
        """This engine's states of its last step."""
        shown = [metric for metric in self._llm.get_metrics() if metric.name == "vllm:pillion_engine_state"]
        return [metric.labels["state"] for metric in shown if metric.value == 1]

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """vLLM's own prefix cache reset, with or without the connector's reset_cache."""
        return bool(self._engine.reset_prefix_cache(reset_connector=reset_connector))

    def sleep(self, level: int) -> None:
        """vLLM's sleep mode."""
        self._llm.sleep(level=level)

    def wake_up(self) -> None:
        """Ends a sleep."""
        self._llm.wake_up()

    def rpc(self, method: str, arguments: dict[str, Any]) -> None:
        """A method of every rank, called through vLLM's collective_rpc."""
        self._llm.collective_rpc(method, kwargs=arguments)

    def alter(self, function: str) -> None:
        """Calls `module:function` with the model of the only rank, in this process and without vLLM's knowledge."""
        module, _, name = function.partition(":")
        worker = self._engine.model_executor.driver_worker
        getattr(importlib.import_module(module), name)(worker.get_model())


def _register(architectures: list[str]) -> None:
    """Imports a model's class in this process: otherwise vLLM would start a process that imports all of vLLM to look at the
    class."""
    for name in architectures:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _new_answer() -> dict[str, Any]:
    answer: dict[str, Any] = {"tokens": [], "logprobs": [], "ttft_s": None, "token_s": []}
    answer |= {"aborted": False, "finish_reason": None, "cached_tokens": None}
    return answer | {"start": time.perf_counter()}


def main() -> None:
    """Reads the engine's role, starts it, and serves commands until stdin closes or `exit` comes."""
    parent = Parent()
    role = parent.hear()
    if role is None:
        return
    parent.log_to(role["log"])
    os.environ.update(role["environment"])
    if current_platform.is_cpu() and not role["spawned"]:
        # As on a GPU. The CPU build's default method imports all of vLLM again, for each of its processes.
        vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    if os.environ.get(BLIND) == "1":
        importlib.import_module("testkit.blind").make()
    try:
        driver = Driver(role["arguments"])
        parent.tell({"result": "ready"})
        _serve(driver, _lines(), parent)
    except BaseException as error:
        parent.tell({"error": f"{type(error).__name__}: {error}"})
        raise


def _lines() -> queue.SimpleQueue[bytes | None]:
    """Lines of stdin, then None. A thread reads them, so commands are seen while requests are stepped."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        # Not sys.stdin: Python aborts at its end when a thread waits inside a buffered file.
        unread = b""
        while chunk := os.read(0, 1 << 16):
            *whole, unread = (unread + chunk).split(b"\n")
            for line in whole:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _serve(driver: Driver, lines: queue.SimpleQueue[bytes | None], parent: Parent) -> None:
    while True:
        while driver.asked and lines.empty():
            for answer in driver.step():
                parent.tell(answer)
        line = lines.get()
        if line is None:
            return
        command = json.loads(line)
        name = command.pop("command")
        if name == "exit":
            parent.tell({"result": "bye"})
            return
        result = getattr(driver, name)(**command)
        if name != "ask":
            parent.tell({"result": result})


if __name__ == "__main__":
    main()
