"""A sample of a rank's live weights, the same wherever the same weights were loaded.

Two engines that state the same facts and were given other weights (a fine-tune under the old name, weights pushed after the
start) make other KV of the same tokens: the sidecar compares samples before it lets them share. vLLM hands connectors no
model, so it is looked for among the process's objects, once.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# 4,096 bytes, the most that a HELLO takes.
PARAMETERS_MAX = 64
SAMPLE_BYTES = 64


def sample(layer: torch.nn.Module, device: torch.device | None) -> bytes | None:
    """Bytes from the middle of parameters of the model of `layer`, as many as lie on `device` or, without one, on the host;
    None if none does."""
    where = str(device or "cpu")
    (model,) = models_of([layer])
    # Experts are dealt out between data-parallel engines, and moved while they serve: no two engines need hold the same.
    shared = [(name, found) for name, found in model.named_parameters() if "experts" not in name.split(".")]
    named = [(name, found) for name, found in shared if str(found.device) == where and found.numel()]
    # Matrices first: many a vector is all ones. By digest, since every eighth by name may be of the same kind in every layer.
    named.sort(key=lambda pair: (pair[1].dim() < 2, hashlib.sha256(pair[0].encode()).digest()))
    return _gather([parameter for _, parameter in named[:PARAMETERS_MAX]])


def models_of(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The outermost modules that `layers` are parts of, each once: the model, and one that drafts for it."""
    import torch

    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    parents = {id(child): module for module in modules for child in module.__dict__.get("_modules", {}).values()}
    models = {}
    for layer in layers:
        model, seen = layer, {id(layer)}
        while (parent := parents.get(id(model))) is not None and id(parent) not in seen:
            seen.add(id(parent))
            model = parent
        models[id(model)] = model
    return list(models.values())


def _gather(parameters: list[torch.nn.Parameter]) -> bytes | None:
    """One copy from the device, however many there are. A parameter is taken as its storage has it, whatever its strides."""
    import torch

    pieces = []
    for parameter in parameters:
        item = parameter.element_size()
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        extent = (last + 1) * item
        length = min(SAMPLE_BYTES, extent)
        start = parameter.storage_offset() * item + (extent - length) // 2
        raw = torch.empty(0, dtype=torch.uint8, device=parameter.device)
        pieces.append(raw.set_(parameter.untyped_storage(), start, (length,), (1,)))
    return torch.cat(pieces).cpu().numpy().tobytes() if pieces else None
