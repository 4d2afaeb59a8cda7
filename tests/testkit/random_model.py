"""Small models of other families than `model.py` has, with random weights that make answers depend on the KV cache.

Windows of two blocks in two of three layers, full attention in the last; blocks are as large as those of `model.TINY`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from testkit import model

_TINY: dict[str, Any] = {
    "hidden_size": model.TINY.hidden,
    "intermediate_size": model.TINY.intermediate,
    "num_hidden_layers": model.TINY.layers,
    "num_attention_heads": model.TINY.heads,
    "num_key_value_heads": model.TINY.kv_heads,
    "head_dim": model.TINY.head_dim,
    "vocab_size": model.TINY.vocab,
    "max_position_embeddings": model.TINY.max_position,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA3 = {"model_type": "gemma3_text", **_TINY, "query_pre_attn_scalar": model.TINY.head_dim}
# Full attention has larger heads, so vLLM gives the other layers blocks of twice as many tokens, 64, and as many bytes.
GEMMA4 = {
    "model_type": "gemma4_text",
    **_TINY,
    "global_head_dim": 2 * model.TINY.head_dim,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": model.TINY.vocab,
}
GPT_OSS = {"model_type": "gpt_oss", **_TINY, "num_local_experts": 4, "num_experts_per_tok": 2}
# Latents in the size of DeepSeek V3, for MLA's kernels; a dense MLP in every layer.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": model.TINY.max_position,
    "rope_scaling": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Three layers with gated delta rules and one with full attention. vLLM makes blocks as long as a state has bytes.
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    **{name: _TINY[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")},
    **{name: _TINY[name] for name in ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")},
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "tie_word_embeddings": False,
}
# Two layers of Mamba2 and one with full attention, between them dense ones. Its kernels need a GPU.
NEMOTRON_H = {
    "model_type": "nemotron_h",
    **{name: _TINY[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")},
    **{name: _TINY[name] for name in ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")},
    "intermediate_size": 256,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
}
# The factor on the usual normals: attention is sharp, and its output counts.
GAIN = 3.0
# Logarithm of the decay of gated delta rules: a state lasts for some hundred tokens.
DECAY_LOG = -6.0

# The factor on the outputs of all layers but the last, for a drafter like the last one.
SILENT = 0.001


def latent_bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of a token's latents over all layers, in bfloat16."""
    return 2 * int(config["num_hidden_layers"]) * int(config["kv_lora_rank"] + config["qk_rope_head_dim"])


def write(directory: Path, config: dict[str, Any], seed: int = 1234) -> Path:
    """Writes the model as transformers has it; returns the directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                fan_in = parameter.shape[-2] if "experts" in name else parameter.shape[-1]
                parameter.normal_(std=GAIN / math.sqrt(fan_in))
            elif name.endswith("A_log"):
                parameter.fill_(DECAY_LOG)
    made.save_pretrained(directory)
    return directory


def add_drafter(directory: Path) -> Path:
    """Adds an MTP layer to a model with gated delta rules: its last layer, behind the embedding alone. The other layers add
    little then, so nearly all proposals are right as long as the layer reads its KV. Returns the directory."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    config, weights = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    size, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    embeddings = weights["model.embed_tokens.weight"]
    # As long as the norm before the MTP layer makes them.
    embeddings /= embeddings.float().square().mean(1, keepdim=True).sqrt()
    made = {name: torch.zeros(size) for name in ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")}
    made["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    for name, tensor in weights.items():
        if name.startswith(last):
            made[f"layers.0.{name.removeprefix(last)}"] = tensor
        elif "down_proj" in name or "out_proj" in name or "o_proj" in name:
            tensor *= SILENT
    weights |= {f"mtp.{name}": tensor.to(torch.bfloat16, copy=True) for name, tensor in made.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return directory
