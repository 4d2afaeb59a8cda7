"""The counts of scripts/prose.counts, which only fall: a line for each file, function and type over the goals.

`scripts/tidy --ratchet` writes them. A text may move to another file with its count, as long as no rule's total rises. A merge
keeps the lines of both sides (.gitattributes), and the next --ratchet makes one of two. Only an edit by hand raises a count.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from prose import Breach, Prose, read_prose

COUNTS = "scripts/prose.counts"
HEAD = "# Breaches of the rules of scripts/prose.py by file, function and type. Written by scripts/tidy --ratchet."
LINE = re.compile(r"(?P<subject>[^#].*): (?P<counts>[a-z]+=\d+(?: [a-z]+=\d+)*)")
FUNCTIONS_MAX, TYPES_MAX = 8, 1
# Rules of names: their counts move nowhere.
NAMED = {"function", "type"}

Over = dict[str, list[Breach]]
Counts = dict[str, Counter[str]]


def name_breaches(files: dict[str, Prose]) -> Over:
    """The functions with a one-word name and the types, by their names, if these are defined too often."""
    found = defaultdict[str, list[Breach]](list)
    for file, prose in files.items():
        for name in prose.names:
            rule = "type" if name.item in {"type", "class"} else "function"
            if rule == "type" or name.one_word:
                advice = "put its subject into its name" if rule == "type" else "say in its name what it acts on"
                found[f"{name.item} {name.name}"].append(Breach(f"{file}:{name.line}", rule, advice, name.name))
    return {
        subject: breaches
        for subject, breaches in found.items()
        if len(breaches) > (TYPES_MAX if breaches[0].rule == "type" else FUNCTIONS_MAX)
    }


def over_goals(files: dict[str, Prose]) -> Over:
    """The breaches of all files and names over the goals."""
    return {name: over for name, prose in files.items() if (over := prose.over())} | name_breaches(files)


def count_breaches(over: Over) -> Counts:
    """Breaches by subject and rule."""
    return {subject: Counter(breach.rule for breach in breaches) for subject, breaches in over.items()}


def parse(text: str) -> Counts:
    """The counts of a file; of two lines for one subject the higher ones, as a merge leaves them."""
    found = defaultdict[str, Counter[str]](Counter)
    for line in filter(None, map(LINE.fullmatch, text.splitlines())):
        found[line["subject"]] |= Counter({rule: int(n) for rule, n in (part.split("=") for part in line["counts"].split())})
    return found


def render(found: Counts) -> str:
    """The text of the file with these counts."""
    lines = [f"{subject}: {' '.join(f'{rule}={n}' for rule, n in sorted(of.items()))}" for subject, of in sorted(found.items())]
    return "\n".join([HEAD, *lines, ""])


def rises(now: Counts, before: Counts) -> Iterator[tuple[str, str, int, int]]:
    """Each subject and rule with a higher count than before, the count and the count before."""
    for subject, of in now.items():
        for rule, count in sorted(of.items()):
            if count > (old := before.get(subject, Counter())[rule]):
                yield subject, rule, count, old


def committed(root: Path, name: str) -> set[str]:
    """The texts of the breaches that a file has in the last commit."""
    command = ["git", "show", f"HEAD:{name}"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    return {breach.text for breach in read_prose(name, shown.stdout).breaches}


def report(root: Path, over: Over, found: Iterable[tuple[str, str, int, int]]) -> Iterator[str]:
    """The breaches behind each rise: of a file the new ones if git can tell, else all."""
    for subject, rule, count, old in found:
        breaches = [breach for breach in over[subject] if breach.rule == rule]
        known = set() if rule in NAMED else committed(root, subject)
        yield f"{subject}: {rule}: {count}, {f'up from {old}' if old else 'over the goal'} ({COUNTS})"
        yield from dict.fromkeys(map(str, [breach for breach in breaches if breach.text not in known] or breaches))


def check_counts(root: Path, files: dict[str, Prose]) -> list[str]:
    """The rises over the written counts; without any, a request to write them if they fell."""
    over, path = over_goals(files), root / COUNTS
    text = path.read_text() if path.exists() else ""
    found = list(report(root, over, rises(count_breaches(over), parse(text))))
    if not found and render(count_breaches(over)) != text:
        found = [f"{COUNTS}: not the counts of this tree, which are lower: run scripts/tidy --ratchet"]
    return found


def write_counts(root: Path, files: dict[str, Prose]) -> list[str]:
    """Writes the counts, unless a rule rose: then the rises. Without a file of counts it writes those of the tree."""
    over, path = over_goals(files), root / COUNTS
    now, before = count_breaches(over), parse(path.read_text()) if path.exists() else None
    if before is not None:
        rise = sum(now.values(), Counter[str]()) - sum(before.values(), Counter[str]())
        refused = [each for each in rises(now, before) if each[1] in rise or each[1] in NAMED]
        if refused:
            return list(report(root, over, refused))
    path.write_text(render(now))
    return []
