"""Weights for greedy answers that depend strongly on the KV: with vLLM's dummy ones of +-1e-3 they hardly do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

LOAD_FORMAT = "pillion_bench"
STATE_DECAY_LOG = -6.0
# A distribution of Python packages with a plugin of vLLM alone; every process of an engine loads it.
PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: pillion-bench\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\npillion_bench = benches.gpu.weights:register\n",
}


def seed(model: Any, shape: dict[str, int], calm: bool = False) -> None:
    """Sets random weights, the same in every process, so greedy answers depend strongly on the KV.

    Attention's logits get a spread of about 2.5: sharp enough for single tokens to matter, not for rounding. In a calm model a
    layer adds little to the output of the layers before it, as in trained models at their start.
    """
    import torch

    hidden, heads = shape["hidden_size"], shape["head_dim"]
    q_rows = shape["num_attention_heads"] * heads
    qk_rows = q_rows + shape["num_key_value_heads"] * heads
    scales = {"o_proj": 2.0, "gate_up_proj": 1.0, "down_proj": 1.0, "lm_head": 1.0}
    if calm:
        scales |= dict.fromkeys(("o_proj", "down_proj"), 1 / math.sqrt(2 * shape["num_hidden_layers"]))
    with torch.no_grad():
        for index, (name, weight) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator(device=weight.device).manual_seed(index)
            *_, kind, leaf = name.split(".")
            if "norm" in kind:
                weight.fill_(1.0)
            elif leaf == "sinks" or leaf.endswith("bias"):
                weight.zero_()
            elif leaf in ("A", "A_log"):
                # A state lasts for some hundred tokens.
                weight.fill_(STATE_DECAY_LOG if leaf == "A_log" else -math.exp(STATE_DECAY_LOG))
            elif kind in ("embed_tokens", "embedding"):
                weight.normal_(0.0, 1.0, generator=generator)
            elif kind == "qkv_proj":
                weight[:qk_rows].normal_(0.0, 1.6 / math.sqrt(hidden), generator=generator)
                weight[qk_rows:].normal_(0.0, 2.0 / math.sqrt(hidden), generator=generator)
            else:
                weight.normal_(0.0, scales.get(kind, 1.0) / math.sqrt(weight.shape[-1]), generator=generator)


def register(calm: bool = False) -> None:
    """Makes `load_format=LOAD_FORMAT` known to vLLM in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(LOAD_FORMAT)
    class SeededLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            seed(model, model_config.hf_text_config.to_dict(), calm)


def write_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH: servers of vLLM then know `load_format=LOAD_FORMAT`."""
    distribution = folder / "pillion_bench-0.dist-info"
    distribution.mkdir(parents=True)
    for name, text in PLUGIN.items():
        (distribution / name).write_text(text)
    return folder
