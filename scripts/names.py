"""Names of the product's own functions and types. The functions of a trait's impl are left out: the trait names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from texts import PYTHON, RUST

# Names with a meaning in every Rust program.
KNOWN = {"new", "main", "default", "len", "get", "insert", "remove", "iter", "next", "build", "with", "from", "fmt"}
RUST_ITEM = re.compile(
    r"^[ \t]*(?P<public>pub(?:\([^)]*\))?\s+)?(?:(?:default|const|async|unsafe|extern)\s+)*"
    r"(?P<item>fn|impl|trait|mod|struct|enum|union)\b(?P<head>[^;{]*)|(?P<open>\{)|(?P<close>\})",
    re.MULTILINE,
)
PYTHON_ITEM = re.compile(r"^(?P<indent> *)(?:async )?(?P<item>def|class) (?P<name>\w+)", re.MULTILINE)
NAME = re.compile(r"\s*(\w+)")


class Name(NamedTuple):
    """The name of a function (`fn`, `def`) or a type (`type`, `class`). A free function is public and no method."""

    line: int
    item: str
    name: str
    free: bool

    @property
    def one_word(self) -> bool:
        """True for the name of a function that is one word of its own."""
        return self.item in {"fn", "def"} and "_" not in self.name.strip("_") and self.name not in KNOWN


def code_alone(source: str, lexer: re.Pattern[str]) -> str:
    """The source with its lines, without comments and literals."""
    return lexer.sub(lambda match: "\n" * match[0].count("\n"), source)


def rust_names(source: str) -> Iterator[Name]:
    """The names of a Rust file."""
    code, line, end = code_alone(source, RUST), 1, 0
    # The items whose braces are open, and the item before the next brace: "impl", "trait impl" and others.
    within, coming = list[str](), ""
    for match in RUST_ITEM.finditer(code):
        place = max(match.start(), match.start("item"))
        line, end = line + code.count("\n", end, place), place
        if match["open"]:
            within, coming = [*within, coming], ""
        elif match["close"]:
            within = within[:-1]
        else:
            item, head = match["item"], match["head"]
            coming = "trait impl" if item == "impl" and re.search(r"\bfor\s", head) else item
            name = NAME.match(head)
            if name and item not in {"impl", "mod"} and "trait impl" not in within:
                free = bool(match["public"]) and not {"impl", "trait"} & {*within}
                yield Name(line, "fn" if item == "fn" else "type", name[1], free)


def python_names(source: str) -> Iterator[Name]:
    """The names of a Python file."""
    code = code_alone(source, PYTHON)
    for match in PYTHON_ITEM.finditer(code):
        name = match["name"]
        if not name.startswith("__"):
            yield Name(code.count("\n", 0, match.start()) + 1, match["item"], name, not match["indent"] and name[0] != "_")


def own_names(name: str, source: str) -> list[Name]:
    """The names of a file, if it is of the product."""
    if name.endswith(".rs") and "/src/" in name:
        return list(rust_names(source))
    return list(python_names(source)) if name.startswith("python/") and name.endswith(".py") else []
