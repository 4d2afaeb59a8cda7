"""Fixtures of the tests of version skew: this tree's sidecar and C library, and those of the release before."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from library import Library, Release

ROOT = Path(__file__).parents[2]
PREVIOUS = ROOT / ".cache/previous-release"


@pytest.fixture(scope="session")
def old() -> Release:
    """The release that scripts/previous-release names."""
    subprocess.run([ROOT / "scripts/build-previous"], check=True)
    return Release(PREVIOUS / "pillion", Library(PREVIOUS / "libpillion.so"))


@pytest.fixture(scope="session")
def new() -> Release:
    """This tree, built as the release before is."""
    packages = ["--package", "sidecar", "--package", "connector-shim", "--features", "connector-shim/c"]
    built = subprocess.run(
        ["cargo", "build", "--locked", "--quiet", *packages, "--message-format", "json"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    files = [Path(file) for message in messages for file in message.get("filenames", ())]
    binary = next(Path(message["executable"]) for message in messages if message.get("executable"))
    return Release(binary, Library(next(file for file in files if file.name == "libconnector_shim.so")))
