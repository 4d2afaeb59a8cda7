"""Drafters with KV of their own, for the small models of `model.py`: a model with fewer layers, or an EAGLE head."""

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
    """True if two answers have the same tokens, and logprobs but for rounding."""
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


def write_equals(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Writes a target of which the last layer alone is at work, and an EAGLE head with this layer: nearly all of its drafts are
    right as long as it reads its KV. Returns the target, and vLLM's `speculative_config`."""
    from safetensors.torch import load_file, save_file

    target, head = model.write(directory / "target", TARGET), directory / "head"
    speculative, weights = write(head, "eagle"), load_file(target / "model.safetensors")
    last, drafts = f"model.layers.{TARGET.layers - 1}.", load_file(head / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith(last):
            drafts[name.replace(last, "layers.0.")] = tensor
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    del drafts["layers.0.input_layernorm.weight"]
    # The head reads the embedding alone, without a norm: it has the length that the target's norm would give it.
    embeddings = weights["model.embed_tokens.weight"]
    embeddings /= embeddings.float().square().mean(1, keepdim=True).sqrt()
    drafts["fc.weight"].zero_()[:, : TARGET.hidden].fill_diagonal_(1)
    for path, tensors in ((target, weights), (head, drafts)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return target, speculative


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
