"""A model directory's weights as a GGUF file in float32, beside them, for llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf
from safetensors import safe_open

from testkit import model


def write(directory: Path, shape: model.Shape = model.TINY) -> Path:
    """Writes model.gguf, of a model of the family `qwen3`, without a tokenizer."""
    config = model.config(shape)
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(str(path), shape.family)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(shape.max_position)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, shape.layers)
    with safe_open(directory / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weights.get_tensor(name).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
