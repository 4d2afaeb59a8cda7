"""Rules of the documentation: all files, tests and headings exist by their names, and each page of docs/ is a chapter of the
book, docs/SUMMARY.md. Source files named in comments exist too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from texts import FENCE, HTML_COMMENT, LINK, SPAN

SUMMARY = Path("docs/SUMMARY.md")
# The index of the decisions: lists, each item a link.
DECISIONS = Path("docs/decisions/README.md")
DECISION = re.compile(r"^- (\[.*?\]\([^)\s]+\))$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
# The target of a link; and links out of the repository.
TARGET = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")
# A source file by its path or the end of it, and a test or module in it.
NAMED = re.compile(r"`([\w./-]+\.(?:rs|py|patch))(?:::(\w+))?`")
# The beginning of a comment in a source file, and a source file by its path.
BEGIN = re.compile(r"//|#|\"\"\"")
PATH = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]+\.(?:rs|py)\b")
# These pages describe the past, so their files may be gone.
PAST = ("docs/decisions/", "CHANGELOG.md")


def unknown_names(path: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    """Source files, and tests in them, named in the page without being there, as `path:line: rule`."""
    if name.startswith(PAST):
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for file, test in NAMED.findall(line):
            there = [known for other, known in files.items() if f"/{other}".endswith(f"/{file}")]
            defined = re.compile(rf"\b(fn|def|class|mod)\s+{test}\b")
            if not there:
                yield f"{name}:{number}: there is no {file}"
            elif test and not any(defined.search(known.read_text(errors="replace")) for known in there):
                yield f"{name}:{number}: there is no {test} in {file}"


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts and mdBook make it."""
    text = LINK.sub(r"\1", heading).lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(text: str) -> set[str]:
    """The anchors of a page; the second of two equal ones gets a number."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        name = slug(heading)
        found[name] = found.get(name, -1) + 1
    return {f"{name}-{number}" if number else name for name, count in found.items() for number in range(count + 1)}


def links(text: str) -> list[str]:
    """The targets of a page's links within the repository."""
    prose = SPAN.sub("", FENCE.sub("", HTML_COMMENT.sub("", text)))
    return [unquote(link) for link in TARGET.findall(prose) if not ELSEWHERE.match(link)]


def target(page: Path, link: str) -> tuple[Path, str]:
    """The file in a page's link, relative to the root, and the anchor in it."""
    name, _, anchor = link.partition("#")
    return (Path(os.path.normpath(page.parent / name)) if name else page), anchor


def broken_links(root: Path, files: set[Path]) -> Iterator[str]:
    """Links of Markdown pages to no file, no folder or no heading."""
    folders = {folder for file in files for folder in file.parents}
    pages = {page: (root / page).read_text() for page in files if page.suffix == ".md"}
    known = {page: anchors(text) for page, text in pages.items()}
    for page, text in sorted(pages.items()):
        for link in links(text):
            path, anchor = target(page, link)
            if path not in files and path not in folders:
                yield f"{page}: no file {link}"
            elif anchor and anchor not in known.get(path, set()):
                yield f"{page}: no heading {link}"


def from_root(line: str, page: Path) -> str:
    """A line of a page with links that start at the root."""
    return TARGET.sub(lambda link: f"]({target(page, link[1])[0]})", line)


def contents(root: Path) -> str:
    """The book's table of contents: docs/SUMMARY.md with the decisions below their list; links start at the root."""
    lines = []
    for line in (root / SUMMARY).read_text().splitlines():
        lines.append(from_root(line, SUMMARY))
        if lines[-1].endswith(f"]({DECISIONS})"):
            indent = line[: line.index("-")] + "  "
            decisions = DECISION.findall((root / DECISIONS).read_text())
            lines += [f"{indent}- {from_root(decision, DECISIONS)}" for decision in decisions]
    return "\n".join(lines) + "\n"


def chapters(root: Path) -> list[Path]:
    """The pages of the book, relative to the root."""
    return [Path(link) for link in links(contents(root))]


def missing_chapters(root: Path, files: set[Path]) -> Iterator[str]:
    """Pages missing in the book: those of docs/, and those with a link from a chapter."""
    found = set(chapters(root))
    wanted = {file for file in files if file.is_relative_to("docs") and file.suffix == ".md"}
    for page in found:
        wanted |= {path for link in links((root / page).read_text()) if (path := target(page, link)[0]).suffix == ".md"}
    yield from (f"{SUMMARY}: {page} is no chapter" for page in sorted(wanted - found))


def unknown_paths(path: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    """Source files named by path in the comments of a source file without being there, as `path:line: rule`."""
    folders = {file.split("/")[0] for file in files}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        begin = BEGIN.search(line)
        for file in PATH.findall(line, begin.start()) if begin else ():
            if file.split("/")[0] in folders and not any(f"/{other}".endswith(f"/{file}") for other in files):
                yield f"{name}:{number}: there is no {file}"
