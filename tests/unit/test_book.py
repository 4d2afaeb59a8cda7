"""scripts/book: which links and headings it finds, and what it says of those that lead nowhere."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from testkit import script


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    return script.loaded("book", monkeypatch)


def write(root: Path, **pages: str) -> set[Path]:
    """Files below docs/, `a` being a.md, and the code that they may link to."""
    files = {Path("docs") / f"{name}.md": text for name, text in pages.items()} | {Path("src/code.rs"): ""}
    for file, text in files.items():
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(text)
    return set(files)


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("`pillion serve`", "pillion-serve"),
        ("`query`: what asking costs", "query-what-asking-costs"),
        ("The peers' [blocks](a.md), again", "the-peers-blocks-again"),
        ("1. Socket and handshake", "1-socket-and-handshake"),
    ],
)
def test_headings_have_the_anchors_of_code_hosts(book: ModuleType, heading: str, anchor: str) -> None:
    assert book.anchors(f"# {heading}\n") == {anchor}


def test_a_heading_that_is_there_twice_has_a_number_and_code_has_none(book: ModuleType) -> None:
    assert book.anchors("## A\n## A\n```sh\n# not one\n```\n") == {"a", "a-1"}


def test_links_to_files_folders_and_headings_are_followed(book: ModuleType, tmp_path: Path) -> None:
    text = "[b](b.md#two) [c](../src/code.rs) [d](../src) [e](#one)\n# One\n`[f](no.md)` [g](https://no.where/a)"
    assert list(book.broken_links(tmp_path, write(tmp_path, a=text, b="# Two"))) == []


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("c.md", "docs/a.md: no file c.md"),
        ("../src/other.rs", "docs/a.md: no file ../src/other.rs"),
        ("b.md#three", "docs/a.md: no heading b.md#three"),
        ("#three", "docs/a.md: no heading #three"),
        ("../src/code.rs#three", "docs/a.md: no heading ../src/code.rs#three"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(book: ModuleType, tmp_path: Path, link: str, said: str) -> None:
    assert list(book.broken_links(tmp_path, write(tmp_path, a=f"[x]({link})", b="# Two"))) == [said]


def test_a_page_that_is_no_chapter_is_named(book: ModuleType, tmp_path: Path) -> None:
    files = write(tmp_path, SUMMARY="[s](SUMMARY.md) [a](a.md)", a="", b="")
    assert list(book.missing_chapters(tmp_path, files)) == ["docs/SUMMARY.md: docs/b.md is no chapter"]


def test_a_built_page_is_looked_at_as_a_browser_would(book: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="one"></h1><a href="b.html#two"></a><img src="c.svg"><a href="#one"></a>')
    (tmp_path / "b.html").write_text('<h1 id="other"></h1>')
    assert list(book.dead_ends(tmp_path)) == ["a.html: no heading b.html#two", "a.html: no file c.svg"]
