"""A sample of the weights that a rank computes with, the same wherever the same weights run.

Files say what was to be loaded; what runs may be a fine-tune under the same name, or weights that were pushed or written
since.

A change of every element of a tensor is always seen, and so is a change of a whole expert. A change of the share f of the
elements of one tensor that is larger than `WHOLE_BYTES` is missed with a chance of (1 - f) ** (elements in its runs).
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pillion.models import Models

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 16
# What is read of one tensor: all of it up to `WHOLE_BYTES`, else runs at even distances. A dense model of 8 billion parameters
# has some 300 tensors of which 4 KiB each are read.
RUNS = 64
RUN_BYTES = 64
WHOLE_BYTES = RUNS * RUN_BYTES
# Of each row of the first axis of tensors of three axes and more, which counts experts.
RUNS_PER_EXPERT = 4
# Columns of a matrix that are read through the kernel that holds it.
PROBES = 4
# Tensors that are left out, by the last part of their name.
LEFT_OUT: dict[str, re.Pattern[str]] = {
    "tables of angles: the fact rotary holds them, and their lengths may differ": re.compile("cos_sin|inv_freq"),
    "scratch of kernels": re.compile("workspace"),
    "what a vision encoder has seen so far, and scales that follow it": re.compile("_fp8_[qkv]_(amax|scale)$"),
}
# Parameters that hold a layer's weights, and no scales or zero points.
WEIGHTS = re.compile(r"(\w+_)?q?weight(_packed)?$")
# Parts of a name below which weights belong to single experts.
EXPERTS = frozenset({"experts", "routed_experts"})
logger = logging.getLogger("vllm.pillion")


class Unsampled(ValueError):
    """Weights that cannot be read. The text names them."""


@dataclass(frozen=True)
class Sample:
    """Digests of `DIGEST_BYTES`."""

    weights: bytes
    # Of the experts, where they are kept apart.
    experts: bytes


class Sampler:
    """Reads the same tensors of the same models again and again."""

    def __init__(self, models: Models, experts_apart: bool = False, resident: bool = True) -> None:
        """`experts_apart`: engines that hold the same model hold different experts, so those get a digest of their own.
        `resident`: a layer's tensors are always its own."""
        self._models = models
        self._experts_apart = experts_apart
        self._resident = resident

    def take(self) -> Sample:
        """Reads the weights; raises `Unsampled`. Waits for all work of the GPU: weights may be written by any stream."""
        import torch

        if not self._resident:
            raise Unsampled("layers are offloaded and take turns in the same memory")
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        try:
            with torch.no_grad():
                pieces = sorted(_pieces(self._models.loaded), key=lambda piece: piece.name)
                contents = _contents([piece.content for piece in pieces])
        except Unsampled:
            raise
        except Exception as error:  # the models' own code, a model that is gone, a GPU without room
            raise Unsampled(str(error)) from error
        if not pieces:
            raise Unsampled("no model with weights has layers of this KV cache")
        weights, experts = hashlib.sha256(), hashlib.sha256()
        for piece, content in zip(pieces, contents, strict=True):
            digest = experts if self._experts_apart and of_expert(piece.name) else weights
            digest.update(f"{piece.name}\0{piece.form}\0".encode() + content)
            if logger.isEnabledFor(logging.DEBUG):
                shown = hashlib.sha256(content).hexdigest()[:8]
                logger.debug("pillion: weights: %s %s %s", piece.name, piece.form, shown)
        return Sample(weights.digest()[:DIGEST_BYTES], experts.digest()[:DIGEST_BYTES])


def of_expert(name: str) -> bool:
    """Whether the tensor or module of this name belongs to single experts."""
    return not EXPERTS.isdisjoint(name.split("."))


@dataclass(frozen=True)
class _Piece:
    name: str
    # Data type, shape and strides.
    form: str
    # Bytes, on the tensor's device.
    content: torch.Tensor


