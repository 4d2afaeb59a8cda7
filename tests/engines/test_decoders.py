"""Decoders with transformers, without vLLM: two models on one sidecar, and a restart of the sidecar while one decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers_decode
from transformers import AutoConfig

from pillion import _shim, identity
from pillion.engine import Engine, Request
from testkit import model, namespaces, prompts, sidecar

# Both import transformers.
pytestmark = pytest.mark.xdist_group("decoders")

TOKENS, NEW = 32, 24
PROMPT = prompts.prompt(330, seed=1700)
# The longest hit of a prompt.
BLOCKS = prompts.hit_tokens(len(PROMPT)) // TOKENS


def founded(socket: Path, directory: Path) -> Engine:
    """An engine whose start gives the sidecar a model's namespace."""
    weights = _shim.weight_files(directory)
    assert weights is not None
    known = namespaces.new(
        layers=model.TINY.layers,
        heads=model.TINY.kv_heads,
        tokens=TOKENS,
        dim=model.TINY.head_dim,
        facts={"weights": weights, "config": identity.describe_config(AutoConfig.from_pretrained(directory))},
    )
    return Engine(socket, f"founder of {directory.name}", known, 1)


def counted(decoder: Any) -> list[int]:
    """A list for the number of blocks of each load of a decoder from here on."""
    loads: list[int] = []
    load: Callable[[list[int]], Request] = decoder.kv.load

    def noted(tokens: list[int]) -> Request:
        request = load(tokens)
        loads.append(len(request.blocks))
        return request

    decoder.kv.load = noted
    return loads


def test_two_models_on_one_sidecar(tmp_path: Path) -> None:
    """Each decoder finds its own namespace and gets its own KV under the same tokens."""
    models = [model.write(tmp_path / f"m{seed}", dataclasses.replace(model.TINY, seed=seed)) for seed in (1, 2)]
    with sidecar.serving(tmp_path) as keeper:
        founders = [founded(keeper.socket, directory) for directory in models]
        # Beside them, another engine would have to prove its KV.
        for founder in founders:
            founder.close()
        decoders = [
            transformers_decode.Decoder(keeper.socket, directory, name=directory.name, check_every=0) for directory in models
        ]
        assert len({decoder.kv.namespace.digest for decoder in decoders}) == len(models)
        loads = [counted(decoder) for decoder in decoders]
        alone, again = ([decoder.generate(PROMPT, NEW)[0] for decoder in decoders] for _ in range(2))
        assert alone == again and alone[0] != alone[1]
        assert loads == [[0, BLOCKS]] * len(models)
        for decoder in decoders:
            decoder.kv.close()


def test_a_sidecar_started_anew_while_a_decoder_answers(tmp_path: Path) -> None:
    """The answer under way is right, and so are answers without a sidecar; blocks are kept again later."""
    directory = model.write(tmp_path / "m", model.TINY)
    with sidecar.serving(tmp_path) as keeper:
        founder = founded(keeper.socket, directory)
        decoder = transformers_decode.Decoder(keeper.socket, directory, check_every=0)
        founder.close()
        loads = counted(decoder)
        right = decoder.generate(PROMPT, NEW)[0]
        computed, forward = 0, decoder.model.forward

        def killing(*given: Any, **more: Any) -> Any:
            nonlocal computed
            computed += 1
            if computed == NEW // 2:
                keeper.kill()
            return forward(*given, **more)

        decoder.model.forward = killing
        assert decoder.generate(PROMPT, NEW)[0] == right and computed == NEW
        decoder.model.forward = forward
    assert decoder.generate(PROMPT, NEW)[0] == right
    assert loads == [0, BLOCKS, 0]
    with sidecar.serving(tmp_path) as keeper:
        keeper.wait_for(lambda: decoder.generate(PROMPT, NEW)[0] == right and loads[-1] > 0, "the decoder has hits again")
        assert loads[3] == 0 and loads[-1] == BLOCKS
        assert decoder.generate(PROMPT, NEW)[0] == right
        decoder.kv.close()
