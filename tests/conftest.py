"""The time of each test, for runs of many tests (scripts/part); and the figures recorded by tests."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

TIMES = os.environ.get("PILLION_TIMES")
_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up a test's set-up, call and teardown."""
    _seconds[report.nodeid] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each of a test's figures: `record_property("figures", text)`."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "figures":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")


def pytest_sessionfinish() -> None:
    """Written by the main process of pytest-xdist."""
    if TIMES and "PYTEST_XDIST_WORKER" not in os.environ:
        with (Path(TIMES) / "tests").open("a") as file:
            file.writelines(f"{seconds:.1f}\t{test}\n" for test, seconds in _seconds.items())
