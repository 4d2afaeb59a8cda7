"""Models with states: an engine loads them right.

Answers are compared with computed ones, logprobs bit for bit with those upon a local hit of the same length.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from testkit import engine, handover, pool_file, prompts, random_model, sidecar, states, windows
from testkit.transfer import TO_ANSWER


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with gated delta rules and one with full attention."""
    return random_model.write(tmp_path_factory.mktemp("model"), random_model.QWEN3_NEXT)


@pytest.mark.supports("states")
def test_states_beside_full_attention(options: engine.Options, model: Path, tmp_path: Path) -> None:
    """Over a restart; and the negative controls: without the states, or with a layer of another one, the answer differs."""
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, model=model, socket=keeper.socket)
        with engine.running(connected, tmp_path / "first.log") as first:
            answers = states.compute(first, keeper)
            first.kill()
        with engine.running(connected, tmp_path / "second.log") as second:
            states.load(second, keeper, answers, layer_bytes=4096)
            second.exit()
        without = dataclasses.replace(connected, connector="testkit.stateless_connector")
        with engine.running(without, tmp_path / "third.log") as third:
            stateless = states.ask(third)
            assert states.all_of(stateless, "cached_tokens") == answers.hits
            assert stateless[-1]["tokens"] != answers.local[-1]["tokens"]
            third.kill()


@pytest.mark.supports("handover")
def test_states_handed_over(options: engine.Options, model: Path, tmp_path: Path) -> None:
    """D goes on from P's last state, to the bit as P upon its own hit there: asked behind P, and with it."""
    with sidecar.serving(tmp_path) as keeper, contextlib.ExitStack() as stack:
        connected = dataclasses.replace(options, model=model, socket=keeper.socket)
        p, d = handover.start(stack, tmp_path, {"p": connected, "d": connected})
        pair = handover.Pair(p, d, None, keeper, counts=d.metrics())
        for at_once, length in [(False, 700), (True, 800), (False, 1300), (True, 1400)]:
            tokens = pair.prompt(length)
            if at_once:
                pair.ask(d, tokens, states.OUTPUT_TOKENS, TO_ANSWER)
                pair.compute(tokens)
                answer = pair.answered()
            else:
                answer = pair.answer(tokens, pair.compute(tokens))
            (local,) = p.generate([tokens], max_tokens=states.OUTPUT_TOKENS, logprobs=0)
            assert local["cached_tokens"] > 0 and answer["computed"] == length - local["cached_tokens"]
            assert (answer["tokens"], answer["logprobs"]) == (local["tokens"], local["logprobs"])
        assert pair.exhausted() == 0


MATCH_TOKENS = 32


@pytest.mark.supports("states")
@pytest.mark.parametrize("batched_tokens", [None, 128])
def test_hits_within_blocks(options: engine.Options, model: Path, tmp_path: Path, batched_tokens: int | None) -> None:
    """With `--prefix-match-unit` a prompt below a block is served, too, as upon vLLM's own hits within blocks. The negative
    controls: with a layer of another state, or of another block of full attention, the answer differs."""
    arguments = {"prefix_match_unit": MATCH_TOKENS}
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(
            options, model=model, socket=keeper.socket, batched_tokens=batched_tokens, arguments=arguments
        )
        found = [(len(tokens) - 1) // MATCH_TOKENS * MATCH_TOKENS for tokens in states.PROMPTS]
        with engine.running(connected, tmp_path / "first.log") as first:
            cold, local = states.ask(first), states.ask(first)
            assert states.all_of(local, "cached_tokens") == found and first.metrics()["external_hits"] == 0
            windows.wait_until_quiet(keeper)
            first.kill()
        with engine.running(connected, tmp_path / "second.log") as second:
            warm, again = states.ask(second), states.ask(second)
            assert states.all_of(warm, "cached_tokens") == states.all_of(again, "cached_tokens") == found
            assert second.metrics()["external_hits"] == sum(found)
            for answers in (warm, again):
                assert states.all_of(answers, "tokens") == states.all_of(cold, "tokens")
                assert states.all_of(answers, "logprobs") == states.all_of(local, "logprobs")
            for kind in ("state", "full"):
                windows.forget(second, keeper)
                with states.exchanged(keeper, layer_bytes=4096, kind=kind) as kept:
                    assert kept > 1
                    exchanged = states.ask(second)
                assert states.all_of(exchanged, "cached_tokens") == found
                assert exchanged[0]["logprobs"] != local[0]["logprobs"], f"without the bytes of {kind}"
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0


def test_a_shared_prompt_is_served_from_its_third_request_on(options: engine.Options, model: Path, tmp_path: Path) -> None:
    """The second request after a restart finds full attention's blocks, and leaves a state at their end."""
    shared = prompts.prompt(1000, seed=7)
    asked = [shared + prompts.prompt(300, seed=seed) for seed in range(4)]
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, model=model, socket=keeper.socket)
        with engine.running(connected, tmp_path / "engine.log") as running:
            found = []
            for tokens in asked[1:]:
                (answer,) = states.ask(running, [tokens])
                found.append(answer["cached_tokens"])
                windows.wait_until_quiet(keeper)
                windows.forget(running, keeper)
            assert found[:2] == [0, 0] and found[2] >= 768
            running.exit()


# Each round asks all prompts.
FAILED_ROUNDS = 10


def test_loads_of_states_that_fail(options: engine.Options, model: Path, tmp_path: Path) -> None:
    """Slots of some groups or all go bad between the answer and the load: the engine lives, and computes the prompts."""
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, model=model, socket=keeper.socket)
        with engine.running(connected, tmp_path / "engine.log") as running:
            cold, local = states.ask(running), states.ask(running)
            windows.wait_until_quiet(keeper)
            for _ in range(FAILED_ROUNDS):
                windows.forget(running, keeper)
                failures = keeper.metrics()["pillion_load_failures_total"]
                with pool_file.broken(keeper.pool, "generation") as slots:
                    assert slots > 0
                    computed = states.ask(running)
                assert keeper.metrics()["pillion_load_failures_total"] > failures
                assert states.all_of(computed, "tokens") == states.all_of(cold, "tokens")
            windows.forget(running, keeper)
            warm = states.ask(running)
            assert states.all_of(warm, "tokens") == states.all_of(cold, "tokens")
            assert states.all_of(warm, "logprobs") == states.all_of(local, "logprobs")
            running.exit()
