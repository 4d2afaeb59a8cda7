"""K and V of a block by strides: the fact `page_form` read, and blocks read and written by it. For engines other than vLLM.

shm-protocol/PROTOCOL.md, section 1, defines the text. Memory is an array of bytes, one row for each block, of numpy or of
torch; K and V are arrays of the same library. Neither is imported here, and vLLM is not either. The text is read in Rust.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from math import prod
from typing import Any

from pillion import _shim
from pillion._shim import ITEM_BYTES

# The axes of K and V in a page. One of length 1 does not show in the text.
AXES = ("kv_heads", "kernel_blocks", "tokens")


class FormError(ValueError):
    """A page that cannot be read by strides. The text names the remedy."""


@dataclass(frozen=True)
class Place:
    """Where the elements of K or of V are in a page, in elements: the first one, and the strides of the axes."""

    offset: int
    strides: Mapping[str, int]

    def __str__(self) -> str:
        axes = sorted(self.strides.items(), key=lambda item: -item[1])
        terms = [f"{axis}*{stride}" if stride > 1 else axis for axis, stride in axes]
        return "+".join([str(self.offset)] * (self.offset > 0) + terms) or "0"


@dataclass(frozen=True)
class Page:
    """The inside of a page, for so many consecutive layers of the model."""

    layers: int
    tokens: int
    # Tokens between two strides of the axis `kernel_blocks`, which attention kernels may divide a page by.
    kernel_block: int
    kv_heads: int
    keys: int
    values: int
    dtype: str
    k: Place
    v: Place

    @property
    def words(self) -> str:
        """What `page_form` says of it behind the number of layers."""
        kernel_block = f"kernel_block={self.kernel_block} " if self.kernel_block != self.tokens else ""
        return (
            f"tokens={self.tokens} {kernel_block}kv_heads={self.kv_heads} keys={self.keys} values={self.values} "
            f"dtype={self.dtype} k={self.k} v={self.v} packing=none"
        )

    @property
    def bytes(self) -> int:
        """Of one layer's page."""
        return self.tokens * self.kv_heads * (self.keys + self.values) * ITEM_BYTES[self.dtype]

    def shape(self, content: str) -> dict[str, int]:
        """The length of each axis of K (`keys`) or V (`values`)."""
        kernel_blocks = self.tokens // self.kernel_block
        lengths = (self.kv_heads, kernel_blocks, self.kernel_block, self.keys if content == "keys" else self.values)
        return dict(zip((*AXES, content), lengths, strict=True))


def parse(form: str) -> list[Page]:
    """The pages of one shard of a block, layer after layer; raises `FormError`."""
    try:
        read = _shim.page_form(form)
    except _shim.ShimError as error:
        raise FormError(str(error)) from None
    return [Page(*sizes, dtype, _place(k, "keys"), _place(v, "values")) for sizes, dtype, k, v in read]


def _place(read: tuple[int, list[int]], content: str) -> Place:
    offset, strides = read
    return Place(offset, {axis: stride for axis, stride in zip((*AXES, content), strides, strict=True) if stride})


def block_bytes(form: str, shards: int = 1) -> int:
    """Of all layers and shards."""
    return shards * sum(page.layers * page.bytes for page in parse(form))


