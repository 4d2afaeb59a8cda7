"""Where a block's bytes lie, read from the strides of the engine's KV tensors.

A block is the concatenation of its regions in (group, layer) order. What a layout is called does not matter: only the
strides are believed. `form` describes the inside of a page, which the namespace digests; where pages lie is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


# A load is delivered in cuts, groups of layers. The first and the last are small, so that a forward begins early and has
# little left to compute when the copy ends; between them few large ones are copied fastest: a cut's part of a block is one
# run where the layout allows, and runs of 128 KiB move at 51.6 GB/s, of 256 KiB at 53, of 1 MiB at 54.5.
SMALLEST_CUT_BYTES = 128 << 10
# Of small pages: more layers would leave a model of 32 layers no middle.
SMALLEST_CUT_LAYERS_MAX = 4
# A middle cut's layers by the smallest cut's: a forward computes so many while the next cut is copied, or the reverse.
LARGEST_BY_SMALLEST = 6
# A load's word counts delivered cuts in one byte.
CUTS_MAX = 255


class GeometryError(ValueError):
    """The KV tensors cannot be described as blocks at fixed strides."""


@dataclass(frozen=True)
class Geometry:
    """Regions of a block in a rank's memory."""

    storages: list[torch.UntypedStorage]
    # (storage index, offset of block 0 in bytes, stride from block to block in bytes, bytes)
    regions: list[tuple[int, int, int, int]]
    form: str
    # Where in a block each layer's bytes end.
    layer_ends: list[int]

    @property
    def cut_layers(self) -> list[int]:
        """How many layers a load delivers together, cut by cut."""
        layers = len(self.layer_ends)
        smallest = min(-(-SMALLEST_CUT_BYTES * layers // self.layer_ends[-1]), SMALLEST_CUT_LAYERS_MAX)
        ends: list[int] = []
        middle = layers
        for size in (smallest, 2 * smallest):
            if middle >= 3 * size:
                ends.append(size)
                middle -= 2 * size
        parts = -(-middle // max(LARGEST_BY_SMALLEST * smallest, -(-layers // (CUTS_MAX - 4))))
        middles = [middle * (part + 1) // parts - middle * part // parts for part in range(parts)]
        return [*ends, *middles, *reversed(ends)]

    @property
    def cuts(self) -> list[int]:
        """Where in a block the layers that are delivered together end."""
        return [self.layer_ends[end - 1] for end in accumulate(self.cut_layers)]


def describe(layers: list[tuple[str, torch.Tensor]], blocks: int) -> Geometry:
    """Describes the layers of one cache group, in order."""
    storages: dict[int, int] = {}
    unique: list[torch.UntypedStorage] = []
    regions: list[tuple[int, int, int, int]] = []
    forms: list[str] = []
    layer_ends: list[int] = []
    end = 0
    for name, tensor in layers:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = len(unique)
            unique.append(storage)
        runs, form = _runs(name, tensor, blocks)
        for offset, stride, length in runs:
            _append(regions, (storages[storage._cdata], offset, stride, length))
            end += length
        layer_ends.append(end)
        forms.append(form)
    if not layer_ends:
        raise GeometryError("no layer of the model keeps KV")
    return Geometry(unique, regions, "; ".join(forms), layer_ends)


def _runs(name: str, tensor: torch.Tensor, blocks: int) -> tuple[list[tuple[int, int, int]], str]:
    """The dense runs of one layer's page, and the page's form."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size == blocks]
    if not axes and tensor.shape[0] % blocks == 0:
        # The attention kernels take smaller blocks than vLLM counts: several of theirs make one.
        tensor, axes = tensor.unflatten(0, (blocks, -1)), [0]
    if not axes:
        raise GeometryError(f"layer {name}: no axis of {tuple(tensor.shape)} has {blocks} blocks")
    block_axis = axes[0]
    item = tensor.element_size()
    inner = [axis for axis in range(tensor.dim()) if axis != block_axis and tensor.shape[axis] > 1]
    inner.sort(key=tensor.stride)
    dense = 1
    while inner and tensor.stride(inner[0]) == dense:
        dense *= tensor.shape[inner.pop(0)]
    offsets = [tensor.storage_offset()]
    for axis in reversed(inner):
        offsets = [offset + i * tensor.stride(axis) for offset in offsets for i in range(tensor.shape[axis])]
    page = [size for axis, size in enumerate(tensor.shape) if axis != block_axis]
    order = sorted((axis for axis in range(tensor.dim()) if axis != block_axis), key=tensor.stride, reverse=True)
    order = [axis - (axis > block_axis) for axis in order if tensor.shape[axis] > 1]
    form = f"{name} {str(tensor.dtype).removeprefix('torch.')} page {page} order {order}"
    stride = tensor.stride(block_axis) * item
    return [(offset * item, stride, dense * item) for offset in offsets], form


def _append(regions: list[tuple[int, int, int, int]], region: tuple[int, int, int, int]) -> None:
    """Adds a region, joining it to the one before where both are one run in every block."""
    if regions:
        storage, offset, stride, length = regions[-1]
        if region[0] == storage and region[2] == stride and region[1] == offset + length:
            regions[-1] = (storage, offset, stride, length + region[3])
            return
    regions.append(region)
