"""vLLM's own descriptions of KV caches."""

from __future__ import annotations

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
