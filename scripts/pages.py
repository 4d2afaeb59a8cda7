"""Rules of the documentation: its sentences are short, the files, tests and headings that it names exist, and each page of
docs/ is a chapter of the book, docs/SUMMARY.md. Source files that comments name exist too.

A code span counts as one word, a link as its text. Sentences end at `.`, `!`, `?`, `:` and `;`. A heading, an item of a list
and a cell of a table are texts of their own. Code blocks are free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

WORDS_MAX = 25
SUMMARY = Path("docs/SUMMARY.md")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(`+).*?\1")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# Where a link leads; and links out of the repository.
TARGET = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")
SENTENCE_END = re.compile(r"(?<=[.!?:;])\**\s+")
ITEM = re.compile(r"([-*]|\d+\.) ")
# A source file by its path or the end of it, and a test or module in it.
NAMED = re.compile(r"`([\w./-]+\.(?:rs|py|patch))(?:::(\w+))?`")
# Where a comment of a source file begins, and a source file by its path.
BEGIN = re.compile(r"//|#|\"\"\"")
PATH = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]+\.(?:rs|py)\b")
# These pages tell of the past, so the files that they name may be gone.
PAST = ("docs/decisions/", "CHANGELOG.md")


def texts(page: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, headings, items and cells of a page, each with the number of its first line."""
    begin, lines = 0, list[str]()
    prose = FENCE.sub(lambda code: "\n" * code[0].count("\n"), page)
    for number, line in enumerate([*prose.splitlines(), ""], 1):
        text = line.strip()
        single = text.startswith(("|", "#"))
        if lines and (not text or single or ITEM.match(text)):
            yield begin, " ".join(lines)
            lines = []
        if single:
            yield from ((number, cell) for cell in text.strip("|").split("|"))
        elif text:
            begin = begin if lines else number
            lines.append(text)


def long_sentences(path: Path, name: str) -> Iterator[str]:
    """Sentences of more than `WORDS_MAX` words, as `path:line: rule`."""
    for number, text in texts(path.read_text()):
        for sentence in SENTENCE_END.split(LINK.sub(r"\1", SPAN.sub("`x`", text))):
            words = [word for word in sentence.split() if re.search(r"[\w`]", word)]
            if len(words) > WORDS_MAX:
                yield f"{name}:{number}: a sentence of {len(words)} words (limit {WORDS_MAX}): {' '.join(words[:6])} ..."


def unknown_names(path: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    """Source files, and tests in them, that the page names and that are not there, as `path:line: rule`."""
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
    """The anchors of a page; one that is there already gets a number."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        name = slug(heading)
        found[name] = found.get(name, -1) + 1
    return {f"{name}-{number}" if number else name for name, count in found.items() for number in range(count + 1)}


def links(text: str) -> list[str]:
    """Where a page's links lead within the repository."""
    prose = SPAN.sub("", FENCE.sub("", COMMENT.sub("", text)))
    return [unquote(link) for link in TARGET.findall(prose) if not ELSEWHERE.match(link)]


def target(page: Path, link: str) -> tuple[Path, str]:
    """The file that a page's link names, relative to the root, and the anchor in it."""
    name, _, anchor = link.partition("#")
    return (Path(os.path.normpath(page.parent / name)) if name else page), anchor


def broken_links(root: Path, files: set[Path]) -> Iterator[str]:
    """Links of Markdown pages that lead to no file, no folder or no heading."""
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


def chapters(root: Path) -> list[Path]:
    """The pages of the book, relative to the root."""
    return [target(SUMMARY, link)[0] for link in links((root / SUMMARY).read_text())]


def missing_chapters(root: Path, files: set[Path]) -> Iterator[str]:
    """Pages that the book must have and has not: those of docs/, and those that a chapter links to."""
    found = set(chapters(root))
    wanted = {file for file in files if file.is_relative_to("docs") and file.suffix == ".md"}
    for page in found:
        wanted |= {path for link in links((root / page).read_text()) if (path := target(page, link)[0]).suffix == ".md"}
    yield from (f"{SUMMARY}: {page} is no chapter" for page in sorted(wanted - found))


def unknown_paths(path: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    """Source files that the comments of a source file name by their paths and that are not there, as `path:line: rule`."""
    folders = {file.split("/")[0] for file in files}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        begin = BEGIN.search(line)
        for file in PATH.findall(line, begin.start()) if begin else ():
            if file.split("/")[0] in folders and not any(f"/{other}".endswith(f"/{file}") for other in files):
                yield f"{name}:{number}: there is no {file}"
