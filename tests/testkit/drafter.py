"""Drafters with KV: for the small models of `model.py` one with fewer layers or an EAGLE head, and MTP for Qwen3-Next."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from testkit import model

TARGET = dataclasses.replace(model.TINY, family="llama")
DRAFT_TOKENS = 2
# A token has come before in each prompt, so every step has drafts. Few of them are right.
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
# Logprobs of one position by steps of several sizes, in float32.
ROUNDING = 1e-3


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers have the same tokens, and logprobs but for rounding."""
    pairs = [
        (left[token], right.get(token, 0.0))
        for left, right in zip(one["logprobs"], other["logprobs"], strict=True)
        for token in left
    ]
    return one["tokens"] == other["tokens"] and all(abs(left - right) < ROUNDING for left, right in pairs)


def write(directory: Path, method: str) -> dict[str, Any]:
    """Writes a drafter for `TARGET`; returns vLLM's `speculative_config`."""
    head = dataclasses.replace(TARGET, layers=1, seed=4321)
    model.write(directory, head)
    if method == "eagle":
        _make_eagle_head(directory, head)
    return {"method": method, "model": str(directory), "num_speculative_tokens": DRAFT_TOKENS}


def add_mtp(directory: Path) -> dict[str, Any]:
    """Adds a layer for MTP to a Qwen3-Next of `random_model.py`, like its last one; returns vLLM's `speculative_config`."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    last, hidden = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    generator = torch.Generator().manual_seed(TARGET.seed)
    layer = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in weights.items() if name.startswith(last)}
    for tensor in layer.values():
        if tensor.dim() > 1:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / math.sqrt(tensor.shape[-1]))
    layer["mtp.fc.weight"] = (torch.randn(hidden, 2 * hidden, generator=generator) / math.sqrt(2 * hidden)).to(torch.bfloat16)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    layer |= {f"mtp.{name}.weight": torch.zeros(hidden, dtype=torch.bfloat16) for name in norms}
    made = weights | {name: tensor.clone() for name, tensor in layer.items()}
    save_file(made, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return {"method": "mtp", "num_speculative_tokens": DRAFT_TOKENS}


def _make_eagle_head(directory: Path, head: model.Shape) -> None:
    """One layer behind a projection of an embedding and the target's hidden state. The target lends its embeddings."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    layer = {name.removeprefix("model."): tensor for name, tensor in weights.items() if ".layers." in name}
    del layer["layers.0.input_layernorm.weight"]
    generator = torch.Generator().manual_seed(head.seed)
    projection = torch.randn(head.hidden, 2 * head.hidden, generator=generator) / math.sqrt(2 * head.hidden)
    layer["fc.weight"] = projection.to(torch.bfloat16)
    save_file(layer, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
