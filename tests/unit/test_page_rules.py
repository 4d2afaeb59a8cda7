"""The rules of the documentation in scripts/pages.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from testkit import script


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script.loaded("pages.py", monkeypatch)


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


def write(root: Path, **texts: str) -> set[Path]:
    """Writes files below docs/, `a` being a.md, and a source file for their links."""
    files = {Path("docs") / f"{name}.md": text for name, text in texts.items()} | {Path("src/code.rs"): ""}
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
def test_headings_have_the_anchors_of_code_hosts(pages: ModuleType, heading: str, anchor: str) -> None:
    assert pages.anchors(f"# {heading}\n") == {anchor}


def test_a_heading_that_is_there_twice_has_a_number_and_code_has_none(pages: ModuleType) -> None:
    assert pages.anchors("## A\n## A\n```sh\n# not one\n```\n") == {"a", "a-1"}


def test_links_to_files_folders_and_headings_are_followed(pages: ModuleType, tmp_path: Path) -> None:
    text = "[b](b.md#two) [c](../src/code.rs) [d](../src) [e](#one)\n# One\n`[f](no.md)` [g](https://no.where/a)"
    assert list(pages.broken_links(tmp_path, write(tmp_path, a=text, b="# Two"))) == []


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
def test_a_link_that_leads_nowhere_is_named(pages: ModuleType, tmp_path: Path, link: str, said: str) -> None:
    assert list(pages.broken_links(tmp_path, write(tmp_path, a=f"[x]({link})", b="# Two"))) == [said]


def test_a_page_that_is_no_chapter_is_named(pages: ModuleType, tmp_path: Path) -> None:
    files = write(tmp_path, SUMMARY="[s](SUMMARY.md) [a](a.md)", a="", b="")
    assert list(pages.missing_chapters(tmp_path, files)) == ["docs/SUMMARY.md: docs/b.md is no chapter"]


def test_the_decisions_are_chapters_below_their_list(pages: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, SUMMARY="- [a](a.md)\n  - [d](decisions/README.md)\n- [r](../README.md)\n", a="")
    (tmp_path / "docs/decisions").mkdir()
    rows = "- [one](0001-one.md)\n- [`two`](0002-two.md)\n- See [a](../a.md)\n"
    (tmp_path / "docs/decisions/README.md").write_text(f"See [a](../a.md).\n\n{rows}")
    assert pages.contents(tmp_path).splitlines() == [
        "- [a](docs/a.md)",
        "  - [d](docs/decisions/README.md)",
        "    - [one](docs/decisions/0001-one.md)",
        "    - [`two`](docs/decisions/0002-two.md)",
        "- [r](README.md)",
    ]


def test_what_a_comment_names_is_there(pages: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "it.py"
    source.write_text('"""As src/a/it.rs and src/it.rs."""\nopen("src/b.py")  # src/c.py, vllm/v1/d.py, /root/src/e.py\n')
    files = {"src/a/it.rs": source}
    assert list(pages.unknown_paths(source, "it.py", files)) == [
        "it.py:1: there is no src/it.rs",
        "it.py:2: there is no src/c.py",
    ]
