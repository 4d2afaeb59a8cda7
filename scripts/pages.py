"""Rules of the documentation: its sentences are short, and the files and tests that it names exist.

A code span counts as one word, a link as its text. Sentences end at `.`, `!`, `?`, `:` and `;`. A heading, an item of a list
and a cell of a table are texts of their own. Code blocks are free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

WORDS_MAX = 25
SPAN = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?:;])\**\s+")
ITEM = re.compile(r"([-*]|\d+\.) ")
# A source file by its path or the end of it, and a test or module in it.
NAMED = re.compile(r"`([\w./-]+\.(?:rs|py|patch))(?:::(\w+))?`")
# These pages tell of the past, so the files that they name may be gone.
PAST = ("docs/decisions/", "CHANGELOG.md")


def texts(page: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, headings, items and cells of a page, each with the number of its first line."""
    fenced, begin, lines = False, 0, list[str]()
    for number, line in enumerate([*page.splitlines(), ""], 1):
        text = line.strip()
        if text.startswith("```"):
            fenced, text = not fenced, ""
        elif fenced:
            continue
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
            there = [known for other, known in files.items() if other == file or other.endswith(f"/{file}")]
            defined = re.compile(rf"\b(fn|def|class|mod)\s+{test}\b")
            if not there:
                yield f"{name}:{number}: there is no {file}"
            elif test and not any(defined.search(known.read_text(errors="replace")) for known in there):
                yield f"{name}:{number}: there is no {test} in {file}"
