"""K and V of a block by strides: the fact `page_form`, and reads and writes of blocks by it. For engines other than vLLM.

shm-protocol/PROTOCOL.md, section 1, defines the text. Memory is an array of bytes of numpy or of torch; K and V are arrays of
the same library. Neither is imported here, and vLLM is not either. The text is read in Rust.

Memory is [blocks, bytes], or [pieces, blocks, bytes]: all blocks' first pieces, then all blocks' second pieces. In pieces of
the right size (`piece_bytes`) the tokens of consecutive blocks follow each other, and are read without a copy.
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

# A copy of a shorter piece costs more by its call than by its bytes.
PIECE_BYTES_MIN = 4096
# Blocks of one head in a copy by numpy: 128 KiB of keys of 128 elements in 32 tokens fit into a core's cache.
BLOCKS_AT_ONCE = 8
# The protocol's limit of regions in a rank's memory.
PIECES_MAX = 1024
# The axes of K and V in a page. The text leaves out an axis of length 1.
AXES = ("kv_heads", "kernel_blocks", "tokens")


class FormError(ValueError):
    """A page without strides for a read. The text names the remedy."""


@dataclass(frozen=True)
class Place:
    """The place of K or V in a page, in elements: the first element, and the strides of the axes."""

    offset: int
    strides: Mapping[str, int]


@dataclass(frozen=True)
class Page:
    """The inside of a page, for so many consecutive layers of the model."""

    layers: int
    tokens: int
    # Tokens between two strides of the axis `kernel_blocks`, the parts of a page for attention kernels.
    kernel_block: int
    kv_heads: int
    keys: int
    values: int
    dtype: str
    k: Place
    v: Place

    @property
    def bytes(self) -> int:
        """Bytes of one layer's page."""
        return self.tokens * self.kv_heads * (self.keys + self.values) * ITEM_BYTES[self.dtype]

    def shape(self, content: str) -> dict[str, int]:
        """The length of each axis of K (`keys`) or V (`values`)."""
        kernel_blocks = self.tokens // self.kernel_block
        lengths = (self.kv_heads, kernel_blocks, self.kernel_block, self.keys if content == "keys" else self.values)
        return dict(zip((*AXES, content), lengths, strict=True))

    def axes(self, content: str) -> list[tuple[int, int]]:
        """Length and stride of each axis of K (`keys`) or V (`values`); an axis missing in the text has stride 0."""
        strides = (self.k if content == "keys" else self.v).strides
        return [(length, strides.get(axis, 0)) for axis, length in self.shape(content).items()]


def parse_pages(form: str) -> list[Page]:
    """The pages of one shard of a block, layer after layer; raises `FormError`."""
    try:
        read = _shim.read_page_form(form)
    except _shim.ShimError as error:
        raise FormError(str(error)) from None
    return [Page(*sizes, dtype, _place(k, "keys"), _place(v, "values")) for sizes, dtype, k, v in read]


def _place(read: tuple[int, list[int]], content: str) -> Place:
    offset, strides = read
    return Place(offset, {axis: stride for axis, stride in zip((*AXES, content), strides, strict=True) if stride})


def block_bytes(form: str, shards: int = 1) -> int:
    """Bytes of a block, all layers and shards."""
    return shards * sum(page.layers * page.bytes for page in parse_pages(form))


