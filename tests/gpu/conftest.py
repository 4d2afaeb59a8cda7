"""Options of the tests, and a model with several cuts."""

from __future__ import annotations

from pathlib import Path

import gpu_options
import pytest

from testkit import model


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of test_kill.py."""
    parser.addoption("--rounds", type=int, default=20, help="rounds of faults")
    parser.addoption("--first", type=int, default=1, help="the number of the first of them")
    parser.addoption("--seed", type=int, default=1, help="from which the faults are drawn")
    parser.addoption("--life", type=int, choices=range(2, 13), default=10, help="rounds of an engine's life")
    parser.addoption("--bare-rounds", type=int, default=60, help="rounds of faults of test_bare_kill.py")
    parser.addoption("--runner", type=int, choices=(1, 2), default=1, help="vLLM's model runner")
    parser.addoption("--graphs", action="store_true", help="CUDA graphs instead of eager mode")


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, so answers depend strongly on the KV."""
    return model.write(tmp_path_factory.mktemp("model"), gpu_options.SHAPE)