def views(memory: Any, form: str, shards: int = 1) -> list[tuple[Any, Any]]:
    """K and V as they lie in `memory`, without a copy, for each run of like layers: [blocks, layers, shards, heads,
    kernel blocks, tokens, dim]. What is written there is in the block."""
    pages = parse(form)
    blocks, row = memory.shape
    shard_bytes = sum(page.layers * page.bytes for page in pages)
    if row != shards * shard_bytes:
        raise FormError(f"blocks of {row} bytes, and page_form has {shards} shards of {shard_bytes}: give each block a row")
    found, start = [], 0
    for page in pages:
        item = ITEM_BYTES[page.dtype]
        if any(size % item for size in (start, row, shard_bytes)):
            raise FormError(f"{page.dtype} begins at byte {start} of a shard of {shard_bytes}: such layers cannot be viewed")
        outer = [(blocks, row // item), (page.layers, page.bytes // item), (shards, shard_bytes // item)]
        both = []
        for place, content in ((page.k, "keys"), (page.v, "values")):
            axes = [(length, place.strides.get(axis, 0)) for axis, length in page.shape(content).items()]
            both.append(_strided(memory, page.dtype, start // item + place.offset, [*outer, *axes]))
        found.append((both[0], both[1]))
        start += page.layers * page.bytes
    return found


def read(memory: Any, form: str, ids: Sequence[int], shards: int = 1, out: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """K and V of blocks, one after the other, as [layers, heads, tokens, dim]: one copy. With `out`, into the first tokens of
    two such arrays, which are returned; otherwise into memory of their own, which takes the system longer than the copy."""
    both = _only(views(memory, form, shards))
    k, v = out or [_empty(view, (*_heads(view), len(ids) * _tokens(view), view.shape[-1])) for view in both]
    for view, found in zip(both, (k, v), strict=True):
        parts = _parts(found, view, len(ids))
        for at, blocks in _runs(ids):
            _blocks_first(parts[:, :, :, at])[:] = view[blocks]
    return k, v


def write(memory: Any, form: str, ids: Sequence[int], k: Any, v: Any, shards: int = 1) -> None:
    """Writes K and V, [layers, heads, tokens, dim], into blocks; tokens behind the last whole block are left out."""
    for view, given in zip(_only(views(memory, form, shards)), (k, v), strict=True):
        parts = _parts(given, view, len(ids))
        for at, blocks in _runs(ids):
            view[blocks] = _blocks_first(parts[:, :, :, at])


def _parts(given: Any, view: Any, blocks: int) -> Any:
    """The first tokens of K or V, [layers, heads, tokens, dim], with shards, blocks and kernel blocks as axes of their own."""
    _, layers, *heads, kernel_blocks, tokens, dim = view.shape
    count = blocks * kernel_blocks * tokens
    if given.ndim != 4 or tuple(given.shape) != (*_heads(view), given.shape[2], dim) or given.shape[2] < count:
        raise FormError(
            f"K or V of {tuple(given.shape)} for {blocks} blocks; wanted are [{layers} layers, {prod(heads)} heads, at "
            f"least {count} tokens, {dim}]"
        )
    if given.dtype != view.dtype:
        raise FormError(f"K or V of {given.dtype} for pages of {view.dtype}: pages are never converted, do it before or after")
    return given[:, :, :count].reshape(layers, *heads, blocks, kernel_blocks, tokens, dim)


def _heads(view: Any) -> tuple[int, int]:
    """Layers, and heads of all shards."""
    _, layers, *heads, _, _, _ = view.shape
    return layers, prod(heads)


def _tokens(view: Any) -> int:
    """Of a block."""
    return int(prod(view.shape[4:6]))


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    """An array of its library and type. numpy asks for large pages of memory and torch does not, so its are faster to fill."""
    if not hasattr(like, "new_empty"):
        return _numpy().empty(shape, like.dtype)
    if not like.is_cpu or find_spec("numpy") is None:
        return like.new_empty(shape)
    import torch

    return torch.from_numpy(_numpy().empty(shape, f"i{like.element_size()}")).view(like.dtype)


def _blocks_first(parts: Any) -> Any:
    """[layers, shards, heads, blocks, ...] with the blocks first."""
    axes = (3, 0, 1, 2, 4, 5, 6)
    return parts.permute(axes) if hasattr(parts, "permute") else parts.transpose(axes)


def _runs(ids: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Consecutive blocks: where they stand in `ids`, and which they are."""
    starts = [at for at, block in enumerate(ids) if at == 0 or block != ids[at - 1] + 1]
    for start, end in pairwise([*starts, len(ids)]):
        yield slice(start, end), slice(ids[start], ids[start] + end - start)


def _only(found: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    if len(found) != 1:
        raise FormError(f"the model has {len(found)} runs of layers with pages of their own: read each by pages.views")
    return found[0]


def _strided(memory: Any, dtype: str, offset: int, axes: list[tuple[int, int]]) -> Any:
    shape, strides = [length for length, _ in axes], [stride for _, stride in axes]
    if hasattr(memory, "as_strided"):
        import torch

        return memory.view(-1).view(getattr(torch, dtype)).as_strided(shape, strides, offset)
    numpy = _numpy()
    if not hasattr(numpy, dtype):
        raise FormError(f"numpy has no {dtype}: give pages memory as a tensor of torch")
    flat = memory.reshape(-1).view(getattr(numpy, dtype))
    steps = [stride * flat.itemsize for stride in strides]
    return numpy.lib.stride_tricks.as_strided(flat[offset:], shape, steps)


def _numpy() -> Any:
    import numpy

    return numpy
