"""The table of `scripts/tidy --count`: all breaches by rule and by kind of file, within the goals or over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prose import FUNCTIONS_MAX, Prose, is_test

KINDS = ("product", "tests", "tools", "docs")
# Each rule's goal, and the rate's unit and number of units.
RATES = {
    "opening": ("1 in 100 sentences", "sentences", 100),
    "relative": ("2 in 100 words of comment", "words", 100),
    "possessive": ("0", "", 0),
    "old": ("3 in 1,000 sentences", "sentences", 1000),
    "cell": ("0", "", 0),
    "name": ("0", "", 0),
}


def kind_of(name: str) -> str:
    """The kind of a file: its column."""
    if name.endswith(".md"):
        return "docs"
    if is_test(name):
        return "tests"
    return "product" if name.endswith(".rs") or name.startswith("python/") else "tools"


def share(part: int, whole: int) -> str:
    """A part of a whole, and its percentage."""
    return f"{part} of {whole} ({100 * part / max(1, whole):.0f} %)"


def name_lines(files: dict[str, Prose]) -> Iterator[str]:
    """The names of functions and types."""
    names = [name for prose in files.values() for name in prose.names]
    uses = Counter((name.item, name.name) for name in names)
    functions = [name for name in names if name.item in {"fn", "def"}]
    bare = [name for name in functions if name.one_word]
    often = {(name.item, name.name) for name in bare if uses[name.item, name.name] > FUNCTIONS_MAX}
    types = [name for name in names if name.item in {"type", "class"}]
    again = [name for name in types if uses[name.item, name.name] > 1]
    yield f"function: {share(len(bare), len(functions))} have a name of one word"
    total = sum(uses[name] for name in often)
    yield f"function: {len(often)} such names are defined more than {FUNCTIONS_MAX} times, {total} in all; goal: 0"
    yield f"type: {share(len(again), len(types))} have a name that is used again; goal: 25 %"


def count_table(files: dict[str, Prose]) -> str:
    """The table as text: counts, with their rates in parentheses."""
    found, units = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for name, prose in files.items():
        kind = kind_of(name)
        found.update((breach.rule, kind) for breach in prose.breaches)
        units += Counter({("sentences", kind): prose.sentences, ("words", kind): prose.words})
    lines = [f"{'':12}" + "".join(f"{kind:>16}" for kind in KINDS) + "  goal"]
    for rule, (goal, unit, per) in RATES.items():
        rates = [f" ({per * found[rule, kind] / units[unit, kind]:.1f})" if units[unit, kind] else "" for kind in KINDS]
        cells = [f"{found[rule, kind]}{rate}" for kind, rate in zip(KINDS, rates, strict=True)]
        lines.append(f"{rule:12}" + "".join(f"{cell:>16}" for cell in cells) + f"  {goal}")
    return "\n".join([*lines, *name_lines(files)])
