"""scripts/support: its errors where marks and rows differ."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from testkit import script


@pytest.fixture
def support(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with one row of each kind."""
    module = script.loaded("support", monkeypatch)
    monkeypatch.setattr(module, "SERVED", {"Models": {"dense": "dense models"}})
    monkeypatch.setattr(module, "REFUSED", {"states": "states"})
    return module


SERVES = '@pytest.mark.supports("dense")\ndef test_served(): ...\n'
REFUSES = (
    '@pytest.mark.parametrize("a", [pytest.param(1, marks=refuses("states", "leave --it 1 out"))])\ndef test_out(remedy): ...\n'
)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (SERVES + REFUSES, None),
        (SERVES, "no test has the row states"),
        (REFUSES, "no test has the row dense"),
        (SERVES.replace("def test_served", "def served") + REFUSES, "a mark that is no test's"),
        (SERVES + REFUSES + SERVES.replace("dense", "MoE"), "test_served: no row MoE"),
        (SERVES + REFUSES.replace("(remedy)", "()"), "test_out does not look at its remedy"),
    ],
)
def test_every_row_is_shown_and_every_mark_has_a_row(support: ModuleType, tmp_path: Path, text: str, error: str | None) -> None:
    (tmp_path / "tests/gpu").mkdir(parents=True)
    (tmp_path / "tests/gpu/test_it.py").write_text(text)
    shown = support.Shown(tmp_path)
    if error:
        assert any(error in said for said in shown.errors)
        return
    assert not shown.errors
    lines = shown.text().splitlines()
    assert "| dense models |  | [it](../tests/gpu/test_it.py) |  |" in lines
    assert "| states | leave `--it 1` out | [it](../tests/gpu/test_it.py) |" in lines
