"""The rules of the documentation that scripts/pages.py looks after."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from testkit import script

WORDS = " ".join(["word"] * 25)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script.loaded("pages.py", monkeypatch)


@pytest.mark.parametrize(
    ("text", "long"),
    [
        (f"{WORDS}.", 0),
        (f"{WORDS} more.", 1),
        (f"{WORDS}:\n{WORDS}.", 0),
        (f"# {WORDS} more", 1),
        (f"| {WORDS} | more |", 0),
        (f"- {WORDS}\n- more", 0),
        (f"- {WORDS}\n  more", 1),
        (f"`{WORDS} more` and [a link](to/it).", 0),
        (f"```\n{WORDS} more\n```\n", 0),
    ],
)
def test_a_sentence_has_25_words_at_most(pages: ModuleType, tmp_path: Path, text: str, long: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{text}\n")
    assert len(list(pages.long_sentences(page, "page.md"))) == long


def test_what_a_page_names_is_there(pages: ModuleType, tmp_path: Path) -> None:
    source, page = tmp_path / "it.rs", tmp_path / "page.md"
    source.write_text("fn it_works() {}\n")
    page.write_text("`it.rs`, `a/it.rs::it_works`, `it.rs::it_fails`, `b/it.rs`, `other.py`\n")
    files = {"src/a/it.rs": source}
    assert list(pages.unknown_names(page, "page.md", files)) == [
        "page.md:1: there is no it_fails in it.rs",
        "page.md:1: there is no b/it.rs",
        "page.md:1: there is no other.py",
    ]
    assert list(pages.unknown_names(page, "CHANGELOG.md", files)) == []
