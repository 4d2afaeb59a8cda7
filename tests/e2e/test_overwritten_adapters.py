"""Blocks of an adapter belong to its bytes: an adapter overwritten at its path has others, on every way to load it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from testkit import adapter, asking, engine, prompts, sidecar
from testkit.asking import CHECKING, again, ask, keep, whole

PROMPT = asking.prompt(320)


@pytest.mark.supports("adapters")
def test_an_overwritten_adapter_has_kv_of_its_own(options: engine.Options, tmp_path: Path) -> None:
    """Overwritten between two engines, under a running one, with a reload and in place; written again, its blocks are hit."""
    path = tmp_path / "adapter"
    one_place = adapter.ARGUMENTS | {"max_loras": 1, "max_cpu_loras": 1}
    adapted = dataclasses.replace(options, batched_tokens=prompts.STEP_TOKENS, arguments=one_place, extra=CHECKING)
    right = {}
    with engine.running(adapted, tmp_path / "plain.log") as plain:
        right[0] = ask(plain, PROMPT)[0]
        for seed in (1, 2):
            written = adapter.write(tmp_path / f"plain-{seed}", seed)
            right[seed] = ask(plain, PROMPT, lora=adapter.asked(written, number=seed))[0]
        plain.exit()
    assert len({tuple(tokens) for tokens in right.values()}) == 3, "the adapters differ where it shows"

    adapter.write(path, seed=1)
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(adapted, socket=keeper.socket)
        with engine.running(connected, tmp_path / "first.log") as first:
            assert keep(keeper, first, PROMPT, lora=adapter.asked(path))[0] == right[1]
            assert keep(keeper, first, PROMPT)[0] == right[0]
            first.exit()
        adapter.write(path, seed=2)
        with engine.running(connected, tmp_path / "second.log") as second:
            assert keep(keeper, second, PROMPT, lora=adapter.asked(path)) == (right[2], 0)
            tokens, hits = ask(second, PROMPT)
            assert tokens == right[0]
            assert whole(hits), f"without an adapter: {hits} hits"
            # The rank computes with its loaded adapter after the file changes, until another adapter takes its only place.
            adapter.overwrite(path, tmp_path / "plain-1")
            assert again(second, PROMPT, lora=adapter.asked(path))[0] == right[2]
            assert again(second, PROMPT, lora=adapter.asked(tmp_path / "plain-2", number=2))[0] == right[2]
            assert again(second, PROMPT, lora=adapter.asked(path)) == (right[1], 0)
            assert again(second, PROMPT, lora=adapter.asked(path, load_inplace=True))[0] == right[1]
            assert again(second, PROMPT, lora=adapter.asked(path))[0] == right[1]
            second.exit()
        with engine.running(connected, tmp_path / "third.log") as third:
            # A query waits for the digest of an adapter that is new to the engine, but not long on a busy machine.
            third.nudge(lora=adapter.asked(path))
            tokens, hits = ask(third, PROMPT, lora=adapter.asked(path))
            assert tokens == right[1]
            assert whole(hits), f"the adapter of before: {hits} hits"
            third.exit()
