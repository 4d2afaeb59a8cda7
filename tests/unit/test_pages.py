"""K and V read and written by the strides of a page's form."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from pillion import pages
from pillion._shim import KEY_THEN_VALUE, KEYS_THEN_VALUES
from pillion.geometry import Heads, describe_layers
from pillion.pages import FormError, Page, Place

BLOCKS, LAYERS, HEADS, TOKENS, KEYS, VALUES = 7, 3, 2, 4, 3, 5
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": KEYS + VALUES}
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
IDS = [5, 1, 2, 3, 0]


def blocks_of(layout: str, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], str, torch.Tensor]:
    """An engine's tensors in a layout, the form of their pages, and their blocks in the order of copies, a row of bytes
    each."""
    generator = torch.Generator().manual_seed(1)
    storage = torch.randn([AXES[axis] for axis in layout], generator=generator).to(dtype)
    logical = list(storage.permute([layout.index(axis) for axis in "LBHNC"]))
    layers = [(f"layer.{layer}", tensor) for layer, tensor in enumerate(logical)]
    geometry = describe_layers(layers, BLOCKS, {name: Heads(KEYS, VALUES, KEY_THEN_VALUE) for name, _ in layers})
    raw = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in geometry.storages]
    rows = [
        torch.cat([raw[s][offset + block * stride :][:length] for s, offset, stride, length in geometry.regions])
        for block in range(BLOCKS)
    ]
    return logical, geometry.form, torch.stack(rows)


def expected(logical: list[torch.Tensor], ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [layers, heads, tokens, dim], by the tensors' own axes."""
    both = torch.stack(logical)[:, ids].permute(0, 2, 1, 3, 4).reshape(LAYERS, HEADS, len(ids) * TOKENS, KEYS + VALUES)
    return both[..., :KEYS], both[..., KEYS:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_and_written_exactly(layout: str, dtype: torch.dtype) -> None:
    logical, form, memory = blocks_of(layout, dtype)
    right = expected(logical, IDS)
    found = pages.read_blocks(memory, form, IDS)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    written = torch.zeros_like(memory)
    pages.write_blocks(written, form, IDS, *found)
    assert torch.equal(written[IDS], memory[IDS])
    assert not written[[4, 6]].any(), "no other block is touched"


# Elements of a piece by layout: all tokens of a head, or of all heads where these are contiguous.
PIECES = {"LBHNC": TOKENS * (KEYS + VALUES), "LHBNC": TOKENS * (KEYS + VALUES), "LBNHC": TOKENS * HEADS * (KEYS + VALUES)}


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("layout", PIECES)
def test_consecutive_blocks_are_shown_in_place(layout: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logical, form, rows = blocks_of(layout)
    monkeypatch.setattr(pages, "PIECE_BYTES_MIN", 1)
    piece = pages.piece_bytes(form)
    assert piece == 4 * PIECES[layout]
    memory = rows.view(BLOCKS, -1, piece).transpose(0, 1).contiguous()
    given = memory if library == "torch" else memory.numpy()
    for ids, in_place in (([2, 3, 4], True), ([6], True), (IDS, False)):
        found = pages.read_blocks(given, form, ids)
        assert all(torch.equal(torch.as_tensor(part), right) for part, right in zip(found, expected(logical, ids), strict=True))
        assert [numpy.may_share_memory(numpy.asarray(part), memory.numpy()) for part in found] == [in_place] * 2
    written = torch.zeros_like(memory)
    pages.write_blocks(written, form, IDS, *expected(logical, IDS))
    assert torch.equal(written[:, IDS], memory[:, IDS])
    assert not written[:, [4, 6]].any(), "no other block is touched"
    with pytest.raises(FormError, match="piece_bytes"):
        pages.view_pages(memory.view(-1, BLOCKS, piece // 16).contiguous(), form)


def test_where_no_piece_serves_blocks_have_rows() -> None:
    _, form, _ = blocks_of("LBHNC")
    whole = pages.block_bytes(form)
    assert pages.piece_bytes(form) == whole, "pieces would be too short"
    assert pages.piece_bytes(form, shards=2) == 2 * whole
    keys_apart = "layers=3000 tokens=32 kv_heads=2 keys=64 values=64 dtype=float32 k=kv_heads*4096+tokens*128+keys "
    assert pages.piece_bytes(f"{keys_apart}v=64+kv_heads*4096+tokens*128+values packing=none") == 3000 * 32 * 2 * 128 * 4


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_blocks_are_read_into_memory_that_a_decoder_has(library: str) -> None:
    """The decoder's memory is longer than the blocks and not contiguous, like a cache for several requests."""
    logical, form, memory = blocks_of("LBHNC")
    given = [torch.full((LAYERS, HEADS, 2, (len(IDS) + 1) * TOKENS, dim), 5.0)[:, :, 1] for dim in (KEYS, VALUES)]
    out = given if library == "torch" else [tensor.numpy() for tensor in given]
    found = pages.read_blocks(memory if library == "torch" else memory.numpy(), form, IDS, out=(out[0], out[1]))
    assert found[0] is out[0] and found[1] is out[1]
    count = len(IDS) * TOKENS
    for tensor, right in zip(given, expected(logical, IDS), strict=True):
        assert torch.equal(tensor[:, :, :count], right)
        assert bool((tensor[:, :, count:] == 5.0).all()), "tokens behind the last block are left alone"
    with pytest.raises(FormError, match="at least"):
        pages.read_blocks(memory, form, IDS, out=(given[0][:, :, 1:count], given[1]))
    with pytest.raises(FormError, match="never converted"):
        pages.read_blocks(memory, form, IDS, out=(given[0].half(), given[1]))


@pytest.mark.parametrize("shards", [1, 2])
def test_many_blocks_with_tokens_side_by_side(shards: int) -> None:
    """As in vLLM's CPU build for keys; numpy copies some blocks of a head at a time, here in runs of 19, 8 and 3."""
    blocks, ids = 40, [*range(21, 40), *range(3, 11), *range(12, 15)]
    sizes = f"layers={LAYERS} tokens={TOKENS} kv_heads={HEADS} keys={KEYS} values={KEYS} dtype=float32"
    strides = f"kv_heads*{2 * KEYS * TOKENS}+keys*{TOKENS}+tokens"
    form = f"{sizes} k={strides} v={KEYS * TOKENS}+{strides.replace('keys', 'values')} packing=none"
    whole = numpy.random.default_rng(1).standard_normal((blocks, shards, LAYERS, HEADS, 2, KEYS, TOKENS), numpy.float32)
    memory = whole.reshape(blocks, -1).view(numpy.uint8)
    # [K and V, layers, shards and heads, blocks and tokens, dim]
    right = whole[ids].transpose(4, 2, 1, 3, 0, 6, 5).reshape(2, LAYERS, shards * HEADS, len(ids) * TOKENS, KEYS)
    found = pages.read_blocks(memory, form, ids, shards)
    assert all(numpy.array_equal(part, wanted) for part, wanted in zip(found, right, strict=True))
    written = numpy.zeros_like(memory)
    pages.write_blocks(written, form, ids, *found, shards)
    assert numpy.array_equal(written[ids], memory[ids])
    assert not numpy.delete(written, ids, 0).any(), "no other block is touched"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_no_blocks_are_read_as_no_tokens(dtype: torch.dtype) -> None:
    """As for a prompt without kept blocks."""
    _, form, memory = blocks_of("LBNHC", dtype)
    assert [(tuple(found.shape), found.dtype) for found in pages.read_blocks(memory, form, [])] == [
        ((LAYERS, HEADS, 0, dim), dtype) for dim in (KEYS, VALUES)
    ]


def test_numpy_reads_the_same_and_needs_no_torch() -> None:
    logical, form, memory = blocks_of("LBNHC")
    keys, values = pages.read_blocks(memory.numpy(), form, IDS)
    right = expected(logical, IDS)
    assert isinstance(keys, numpy.ndarray)
    assert numpy.array_equal(keys, right[0].numpy()) and numpy.array_equal(values, right[1].numpy())
    written = numpy.zeros_like(memory.numpy())
    pages.write_blocks(written, form, IDS, keys, values)
    assert numpy.array_equal(written[IDS], memory.numpy()[IDS])
    with pytest.raises(FormError, match="numpy has no bfloat16"):
        pages.view_pages(memory.numpy(), form.replace("float32", "bfloat16").replace("tokens=4", "tokens=8"))


def test_views_are_the_memory_itself() -> None:
    logical, form, memory = blocks_of("LBHNC")
    [(keys, values)] = pages.view_pages(memory, form)
    assert tuple(keys.shape) == (BLOCKS, LAYERS, 1, HEADS, 1, TOKENS, KEYS)
    keys[2, 1, 0, 1, 0, 3] = 9.0
    values[2, 1, 0, 1, 0, 3] = 8.0
    changed = expected(logical, [2])
    changed[0][1, 1, 3] = 9.0
    changed[1][1, 1, 3] = 8.0
    assert all(torch.equal(one, other) for one, other in zip(pages.read_blocks(memory, form, [2]), changed, strict=True))


def test_shards_are_heads_after_heads() -> None:
    """As for two ranks of vLLM: the heads of the second one come after those of the first."""
    logical, form, first = blocks_of("LBHNC")
    second = torch.roll(first, 1, 0)
    found = pages.read_blocks(torch.cat([first, second], 1), form, [3], shards=2)
    one, other = expected(logical, [3]), expected(logical, [2])
    assert all(torch.equal(found[part], torch.cat([one[part], other[part]], 1)) for part in (0, 1))
    with pytest.raises(FormError, match="2 shards"):
        pages.view_pages(first, form, shards=2)


def test_kernel_blocks_between_heads() -> None:
    """Blocks of two kernel blocks of attention: [kernel blocks, heads, tokens, content]."""
    tensor = torch.arange(BLOCKS * 2 * HEADS * TOKENS * 8, dtype=torch.float32).view(BLOCKS * 2, HEADS, TOKENS, 8)
    form = describe_layers([("layer.0", tensor)], BLOCKS, {"layer.0": Heads(4, 4, KEY_THEN_VALUE)}).form
    keys, values = pages.read_blocks(tensor.view(BLOCKS, -1).view(torch.uint8), form, [1, 4])
    right = torch.cat([tensor[[2, 3]], tensor[[8, 9]]]).permute(1, 0, 2, 3).reshape(1, HEADS, 16, 8)
    assert torch.equal(keys, right[..., :4]) and torch.equal(values, right[..., 4:])


def test_tokens_behind_the_last_block_are_left_out_and_too_few_are_refused() -> None:
    logical, form, memory = blocks_of("LBHNC")
    more = expected(logical, [3, 4])
    written = torch.zeros_like(memory)
    pages.write_blocks(written, form, [0], *more)
    assert torch.equal(written[0], memory[3])
    with pytest.raises(FormError, match="at least 12 tokens"):
        pages.write_blocks(written, form, [0, 1, 2], *more)


def test_a_form_of_kernel_blocks_is_read_whole() -> None:
    form = (
        "layers=2 tokens=8 kernel_block=4 kv_heads=2 keys=4 values=4 dtype=float32 "
        "k=kernel_blocks*64+kv_heads*32+tokens*8+keys v=4+kernel_blocks*64+kv_heads*32+tokens*8+values packing=none"
    )
    strides = {"kernel_blocks": 64, "kv_heads": 32, "tokens": 8}
    k, v = Place(0, strides | {"keys": 1}), Place(4, strides | {"values": 1})
    assert pages.parse_pages(form) == [Page(2, 8, 4, 2, 4, 4, "float32", k, v)]
    assert pages.block_bytes(form, shards=2) == 2 * 2 * 8 * 2 * 8 * 4


SOUND = "layers=1 tokens=4 kv_heads=2 keys=2 values=2 dtype=float32 k=kv_heads*16+tokens*4+keys v=2+kv_heads*16+tokens*4+values"


@pytest.mark.parametrize(
    "form",
    [
        SOUND,
        f"{SOUND} packing=amx",
        f"{SOUND} packing=none".replace("kv_heads*16", "kv_heads*17"),
        f"{SOUND} packing=none".replace("v=2", "v=3"),
        f"{SOUND} packing=none".replace("tokens*4+keys", "keys"),
        f"{SOUND} packing=none".replace("+keys", "+keys+keys"),
        f"{SOUND} packing=none".replace("+keys", "-keys"),
        f"{SOUND} packing=none".replace("float32", "int4"),
        f"{SOUND} packing=none".replace("tokens=4", "tokens=0"),
        f"{SOUND} packing=none".replace("layers=1", "layers=99999"),
        f"{SOUND} packing=none".replace("layers=1 ", ""),
        "layers=1 tokens=4 kernel_block=4 kv_heads=2 keys=2 values=2 dtype=float32 order=kv_heads,tokens,content packing=none",
    ],
)
def test_what_strides_do_not_describe_is_refused(form: str) -> None:
    """Strides beyond the page are refused before any memory is read."""
    assert pages.parse_pages(f"{SOUND} packing=none")
    with pytest.raises(FormError, match=r"page_form|packing"):
        pages.parse_pages(form)


def cpu_page(isa: str, dtype: torch.dtype, tokens: int) -> tuple[Any, Any, torch.Tensor]:
    """Keys and values of one block, and a cache of three blocks with vLLM's copy of them in the middle one."""
    from vllm import _custom_ops as ops

    dim = 64
    keys, values = (torch.randn(tokens, HEADS, dim, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    cache = torch.zeros(3, HEADS, tokens, 2 * dim, dtype=dtype)
    key_cache, value_cache = cache.view(3, HEADS, tokens * 2, dim).chunk(2, dim=2)
    slots = torch.arange(tokens, 2 * tokens)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    return keys, values, cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("isa", "tokens"), [("vec", 32), ("vec16", 32), ("vec16", 16)])
def test_pages_of_the_cpu_builds_attention_are_as_stated(isa: str, tokens: int, dtype: torch.dtype) -> None:
    """Pillion reads the CPU kernel's bytes by the strides, and instruction sets with equal bytes have one form."""
    keys, values, cache = cpu_page(isa, dtype, tokens)
    form = describe_layers([("layer.0", cache)], 3, {"layer.0": Heads(64, 64, KEYS_THEN_VALUES)}).form
    assert f"k=kv_heads*{tokens * 128}+keys*{tokens}+tokens v={tokens * 64}+kv_heads*{tokens * 128}+tokens*64+values" in form
    found = pages.read_blocks(cache.view(3, -1).view(torch.uint8), form, [1])
    assert torch.equal(found[0][0], keys.transpose(0, 1)) and torch.equal(found[1][0], values.transpose(0, 1))
