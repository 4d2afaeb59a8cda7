"""scripts/book: what it says of links of the built book that lead nowhere."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from testkit import script


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    return script.loaded("book", monkeypatch)


def test_a_built_page_is_looked_at_as_a_browser_would(book: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="one"></h1><a href="b.html#two"></a><img src="c.svg"><a href="#one"></a>')
    (tmp_path / "b.html").write_text('<h1 id="other"></h1>')
    assert list(book.dead_ends(tmp_path)) == ["a.html: no heading b.html#two", "a.html: no file c.svg"]
