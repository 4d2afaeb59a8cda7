"""The shapes of the measured models, and a config.json of each: the weights are made on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Llama 3.1 8B; gpt-oss-20b, with windows of 128 tokens in every other layer and 32 experts; Qwen3-Next 80B with 64 of its 512
# experts, three layers of gated delta rules to each of full attention; Nemotron-H 8B, of Mamba2, dense layers, and few of full
# attention.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "layers_block_type": [*["linear_attention", "mlp"] * 5, "full_attention", "mlp", "linear_attention"],
    },
}
# The lists of a shape name layers over and over.
LISTS = ("layer_types", "layers_block_type")
# Sizes of a model that runs in vLLM's CPU build in seconds.
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
# Sizes of models with states or experts, in place of their own.
TINY_PARTS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "mamba_num_heads": 8,
    "ssm_state_size": 64,
    "n_groups": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "conv_kernel": 4,
        "chunk_size": 128,
    },
}
# FlashInfer would build its kernels of gated delta rules for the first prompt; a CPU has them for bfloat16 alone.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"additional_config": {"gdn_prefill_backend": "triton"}, "dtype": "bfloat16"},
}


def tiny(model: str) -> dict[str, Any]:
    """A small model of the same kind."""
    shape = SHAPES[model]
    return shape | TINY | {name: size for name, size in TINY_PARTS.items() if name in shape}


def write(folder: Path, shape: dict[str, Any]) -> Path:
    """A folder with a config.json and nothing else."""
    folder.mkdir()
    family = shape.get("model_type", "llama")
    config: dict[str, Any] = {"model_type": family, **_FAMILIES[family], **shape}
    for name in LISTS:
        if layers := shape.get(name):
            config[name] = [layers[layer % len(layers)] for layer in range(shape["num_hidden_layers"])]
    config |= {"max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
