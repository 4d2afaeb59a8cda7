"""The scheduler role over a played policy. Tests of the policy itself: connector-shim/tests/policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from specs import full_attention, kv_cache_config
from vllm.v1.request import RequestStatus

from pillion import _shim, vllm_compat
from pillion.scheduler import Scheduler
from pillion.state import SOURCES
from testkit.engine_config import engine_config

BLOCK_TOKENS = 16
# The policy itself, for the names of its calls.
OWN = _shim.Policy
ANSWERS: dict[str, Any] = {
    "allocated": None,
    "begin_step": ([], [], False, 0),
    "end_request": (None, []),
    "look_for_verdict": False,
    "matched": (0, False),
    "may_announce": True,
    "passes_over": False,
    "release_held": [],
    "take_events": [],
    "take_hit_tokens": (0,) * len(SOURCES),
    "take_notices": ([], [], [], []),
    "take_unkept": (0, 0),
}


class Policy:
    """Records its calls, and gives the answers set by a test."""

    def __init__(self, options: Any, **facts: Any) -> None:
        self.options, self.facts = options, facts
        self.state = "serving"
        # Each call by its name, with its arguments.
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers = dict(ANSWERS)
        self._numbers, self._steps = itertools.count(1), itertools.count(1)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        assert hasattr(OWN, name), f"the policy has no {name}"

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return self.answers.get(name)

        return call

    def follow_request(self, *arguments: Any) -> int:
        """The next number."""
        self.calls.append(("follow_request", arguments))
        return next(self._numbers)

    def end_step(self, due: list[Any], computes: int, named: list[int]) -> tuple[Any, ...]:
        """The next step, without work for the ranks."""
        self.calls.append(("end_step", (due, computes, named)))
        return next(self._steps), [([], [], False)], False, True, [], [], 0

    def told(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of this name."""
        assert hasattr(OWN, name), f"the policy has no {name}"
        return [arguments for called, arguments in self.calls if called == name]


def scheduler(
    monkeypatch: pytest.MonkeyPatch,
    on_gpu: bool = False,
    beside_others: bool = False,
    failures: str = "recompute",
    made: type[Policy] = Policy,
    **options: Any,
) -> tuple[Scheduler, Any]:
    """The scheduler role of an engine, and its policy. `failures`: the engine's kv_load_failure_policy."""
    monkeypatch.setattr(_shim, "Policy", made)
    monkeypatch.setattr(vllm_compat, "on_gpu", lambda: on_gpu)
    engine: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="engine", kv_role="kv_both", kv_load_failure_policy=failures),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor"),
        max_concurrent_batches=1,
    )
    role = Scheduler(engine_config(**options), engine, kv_cache_config(full_attention()), beside_others)
    return role, role._policy


def request(name: str, tokens: int = 4 * BLOCK_TOKENS + 1, **more: Any) -> Any:
    """A request as vLLM has it."""
    given: dict[str, Any] = {
        "request_id": name,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "kv_transfer_params": None,
        "block_hashes": [bytes([block] * 32) for block in range(tokens // BLOCK_TOKENS)],
        "all_token_ids": list(range(tokens)),
        "output_token_ids": [],
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "prompt_embeds": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**given | more)


def step(role: Scheduler, *begun: Any, computes: dict[str, int] | None = None) -> Any:
    """Plays a step: requests begin on blocks of their own."""
    new = [SimpleNamespace(req_id=each.request_id, block_ids=[[1, 2, 3, 4, 5]], num_computed_tokens=0) for each in begun]
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    output: Any = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=computes or {each.request_id: each.num_tokens for each in begun},
        new_block_ids_to_zero=None,
        scheduled_encoder_inputs={},
    )
    return role.step(output)


def finish(role: Scheduler, request: Any, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    """Ends the request; the answer to its router."""
    request.status = RequestStatus[status]
    return role.finished(request)
