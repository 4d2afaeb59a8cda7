"""Where one role of an engine cannot be served, neither serves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from testkit import asking, engine, prompts, sidecar
from testkit.asking import ask

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


def test_the_scheduler_does_not_serve_what_its_rank_does_not(tmp_path: Path) -> None:
    """Without the hybrid manager vLLM shows a scheduler the kind of the first layer alone: full attention. A rank sees all."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(GEMMA4))
    plain = engine.Options(
        model=directory,
        arguments={"load_format": "dummy", "disable_hybrid_kv_cache_manager": True},
        extra={"pillion.model_id": "gemma4"},
    )
    [right] = asking.right(plain, tmp_path / "plain.log", PROMPT)
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(plain, socket=keeper.socket)
        with engine.running(connected, tmp_path / "engine.log") as running:
            keeper.wait_for(lambda: keeper.metrics()["pillion_sessions"] == 0, "no session of either role")
            for _ in range(2):
                assert ask(running, PROMPT) == (right, 0)
                assert running.reset_prefix_cache()
            running.exit()
        assert keeper.metrics()["pillion_saved_blocks_total"] == 0
    log = (tmp_path / "engine.log").read_text()
    assert "PILLION STAYS OUT: rank 0: the KV cache is of kind" in log
