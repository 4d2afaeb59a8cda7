"""Regions of a block: gathering them from raw storage must give exactly the bytes of the block's pages. Tests of cuts:
connector-shim/src/core/regions.rs."""

from __future__ import annotations

import pytest
import torch

from pillion import pages
from pillion._shim import KEY_THEN_VALUE
from pillion.geometry import Geometry, GeometryError, Heads, describe_layers
from pillion.pages import FormError

BLOCKS, LAYERS, HEADS, TOKENS, CONTENT = 7, 3, 2, 4, 5
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}


def caches(layout: str) -> list[tuple[str, torch.Tensor]]:
    """Logical [B, H, N, C] views, one a layer, of one storage in the given physical order."""
    shape = [AXES[axis] for axis in layout]
    count = LAYERS * BLOCKS * HEADS * TOKENS * CONTENT
    storage = torch.arange(count, dtype=torch.int16).reshape(shape)
    logical = storage.permute([layout.index(axis) for axis in "LBHNC"])
    return [(f"layer.{layer}", logical[layer]) for layer in range(LAYERS)]


def block_bytes(geometry: Geometry, block: int) -> bytes:
    """The bytes of a copy of the block by its regions."""
    raw = [bytes(torch.tensor([], dtype=torch.uint8).set_(storage).tolist()) for storage in geometry.storages]
    parts = [raw[s][offset + block * stride :][:length] for s, offset, stride, length in geometry.regions]
    return b"".join(parts)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_layout_is_gathered_exactly(layout: str) -> None:
    layers = caches(layout)
    geometry = describe_layers(layers, BLOCKS)
    inside = [axis for axis in layout if axis in "HNC"]
    for block in range(BLOCKS):
        pages = [cache[block].permute(["HNC".index(axis) for axis in inside]) for _, cache in layers]
        expected = b"".join(page.contiguous().numpy().tobytes() for page in pages)
        assert block_bytes(geometry, block) == expected


def test_a_block_outermost_layout_is_one_run() -> None:
    assert len(describe_layers(caches("BLNHC"), BLOCKS).regions) == 1
    assert len(describe_layers(caches("LBNHC"), BLOCKS).regions) == LAYERS
    assert len(describe_layers(caches("LHBNC"), BLOCKS).regions) == LAYERS * HEADS


def test_the_form_tells_the_inside_of_a_page_and_nothing_else() -> None:
    form = {layout: describe_layers(caches(layout), BLOCKS).form for layout in ("LBHNC", "BLHNC", "LBNHC", "BLNHC")}
    assert form["LBHNC"] == form["BLHNC"]
    assert form["LBNHC"] == form["BLNHC"]
    inside = "tokens=4 kernel_block=4 kv_heads=2 keys=5 values=0 dtype=int16 order="
    assert form["LBHNC"] == f"layers=3 {inside}kv_heads,tokens,content packing=none"
    assert form["LBNHC"] == f"layers=3 {inside}tokens,kv_heads,content packing=none"


def heads(keys: int, packing: str = KEY_THEN_VALUE) -> dict[str, Heads]:
    """The same heads for every layer."""
    return {f"layer.{layer}": Heads(keys, CONTENT - keys, packing) for layer in range(LAYERS + 1)}


def test_the_form_says_where_keys_and_values_are() -> None:
    """The form has strides in the copied page, independent of the page's place in the engine's memory."""
    form = {layout: describe_layers(caches(layout), BLOCKS, heads(3)).form for layout in ("LBHNC", "LHBNC", "LBNHC", "BLNHC")}
    assert form["LBHNC"] == form["LHBNC"] and form["LBNHC"] == form["BLNHC"]
    inside = "layers=3 tokens=4 kv_heads=2 keys=3 values=2 dtype=int16"
    assert form["LBHNC"] == f"{inside} k=kv_heads*20+tokens*5+keys v=3+kv_heads*20+tokens*5+values packing=none"
    assert form["LBNHC"] == f"{inside} k=tokens*10+kv_heads*5+keys v=3+tokens*10+kv_heads*5+values packing=none"


