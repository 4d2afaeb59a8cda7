"""The shapes of the measured models, and a config.json of each: the weights are made on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Llama 3.1 8B, and gpt-oss-20b: windows of 128 tokens in every other layer, 32 experts.
SHAPES = {
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
    },
}
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
_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "swiglu_limit": 7.0,
}


def tiny(model: str) -> dict[str, int]:
    """A small model of the same kind."""
    return SHAPES[model] | TINY


def write(folder: Path, shape: dict[str, int]) -> Path:
    """A folder with a config.json and nothing else."""
    folder.mkdir()
    windows = shape.get("sliding_window")
    config: dict[str, Any] = {**(_GPT_OSS if windows else _LLAMA), **shape}
    if windows:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(shape["num_hidden_layers"])]
    config |= {"max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