def _pieces(models: list[torch.nn.Module]) -> Iterator[_Piece]:
    for name, tensor in _tensors(models):
        try:
            content = _content(tensor)
        except Exception as error:  # tensors of a quantization's own kind may have no storage
            raise Unsampled(f"{name} cannot be read ({error})") from error
        yield _Piece(name, f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}", content)


def _tensors(models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer that is not left out, and what kernels hold instead of one."""
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if _is_emptied(module):
                yield f"{number}.{name}.weight in its kernel", _probed(name, module)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            last = name.rpartition(".")[2]
            if tensor.device.type != "meta" and not any(pattern.search(last) for pattern in LEFT_OUT.values()):
                yield f"{number}.{name}", tensor.data


def _is_emptied(module: torch.nn.Module) -> bool:
    """Whether a kernel took over the module's weights. `None` says so of vLLM's layers alone: others may have no weight."""
    own = [parameter for name, parameter in module._parameters.items() if WEIGHTS.match(name)]
    kept = [parameter for parameter in own if parameter is not None]
    return all(not parameter.numel() for parameter in kept) and bool(kept or (own and hasattr(module, "quant_method")))


def _probed(name: str, module: torch.nn.Module) -> torch.Tensor:
    """Columns of the matrix that vLLM's CPU kernel of this layer holds, exact in every bit: 1 * w + 0 * ... has no rounding."""
    import torch

    multiply = getattr(module, "cpu_linear", None)
    width = getattr(module, "input_size_per_partition", getattr(module, "input_size", None))
    if multiply is None or width is None:
        raise Unsampled(f"the weights of {name} ({type(module).__qualname__}) are held where they cannot be read")
    rows = torch.zeros(PROBES, width, dtype=module.weight.dtype)
    for row in range(PROBES):
        rows[row, row * (width - 1) // (PROBES - 1)] = 1
    try:
        columns: torch.Tensor = multiply(rows, module.weight, None)
    except Exception as error:  # the kernel's own
        raise Unsampled(f"the weights of {name} cannot be read back from their kernel ({error})") from error
    return columns


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor on its device: all of a small one, else runs at even distances, as its storage has them."""
    import torch

    item = tensor.element_size()
    runs = max(RUNS, RUNS_PER_EXPERT * tensor.shape[0] if tensor.dim() > 2 else 0)
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    # Where an axis repeats the same elements, they are read once.
    once = tensor[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(once.shape, once.stride(), strict=True))
    if extent != once.numel():
        return _scattered(once, runs)
    length, start = extent * item, tensor.storage_offset() * item
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if length <= runs * RUN_BYTES:
        return raw.set_(tensor.untyped_storage(), start, (length,), (1,))
    distance = (length - RUN_BYTES) // (runs - 1)
    return raw.set_(tensor.untyped_storage(), start, (runs, RUN_BYTES), (distance, 1)).reshape(-1)


def _scattered(tensor: torch.Tensor, runs: int) -> torch.Tensor:
    """The same of a view with gaps: between its elements lies what is not its own."""
    import torch

    # As plain words: not every data type can be indexed.
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain, each = tensor.view(words[tensor.element_size()]), max(1, RUN_BYTES // tensor.element_size())
    if tensor.numel() <= runs * each:
        return plain.contiguous().view(-1).view(torch.uint8)
    starts = torch.arange(runs) * ((tensor.numel() - each) // (runs - 1))
    indices = torch.unravel_index((starts[:, None] + torch.arange(each)).view(-1), tensor.shape)
    return plain[tuple(index.to(tensor.device) for index in indices)].view(torch.uint8)


def _contents(tensors: list[torch.Tensor]) -> list[bytes]:
    """The tensors' bytes, by one copy from each device."""
    import torch

    found = [b""] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    for numbers in by_device.values():
        joined = torch.cat([tensors[number] for number in numbers]).cpu().numpy().tobytes()
        start = 0
        for number in numbers:
            end = start + tensors[number].numel()
            found[number], start = joined[start:end], end
    return found
