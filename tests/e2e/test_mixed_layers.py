"""One group of layers that differ: the scheduler role knows one kind, the ranks all kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testkit import engine, prompts, sidecar

# Full layers, the first of them first, between layers with a window; heads of another size in these.
GEMMA4 = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 128,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "max_position_embeddings": 4096,
}
PROMPT = prompts.prompt(700, seed=380)


@pytest.mark.supports("promoted", "heads")
def test_layers_of_two_kinds_and_head_sizes_in_one_group(tmp_path: Path) -> None:
    """Without the hybrid manager vLLM shows a scheduler the kind of the first layer alone. A rank sees all kinds, and both
    serve."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(GEMMA4))
    arguments = {"load_format": "dummy", "disable_hybrid_kv_cache_manager": True}
    with sidecar.serving(tmp_path) as keeper:
        options = engine.Options(
            model=directory,
            socket=keeper.socket,
            arguments=arguments,
            extra={"pillion.model_id": "gemma4", "pillion.check_every": 1},
        )
        with engine.running(options, tmp_path / "engine.log") as running:
            [cold] = running.generate([PROMPT], max_tokens=8)
            keeper.wait_metric("pillion_saved_blocks_total", prompts.stored_blocks(len(PROMPT), 8))
            assert running.reset_prefix_cache()
            [loaded] = running.generate([PROMPT], max_tokens=8)
            assert loaded["tokens"] == cold["tokens"] and running.metrics()["external_hits"] > 0
            # The standing check computes a part of the hit again: KV of another layer or token would differ widely.
            keeper.wait_metric("pillion_checks_total", 1)
            assert keeper.metrics()["pillion_checks_differing_total"] == 0
            running.exit()
