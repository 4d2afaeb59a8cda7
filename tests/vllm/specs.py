"""vLLM's own descriptions of KV caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]


def kv_cache_config(specs: dict[str, Any] | Any, blocks: int = 10) -> Any:
    """vLLM's configuration of one group with these specs by layer, or one spec for all layers."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

    several = isinstance(specs, dict)
    spec = UniformTypeKVCacheSpecs.from_specs(specs) if several else specs
    names = list(specs) if several else LAYERS
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])


def full_attention(**more: Any) -> Any:
    """vLLM's spec of a layer."""
    return spec("FullAttentionSpec", **more)


def spec(name: str, **more: Any) -> Any:
    """A spec of vLLM's, by its class."""
    from vllm.v1 import kv_cache_interface

    given = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return getattr(kv_cache_interface, name)(**given | more)


# --- DeepSeek V4 ---

# Tokens of each compressed latent, by layer; 1: windows alone. The released model has 61 layers.
V4_RATIOS = (1, 4, 128, 4, 128)


def v4_layers(ratios: tuple[int, ...] = V4_RATIOS, **more: Any) -> dict[str, Any]:
    """The specs of DeepSeek V4's caches, as its layers make them with FP8 KV on CUDA; `more`: of the latents."""
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    plain = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    packed = plain | {"head_size": 512, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
    packed |= {"state_content_bytes": 584, "kv_quant_mode": get_kv_quant_mode("fp8_ds_mla")} | more
    made = {}
    for number, ratio in enumerate(ratios):
        name, sizes = f"model.layers.{number}.attn", {"tokens_per_state": ratio, "block_size": 256}
        # Raw keys and scores, until they are compressed.
        raw = plain | {"dtype": torch.float32, "block_size": 4 if ratio == 4 else 8}
        raw["sliding_window"] = 8 if ratio == 4 else 128
        made[f"{name}.swa_cache"] = spec("SlidingWindowMLASpec", **packed, block_size=64, sliding_window=128)
        if ratio == 1:
            continue
        made[name] = spec("MLAAttentionSpec", **packed, **sizes)
        parts = 4 if ratio == 4 else 2
        made[f"{name}.compressor.state_cache"] = spec("SlidingWindowMLASpec", **raw, head_size=parts * 512)
        if ratio == 4:
            keys = plain | {"head_size": 132, "dtype": torch.uint8}
            made[f"{name}.indexer.k_cache"] = spec("MLAAttentionSpec", **keys, **sizes)
            made[f"{name}.indexer.compressor.state_cache"] = spec("SlidingWindowMLASpec", **raw, head_size=parts * 128)
    return made


def v4_groups(layers: dict[str, Any], blocks: int = 6) -> Any:
    """vLLM's configuration of these caches, by its own planner."""
    from vllm.v1.core import kv_cache_utils as planner
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = {"get_resolved_kv_cache_layout": lambda: KVCacheLayout.BLHNC}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**layout, num_gpu_blocks_override=None, prefix_cache_retention_interval=0),
        attention_config=SimpleNamespace(hisparse_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
    )
    groups = planner.get_kv_cache_groups(config, layers)
    widest = max(group.kv_cache_spec.page_size_bytes for group in groups)
    made = planner.get_kv_cache_config_from_groups(config, groups, blocks * widest)
    made.hash_block_size = 4
    made.cache_hit_alignment_tokens = 256
    return made
