"""The digest of a rank's computation at the moment: it changes with the weights, and back with them.

It is the digest of the weights alone while everything else agrees with the rank's facts. Any change since their statement (of
the configuration, the rotary caches, experts outside of all samples) is mixed in.
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

# Beside the names of facts: the weights of experts kept apart.
EXPERTS = "weights of experts"
logger = logging.getLogger("vllm.pillion")


class Live:
    """Takes samples of one rank. A digest without a sample is a random one after the start: it equals no other digest."""

    def __init__(self, sampler: Sampler, read_facts: Callable[[], Mapping[str, str]], experts_move: bool = False) -> None:
        """`read_facts`: the facts that may change while the engine runs. `experts_move`: experts change places, so their
        comparison is not possible."""
        self._sampler = sampler
        self._read_facts = read_facts
        self._experts_move = experts_move
        # The rank's facts at its start; None if its weights could not be read then.
        self._stated: dict[str, str] | None = None
        self._last: Sample | None = None

    def begin(self, facts: Mapping[str, str], moment: int | None = None) -> bytes | None:
        """The digest for these facts; None if the weights cannot be read: then the facts alone decide."""
        self._last = self._sample(moment)
        if self._last is None:
            return None
        self._stated = {**facts, EXPERTS: self._last.experts.hex()}
        return self._last.weights

    def again(self, moment: int | None = None) -> bytes:
        """The digest after a possible change of the weights; `moment` as in [Sampler.take][]."""
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
        """True if the weights differ from those of the last sample; False without one."""
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
