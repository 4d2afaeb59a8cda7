"""The life cycles of the core, read from its Rust source: the phases of an enum, and the transitions in its `after`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from names import code_alone
from texts import RUST

END = "end"
FIELDS = re.compile(r"\{[^{}]*\}|\([^()]*\)")
# An arm of a match on a pair, up to its result.
ARM = re.compile(r"(?:^|[,}] )\((?P<pair>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)(?: if \w+)? => ")

# For each phase in its order, the events for each phase behind it.
Cycle = dict[str, dict[str, list[str]]]


def body_behind(source: str, head: str) -> str:
    """The text within the braces behind a head."""
    start = source.index("{", source.index(head)) + 1
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
    return source[start : end - 1]


def read_variants(source: str, name: str) -> list[str]:
    """The variants of an enum."""
    return re.findall(r"\w+", FIELDS.sub("", body_behind(source, f"enum {name} ")))


def split_pair(pair: str) -> tuple[str, str]:
    """The two parts of a pattern, at the first comma outside of braces."""
    at = FIELDS.sub(lambda fields: "-" * len(fields[0]), FIELDS.sub(lambda fields: "-" * len(fields[0]), pair)).index(",")
    return pair[:at], pair[at:]


def read_arms(table: str) -> Iterator[tuple[str, str, str]]:
    """The phases, the events and the result of each arm."""
    arms = list(ARM.finditer(table))
    ends = [arm.start() for arm in arms[1:]] + [len(table)]
    for arm, end in zip(arms, ends, strict=True):
        yield *split_pair(arm["pair"]), table[arm.end() : end].removeprefix("{ ")


def words_among(text: str, names: list[str]) -> list[str]:
    """The words of a text among these names."""
    return [word for word in re.findall(r"\w+", text) if word in names]


def read_cycle(path: Path, phase: str, event: str) -> Cycle:
    """The life cycle of an enum. A transition into the same phase is left out."""
    source = code_alone(path.read_text(), RUST)
    phases, events = read_variants(source, phase), read_variants(source, event)
    table = " ".join(body_behind(body_behind(source, f"impl {phase} "), "match (self, event)").split())
    cycle: Cycle = {name: {} for name in phases}
    met = set[str]()
    for before, happened, result in read_arms(table):
        named = words_among(result, phases)
        behind = END if result.startswith("Break") else named[0] if named else None
        of, by = words_among(before, phases), words_among(happened, events)
        met |= {*of, *by, *named}
        for name in of:
            if behind not in {name, None}:
                cycle[name].setdefault(str(behind), []).extend(by)
    if missing := {*phases, *events} - met:
        raise ValueError(f"{path}: the table of {phase} does not name {', '.join(sorted(missing))}")
    return cycle