def test_the_form_tells_one_kind_of_layer_from_the_next() -> None:
    layers = [*caches("LBNHC"), ("layer.3", torch.zeros(BLOCKS, 1, TOKENS, CONTENT))]
    kinds = describe_layers(layers, BLOCKS, heads(3) | {"layer.2": Heads(2, 3, KEY_THEN_VALUE)}).form.split("; ")
    assert [kind.split()[0] for kind in kinds] == ["layers=2", "layers=1", "layers=1"]
    assert [kind.split()[3:5] for kind in kinds] == [["keys=3", "values=2"], ["keys=2", "values=3"], ["keys=3", "values=2"]]
    assert kinds[2].endswith("kv_heads=1 keys=3 values=2 dtype=float32 k=tokens*5+keys v=3+tokens*5+values packing=none")


def test_what_kernels_rearrange_by_a_rule_of_their_own_is_named_and_not_claimed() -> None:
    """The same holds for a page with more content than a key and a value."""
    assert describe_layers(caches("LBHNC"), BLOCKS, heads(3, "amx")).form.endswith(
        "keys=3 values=2 dtype=int16 order=kv_heads,tokens,content packing=amx"
    )
    with pytest.raises(FormError, match="packing=amx"):
        pages.parse_pages(describe_layers(caches("LBHNC"), BLOCKS, heads(3, "amx")).form)
    larger = {f"layer.{layer}": Heads(2, 2, KEY_THEN_VALUE) for layer in range(LAYERS)}
    with pytest.raises(FormError, match="strides do not describe"):
        pages.parse_pages(describe_layers(caches("LBHNC"), BLOCKS, larger).form)


def test_separate_storages_and_a_leading_pair_of_keys_and_values() -> None:
    layers = [(f"layer.{i}", torch.full((2, BLOCKS, TOKENS, CONTENT), i, dtype=torch.int16)) for i in range(2)]
    geometry = describe_layers(layers, BLOCKS)
    assert len(geometry.storages) == 2
    assert [region[0] for region in geometry.regions] == [0, 0, 1, 1]


def test_tensors_without_blocks_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"layer\.0"):
        describe_layers(caches("LBHNC"), BLOCKS + 1)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_block_ends_where_its_last_layer_does(layout: str) -> None:
    page = HEADS * TOKENS * CONTENT * 2
    geometry = describe_layers(caches(layout), BLOCKS)
    assert geometry.cuts[-1] == 3 * page == sum(region[3] for region in geometry.regions)


def test_blocks_of_several_kernel_blocks_are_gathered_exactly() -> None:
    """FlashInfer splits blocks of 128 tokens into kernel blocks of 64: the tensors count those."""
    layers = caches("LBNHC")
    apart = [(name, cache.contiguous().view(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)) for name, cache in layers]
    form = describe_layers(apart, BLOCKS).form
    assert form.startswith("layers=3 tokens=4 kernel_block=2 kv_heads=2 keys=5 values=0")
    assert "order=kernel_blocks,kv_heads,tokens,content" in form
    assert "kernel_block=2 kv_heads=2 keys=3 values=2 dtype=int16 k=kernel_blocks*20+kv_heads*10+tokens*5+keys v=3+" in (
        describe_layers(apart, BLOCKS, heads(3)).form
    )
    split = [(name, cache.permute(0, 2, 1, 3).reshape(BLOCKS * 2, TOKENS // 2, HEADS, CONTENT)) for name, cache in layers]
    whole = [(name, cache.permute(0, 2, 1, 3)) for name, cache in layers]
    logical = [(name, kernel.permute(0, 2, 1, 3)) for name, kernel in split]
    assert describe_layers(logical, BLOCKS, heads(3)).form == describe_layers(layers, BLOCKS, heads(3)).form, "the same bytes"
    for (_, kernel), (_, block) in zip(split, whole, strict=True):
        assert kernel.data_ptr() == block.data_ptr()
    assert (
        describe_layers([(name, cache.permute(0, 2, 1, 3)) for name, cache in split], BLOCKS).regions
        == describe_layers(whole, BLOCKS).regions
    )
