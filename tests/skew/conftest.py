"""Fixtures of the tests of version skew: this tree's sidecar and C library, and those of the releases before and after it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from library import Library, Release
from testkit import sidecar

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"


def built(which: str) -> Release:
    """The build of scripts/build-release: the `previous` release, or the `next`."""
    subprocess.run([ROOT / "scripts/build-release", which], check=True)
    folder = CACHE / f"{which}-release"
    return Release(folder / "pillion", Library(folder / "libpillion.so"))


@pytest.fixture
def pool() -> Iterator[Path]:
    """A pool file for several sidecars."""
    path = sidecar.new_pool()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def old() -> Release:
    """The release named by scripts/previous-release."""
    return built("previous")


@pytest.fixture(scope="session")
def following() -> Release:
    """This tree with higher versions; its ranges include the versions of this release."""
    return built("next")


@pytest.fixture(scope="session")
def new() -> Release:
    """This tree, built as the previous release is."""
    packages = ["--package", "pillion-cli", "--package", "connector-shim", "--features", "connector-shim/c"]
    build = subprocess.run(
        ["cargo", "build", "--locked", "--quiet", *packages, "--message-format", "json"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    messages = [json.loads(line) for line in build.stdout.splitlines()]
    files = [Path(file) for message in messages for file in message.get("filenames", ())]
    binary = next(Path(message["executable"]) for message in messages if message.get("executable"))
    return Release(binary, Library(next(file for file in files if file.name == "libconnector_shim.so")))
