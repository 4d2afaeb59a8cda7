"""KV tensors with vLLM's own allocation and views for GPU backends, and the layout that Pillion asks for."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specs import v4_groups, v4_layers

from pillion import groups, vllm_compat
from pillion.connector import PillionConnector
from pillion.geometry import Geometry, GeometryError, describe_layers, self_test

BLOCKS, LAYERS, KV_HEADS, HEAD_SIZE = 6, 10, 2, 16
LAYER_NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def allocate(layout_name: str, block_tokens: int = 16, kernel_tokens: int = 16) -> tuple[Any, dict[str, torch.Tensor]]:
    """vLLM's KV cache configuration, and its tensors for connectors, with distinct bytes."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    layout = KVCacheLayout[layout_name]
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=None, prefix_cache_retention_interval=None
    )
    vllm_config = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    groups = [KVCacheGroupSpec(list(LAYER_NAMES), spec)]
    config = get_kv_cache_config_from_groups(vllm_config, groups, BLOCKS * LAYERS * spec.page_size_bytes)
    assert config.num_blocks == BLOCKS
    tensors = allocate_kv_cache(config, torch.device("cpu"), layout, [kernel_tokens])
    raw = torch.empty(0, dtype=torch.int16).set_(tensors[LAYER_NAMES[0]].untyped_storage())
    raw.copy_(torch.arange(len(raw)).to(torch.int16))
    return config, tensors


def gathered(geometry: Geometry, block: int) -> bytes:
    """The bytes of a copy of the block by its regions."""
    raw = [bytes(storage.tolist()) for storage in geometry.storages]
    return b"".join(raw[s][offset + block * stride :][:length] for s, offset, stride, length in geometry.regions)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_gathered_and_cut_exactly(layout: str) -> None:
    """Layer after layer, in each order of memory: a cut of a block has its layers' pages and nothing else."""
    config, tensors = allocate(layout)
    layers = vllm_compat.list_tensors(config, tensors)
    assert [name for name, _ in layers] == LAYER_NAMES
    geometry = describe_layers(layers, BLOCKS)
    inside = [axis for axis in layout if axis in "HNC"]
    for block in range(BLOCKS):
        pages = [tensor[block].permute(["HNC".index(axis) for axis in inside]) for _, tensor in layers]
        expected = [page.contiguous().view(torch.int16).numpy().tobytes() for page in pages]
        found = gathered(geometry, block)
        assert found == b"".join(expected)
        start = first = 0
        for end, count in zip(geometry.cuts, geometry.cut_layers, strict=True):
            assert found[start:end] == b"".join(expected[first : first + count])
            start, first = end, first + count
        assert first == len(LAYER_NAMES)


