"""Reads the weights of models: all bytes or some runs of every tensor, in one copy from each device.

The places of these bytes are worked out once, and again after a tensor has come, gone, moved or changed its form. No weights
are kept alive.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The parts of one tensor: all bytes up to `WHOLE_BYTES`, otherwise runs at even distances. A dense model of 8 billion
# parameters has some 300 tensors, each with 4 KiB of them.
RUNS = 64
RUN_BYTES = 64
WHOLE_BYTES = RUNS * RUN_BYTES
# Runs of each row of the first axis in tensors of three axes and more: the axis of experts.
RUNS_PER_EXPERT = 4
# Columns of a matrix, read through its kernel.
PROBES = 4
# Excluded tensors, by the last part of their name.
LEFT_OUT: dict[str, re.Pattern[str]] = {
    "tables of angles: the fact rotary holds them, and their lengths may differ": re.compile("cos_sin|inv_freq"),
    "scratch of kernels": re.compile("workspace"),
    "the history of a vision encoder, and its scales": re.compile("_fp8_[qkv]_(amax|scale)$"),
}
# Parameters with a layer's weights, without scales or zero points.
WEIGHTS = re.compile(r"(\w+_)?q?weight(_packed)?$")


class Unsampled(ValueError):
    """Unreadable weights. The text names them."""


@dataclass(frozen=True)
class _Piece:
    name: str
    # Data type, shape and strides.
    form: str
    # The tensor, maybe read through a kernel; None: it is gone.
    tensor: Callable[[], torch.Tensor | None]
    # Runs of `RUN_BYTES`, and bytes from one to the next; without runs, all of its bytes; None: its elements lie apart.
    cut: tuple[int, int] | None
    # Count of runs of a tensor with elements apart.
    runs: int
    # True if each row belongs to a token: the runs of such a table are folded into one.
    is_table: bool


class Reading:
    """The pieces of some models, by name."""

    def __init__(self, models: list[torch.nn.Module], outline: list[Any] | None) -> None:
        """`outline`: the present outline of the models."""
        self.outline = outline
        self.pieces = sorted(_pieces(models), key=lambda piece: piece.name)

    def read(self) -> list[bytes] | None:
        """The bytes of each piece; None if a tensor is gone, replaced by another one."""
        import torch

        found = [b""] * len(self.pieces)
        # Runs are rows of one tensor; a whole tensor is joined to another.
        batches: dict[tuple[torch.device, bool], list[tuple[int, torch.Tensor]]] = {}
        for number, piece in enumerate(self.pieces):
            tensor = piece.tensor()
            if tensor is None:
                return None
            try:
                content = _content(tensor, piece)
            except Exception as error:  # tensors of a quantization's own kind may have no storage
                raise Unsampled(f"{piece.name} cannot be read ({error})") from error
            batches.setdefault((content.device, content.dim() == 1), []).append((number, content))
        for batch in batches.values():
            joined = torch.cat([content for _, content in batch]).cpu().numpy().tobytes()
            start = 0
            for number, content in batch:
                end = start + content.numel()
                found[number], start = joined[start:end], end
        return found


def outline_models(models: list[torch.nn.Module]) -> list[Any] | None:
    """Equal while the tensors, their places and their forms are the same; None if no comparison is possible."""
    found: list[Any] = []
    waiting, seen = list(models), set()
    try:
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            found.append(id(module))
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    found.append(name)
                    if tensor is not None:
                        found += (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            for name, child in module._modules.items():
                found.append(name)
                if child is not None:
                    waiting.append(child)
    except Exception:  # tensors of a quantization's own kind may have no place
        return None
    return found


def _pieces(models: list[torch.nn.Module]) -> Iterator[_Piece]:
    tables = {
        id(parameter)
        for model in models
        for module in model.modules()
        if hasattr(module, "num_embeddings")
        for parameter in module.parameters(recurse=False)
    }
    for name, source in _tensors(models):
        tensor = source()
        assert tensor is not None, "it was found just now"
        is_table = id(tensor) in tables and tensor.dim() == 2
        try:
            runs = _runs(tensor, is_table)
            cut = _cut(tensor, runs)
            form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
        except Exception as error:  # as above
            raise Unsampled(f"{name} cannot be read ({error})") from error
        yield _Piece(name, form, source, cut, runs, is_table)


def _tensors(models: list[torch.nn.Module]) -> Iterator[tuple[str, Callable[[], torch.Tensor | None]]]:
    """Every parameter and buffer, except the excluded ones, and the columns of kernels in place of emptied ones."""
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if _is_emptied(module):
                yield f"{number}.{name}.weight in its kernel", _Probed(name, weakref.ref(module))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            last = name.rpartition(".")[2]
            if tensor.device.type != "meta" and not any(pattern.search(last) for pattern in LEFT_OUT.values()):
                yield f"{number}.{name}", weakref.ref(tensor)


def _is_emptied(module: torch.nn.Module) -> bool:
    """True if a kernel took over the module's weights. In vLLM's layers alone `None` means so: others may have no weight."""
    own = [parameter for name, parameter in module._parameters.items() if WEIGHTS.match(name)]
    kept = [parameter for parameter in own if parameter is not None]
    return all(not parameter.numel() for parameter in kept) and bool(kept or (own and hasattr(module, "quant_method")))


@dataclass(frozen=True)
class _Probed:
    """Reads columns of a layer's weights through the kernel that took them over; None: the layer is gone."""

    name: str
    module: weakref.ref[torch.nn.Module]

    def __call__(self) -> torch.Tensor | None:
        module = self.module()
        return None if module is None else _probed(self.name, module)


