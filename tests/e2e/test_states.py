"""Models with states: an engine loads them right.

Answers are compared with computed ones, logprobs bit for bit with those upon a local hit of the same length.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from testkit import engine, pool_file, prompts, random_model, sidecar, states, windows


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
