"""What a rank computes with at the moment, as one digest: it changes with the weights, and back with them.

The digest of the weights alone, as long as everything else is what the rank's facts say. What has changed besides since the
rank stated them (its configuration, its rotary caches, experts that no sample holds) is mixed in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping

from pillion.reading import Unsampled
from pillion.sample import DIGEST_BYTES, Sample, Sampler

# Beside the names of facts: the weights of experts that are kept apart.
EXPERTS = "weights of experts"
logger = logging.getLogger("vllm.pillion")


class Live:
    """Takes samples of one rank. A digest that cannot be had is a random one after the start: it equals nothing."""

    def __init__(self, sampler: Sampler, read_facts: Callable[[], Mapping[str, str]], experts_move: bool = False) -> None:
        """`read_facts`: the facts that may change while the engine runs. `experts_move`: nobody can tell whether experts that
        are not where they were are still the same."""
        self._sampler = sampler
        self._read_facts = read_facts
        self._experts_move = experts_move
        # What the rank said of itself when it began; None if its weights could not be read then.
        self._stated: dict[str, str] | None = None
        self._last: Sample | None = None

    def begin(self, facts: Mapping[str, str], moment: int | None = None) -> bytes | None:
        """The digest that goes with these facts; None where the weights cannot be read: then the facts alone decide."""
        self._last = self._sample(moment)
        if self._last is None:
            return None
        self._stated = {**facts, EXPERTS: self._last.experts.hex()}
        return self._last.weights

    def again(self, moment: int | None = None) -> bytes:
        """The digest after a time at which the weights may have changed; `moment` as in [Sampler.take][]."""
        self._last = self._sample(moment) if self._stated is not None else None
        if self._stated is None or self._last is None or self._experts_move:
            return os.urandom(DIGEST_BYTES)
        now = {**self._read_facts(), EXPERTS: self._last.experts.hex()}
        changed = {name: value for name, value in now.items() if value != self._stated[name]}
        if not changed:
            return self._last.weights
        text = json.dumps(changed, sort_keys=True)
        return hashlib.sha256(self._last.weights + text.encode()).digest()[:DIGEST_BYTES]

    def differs(self, moment: int | None = None) -> bool:
        """Whether the weights are others than in the last sample; never without one."""
        return self._last is not None and self._sample(moment) != self._last

    def _sample(self, moment: int | None) -> Sample | None:
        try:
            sample = self._sampler.take(moment)
        except Unsampled as error:
            logger.warning(
                "pillion: the loaded weights cannot be sampled: %s. Their files stand for them until the weights may have "
                "changed; after that this engine shares nothing until it restarts",
                error,
            )
            return None
        return dataclasses.replace(sample, experts=b"") if self._experts_move else sample
