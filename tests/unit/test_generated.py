"""scripts/generated.py: the checks and writes of generated files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from testkit import script


def test_a_file_that_differs_is_an_error_and_is_written_without_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generated = script.loaded("generated.py", monkeypatch)
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    page = tmp_path / "options.md"
    monkeypatch.setattr(sys, "argv", ["scripts/options", "--check"])
    assert generated.write_or_check({page: "new\n"}) == 1
    assert "options.md is not what scripts/options writes" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["scripts/options"])
    assert generated.write_or_check({page: "new\n"}) == 0 and page.read_text() == "new\n"
    monkeypatch.setattr(sys, "argv", ["scripts/options", "--check"])
    assert generated.write_or_check({page: "new\n"}) == 0
