"""The texts of a file: its comments, its messages, and the paragraphs, items, headings and cells of a page.

A code span and a placeholder of a format stand as `x`, a link as its text. A comment is read as Markdown. A message is a string
literal with at least `MESSAGE_WORDS_MIN` words: an error, a log line, the help of a metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MESSAGE_WORDS_MIN = 3
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(`+)(?:[^\n]|\n(?!\s*\n))*?\1")
HTML_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\))?")
ITEM = re.compile(r"([-*]|\d+\.) +")
HEADER_RULE = re.compile(r"\|[ :|-]+$")
# A sentence ends before a space and a capital; a colon and a semicolon end one there, too.
SENTENCE_END = re.compile(r"(?<=[.!?:;])[*_\"')]*\s+(?=[*_\"'(]*[A-Z`])")
WORD = re.compile(r"[\"'(]*[A-Za-z][A-Za-z'-]*[\"'.,:;!?)]*")
PLACEHOLDER = re.compile(r"\{[^{}]*\}")

# Comments and string literals; a character of Rust is matched so that a quote in it begins nothing.
RUST = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|\bb?r(?P<hashes>#*)\"(?P<raw>.*?)\"(?P=hashes)"
    r"|\"(?P<string>(?:[^\"\\]|\\.)*)\""
    r"|'(?:\\[^\n']+|\\'|[^'\\\n])'",
    re.DOTALL,
)
PYTHON = re.compile(
    r"(?P<comment>#[^\n]*)"
    r"|(?:\b[bfruBFRU]{1,2})?(?:(?P<quote>\"\"\"|''')(?P<raw>(?:[^\\]|\\.)*?)(?P=quote)"
    r"|(?P<mark>[\"'])(?P<string>(?:(?!(?P=mark))[^\\\n]|\\.)*)(?P=mark))",
    re.DOTALL,
)
HASHES = re.compile(r"(?<![^\s])(?P<comment>#[^\n]*)")
# Texts of rules and panels, as Prometheus and Grafana show them.
SHOWN = re.compile(r"^ *\"?(?:summary|remedy|description|title)\"?: +\"?(?P<shown>[^\"\n]*)", re.MULTILINE)
MARKER = re.compile(r"//[/!]?|/\*+|#+")
# Behind these a string is part of an expression.
OPEN = ("(", "[", "{", ",", "=", "+", "return")
# Comments to a program, and titles of the parts of a file.
DIRECTIVE = re.compile(r"!|===|noqa|type: ?ignore|ruff:|fmt:|SYNC POINT|shellcheck")


class Text(NamedTuple):
    """A paragraph or the like: `comment`, `message`, `page`, `heading` or `cell`, and its first line."""

    kind: str
    line: int
    text: str

    def sentences(self) -> Iterator[tuple[int, str]]:
        """Its sentences, each with its line."""
        begin = 0
        for end in [*SENTENCE_END.finditer(self.text), None]:
            sentence = self.text[begin : end.start() if end else None]
            yield self.line + self.text.count("\n", 0, begin), " ".join(sentence.split())
            begin = end.end() if end else begin


def without_code(text: str) -> str:
    """The text without its code and its links' targets; with all its lines."""

    def empty(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    def span(match: re.Match[str]) -> str:
        return "`x`" + empty(match)

    return LINK.sub(r"\1", SPAN.sub(span, HTML_COMMENT.sub(empty, FENCE.sub(empty, text))))


def paragraphs(kind: str, first: int, markdown: str) -> Iterator[Text]:
    """The paragraphs, items, headings and cells of Markdown whose first line is the file's line `first`."""
    begin, lines = first, list[str]()
    rows = [*(line.strip() for line in without_code(markdown).split("\n")), ""]
    for number, line in enumerate(rows, first):
        row, heading, item = line.startswith("|"), line.startswith("#"), ITEM.match(line)
        if lines and (not line or row or heading or item):
            yield Text(kind, begin, "\n".join(lines))
            lines = []
        if heading:
            yield Text("heading", number, line.lstrip("# "))
        elif row:
            titles = HEADER_RULE.match(rows[number - first + 1])
            yield from (Text("heading" if titles else "cell", number, cell.strip()) for cell in line.strip("|").split("|"))
        elif line:
            begin = begin if lines else number
            lines.append(line[item.end() :] if item else line)


def message(line: int, literal: str) -> Iterator[Text]:
    """A string literal, if it is prose. A literal that continues a sentence has `x` for the words before it."""
    text = literal.replace("\\\n", "\n").replace("\\n", " ").replace('\\"', '"').replace("{{", "").replace("}}", "")
    text = PLACEHOLDER.sub("`x`", without_code(text))
    if sum(WORD.fullmatch(word) is not None for word in text.split()) >= MESSAGE_WORDS_MIN:
        yield Text("message", line, f"`x`{text}" if text[0].isspace() else text)


class Token(NamedTuple):
    """A comment or a string literal, with the code between the token before and it."""

    line: int
    column: int
    code: str
    marker: str
    text: str
    docstring: bool

    def goes_on(self, other: Token) -> bool:
        """True if the other token is the next line of the same comment, or the next part of the same literal."""
        if self.code.strip() or self.marker != other.marker:
            return False
        return not self.marker or (self.line == other.line + 1 and self.column == other.column and "\n" in other.code)


def tokens(source: str, lexer: re.Pattern[str]) -> Iterator[Token]:
    """The comments and string literals of a source file."""
    line, end, before = 1, 0, ""
    for match in lexer.finditer(source):
        code, groups = source[end : match.start()], match.groupdict()
        line += source.count("\n", end, match.start())
        column = match.start() - source.rfind("\n", 0, match.start()) - 1
        before = code.strip() or before
        comment = groups["comment"] or ""
        marker = MARKER.match(comment)
        docstring = bool(groups.get("quote")) and not code.rsplit("\n", 1)[-1].strip() and not before.endswith(OPEN)
        text = (
            comment[marker.end() :].removesuffix("*/").rstrip(" ")
            if marker
            else groups.get("string") or groups.get("raw") or ""
        )
        yield Token(line, column, code, marker[0] if marker else "", "" if DIRECTIVE.match(text.strip()) else text, docstring)
        line, end = line + match[0].count("\n"), match.end()


def source_texts(source: str, lexer: re.Pattern[str]) -> Iterator[Text]:
    """The comments and messages of a source file; a docstring is a comment."""
    parts = list[Token]()
    for token in [*tokens(source, lexer), None]:
        if parts and (token is None or token.docstring or not token.goes_on(parts[-1])):
            text = "\n".join(part.text for part in parts)
            prose = parts[0].marker or parts[0].docstring
            yield from paragraphs("comment", parts[0].line, text) if prose else message(parts[0].line, text)
            parts = []
        if token:
            parts.append(token)


def file_texts(name: str, source: str) -> Iterator[Text]:
    """The texts of a file."""
    suffix = name.rpartition("/")[2].rpartition(".")[2]
    if suffix == "md":
        yield from paragraphs("page", 1, source)
    elif suffix in {"rs", "c"}:
        yield from source_texts(source, RUST)
    elif suffix in {"py", "pyi"} or source.startswith("#!/usr/bin/env python3"):
        yield from source_texts(source, PYTHON)
    elif name.startswith("deploy/monitoring/"):
        yield from (
            text for found in SHOWN.finditer(source) for text in message(source.count("\n", 0, found.start()) + 1, found[1])
        )
    if suffix in {"sh", "yaml", "toml", "Makefile", "service"} or source.startswith(("#!/bin/", "#!/usr/bin/env bash")):
        yield from source_texts(source, HASHES)
