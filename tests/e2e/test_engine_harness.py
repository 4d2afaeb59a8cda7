"""The harness itself, on vLLM alone: the properties that other tests rely on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from testkit import engine, prompts
from testkit.waiting import Failed


def test_local_hit_is_bit_equal_and_counted(plain: engine.Engine) -> None:
    """vLLM's own prefix hit is bit-equal and counted: other tests compare reloaded KV with it."""
    tokens = prompts.prompt(700, seed=101)
    before = plain.metrics()
    first, second, third = (plain.generate([tokens])[0] for _ in range(3))
    after = plain.metrics()
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == prompts.hit_tokens(700)
    assert after["local_hits"] - before["local_hits"] == 2 * prompts.hit_tokens(700)
    assert first["tokens"] == second["tokens"]
    assert second["logprobs"] == third["logprobs"]
    assert after["external_queries"] == before["external_queries"] == 0


def test_output_depends_on_early_context(plain: engine.Engine) -> None:
    """Another first token changes the answer, so tests notice a cache that mixes up prompts."""
    tokens = prompts.prompt(700, seed=102)
    other = [tokens[0] - 1 or tokens[0] + 1, *tokens[1:]]
    answers = plain.generate([tokens])[0], plain.generate([other])[0]
    assert answers[0]["logprobs"] != answers[1]["logprobs"]
    assert len(set(answers[0]["tokens"])) > 1


def test_abort_ends_one_request_only(plain: engine.Engine) -> None:
    """An aborted request ends without an answer, the others go on."""
    both = [prompts.prompt(600, seed=103), prompts.prompt(300, seed=104)]
    aborted, answered = plain.generate(both, max_tokens=16, abort_after_steps={"0": 4})
    assert aborted["aborted"]
    assert aborted["finish_reason"] in (None, "abort")
    assert len(answered["tokens"]) == 16


def test_a_failed_start_is_an_error_with_its_reason(options: engine.Options, tmp_path: Path) -> None:
    """An engine with a failed start fails the test at once, with vLLM's message."""
    missing = dataclasses.replace(options, model=tmp_path / "no-such-model")
    with (
        pytest.raises(Failed, match="no-such-model"),
        engine.running(missing, tmp_path / "engine.log"),
    ):
        pass
