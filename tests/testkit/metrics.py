"""Reads a page in the text format of Prometheus."""

from __future__ import annotations

import re

# A name, perhaps labels, a value.
SAMPLE = re.compile(r"^([\w:]+)(\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def totals(page: str) -> dict[str, int]:
    """Every sample by name, summed over its labels."""
    found: dict[str, int] = {}
    for name, _, value in SAMPLE.findall(page):
        found[name] = found.get(name, 0) + int(float(value))
    return found


def sample(page: str, name: str) -> int:
    """One sample by its name with the labels, as the page has it."""
    return int(value(page, name))


def value(page: str, name: str) -> float:
    """The same where it is no whole number."""
    return next(float(value) for found, labels, value in SAMPLE.findall(page) if found + labels == name)
