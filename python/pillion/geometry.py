"""The places of a block's bytes, read from the strides of the engine's KV tensors.

A block is the concatenation of its regions in (group, layer) order. The name of a layout does not matter: only the strides
count. `form` describes the inside of a page, for the namespace's digest; the places of pages are not in it.
shm-protocol/PROTOCOL.md, section 1, defines both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pillion import _shim
from pillion._shim import KEY_THEN_VALUE

if TYPE_CHECKING:
    import torch


class GeometryError(ValueError):
    """The KV tensors cannot be described as blocks at fixed strides."""


class Heads(NamedTuple):
    """The heads of a layer: elements of a key and of a value, and their order in kernels."""

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
    # The end of each cut's bytes in a block. A cut has the layers delivered together by a load.
    cuts: list[int]
    # The number of layers in each cut.
    cut_layers: list[int]


def describe_layers(layers: list[tuple[str, torch.Tensor]], blocks: int, heads: Mapping[str, Heads] | None = None) -> Geometry:
    """Describes the layers of one cache group, in order; `heads` of each layer with known ones."""
    if not layers:
        raise GeometryError("no layer of the model keeps KV")
    storages: dict[int, torch.UntypedStorage] = {}
    tensors = []
    for name, tensor in layers:
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, storage)
        split, block_axis = split_pages(name, tensor, blocks)
        place = list(storages).index(storage._cdata), split.storage_offset(), split.element_size()
        dtype = str(split.dtype).removeprefix("torch.")
        tensors.append((place, split.shape, split.stride(), block_axis, dtype, (heads or {}).get(name, UNKNOWN_HEADS)))
    return Geometry(list(storages.values()), *_shim.lay_out_block(tensors))


def split_pages(name: str, tensor: torch.Tensor, blocks: int) -> tuple[torch.Tensor, int]:
    """A layer's tensor with an axis over vLLM's blocks, and the number of that axis."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size == blocks]
    if not axes and tensor.shape[0] % blocks == 0:
        # The attention kernels have smaller blocks than vLLM: several of theirs make one.
        return tensor.unflatten(0, (blocks, -1)), 0
    if not axes:
        raise GeometryError(f"layer {name}: no axis of {tuple(tensor.shape)} has {blocks} blocks")
    return tensor, axes[0]


def self_test(layers: list[tuple[str, torch.Tensor]], geometry: Geometry, blocks: int) -> None:
    """Fills one block of every layer with random bytes through vLLM's tensors, finds all of them in order through the regions,
    and clears them. No KV is there yet."""
    import torch

    # As integers: some of the KV's data types cannot be copied, and their NaNs need not survive it.
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
        # A kernel may read masked bytes, and a NaN times zero is a NaN.
        for page in pages:
            page.zero_()
    if not right:
        raise GeometryError(
            "bytes of a block are not where the strides of vLLM's KV tensors say: report the model and vLLM's version, and "
            "leave --kv-transfer-config out"
        )
