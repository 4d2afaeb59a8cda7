"""Fixtures of the end-to-end tests: model, logs, and one plain vLLM engine to compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import engine, logs, model, prompts


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with outputs that depend strongly on its KV."""
    return model.write(tmp_path_factory.mktemp("model"), model.TINY)


@pytest.fixture(scope="session")
def options(tiny_model: Path) -> engine.Options:
    """A plain engine, without a connector. Tests replace single options."""
    return engine.Options(model=tiny_model)


@pytest.fixture(scope="session")
def plain(options: engine.Options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.Engine]:
    """vLLM without a connector, alive for the whole session: its answers are the right ones.

    It cuts prompts into steps of prompts.STEP_TOKENS.
    """
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    with engine.running(dataclasses.replace(options, batched_tokens=prompts.STEP_TOKENS), log) as running:
        yield running


@pytest.fixture(scope="session")
def right_two_ranks(
    options: engine.Options, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[list[list[int]], int], list[list[int]]]:
    """The right answers of two ranks; their sums round differently from those of one rank. Starts one engine, when first
    asked."""
    known: dict[str, list[list[int]]] = {}

    def ask(asked: list[list[int]], output_tokens: int) -> list[list[int]]:
        key = repr((asked, output_tokens))
        if key not in known:
            log = tmp_path_factory.mktemp("plain-two-ranks") / "engine.log"
            two = dataclasses.replace(options, multiprocess=True, tensor_parallel=2)
            with engine.running(two, log) as running:
                answers = [running.generate([tokens], max_tokens=output_tokens)[0] for tokens in asked]
                running.exit()
            known[key] = [answer["tokens"] for answer in answers]
        return known[key]

    return ask


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Any:
    """On a failure, show the end of every log of the test's engines and sidecars."""
    report = yield
    if report.failed:
        directories = {value for value in item.funcargs.values() if isinstance(value, Path)}
        states = [v for v in item.funcargs.values() if hasattr(v, "directory")]
        directories |= {state.directory for state in states}
        for log in sorted(path for folder in directories for path in folder.glob("*.log")):
            report.sections.append((str(log), logs.tail(log)))
    return report
