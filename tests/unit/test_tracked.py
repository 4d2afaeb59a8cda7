"""scripts/tracked.py: the files of a tree for the other scripts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from testkit import script


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script.loaded("tracked.py", monkeypatch)


@pytest.mark.parametrize("checkout", [True, False])
def test_build_results_are_left_out_in_a_checkout_and_outside(module: ModuleType, tmp_path: Path, checkout: bool) -> None:
    for name in ("a.py", "folder/ü.md", "target/b.rs", ".cache/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    wanted = {Path("a.py"), Path("folder/ü.md")}
    if checkout:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
        (tmp_path / ".gitignore").write_text("target\n.cache\n")
        wanted.add(Path(".gitignore"))
    assert module.tracked(tmp_path) == wanted
