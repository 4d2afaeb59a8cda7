"""A sample of a rank's weights in use, equal for equal weights.

Files name the weights to load; the weights in use may be a fine-tune under the same name, or written later.

A change of every element of a tensor is always seen, and so is a change of a whole expert. A change of the share f of the
elements of one tensor larger than `WHOLE_BYTES` is missed with a chance of (1 - f) ** (elements in its runs).
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from pillion.models import Models
from pillion.reading import Reading, Unsampled, outline_models

DIGEST_BYTES = 16
# Parts of a name above the weights of single experts.
EXPERTS = frozenset({"experts", "routed_experts"})
logger = logging.getLogger("vllm.pillion")


@dataclass(frozen=True)
class Sample:
    """Digests of `DIGEST_BYTES`."""

    weights: bytes
    # The digest of experts kept apart.
    experts: bytes


class Sampler:
    """Reads the same tensors of the same models again and again."""

    def __init__(self, models: Models, experts_apart: bool = False, resident: bool = True) -> None:
        """`experts_apart`: engines of the same model hold different experts, so experts get a digest of their own. `resident`:
        a layer's tensors always hold its own weights."""
        self._models = models
        self._experts_apart = experts_apart
        self._resident = resident
        self._reading: Reading | None = None
        # The last sample's bytes, its digests, and its moment.
        self._contents: list[bytes] = []
        self._last: Sample | None = None
        self._moment: int | None = None

    def take(self, moment: int | None = None) -> Sample:
        """Reads the weights; raises `Unsampled`. Waits for all work of the GPU: weights may be written by any stream. In one
        `moment`, without writes of weights, they are read once."""
        import torch

        if moment is not None and moment == self._moment and self._last is not None:
            return self._last
        if not self._resident:
            raise Unsampled("layers are offloaded and take turns in the same memory")
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        try:
            with torch.no_grad():
                contents = self._read()
        except Unsampled:
            raise
        except Exception as error:  # the models' own code, a lost model, a GPU without room
            raise Unsampled(str(error)) from error
        if self._last is None or contents != self._contents:
            self._contents, self._last = contents, self._digest(contents)
        self._moment = moment
        return self._last

    def _read(self) -> list[bytes]:
        models = self._models.loaded
        now = outline_models(models)
        contents = self._reading.read() if self._reading and now is not None and self._reading.outline == now else None
        if contents is None:
            self._last = None
            self._reading = Reading(models, now)
            contents = self._reading.read()
        if not contents:
            raise Unsampled("no model with weights has layers of this KV cache")
        return contents

    def _digest(self, contents: list[bytes]) -> Sample:
        assert self._reading is not None, "they were read"
        weights, experts = hashlib.sha256(), hashlib.sha256()
        for piece, content in zip(self._reading.pieces, contents, strict=True):
            digest = experts if self._experts_apart and of_expert(piece.name) else weights
            digest.update(f"{piece.name}\0{piece.form}\0".encode() + content)
            if logger.isEnabledFor(logging.DEBUG):
                shown = hashlib.sha256(content).hexdigest()[:8]
                logger.debug("pillion: weights: %s %s %s", piece.name, piece.form, shown)
        return Sample(weights.digest()[:DIGEST_BYTES], experts.digest()[:DIGEST_BYTES])


def of_expert(name: str) -> bool:
    """True if the tensor or module of this name belongs to single experts."""
    return not EXPERTS.isdisjoint(name.split("."))