def piece_bytes(form: str, shards: int = 1) -> int:
    """The best length of pieces for reads without a copy: tokens are the outermost axis of a piece. The bytes of a whole block
    if no length fits."""
    whole = block_bytes(form, shards)
    (page, *others) = parse_pages(form)
    if others or shards > 1 or page.kernel_block != page.tokens:
        return whole
    tokens = (place.strides.get("tokens", 0) * page.tokens * ITEM_BYTES[page.dtype] for place in (page.k, page.v))
    fit = [size for size in tokens if size >= PIECE_BYTES_MIN and page.bytes % size == 0 and whole // size <= PIECES_MAX]
    return max((size for size in fit if _in_pieces(page, size)), default=whole)


def view_pages(memory: Any, form: str, shards: int = 1) -> list[tuple[Any, Any]]:
    """K and V in `memory`, without a copy, for each run of like layers: [blocks, layers, shards, heads, kernel blocks, tokens,
    dim]. A write to these arrays is a write to the block."""
    pages = parse_pages(form)
    pieces, blocks, piece = memory.shape if memory.ndim == 3 else (1, *memory.shape)
    shard_bytes = sum(page.layers * page.bytes for page in pages)
    if pieces * piece != shards * shard_bytes:
        raise FormError(
            f"blocks have {pieces * piece} bytes, and page_form has {shards} shards of {shard_bytes}: give each block a row"
        )
    found, start = [], 0
    for page in pages:
        item = ITEM_BYTES[page.dtype]
        if any(size % item for size in (start, piece, shard_bytes)):
            raise FormError(
                f"{page.dtype} begins at byte {start} of a shard of {shard_bytes} bytes: such layers cannot be viewed"
            )
        if pieces > 1 and (len(pages) > 1 or not _in_pieces(page, piece)):
            raise FormError(
                f"pieces of {piece} bytes divide what the strides of page_form join: pass memory in pieces of pages.piece_bytes"
            )
        outer = [(page.layers, page.bytes // item), (shards, shard_bytes // item)]
        both = []
        for place, content in ((page.k, "keys"), (page.v, "values")):
            spread = [(length, _spread(stride, piece // item, blocks)) for length, stride in (*outer, *page.axes(content))]
            offset = _spread(start // item + place.offset, piece // item, blocks)
            both.append(_strided(memory, page.dtype, offset, [(blocks, piece // item), *spread]))
        found.append((both[0], both[1]))
        start += page.layers * page.bytes
    return found


def _in_pieces(page: Page, piece: int) -> bool:
    """True if each axis of K and V stays inside of pieces of this length, or steps over whole ones."""
    size = piece // ITEM_BYTES[page.dtype]
    if page.bytes % piece:
        return False
    for place, content in ((page.k, "keys"), (page.v, "values")):
        axes = page.axes(content)
        inside = sum((length - 1) * stride for length, stride in axes if stride < size)
        if place.offset % size + inside >= size or any(stride % size for _, stride in axes if stride > size):
            return False
    return True


def _spread(elements: int, piece: int, blocks: int) -> int:
    """A distance inside of a block, in memory with each piece beside those of all blocks."""
    return elements // piece * piece * blocks + elements % piece


def read_blocks(
    memory: Any, form: str, ids: Sequence[int], shards: int = 1, out: tuple[Any, Any] | None = None
) -> tuple[Any, Any]:
    """K and V of blocks, one after the other, as [layers, heads, tokens, dim].

    If the blocks permit it, the arrays are views of them, and show later changes of the blocks. Otherwise they are copied once:
    into the first tokens of the two arrays `out`, which are returned, or into new memory, at a higher cost.
    """
    both = _only(view_pages(memory, form, shards))
    if out is None:
        k, v = (_shown(view, ids) if _in_place(view, ids) else _copied(view, ids) for view in both)
    else:
        k, v = (_copied(view, ids, given) for view, given in zip(both, out, strict=True))
    return k, v


def _in_place(view: Any, ids: Sequence[int]) -> bool:
    """True if the tokens of these blocks are equally far from each other."""
    _, _, shards, _, kernel_blocks, tokens, _ = view.shape
    strides = _strides(view)
    consecutive = len(list(_runs(ids))) == 1
    return consecutive and shards == kernel_blocks == 1 and (len(ids) == 1 or strides[0] == tokens * strides[5])


def _shown(view: Any, ids: Sequence[int]) -> Any:
    """Consecutive blocks in place, as [layers, heads, tokens, dim]."""
    blocks = view[ids[0] : ids[0] + len(ids)]
    return _ordered(blocks, (1, 2, 3, 0, 4, 5, 6)).reshape(*_heads(view), len(ids) * _tokens(view), view.shape[-1])


def _copied(view: Any, ids: Sequence[int], out: Any = None) -> Any:
    """Blocks in the first tokens of `out`, or in memory of their own."""
    found = _fresh(view, len(ids)) if out is None else out
    parts = _parts(found, view, len(ids))
    for at, blocks in _runs(ids):
        _copy(_blocks_first(parts[:, :, :, at]), view[blocks])
    return found


def write_blocks(memory: Any, form: str, ids: Sequence[int], k: Any, v: Any, shards: int = 1) -> None:
    """Writes K and V, [layers, heads, tokens, dim], into blocks, except the tokens behind the last whole block."""
    for view, given in zip(_only(view_pages(memory, form, shards)), (k, v), strict=True):
        parts = _parts(given, view, len(ids))
        for at, blocks in _runs(ids):
            _copy(view[blocks], _blocks_first(parts[:, :, :, at]))


# Published under these names.
parse, views, read, write = parse_pages, view_pages, read_blocks, write_blocks


def write_tokens(memory: Any, form: str, ids: Sequence[int], first: int, k: Any, v: Any, shards: int = 1) -> None:
    """Writes K and V, [layers, heads, tokens, dim], from the blocks' token `first` on; other tokens stay as they are."""
    write_blocks(memory, form, (), k, v, shards)  # other shapes and types are refused
    size, end = parse_pages(form)[0].tokens, first + k.shape[2]
    while first < end:
        at = first % size
        count = (end - first) // size * size if at == 0 else 0
        count = count or min(size - at, end - first)
        blocks = ids[first // size :][: max(1, count // size)]
        new = (k[:, :, :count], v[:, :, :count])
        if count % size:
            block = read_blocks(memory, form, blocks, shards)
            for part, tokens in zip(block, new, strict=True):
                part[:, :, at : at + count] = tokens
            new = block
        write_blocks(memory, form, blocks, *new, shards)
        k, v, first = k[:, :, count:], v[:, :, count:], first + count


def _copy(to: Any, source: Any) -> None:
    """Copies blocks, [blocks, layers, shards, heads, kernel blocks, tokens, dim].

    For each short run of adjacent tokens numpy goes through all blocks, and by then the bytes beside the run have left a core's
    cache. So numpy gets few blocks of a head at a time.
    """
    if len(to) <= BLOCKS_AT_ONCE or hasattr(to, "permute") or any(side.strides[5] != side.itemsize for side in (to, source)):
        to[:] = source
        return
    for head in _numpy().ndindex(to.shape[1:4]):
        for at in range(0, len(to), BLOCKS_AT_ONCE):
            place = (slice(at, at + BLOCKS_AT_ONCE), *head)
            to[place] = source[place]


def _parts(given: Any, view: Any, blocks: int) -> Any:
    """The first tokens of K or V, [layers, heads, tokens, dim], with shards, blocks and kernel blocks as axes of their own."""
    _, layers, *heads, kernel_blocks, tokens, dim = view.shape
    count = blocks * kernel_blocks * tokens
    if given.ndim != 4 or tuple(given.shape) != (*_heads(view), given.shape[2], dim) or given.shape[2] < count:
        raise FormError(
            f"K or V has shape {tuple(given.shape)} for {blocks} blocks: pass [{layers} layers, {prod(heads)} heads, at least "
            f"{count} tokens, {dim}]"
        )
    if given.dtype != view.dtype:
        raise FormError(
            f"K or V has {given.dtype} and pages have {view.dtype}: convert K and V yourself, pages are never converted"
        )
    return given[:, :, :count].reshape(layers, *heads, blocks, kernel_blocks, tokens, dim)


def _heads(view: Any) -> tuple[int, int]:
    """Layers, and heads of all shards."""
    _, layers, *heads, _, _, _ = view.shape
    return layers, prod(heads)


def _tokens(view: Any) -> int:
    """Tokens of a block."""
    return int(prod(view.shape[4:6]))


def _fresh(view: Any, blocks: int) -> Any:
    """Memory for so many blocks, [layers, heads, tokens, dim]. Adjacent tokens or dims of a block are adjacent in it."""
    tokens, dim = blocks * _tokens(view), view.shape[-1]
    *_, token, element = _strides(view)
    if element > token > 0:
        return _empty(view, (*_heads(view), dim, tokens)).swapaxes(2, 3)
    return _empty(view, (*_heads(view), tokens, dim))


def _strides(view: Any) -> Any:
    return view.stride() if callable(getattr(view, "stride", None)) else view.strides


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    """An array of the same library and type. numpy asks for large pages of memory and torch does not, so numpy's are faster to
    fill."""
    if not hasattr(like, "new_empty"):
        return _numpy().empty(shape, like.dtype)
    if not like.is_cpu or find_spec("numpy") is None:
        return like.new_empty(shape)
    import torch

    return torch.from_numpy(_numpy().empty(shape, f"i{like.element_size()}")).view(like.dtype)


def _blocks_first(parts: Any) -> Any:
    """[layers, shards, heads, blocks, ...] with the blocks first."""
    return _ordered(parts, (3, 0, 1, 2, 4, 5, 6))


def _ordered(array: Any, axes: tuple[int, ...]) -> Any:
    return array.permute(axes) if hasattr(array, "permute") else array.transpose(axes)


def _runs(ids: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Consecutive blocks: their places in `ids`, and their numbers."""
    starts = [at for at, block in enumerate(ids) if at == 0 or block != ids[at - 1] + 1]
    for start, end in pairwise([*starts, len(ids)]):
        yield slice(start, end), slice(ids[start], ids[start] + end - start)


def _only(found: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    if len(found) != 1:
        raise FormError(f"the model has {len(found)} runs of layers with pages of their own: read each with pages.views")
    return found[0]


def _strided(memory: Any, dtype: str, offset: int, axes: list[tuple[int, int]]) -> Any:
    shape, strides = [length for length, _ in axes], [stride for _, stride in axes]
    if hasattr(memory, "as_strided"):
        import torch

        return memory.view(-1).view(getattr(torch, dtype)).as_strided(shape, strides, offset)
    numpy = _numpy()
    if not hasattr(numpy, dtype):
        raise FormError(f"numpy has no {dtype}: pass the memory of pages as a tensor of torch")
    flat = memory.reshape(-1).view(getattr(numpy, dtype))
    steps = [stride * flat.itemsize for stride in strides]
    return numpy.lib.stride_tricks.as_strided(flat[offset:], shape, steps)


def _numpy() -> Any:
    import numpy

    return numpy
