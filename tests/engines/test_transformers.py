"""transformers decodes prompts that vLLM prefilled in two ranks, and in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from testkit import decoding, engine, model
from testkit.decoding import EQUAL_MAX, HITS, TOKENS, decoded

# Both import transformers.
pytestmark = pytest.mark.xdist_group("decoders")

# Two kernels' float32 after three layers, added up by two ranks.
DIFFERENCE_MAX = 1e-4


def test_two_ranks_prefill_and_one_process_decodes(tmp_path: Path) -> None:
    """Both ranks' heads are read side by side: every token is right, and with those of one rank zeroed few are."""
    weights = model.write(tmp_path / "model")
    with decoding.prefilled(tmp_path, weights, dtype="float32", multiprocess=True, tensor_parallel=2) as known:
        spoils = ["zeroed", "last shard"]
        [namespace] = known.keeper.namespaces()
        assert namespace["facts"]["tensor_parallel_size"] == "2"
        runs = decoded(
            "transformers_decode", known.keeper.socket, known.keeper, weights, known.right, spoils=spoils, saves=False
        )
    print({how: (run["equal"], run["difference"]) for how, run in runs.items()})
    assert runs["right"]["equal"] == TOKENS and runs["right"]["difference"] <= DIFFERENCE_MAX
    assert [run["blocks"] * engine.BLOCK_TOKENS for run in runs.values()] == [HITS] * (1 + len(spoils))
    assert all(runs[how]["equal"] <= EQUAL_MAX for how in spoils), runs


@pytest.mark.supports("decoders")
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="pages of AMX are not described by strides")
def test_bfloat16_behind_vllms_own_tokens(tmp_path: Path) -> None:
    """transformers chooses vLLM's tokens at least as often as where it computes the prompt itself. A logit of 8 is in steps of
    1/16 in bfloat16: if several tokens have the largest one, each is right."""
    weights = model.write(tmp_path / "model")
    asked: dict[str, Any] = {"spoils": ["cold", "zeroed"], "saves": False, "dtype": "bfloat16", "forced": True}
    with decoding.prefilled(tmp_path, weights, dtype="bfloat16") as known:
        runs = decoded("transformers_decode", known.keeper.socket, known.keeper, weights, known.right, **asked)
    print({how: (run["alike"], run["equal"], run["difference"]) for how, run in runs.items()})
    assert [run["blocks"] * engine.BLOCK_TOKENS for run in runs.values()] == [HITS, 0, HITS]
    assert runs["right"]["alike"] >= max(0.98 * TOKENS, runs["cold"]["alike"])
    assert runs["zeroed"]["alike"] <= EQUAL_MAX
