"""A prefill engine P and a decode engine D."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testkit import engine, metrics, prompts, sidecar
from testkit.transfer import TO_COMPUTE

OUTPUT_TOKENS = 8
PATIENCE_S = 120
EXHAUSTED = "pillion_handover_exhausted_total"
DURATION = 'pillion_handover_duration_seconds_%s{part="whole"}'


@dataclasses.dataclass
class Pair:
    """`p` computes prompts, `d` answers them, and `lone` gives the right answers; without `lone` `p` does, from its own cache.

    `keeper` is P's sidecar, and D's unless `beside_d` is another one.
    """

    p: engine.Engine
    d: engine.Engine
    lone: engine.Engine | None
    keeper: sidecar.Sidecar
    seed: int = 0
    number: int = 0
    # D's counters after its last answer.
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    beside_d: sidecar.Sidecar | None = None

    @property
    def keepers(self) -> list[sidecar.Sidecar]:
        """Every sidecar, D's last."""
        return [self.keeper] + ([self.beside_d] if self.beside_d else [])

    def prompt(self, tokens: int) -> list[int]:
        """A prompt without KV in any engine."""
        self.seed += 1
        return prompts.prompt(tokens, 70_000 + self.seed)

    def right(self, tokens: list[int]) -> list[int]:
        """The right answer: from `lone`, or without one from `p`."""
        return list((self.lone or self.p).generate([tokens], max_tokens=OUTPUT_TOKENS, logprobs=0)[0]["tokens"])

    def ask(self, which: engine.Engine, tokens: list[int], max_tokens: int, transfer: dict[str, Any]) -> None:
        """Sends a request."""
        self.number += 1
        which.ask(self.number, tokens, max_tokens, transfer=transfer)

    def compute(self, tokens: list[int]) -> dict[str, Any]:
        """Has P compute a prompt; P's kv_transfer_params for a router."""
        self.ask(self.p, tokens, 1, TO_COMPUTE)
        [answer] = self.p.answered(PATIENCE_S)
        return dict(answer["transfer"])

    def answer(self, tokens: list[int], transfer: dict[str, Any]) -> dict[str, Any]:
        """D's answer."""
        self.ask(self.d, tokens, OUTPUT_TOKENS, transfer)
        return self.answered()

    def answered(self) -> dict[str, Any]:
        """D's answer to the request; `computed` is the number of tokens without a hit, by vLLM's counters."""
        [answer] = self.d.answered(PATIENCE_S)
        counts = self.d.metrics()
        seen, self.counts = self.counts, counts
        found = sum(counts[name] - seen.get(name, 0) for name in ("external_hits", "local_hits"))
        return answer | {"computed": counts["local_queries"] - seen.get("local_queries", 0) - found}

    def exhausted(self) -> int:
        """Requests of D without P's blocks in time."""
        return self.keepers[-1].metrics()[EXHAUSTED]


def durations(keeper: sidecar.Sidecar) -> tuple[float, float]:
    """The number of prompts handed over between engines of this sidecar, and their total seconds from the end of P's last step,
    as the sidecar saw it, to the end of D's load."""
    page = keeper.get("/metrics") or ""
    count, seconds = (metrics.value(page, DURATION % part) for part in ("count", "sum"))
    return count, seconds


def start(stack: contextlib.ExitStack, folder: Path, named: Mapping[str, engine.Options]) -> list[engine.Engine]:
    """Ready engines, in this order, until the stack ends."""
    started = [engine.Engine(options, folder / f"{name}.log") for name, options in named.items()]
    for one in started:
        stack.callback(one.kill)
    for one in started:
        one.wait_started().wait_served()
        one.generate([prompts.prompt(40, seed=1)], max_tokens=1)
    return started