@pytest.mark.parametrize("tokens", [(16, 16), (128, 64)], ids=["blocks", "kernel-blocks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_self_test_sees_a_wrong_region_and_leaves_nothing_behind(layout: str, tokens: tuple[int, int]) -> None:
    """The right geometry passes; one with a region a byte off, or with swapped layers, is refused."""
    if tokens[0] != tokens[1] and layout != "LBNHC":
        return
    config, tensors = allocate(layout, *tokens)
    layers = vllm_compat.list_tensors(config, tensors)
    before = [tensor.view(torch.int16).clone() for _, tensor in layers]
    geometry = describe_layers(layers, BLOCKS)
    self_test(layers, geometry, BLOCKS)
    split = tokens[0] // tokens[1]
    for (_, tensor), old in zip(layers, before, strict=True):
        assert torch.equal(tensor.view(torch.int16)[:-split], old[:-split]), "no other block is touched"
        assert not tensor[-split:].any()
    storage, offset, stride, length = geometry.regions[0]
    moved = [(storage, offset + 1, stride, length - 1), (storage, offset, stride, 1), *geometry.regions[1:]]
    with pytest.raises(GeometryError, match="are not where"):
        self_test(layers, dataclasses.replace(geometry, regions=moved), BLOCKS)
    with pytest.raises(GeometryError, match="are not where"):
        self_test(layers[::-1], geometry, BLOCKS)


def test_runs_of_a_block() -> None:
    """A block is one run in the layout that Pillion asks for."""
    runs = {layout: len(describe_layers(vllm_compat.list_tensors(*allocate(layout)), BLOCKS).regions) for layout in LAYOUTS}
    assert vllm_compat.BLOCK_LAYOUT == "BLNHC"
    assert runs["BLNHC"] == runs["BLHNC"] == 1
    assert runs["LBNHC"] == runs["LBHNC"] == LAYERS


def describe_v4(layers: dict[str, Any]) -> list[str]:
    """The form of each of these groups' pages as vLLM lays them out, once all their bytes were found."""
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    made, forms = v4_groups(layers, BLOCKS), []
    tensors = allocate_kv_cache(made, torch.device("cpu"), KVCacheLayout.BLHNC)
    for group, view in groups.split_groups(made):
        pages = vllm_compat.list_tensors(view, tensors)
        geometry = describe_layers(pages, BLOCKS)
        (storage,) = geometry.storages
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).random_()
        for block in range(BLOCKS):
            found = [memory[offset + block * stride :][:length] for _, offset, stride, length in geometry.regions]
            expected = [page[block].reshape(-1).view(torch.uint8) for _, page in pages]
            assert torch.equal(torch.cat(found), torch.cat(expected)), group
        # The padding of a page is not kept.
        specs = view.kv_cache_groups[0].kv_cache_spec.kv_cache_specs.values()
        assert geometry.cuts[-1] == sum(spec.real_page_size_bytes for spec in specs)
        assert geometry.cuts[-1] < sum(spec.page_size_bytes for spec in specs)
        self_test(pages, geometry, BLOCKS)
        forms.append(geometry.form)
    return forms


@pytest.mark.supports("compressed")
def test_pages_of_several_sizes_lie_side_by_side() -> None:
    """DeepSeek V4's groups share their memory. Other compression and other latents have other forms."""
    usual = describe_v4(v4_layers())
    plain = {"dtype": torch.bfloat16, "cache_dtype_str": "auto", "state_content_bytes": None, "head_size": 508, "alignment": 48}
    others = [describe_v4(v4_layers((1, 4, 4, 4, 128))), describe_v4(v4_layers(**plain))]
    assert all(set(other) != set(usual) for other in others) and others[0] != others[1]
    assert describe_v4(v4_layers()) == usual


def test_kernel_blocks_smaller_than_blocks() -> None:
    """As FlashInfer has it with blocks of 128 tokens: the tensors count kernel blocks, Pillion vLLM's blocks."""
    config, tensors = allocate("LBNHC", block_tokens=128, kernel_tokens=64)
    assert tensors[LAYER_NAMES[0]].shape[0] == 2 * BLOCKS
    split = describe_layers(vllm_compat.list_tensors(config, tensors), BLOCKS)
    whole = describe_layers(vllm_compat.list_tensors(*allocate("LBNHC", block_tokens=128, kernel_tokens=128)), BLOCKS)
    assert split.regions == whole.regions
    assert split.cuts == whole.cuts


def test_a_layer_that_reads_another_ones_kv_has_none_of_its_own() -> None:
    """vLLM lists it in the group and gives it the other one's tensor."""
    config, tensors = allocate("BLNHC")
    config.kv_cache_groups[0].layer_names.append("reader")
    tensors["reader"] = tensors[LAYER_NAMES[3]]
    assert [name for name, _ in vllm_compat.list_tensors(config, tensors)] == LAYER_NAMES


# --- the chosen layout ---


def wish(
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None = None,
    layouts: tuple[str, ...] | None = None,
    tokens: int | None = 16,
    on_gpu: bool = True,
    **model: bool,
) -> str | None:
    """The layout that Pillion asks for."""
    monkeypatch.setattr(vllm_compat, "on_gpu", lambda: on_gpu)
    named = layouts and [SimpleNamespace(name=layout) for layout in layouts]
    implementation = SimpleNamespace(supported_kv_cache_layouts=lambda: named)
    chosen = backend and SimpleNamespace(name=backend, get_class=lambda: implementation)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(block_size=tokens),
        attention_config=SimpleNamespace(backend=chosen),
    )
    return vllm_compat.fitting_layout(config)


@pytest.mark.parametrize(("layout", "asked"), [("none", None), ("BHLNC", "BHLNC")])
def test_a_named_layout_is_asked_for(layout: str, asked: str | None) -> None:
    """Engines of every kind accept it."""
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"pillion.layout": layout}))
    assert PillionConnector.get_required_kvcache_layout(config) == asked


def test_a_cpu_engine_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU attention has one layout."""
    assert wish(monkeypatch, on_gpu=False) is None
    assert not vllm_compat.on_gpu()


def test_backends_known_to_take_it_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend without a list takes any layout; a list must have it; Pillion leaves unmeasured backends alone."""
    assert wish(monkeypatch) == "BLNHC"
    assert wish(monkeypatch, "FLASH_ATTN") == "BLNHC"
    assert wish(monkeypatch, "TRITON_ATTN", ("LBNHC", "BLNHC")) == "BLNHC"
    assert wish(monkeypatch, "FLASHINFER", ("LBHNC", "BLHNC")) is None
    assert wish(monkeypatch, "FLEX_ATTENTION") is None


def test_models_and_blocks_that_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA has other backends; large blocks may be split into kernel blocks, which must be dense."""
    assert wish(monkeypatch, use_mla=True) is None
    assert wish(monkeypatch, is_hybrid=True) is None
    assert wish(monkeypatch, tokens=64) == "BLNHC"
    assert wish(monkeypatch, tokens=128) is None
    assert wish(monkeypatch, tokens=None) == "BLNHC"


# --- forwards with calls of the hooks ---


def test_kinds_of_forwards() -> None:
    """Full graphs call no hook, halves of a batch call them from two threads, warm-up runs have no metadata."""
    from vllm.config import CUDAGraphMode

    def mode(runtime: Any, **more: Any) -> str | None:
        given: dict[str, Any] = {"attn_metadata": {}, "ubatch_slices": None, "cudagraph_runtime_mode": runtime}
        return vllm_compat.hook_mode(SimpleNamespace(**given | more))

    assert mode(CUDAGraphMode.NONE) == "NONE"
    assert mode(CUDAGraphMode.PIECEWISE) == "PIECEWISE"
    assert mode(CUDAGraphMode.FULL) is None
    assert mode(CUDAGraphMode.NONE, attn_metadata=None) is None
    assert mode(CUDAGraphMode.NONE, ubatch_slices=[1]) is None
    assert vllm_compat.running_hook_mode() is None
