"""Where a block's bytes lie, read from the strides of the engine's KV tensors.

A block is the concatenation of its regions in (group, layer) order. What a layout is called does not matter: only the
strides are believed. `form` describes the inside of a page, which the namespace digests; where pages lie is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


# Loads are delivered in cuts of so many layers that a cut's part of a block, one run where the layout allows, reaches this:
# 256 KiB are copied at 53 of 55 GB/s, 64 KiB at 48. Pages of 64 KiB (8 KV heads x 128, 16 tokens, bf16) make it 4 layers,
# with which a load of 1.3 GB ended 1.0 ms later than with 2, in half as many pieces where blocks lie scattered.
CUT_PIECE_BYTES = 256 << 10
# Fewer layers gain nothing that a launch does not cost; more would leave a model of 32 layers less than four cuts.
LAYERS_PER_CUT_MIN, LAYERS_PER_CUT_MAX = 2, 8
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
    def layers_per_cut(self) -> int:
        """Layers that a load delivers together."""
        layers = len(self.layer_ends)
        wanted = -(-CUT_PIECE_BYTES * layers // self.layer_ends[-1])
        bounded = min(max(wanted, LAYERS_PER_CUT_MIN), LAYERS_PER_CUT_MAX)
        return max(bounded, -(-layers // CUTS_MAX))

    @property
    def cuts(self) -> list[int]:
        """Where in a block the layers that are delivered together end."""
        step = self.layers_per_cut
        return [*self.layer_ends[step - 1 : -1 : step], self.layer_ends[-1]]


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
