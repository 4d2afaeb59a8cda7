"""Conversations with more KV than the device holds: output rate, first tokens of later turns, gaps between tokens.

All conversations share their first tokens; each turn adds new ones and is answered. `at_once` requests are in flight, and a
conversation's next turn waits behind every other conversation, so its KV has left the device by then. Every mode is given the
same histories, made of the first mode's answers, so each answer can be compared with the first mode. If a step's batch differs,
rounding does too: equal answers are then a share, not a promise (`--invariant` makes them one). `gaps_over_25ms` is the share
of gaps whose step also computed a prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from typing import Any

from benches import harness
from benches.gpu import rig
from benches.gpu.engine import Answer, Engine

# 24 x (2,048 + 6 x 1,088) tokens less the shared ones are a working set of 10,000 blocks of 16; the device holds 4,096 (kv_mib:
# of 2 MiB), from the fifth turn on less than the requests in flight. roomy_mib: everything. batched_tokens: the default of
# `vllm serve` on such a GPU; vLLM's LLM class has 16,384.
SIZES = {
    "full": {
        "conversations": 24, "turns": 6, "shared": 2048, "new": 1024, "output": 64,
        "at_once": 12, "batched_tokens": 8192, "kv_mib": 8192, "roomy_mib": 40960, "host_gib": 40,
    },
    "quick": {
        "conversations": 8, "turns": 3, "shared": 512, "new": 512, "output": 16,
        "at_once": 4, "batched_tokens": 8192, "kv_mib": 1024, "roomy_mib": 8192, "host_gib": 8,
    },
    "tiny": {
        "conversations": 4, "turns": 3, "shared": 128, "new": 128, "output": 8,
        "at_once": 2, "batched_tokens": 8192, "kv_mib": 3, "roomy_mib": 24, "host_gib": 1,
    },
}  # fmt: skip
SHARED_SEED = 10_000_000
WARM_SEED = 20_000_000
# A decode step takes some 7 ms; one with a prompt takes more than this.
LONG_GAP_MS = 25.0
LATE = 10


def longest(sizes: dict[str, int]) -> int:
    """Tokens of a conversation at its end."""
    return sizes["shared"] + sizes["turns"] * (sizes["new"] + sizes["output"])


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments: a device with room for a part of the working set."""
    return {
        "kv_cache_memory_bytes": sizes["kv_mib"] << 20,
        "max_model_len": longest(sizes) + 64,
        "max_num_batched_tokens": sizes["batched_tokens"],
        "max_num_seqs": sizes["at_once"],
    }


class Conversations:
    """The next turns, and the answers so far."""

    def __init__(self, engine: Engine, sizes: dict[str, int], reference: list[list[list[int]]] | None) -> None:
        self._engine = engine
        self._sizes = sizes
        self._reference = reference
        shared = engine.prompt(sizes["shared"], SHARED_SEED)
        self._histories = [list(shared) for _ in range(sizes["conversations"])]
        self.answers: list[list[Answer]] = [[] for _ in range(sizes["conversations"])]
        self.waiting = deque(range(sizes["conversations"]))
        self._asked: dict[str, int] = {}

    def ask(self) -> None:
        """Sends the next turn of the conversation that has waited longest."""
        number = self.waiting.popleft()
        turn = len(self.answers[number])
        self._histories[number] += self._engine.prompt(self._sizes["new"], number * 1000 + turn)
        self._asked[self._engine.add(self._histories[number], self._sizes["output"])] = number

    def note(self, request_id: str, answer: Answer) -> None:
        """Takes an answer; its conversation waits for its next turn, if it has one."""
        number = self._asked.pop(request_id)
        turn = len(self.answers[number])
        self.answers[number].append(answer)
        self._histories[number] += self._reference[number][turn] if self._reference else answer.tokens
        if turn + 1 < self._sizes["turns"]:
            self.waiting.append(number)


