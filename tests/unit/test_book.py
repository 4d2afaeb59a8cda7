"""scripts/book: broken links of the built book, and line breaks of inline code in narrow tables."""

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


@pytest.mark.parametrize(
    ("code", "broken"),
    [
        ("a/b.rs::name", "a/|b.rs::|name"),
        ("--size=4", "--size=|4"),
        ("PROMPTS_MAX", "PROMPTS_MAX"),
        ("longer_than_either_half_of_a_name", "longer_than_|either_|half_of_a_name"),
    ],
)
def test_long_code_has_chances_for_a_new_line(book: ModuleType, code: str, broken: str) -> None:
    page = "<pre><code>a/b</code></pre><p>a/b <code>{}</code></p>"
    assert book.breakable(page.format(code)) == page.format(broken.replace("|", "<wbr>"))
