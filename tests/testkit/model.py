#!/usr/bin/env python3
"""Writes a small model directory (config.json, model.safetensors) with random weights.

The scales are chosen so that greedy output depends strongly on the KV cache: with vLLM's dummy weights (+-1e-3) a broken cache
would go unnoticed, with these it does not.

    tests/testkit/model.py DIR [tiny|demo]
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model: they decide its cost and the size of its KV blocks."""

    layers: int = 3
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 256
    vocab: int = 512
    max_position: int = 4096
    qk_norm: float = 1.5  # how sharp attention is
    attention_scale: float = 4.0  # how much attention's output weighs against the token's own
    seed: int = 1234
    # `phi3` rotates by LongRoPE: by other factors where an engine's max_model_len is above LONGROPE_ORIGINAL.
    family: Literal["qwen3", "phi3", "qwen3_moe", "llama"] = "qwen3"
    experts: int = 0
    window: int = 0  # tokens read by layers of `llama`; 0: all layers read all tokens
    full_layers: int = 1  # layers at the end that read all tokens, beside those with a window

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """The bytes of one token's KV over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * dtype_bytes


TINY = Shape()
# A prefill of a few thousand tokens costs seconds on two cores, its KV a few milliseconds to copy.
DEMO = Shape(
    layers=8,
    hidden=1024,
    heads=16,
    kv_heads=4,
    intermediate=4096,
    vocab=1024,
    max_position=8192,
    qk_norm=2.0,
)
# Phi-3 takes the size of a head from these two.
TINY_PHI3 = Shape(family="phi3", hidden=256)
LONGROPE_ORIGINAL = 2048
TINY_MOE = Shape(family="qwen3_moe", experts=4)
# Two blocks of 32 tokens.
TINY_WINDOWS = Shape(family="llama", window=64)
TINY_ALL_WINDOWS = Shape(family="llama", window=64, full_layers=0)
SHAPES = {"tiny": TINY, "demo": DEMO}


def config(shape: Shape) -> dict[str, Any]:
    """The contents of config.json."""
    family = {"phi3": _phi3, "llama": _llama}.get(shape.family, _qwen3)
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "sliding_window": None,
        **family(shape),
    }


def _qwen3(shape: Shape) -> dict[str, Any]:
    dense = {
        "model_type": shape.family,
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": shape.head_dim,
        "use_sliding_window": False,
        "max_window_layers": shape.layers,
    }
    if not shape.experts:
        return dense
    return dense | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": shape.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(shape: Shape) -> dict[str, Any]:
    pairs = shape.head_dim // 2
    assert shape.hidden == shape.heads * shape.head_dim
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "pad_token_id": 0,
        "original_max_position_embeddings": LONGROPE_ORIGINAL,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs},
    }


def _llama(shape: Shape) -> dict[str, Any]:
    kinds = ["sliding_attention"] * (shape.layers - shape.full_layers) + ["full_attention"] * shape.full_layers
    windows = {"sliding_window": shape.window, "layer_types": kinds}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": shape.head_dim,
        **(windows if shape.window else {}),
    }


def _weights(shape: Shape) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(shape.seed)
    dtype = torch.bfloat16

    def linear(rows: int, columns: int, scale: float = 1.0) -> Any:
        values = torch.randn(rows, columns, generator=generator)
        return (values * scale / math.sqrt(columns)).to(dtype)

    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": linear(shape.vocab, shape.hidden, math.sqrt(shape.hidden)),
        "model.norm.weight": torch.ones(shape.hidden, dtype=dtype),
        "lm_head.weight": linear(shape.vocab, shape.hidden, 3.0),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": linear(q_size, shape.hidden, 2.0),
            prefix + "self_attn.k_proj.weight": linear(kv_size, shape.hidden, 2.0),
            prefix + "self_attn.v_proj.weight": linear(kv_size, shape.hidden, 2.0),
            prefix + "self_attn.o_proj.weight": linear(shape.hidden, q_size, shape.attention_scale),
            prefix + "input_layernorm.weight": torch.ones(shape.hidden, dtype=dtype),
            prefix + "post_attention_layernorm.weight": torch.ones(shape.hidden, dtype=dtype),
        }
        for mlp in [f"mlp.experts.{expert}." for expert in range(shape.experts)] or ["mlp."]:
            weights[prefix + mlp + "gate_proj.weight"] = linear(shape.intermediate, shape.hidden)
            weights[prefix + mlp + "up_proj.weight"] = linear(shape.intermediate, shape.hidden)
            weights[prefix + mlp + "down_proj.weight"] = linear(shape.hidden, shape.intermediate)
        if shape.experts:
            weights[prefix + "mlp.gate.weight"] = linear(shape.experts, shape.hidden)
        if shape.family == "phi3":
            fused = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
            for name, parts in fused.items():
                module = name.split(".")[0]
                rows = [weights.pop(f"{prefix}{module}.{part}_proj.weight") for part in parts]
                weights[f"{prefix}{name}.weight"] = torch.cat(rows)
        if not shape.family.startswith("qwen3"):
            continue
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}self_attn.{name}.weight"] = torch.full((shape.head_dim,), shape.qk_norm, dtype=dtype)
    return weights


def write(directory: Path, shape: Shape = TINY) -> Path:
    """Writes the model unless the directory already holds exactly this shape; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shape_file = directory / "pillion-shape.json"
    wanted = json.dumps(dataclasses.asdict(shape), sort_keys=True)
    if shape_file.exists() and shape_file.read_text() == wanted:
        return directory
    from safetensors.torch import save_file

    (directory / "config.json").write_text(json.dumps(config(shape), indent=1))
    save_file(_weights(shape), directory / "model.safetensors", metadata={"format": "pt"})
    shape_file.write_text(wanted)  # last: if it exists, the rest is complete
    return directory


if __name__ == "__main__":
    write(Path(sys.argv[1]), SHAPES[sys.argv[2] if len(sys.argv) > 2 else "tiny"])
