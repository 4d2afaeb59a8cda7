"""Each figure of a table of benches/README.md with a link to a result file is in that file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHES = Path(__file__).resolve().parents[2] / "benches"
# These sections have measured figures; the table of promises also has ratios of them.
SECTIONS = ("Copies", "Rivals", "Disaggregated prefill")
FILE = re.compile(r"\((gpu/results/[\w.-]+)\)")
NUMBER = re.compile(r"(?<![\w.-])-?\d*\.?\d+(?![\w.])")


def leaves(value: Any) -> Iterator[float]:
    """The numbers in a result."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    elif isinstance(value, int | float):
        yield value


def columns(table: list[list[str]]) -> Iterator[tuple[str, str]]:
    """The cells of a table with its files in a last row, each with its file."""
    file = ""
    for column, cell in enumerate(table[-1]):
        file = found[0] if (found := FILE.findall(cell)) else file if cell == "the same" else ""
        yield from ((file, row[column]) for row in table[2:-1] if file)


def cells() -> Iterator[tuple[str, str]]:
    """Cells with figures, each with its result file."""
    for section in re.split(r"^#+ ", (BENCHES / "README.md").read_text(), flags=re.MULTILINE):
        if not section.startswith(SECTIONS):
            continue
        for text in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
            if table[-1][0] == "date":
                yield from columns(table)
                continue
            for row in table:
                for file in FILE.findall(" ".join(row)):
                    yield from ((file, cell) for cell in row[1:] if not FILE.search(cell) and "`" not in cell)


@pytest.mark.parametrize(("file", "cell"), sorted({(file, cell) for file, cell in cells() if NUMBER.search(cell)}))
def test_a_figure_is_in_its_result_file(file: str, cell: str) -> None:
    measured = [number for line in (BENCHES / file).read_text().splitlines() for number in leaves(json.loads(line))]
    for text in NUMBER.findall(cell.replace(",", "") if re.search(r"\d,\d{3}", cell) else cell):
        places = len(text.partition(".")[2])
        assert any(abs(number - float(text)) <= 0.5001 * 10**-places for number in measured), text
