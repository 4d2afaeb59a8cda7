"""vLLM and llama.cpp on one KV, in float32: each decodes prompts that the other prefilled, with the tokens of its own
prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import decoding, engine, gguf_file, model, sidecar
from testkit.decoding import EQUAL_MAX, HITS, PROMPTS, TOKENS, Prefilled, ask, assert_alike, decoded

# The prompts are prefilled once by vLLM.
pytestmark = pytest.mark.xdist_group("llama.cpp")

# The largest difference of log probabilities, where both compute in float32.
DIFFERENCE_MAX = 5e-3
SPOILS = ["zeroed", "last block"]


@pytest.fixture(scope="module")
def prefilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefilled]:
    """The weights in both engines' files."""
    directory = tmp_path_factory.mktemp("prefilled")
    weights = model.write(directory / "model")
    gguf_file.write(weights)
    with decoding.prefilled(directory, weights, dtype="float32") as known:
        yield known


@pytest.mark.supports("decoders")
def test_llama_cpp_decodes_what_vllm_prefilled(prefilled: Prefilled) -> None:
    """Every block of a hit is loaded and every token is right; with other KV few are."""
    keeper, weights = prefilled.keeper, prefilled.options.model
    runs = decoded("llama_cpp_decode", keeper.socket, keeper, weights, prefilled.right, spoils=SPOILS, saves=False)
    print({how: (run["equal"], run["difference"]) for how, run in runs.items()})
    assert runs["right"]["equal"] == TOKENS and runs["right"]["difference"] <= DIFFERENCE_MAX
    assert [run["blocks"] * engine.BLOCK_TOKENS for run in runs.values()] == [HITS] * (1 + len(SPOILS))
    assert all(runs[how]["equal"] <= EQUAL_MAX for how in SPOILS), runs


@pytest.mark.supports("decoders")
def test_vllm_decodes_what_llama_cpp_prefilled(prefilled: Prefilled, tmp_path: Path) -> None:
    """vLLM asks another sidecar, which has no blocks of vLLM."""
    weights = prefilled.options.model
    with sidecar.serving(tmp_path) as keeper:
        alone = decoded("llama_cpp_decode", keeper.socket, prefilled.keeper, weights, prefilled.right, spoils=[], saves=True)
        assert (alone["right"]["blocks"], alone["right"]["equal"]) == (0, TOKENS)
        with engine.running(dataclasses.replace(prefilled.options, socket=keeper.socket), tmp_path / "engine.log") as running:
            assert_alike(ask(running, PROMPTS), prefilled.right, DIFFERENCE_MAX)
            assert running.metrics()["external_hits"] == HITS
            running.exit()
