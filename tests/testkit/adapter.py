"""Writes a small LoRA adapter in PEFT's form; its random weights change answers."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from testkit import model

RANK = 8
# The scale of an adapter is its alpha over its rank.
ALPHA = 16
# Arguments of an engine for such adapters.
ARGUMENTS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}


def write(directory: Path, seed: int, shape: model.Shape = model.TINY) -> Path:
    """Writes the adapter, and replaces one at this place: new files, and so new times; returns the directory."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    tensors = {}
    for layer in range(shape.layers):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, shape.hidden, generator=generator) / math.sqrt(shape.hidden)
            up = torch.randn(size, RANK, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = down.to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = up.to(torch.bfloat16)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(sizes),
    }
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def overwrite(directory: Path, source: Path) -> None:
    """Puts another adapter's bytes into the present files. They keep size, mtime and inode."""
    for old in directory.iterdir():
        before, new = old.stat(), (source / old.name).read_bytes()
        assert len(new) == before.st_size
        old.write_bytes(new)
        os.utime(old, ns=(before.st_atime_ns, before.st_mtime_ns))


def asked(path: Path, number: int = 1, load_inplace: bool = False) -> dict[str, Any]:
    """The fields of vLLM's LoRARequest for the adapter at `path`."""
    return {
        "lora_name": f"adapter-{number}",
        "lora_int_id": number,
        "lora_path": str(path),
        "load_inplace": load_inplace,
    }
