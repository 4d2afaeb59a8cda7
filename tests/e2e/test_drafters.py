"""Speculation: KV of steps with drafts is kept over a restart, with one cache group and with several.

With EAGLE vLLM takes each hit of its own cache to be a block shorter. Pillion does not load this block again for each request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import drafter, engine, model, pool_file, prompts, sidecar, windows

PROMPT = prompts.prompt(700, seed=31)
WHOLE = prompts.hit_tokens(len(PROMPT))
OUTPUT_TOKENS = 96
# Tokens of vLLM's own hits.
LOCAL = {"draft_model": WHOLE, "eagle": WHOLE - engine.BLOCK_TOKENS}


def ask(running: engine.Engine) -> tuple[dict[str, Any], int]:
    """The answer to the prompt, and the tokens of it from the sidecar."""
    before = running.metrics()["external_hits"]
    (answer,) = running.generate([PROMPT], max_tokens=OUTPUT_TOKENS)
    return answer, running.metrics()["external_hits"] - before


@pytest.mark.supports("eagle")
@pytest.mark.parametrize("method", LOCAL)
def test_a_drafter_s_kv_outlives_the_engine(method: str, tmp_path: Path) -> None:
    """The engines use float32, so steps of several sizes choose the same tokens. A good drafter is as good after a restart, and
    worse without its layer's KV."""
    if method == "eagle":
        shape, speculative = drafter.write_equals(tmp_path)
    else:
        shape, speculative = model.write(tmp_path / "model", drafter.TARGET), drafter.write(tmp_path / "drafter", method)
    with sidecar.serving(tmp_path) as keeper:
        options = engine.Options(
            shape, keeper.socket, dtype="float32", batched_tokens=256, arguments={"speculative_config": speculative}
        )
        with engine.running(options, tmp_path / "first.log") as first:
            (cold, _), (local, loaded) = ask(first), ask(first)
            before = first.metrics()
            assert (local["tokens"], local["cached_tokens"], loaded) == (cold["tokens"], LOCAL[method], 0)
            keeper.wait_metric("pillion_saved_blocks_total", WHOLE // engine.BLOCK_TOKENS)
            first.kill()
        with engine.running(options, tmp_path / "second.log") as second:
            warm, loaded = ask(second)
            after = second.metrics()
            assert (warm["tokens"], loaded) == (cold["tokens"], WHOLE)
            again, loaded = ask(second)
            assert (again["tokens"], again["cached_tokens"], loaded) == (cold["tokens"], LOCAL[method], 0)
            if method == "eagle":
                good, kept, without = acceptance(before), acceptance(after), accepted_without_kv(second, keeper, cold)
                print(f"accepted: {good:.3f}, over a restart {kept:.3f}, without the drafter's KV {without:.3f}")
                assert good >= 0.5 and kept >= 0.98 * good and without <= good - 0.2
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0
    for log in ("first.log", "second.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()


def acceptance(counts: dict[str, Any]) -> float:
    """The share of accepted drafts."""
    return float(counts["accepted_drafts"] / counts["drafts"])


def accepted_without_kv(running: engine.Engine, keeper: sidecar.Sidecar, right: dict[str, Any]) -> float:
    """The same with zeros in place of the drafter's kept KV, which costs drafts and never a token."""
    before = running.metrics()
    windows.forget(running, keeper)
    with pool_file.zeroed(keeper.pool, drafter.TARGET.layers / (drafter.TARGET.layers + 1)) as blocks:
        assert blocks > 0
        answer, loaded = ask(running)
    assert (answer["tokens"], loaded) == (right["tokens"], WHOLE)
    after = running.metrics()
    return acceptance({name: after[name] - before[name] for name in ("accepted_drafts", "drafts")})


@pytest.mark.supports("eagle")
def test_eagle_beside_windows(tmp_path: Path) -> None:
    """The target has windows in a group of their own. The negative control: wrong keys in every block show."""
    speculative = drafter.write(tmp_path / "drafter", "eagle")
    shape = model.write(tmp_path / "model", model.TINY_WINDOWS)
    plain = engine.Options(shape, dtype="float32", batched_tokens=256)
    with engine.running(plain, tmp_path / "plain.log") as without:
        (right,) = without.generate([PROMPT], max_tokens=OUTPUT_TOKENS)
        without.exit()
    with sidecar.serving(tmp_path) as keeper:
        options = dataclasses.replace(plain, socket=keeper.socket, arguments={"speculative_config": speculative})
        with engine.running(options, tmp_path / "first.log") as first:
            (cold, _), (local, loaded) = ask(first), ask(first)
            assert cold["tokens"] == local["tokens"] == right["tokens"]
            assert (local["cached_tokens"], loaded) == (LOCAL["eagle"], 0)
            windows.wait_until_quiet(keeper)
            first.kill()
        with engine.running(options, tmp_path / "second.log") as second:
            warm, loaded = ask(second)
            assert (warm["tokens"], loaded) == (right["tokens"], WHOLE)
            windows.forget(second, keeper)
            with pool_file.damaged(keeper.pool) as blocks:
                assert blocks > 0
                damaged, loaded = ask(second)
            assert loaded == WHOLE and damaged["logprobs"] != warm["logprobs"]
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0


# An answer of several blocks, second turns' ends, and their answers.
ANSWER_TOKENS, TURN_TOKENS, MORE = 100, 8, [prompts.prompt(50, seed=seed) for seed in range(33, 39)]
MODELS: dict[str, Callable[[Path], Path]] = {
    "windows": windows.FAMILIES["gemma3"],
    "all-windows": lambda directory: model.write(directory, model.TINY_ALL_WINDOWS),
}


@pytest.mark.supports("ngram")
@pytest.mark.parametrize("name", MODELS)
def test_blocks_with_rejected_drafts(options: engine.Options, tmp_path: Path, name: str) -> None:
    """Blocks of an answer are filled by steps with rejected drafts. Second turns over a restart are answered as by an
    engine without Pillion; with a wrong key in every block some are not."""
    arguments = {"speculative_config": drafter.NGRAMS}
    plain = dataclasses.replace(options, model=MODELS[name](tmp_path / "model"), dtype="float32", arguments=arguments)
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(plain, socket=keeper.socket)
        with engine.running(connected, tmp_path / "first.log") as first:
            (turn,) = first.generate([PROMPT], max_tokens=ANSWER_TOKENS)
            windows.wait_until_quiet(keeper)
            first.kill()
        turns = [[*PROMPT, *turn["tokens"], *more] for more in MORE]

        def answers(running: engine.Engine) -> Iterator[dict[str, Any]]:
            for asked in turns:
                windows.forget(running, keeper)
                (answer,) = running.generate([asked], max_tokens=TURN_TOKENS)
                yield answer

        with engine.running(connected, tmp_path / "second.log") as second:
            warm = list(answers(second))
            # The last token of an answer has no KV until the next turn.
            ends = [len(PROMPT) + ANSWER_TOKENS - 1, *[len(PROMPT) + ANSWER_TOKENS] * (len(turns) - 1)]
            found = [end // engine.BLOCK_TOKENS * engine.BLOCK_TOKENS for end in ends]
            assert [answer["cached_tokens"] for answer in warm] == found
            assert second.metrics()["external_hits"] == sum(found)
            with pool_file.damaged(keeper.pool, value_bytes=4) as blocks:
                assert blocks > 0
                damaged = list(answers(second))
            second.exit()
    with engine.running(dataclasses.replace(plain, socket=None), tmp_path / "plain.log") as without:
        right = [without.generate([asked], max_tokens=TURN_TOKENS)[0] for asked in turns]
        without.exit()
    assert all(map(drafter.agree, warm, right)) and not all(map(drafter.agree, damaged, right))
