"""Where a block's bytes lie, read from the strides of the engine's KV tensors.

A block is the concatenation of its regions in (group, layer) order. What a layout is called does not matter: only the
strides are believed. `form` describes the inside of a page, which the namespace digests; where pages lie is not in it.
shm-protocol/PROTOCOL.md, section 1, defines both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from pillion import _shim
from pillion._shim import KEY_THEN_VALUE

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


class Heads(NamedTuple):
    """What the heads of a layer hold: elements of a key and of a value, and how kernels arrange them."""

    keys: int
    values: int
    packing: str


UNKNOWN_HEADS = Heads(0, 0, KEY_THEN_VALUE)


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


def describe(layers: list[tuple[str, torch.Tensor]], blocks: int, heads: Mapping[str, Heads] | None = None) -> Geometry:
    """Describes the layers of one cache group, in order; `heads` of each layer, where they are known."""
    storages: dict[int, int] = {}
    unique: list[torch.UntypedStorage] = []
    regions: list[tuple[int, int, int, int]] = []
    tensors = []
    layer_ends: list[int] = []
    end = 0
    for name, tensor in layers:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = len(unique)
            unique.append(storage)
        split, block_axis = split_pages(name, tensor, blocks)
        runs = _runs(split, block_axis)
        for offset, stride, length in runs:
            _append(regions, (storages[storage._cdata], offset, stride, length))
            end += length
        layer_ends.append(end)
        dtype = str(split.dtype).removeprefix("torch.")
        tensors.append((split.shape, split.stride(), block_axis, dtype, (heads or {}).get(name, UNKNOWN_HEADS)))
    if not layer_ends:
        raise GeometryError("no layer of the model keeps KV")
    return Geometry(unique, regions, _shim.write_page_form(tensors), layer_ends)


def split_pages(name: str, tensor: torch.Tensor, blocks: int) -> tuple[torch.Tensor, int]:
    """A layer's tensor with an axis that counts vLLM's blocks, and which one that is."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size == blocks]
    if not axes and tensor.shape[0] % blocks == 0:
        # The attention kernels take smaller blocks than vLLM counts: several of theirs make one.
        return tensor.unflatten(0, (blocks, -1)), 0
    if not axes:
        raise GeometryError(f"layer {name}: no axis of {tuple(tensor.shape)} has {blocks} blocks")
    return tensor, axes[0]


def _runs(pages: torch.Tensor, block_axis: int) -> list[tuple[int, int, int]]:
    """The dense runs of one layer's page."""
    item = pages.element_size()
    inner = [axis for axis in range(pages.dim()) if axis != block_axis and pages.shape[axis] > 1]
    inner.sort(key=pages.stride)
    dense = 1
    while inner and pages.stride(inner[0]) == dense:
        dense *= pages.shape[inner.pop(0)]
    offsets = [pages.storage_offset()]
    for axis in reversed(inner):
        offsets = [offset + i * pages.stride(axis) for offset in offsets for i in range(pages.shape[axis])]
    return [(offset * item, pages.stride(block_axis) * item, dense * item) for offset in offsets]


def _append(regions: list[tuple[int, int, int, int]], region: tuple[int, int, int, int]) -> None:
    """Adds a region, joining it to the one before where both are one run in every block."""
    if regions:
        storage, offset, stride, length = regions[-1]
        if region[0] == storage and region[2] == stride and region[1] == offset + length:
            regions[-1] = (storage, offset, stride, length + region[3])
            return
    regions.append(region)


def self_test(layers: list[tuple[str, torch.Tensor]], geometry: Geometry, blocks: int) -> None:
    """Fills one block of every layer with random bytes through vLLM's tensors, finds all of them in order through the regions,
    and clears them. No KV is there yet."""
    import torch

    # As plain words: some of the KV's data types cannot be copied, and their NaNs need not survive it.
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    block = blocks - 1
    expected, pages = [], []
    try:
        for name, tensor in layers:
            split, block_axis = split_pages(name, tensor, blocks)
            page = split.select(block_axis, block)
            page = page.permute(sorted(range(page.dim()), key=page.stride, reverse=True)).view(words[page.element_size()])
            pages.append(page)
            pattern = torch.randint(256, (page.numel() * page.element_size(),), dtype=torch.uint8, device=page.device)
            page.copy_(pattern.view(page.dtype).view(page.shape))
            expected.append(pattern)
        memory = [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in geometry.storages]
        found = [
            memory[storage][offset + block * stride : offset + block * stride + length]
            for storage, offset, stride, length in geometry.regions
        ]
        right = torch.equal(torch.cat(found), torch.cat(expected))
    finally:
        # A kernel may read what it masks, and a NaN times nothing is a NaN.
        for page in pages:
            page.zero_()
    if not right:
        raise GeometryError(
            "bytes of a block are not where the strides of vLLM's KV tensors say: report the model and vLLM's version, and "
            "leave --kv-transfer-config out"
        )
