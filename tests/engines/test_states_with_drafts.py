"""Models with states, with drafts: KV and states of steps with rejected drafts outlive the engine.

vLLM's CPU build has no kernels that move states between steps with drafts, so Triton's interpreter runs them: minutes for some
hundred tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import drafter, engine, prompts, random_model, sidecar, states, windows

# The answer has the end of a block of states, 768 tokens, and so has its next turn.
PROMPT, ANSWER_TOKENS = prompts.prompt(720, seed=31), 100
MORE = [prompts.prompt(50, seed=seed) for seed in (33, 34)]


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    """Engines that start now interpret Triton's kernels."""
    driver, engine.DRIVER = engine.DRIVER, "testkit.interpreted_driver"
    yield
    engine.DRIVER = driver


@pytest.mark.supports("states-drafts")
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_states_made_with_drafts(method: str, tmp_path: Path) -> None:
    """Second turns over a restart are answered as by an engine without Pillion and without drafts; and with a layer of another
    state they are not."""
    shape = random_model.write(tmp_path / "model", random_model.QWEN3_NEXT)
    speculative = drafter.NGRAMS if method == "ngram" else drafter.add_mtp(shape)
    # An interpreter of its own: the others have imported vLLM without Triton.
    plain = engine.Options(shape, prefix=("env",), arguments={"enforce_eager": True})
    with sidecar.serving(tmp_path) as keeper:
        arguments = plain.arguments | {"speculative_config": speculative}
        connected = dataclasses.replace(plain, socket=keeper.socket, arguments=arguments)
        with engine.running(connected, tmp_path / "first.log") as first:
            (turn,) = first.generate([PROMPT], max_tokens=ANSWER_TOKENS)
            windows.wait_until_quiet(keeper)
            first.kill()
        turns = [[*PROMPT, *turn["tokens"], *more] for more in MORE]
        with engine.running(plain, tmp_path / "plain.log") as without:
            right = states.all_of(states.ask(without, turns), "tokens")
            without.exit()
        with engine.running(connected, tmp_path / "second.log") as second:
            warm = states.ask(second, turns)
            print(
                method, [answer["cached_tokens"] for answer in warm], keeper.metrics()["pillion_saved_blocks_total"], flush=True
            )
            assert [answer["cached_tokens"] for answer in warm] == [768, 768]
            assert states.all_of(warm, "tokens") == right
            windows.forget(second, keeper)
            with states.exchanged(keeper, layer_bytes=4096) as kept:
                assert kept > 1
                exchanged = states.ask(second, turns)
            assert states.all_of(exchanged, "tokens") != right
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0
