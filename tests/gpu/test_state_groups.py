"""Models with states beside full attention, on a GPU: gated delta rules and Mamba2 outlive the engine.

The first engine is killed once its states are kept. The second answers from them, bit for bit as the first did from its own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gpu_options
import pytest
from gpu_options import Mode

from testkit import drafter, engine, pool_file, prompts, random_model, sidecar, states, windows

# FlashInfer would build its kernels for the first prompt.
TRITON = {"additional_config": {"gdn_prefill_backend": "triton"}}
FAMILIES: dict[str, dict[str, Any]] = {"gated-delta": random_model.QWEN3_NEXT, "mamba2": random_model.NEMOTRON_H}
MODES = [Mode(1, graphs=False), Mode(2, graphs=True), Mode(1, graphs=True, copy="engine")]


def with_arguments(options: engine.Options, more: dict[str, Any]) -> engine.Options:
    """The options with more arguments of `vllm.LLM`."""
    return dataclasses.replace(options, arguments=options.arguments | more)


@pytest.mark.supports("states")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_states_outlive_the_engine(mode: Mode, family: str, tmp_path: Path) -> None:
    """Over a restart; and with a layer of another state the answer differs."""
    shape = random_model.write(tmp_path / "model", FAMILIES[family])
    with sidecar.serving(tmp_path, gpu=mode.copy == "sidecar") as keeper:
        options = with_arguments(gpu_options.options(shape, mode, keeper.socket), TRITON)
        with engine.running(options, tmp_path / "first.log") as first:
            answers = states.compute(first, keeper)
            first.kill()
        with engine.running(options, tmp_path / "second.log") as second:
            states.load(second, keeper, answers, layer_bytes=4096)
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0
    for log in ("first.log", "second.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()


# An answer of more than a block of states, and ends of second turns.
PROMPT, ANSWER_TOKENS = prompts.prompt(700, seed=31), 600
MORE = [prompts.prompt(50, seed=seed) for seed in (33, 34)]


@pytest.mark.supports("states-drafts")
def test_states_made_with_drafts(tmp_path: Path) -> None:
    """Second turns over a restart are answered as by an engine without Pillion and without drafts; and with a layer of another
    state they are not."""
    shape = random_model.write(tmp_path / "model", random_model.QWEN3_NEXT)
    # Runner V1 has no asynchronous steps with n-grams, and V2 no n-grams.
    drafts = {"speculative_config": drafter.NGRAMS, "async_scheduling": False}
    plain = with_arguments(gpu_options.options(shape, Mode(1, graphs=False), None), TRITON)
    with sidecar.serving(tmp_path, gpu=True) as keeper:
        options = with_arguments(gpu_options.options(shape, Mode(1, graphs=False), keeper.socket), TRITON | drafts)
        with engine.running(options, tmp_path / "first.log") as first:
            (turn,) = first.generate([PROMPT], max_tokens=ANSWER_TOKENS)
            windows.wait_until_quiet(keeper)
            first.kill()
        turns = [[*PROMPT, *turn["tokens"], *more] for more in MORE]
        with engine.running(plain, tmp_path / "plain.log") as without:
            right = states.all_of(states.ask(without, turns), "tokens")
            without.exit()
        with engine.running(options, tmp_path / "second.log") as second:
            warm = states.ask(second, turns)
            found = states.all_of(warm, "cached_tokens")
            print(f"{found} of {len(turns[0])} tokens were found", flush=True)
            assert all(found) and states.all_of(warm, "tokens") == right
            windows.forget(second, keeper)
            with states.exchanged(keeper, layer_bytes=4096) as kept:
                assert kept > 1
                exchanged = states.ask(second, turns)
            assert states.all_of(exchanged, "logprobs") != states.all_of(warm, "logprobs")
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0


# vLLM takes a block from its own hits for the drafter: of prompts below two blocks it has none.
DRAFTED = [prompts.prompt(tokens, tokens) for tokens in (600, 1100, 1900)]
TURN, REST = prompts.prompt(700, 31), [prompts.prompt(50, seed) for seed in (33, 34)]
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def accepted_of(running: engine.Engine) -> tuple[float, list[int]]:
    """The share of accepted drafts in a long answer to the longest prompt, and the answer."""
    before = running.metrics()
    (answer,) = running.generate(DRAFTED[-1:], max_tokens=ANSWER_TOKENS)
    after = running.metrics()
    drafts, accepted = (after[name] - before[name] for name in ("drafts", "accepted_drafts"))
    return accepted / drafts, answer["tokens"]


@pytest.mark.supports("states-drafts")
@pytest.mark.parametrize("mode", [Mode(1, graphs=False), Mode(2, graphs=True)], ids=str)
def test_states_beside_mtp(mode: Mode, tmp_path: Path) -> None:
    """The drafter's layer has its KV in blocks of full attention. Hits over a restart are vLLM's own, to the bit, and no
    request loads the block that vLLM has taken from its own hit. The drafter is as good as before, and worse without its KV.
    Second turns go on from states made with drafts."""
    shape = random_model.add_drafter(random_model.write(tmp_path / "model", random_model.QWEN3_NEXT))
    with sidecar.serving(tmp_path, gpu=True) as keeper:
        options = with_arguments(gpu_options.options(shape, mode, keeper.socket), TRITON | MTP)
        with engine.running(options, tmp_path / "first.log") as first:
            answers = states.compute(first, keeper, DRAFTED)
            good, right_tokens = accepted_of(first)
            (turn,) = first.generate([TURN], max_tokens=ANSWER_TOKENS)
            turns = [[*TURN, *turn["tokens"], *rest] for rest in REST]
            # Rounding depends on where a hit ends: the second answers go on from where those of the second engine do.
            states.ask(first, turns)
            right = states.all_of(states.ask(first, turns), "tokens")
            windows.wait_until_quiet(keeper)
            first.kill()
        with engine.running(options, tmp_path / "second.log") as second:
            states.load(second, keeper, answers, layer_bytes=4096)
            windows.forget(second, keeper)
            kept, kept_tokens = accepted_of(second)
            warm = states.ask(second, turns)
            found = states.all_of(warm, "cached_tokens")
            without = accepted_without_layers(second, keeper, kept_tokens)
            print(f"\naccepted: {good:.3f}, over a restart {kept:.3f}, without the KV of a layer {without}", end="; ")
            print(f"prompts of {list(map(len, DRAFTED))} tokens found {answers.hits}, second turns {found} of {len(turns[0])}")
            assert all(found) and states.all_of(warm, "tokens") == right
            assert kept_tokens == right_tokens and good >= 0.5 and kept >= 0.98 * good
            # The drafter's layer, which costs drafts and no token, and the last one of the model.
            assert [right for right, _ in without].count(True) == 1
            assert all(share <= kept - 0.2 for right, share in without if right)
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0
    for log in ("first.log", "second.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()


def accepted_without_layers(running: engine.Engine, keeper: sidecar.Sidecar, right: list[int]) -> list[tuple[bool, float]]:
    """For each layer with full attention, with zeros in place of its kept KV: whether the answer begins right, and the share of
    accepted drafts. Rounding depends on the number of drafts in a step, so later tokens may differ."""
    names = states.namespaces(keeper, "full")
    layers = [(names[0], 0.0, 0.5), (names[0], 0.5, 1.0)] if len(names) == 1 else [(name, 0.0, 1.0) for name in names]
    found = []
    for namespace, begin, end in layers:
        windows.forget(running, keeper)
        with pool_file.zeroed(keeper.pool, begin, end, namespace) as blocks:
            assert blocks > 0
            share, tokens = accepted_of(running)
        found.append((tokens[: states.OUTPUT_TOKENS] == right[: states.OUTPUT_TOKENS], round(share, 3)))
    return found