def _probed(name: str, module: torch.nn.Module) -> torch.Tensor:
    """Columns of a matrix in vLLM's CPU kernel of this layer, exact in every bit: 1 * w + 0 * ... has no rounding."""
    import torch

    multiply = getattr(module, "cpu_linear", None)
    width = getattr(module, "input_size_per_partition", getattr(module, "input_size", None))
    if multiply is None or width is None:
        raise Unsampled(f"the weights of {name} ({type(module).__qualname__}) are stored in a form that cannot be read")
    rows = torch.zeros(PROBES, width, dtype=module.weight.dtype)
    for row in range(PROBES):
        rows[row, row * (width - 1) // (PROBES - 1)] = 1
    try:
        columns: torch.Tensor = multiply(rows, module.weight, None)
    except Exception as error:  # the kernel's own
        raise Unsampled(f"the weights of {name} cannot be read back from their kernel ({error})") from error
    return columns


def _runs(tensor: torch.Tensor, is_table: bool) -> int:
    if tensor.dim() > 2:
        return max(RUNS, RUNS_PER_EXPERT * len(tensor))
    # One run of each row of a table: some tokens may be trained alone.
    return max(RUNS, len(tensor)) if is_table else RUNS


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each element once, without the repeats of an axis."""
    return tensor[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())]


def _cut(tensor: torch.Tensor, runs: int) -> tuple[int, int] | None:
    """The bytes to read of a tensor's storage, as in `_Piece.cut`; None if other bytes lie between its elements."""
    if not tensor.numel():
        return (0, 0)
    once = _once(tensor)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(once.shape, once.stride(), strict=True))
    if extent != once.numel():
        return None
    length = extent * tensor.element_size()
    if length <= runs * RUN_BYTES:
        return (0, length)
    return (runs, (length - RUN_BYTES) // (runs - 1))


def _content(tensor: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Bytes of a tensor on its device: runs as rows, or all bytes in one row."""
    import torch

    if piece.cut is None:
        found = _scattered(_once(tensor), piece.runs)
        return _folded(found.view(-1, RUN_BYTES)) if piece.is_table and len(found) == piece.runs * RUN_BYTES else found
    runs, bytes_ = piece.cut
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if not runs and not bytes_:
        return raw
    size, strides = ((runs, RUN_BYTES), (bytes_, 1)) if runs else ((bytes_,), (1,))
    raw = raw.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), size, strides)
    return _folded(raw) if piece.is_table and runs else raw


def _folded(rows: torch.Tensor) -> torch.Tensor:
    """`RUN_BYTES` for many runs: the sum of their words, each times an odd number of its row."""
    import torch

    words = rows.contiguous().view(torch.int64)
    odd = torch.arange(1, 2 * len(words), 2, device=words.device)
    return (words * odd[:, None]).sum(0).view(torch.uint8)


def _scattered(tensor: torch.Tensor, runs: int) -> torch.Tensor:
    """Elements at even distances, of a tensor with other bytes between its elements."""
    import torch

    # As integers: not every data type can be indexed.
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain, each = tensor.view(words[tensor.element_size()]), max(1, RUN_BYTES // tensor.element_size())
    if tensor.numel() <= runs * each:
        return plain.contiguous().view(-1).view(torch.uint8)
    starts = torch.arange(runs) * ((tensor.numel() - each) // (runs - 1))
    indices = torch.unravel_index((starts[:, None] + torch.arange(each)).view(-1), tensor.shape)
    return plain[tuple(index.to(tensor.device) for index in indices)].view(torch.uint8)