def measure(engine: Engine, sizes: dict[str, int], options: argparse.Namespace, reference: Any) -> dict[str, Any]:
    """Plays every turn of every conversation, `at_once` at a time."""
    prompts = [engine.prompt(sizes["new"], WARM_SEED + index) for index in range(sizes["at_once"])]
    rig.warm_up(engine, prompts, sizes["output"], options.mode)
    conversations = Conversations(engine, sizes, reference["tokens"] if reference else None)
    begun = time.perf_counter()
    while conversations.waiting or engine.running:
        while conversations.waiting and engine.running < sizes["at_once"]:
            conversations.ask()
        for request_id, answer in engine.step():
            conversations.note(request_id, answer)
    elapsed_s = time.perf_counter() - begun
    engine.say(f"conversations done in {elapsed_s:.1f} s")
    answers = conversations.answers
    later = [answer for turns in answers for answer in turns[1:]]
    everything = [answer for turns in answers for answer in turns]
    return {
        "elapsed_s": elapsed_s,
        "tokens": [[answer.tokens for answer in turns] for turns in answers],
        "ttft_first_ms": [turns[0].ttft_ms for turns in answers],
        "ttft_later_ms": [answer.ttft_ms for answer in later],
        "gaps_ms": [gap for answer in everything for gap in answer.gaps_ms],
        "prompt_tokens_later": sum(answer.prompt_tokens for answer in later),
        "cached_tokens_later": sum(answer.cached_tokens for answer in later),
        "requests": [
            requested(answer, begun, conversation, turn)
            for conversation, turns in enumerate(answers)
            for turn, answer in enumerate(turns)
        ],
    }


def requested(answer: Answer, begun: float, conversation: int, turn: int) -> dict[str, Any]:
    """One request, in milliseconds from the beginning."""
    return {
        "conversation": conversation,
        "turn": turn,
        "tokens": answer.prompt_tokens,
        "found": answer.cached_tokens,
        "added_ms": round((answer.added - begun) * 1e3, 1),
        "waited_ms": round(answer.waited_ms, 1),
        "ttft_ms": round(answer.ttft_ms, 1),
        "token_ms": [round((at - begun) * 1e3, 1) for at in answer.times],
    }


def compare(raw: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode, and the share of its answers equal to those of the first mode."""
    mine = [tokens for turns in raw["tokens"] for tokens in turns]
    theirs = [tokens for turns in reference["tokens"] for tokens in turns]
    waited = [request["waited_ms"] for request in raw["requests"] if request["turn"]]
    first_equal = rig.first_tokens_equal(mine, theirs)
    return {
        "facts": raw["facts"],
        "output_tok_s": round(sum(map(len, mine)) / raw["elapsed_s"], 1),
        "elapsed_s": round(raw["elapsed_s"], 2),
        "ttft_first_mean_ms": round(statistics.mean(raw["ttft_first_ms"]), 1),
        "ttft_later_mean_ms": round(statistics.mean(raw["ttft_later_ms"]), 1),
        "ttft_later_p99_ms": harness.percentile(raw["ttft_later_ms"], 0.99),
        "itl_p50_ms": harness.percentile(raw["gaps_ms"], 0.5),
        "itl_p99_ms": harness.percentile(raw["gaps_ms"], 0.99),
        "gaps_over_25ms": long_gaps(raw["gaps_ms"]),
        "waited_later_mean_ms": round(statistics.mean(waited), 1),
        "late": late(raw["requests"]),
        "cached_share_later": round(raw["cached_tokens_later"] / raw["prompt_tokens_later"], 3),
        "answers_equal": rig.share_equal(mine, theirs),
        "first_tokens_equal": first_equal,
        "ok": first_equal >= rig.FIRST_TOKENS_EQUAL_MIN,
    }


def long_gaps(gaps_ms: list[float]) -> dict[str, float]:
    """Figures of the gaps between tokens with other work than decoding."""
    long = [gap for gap in gaps_ms if gap > LONG_GAP_MS]
    return {"count": len(long), "share": round(len(long) / len(gaps_ms), 4), "mean_ms": round(statistics.fmean(long or [0]), 1)}


def late(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The later turns with the latest first tokens: their waits, and their computed tokens."""
    later = sorted((request for request in requests if request["turn"]), key=lambda request: -request["ttft_ms"])
    kept = ("turn", "added_ms", "waited_ms", "ttft_ms", "found", "tokens")
    return [{key: request[key] for key in kept} for request in later[:LATE]]


BENCH = rig.Bench("multiturn", str(__doc__), SIZES, engine_settings, measure, compare)

if __name__ == "__main__":
    rig.main(BENCH)
