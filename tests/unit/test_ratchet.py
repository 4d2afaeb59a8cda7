"""The counts of scripts/prose.counts: none rises, a text may move, both sides of a merge count, and `--ratchet` lowers them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from testkit import script

BAD, GOOD = "Where it is.\n\n", "The pool is full.\n\n"


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    (tmp_path / "scripts").mkdir()
    return script.loaded("ratchet.py", monkeypatch)


class Tree:
    """Files of a tree, with the counts of its first state written."""

    def __init__(self, ratchet: ModuleType, root: Path, **files: str) -> None:
        self.ratchet, self.root = ratchet, root
        assert self.write(**files) == []

    def prose(self, files: dict[str, str]) -> dict[str, object]:
        """The prose of these files; `a` is a.md, and a name with a slash is itself."""
        named = {name if "/" in name else f"{name}.md": text for name, text in files.items()}
        return {name: self.ratchet.read_prose(name, text) for name, text in named.items()}

    def check(self, **files: str) -> list[str]:
        """The output of scripts/tidy."""
        found: list[str] = self.ratchet.check_counts(self.root, self.prose(files))
        return found

    def write(self, **files: str) -> list[str]:
        """The output of scripts/tidy --ratchet."""
        found: list[str] = self.ratchet.write_counts(self.root, self.prose(files))
        return found

    @property
    def counts(self) -> str:
        """The written lines."""
        return "".join((self.root / "scripts/prose.counts").read_text().splitlines(keepends=True)[1:])


def test_equal_counts_pass_and_a_rise_is_named_with_its_sentences(ratchet: ModuleType, tmp_path: Path) -> None:
    tree = Tree(ratchet, tmp_path, a=BAD, b=GOOD)
    assert tree.counts == "a.md: opening=1\n"
    assert tree.check(a=f"{GOOD}{BAD}", b=GOOD) == []
    first, *sentences = tree.check(a=f"{BAD}What is here.\n", b=GOOD)
    assert first == "a.md: opening: 2, up from 1 (scripts/prose.counts)"
    assert sentences == [
        "a.md:1: opening: begin with the subject, a noun, not with 'Where': Where it is.",
        "a.md:3: opening: begin with the subject, a noun, not with 'What': What is here.",
    ]


def test_of_a_file_in_git_the_new_sentences_alone_are_named(ratchet: ModuleType, tmp_path: Path) -> None:
    tree = Tree(ratchet, tmp_path, a=BAD)
    (tmp_path / "a.md").write_text(BAD)
    for command in ("init -q", "add a.md", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    assert [line.split(":")[1] for line in tree.check(a=f"{BAD}What is here.\n")[1:]] == ["3"]


def test_a_new_file_meets_the_goals(ratchet: ModuleType, tmp_path: Path) -> None:
    tree = Tree(ratchet, tmp_path, a=BAD)
    assert tree.check(a=BAD, b=GOOD) == []
    assert tree.check(a=BAD, b=BAD)[0] == "b.md: opening: 1, over the goal (scripts/prose.counts)"


def test_a_fall_is_written_and_never_a_rise(ratchet: ModuleType, tmp_path: Path) -> None:
    tree = Tree(ratchet, tmp_path, a=BAD * 3, b=BAD)
    assert "run scripts/tidy --ratchet" in tree.check(a=BAD * 2)[0]
    assert tree.write(a=BAD * 2) == []
    assert tree.counts == "a.md: opening=2\n"
    assert tree.check(a=BAD * 2) == []
    assert tree.write(a=BAD * 3)[0] == "a.md: opening: 3, up from 2 (scripts/prose.counts)"
    assert tree.counts == "a.md: opening=2\n"


def test_a_text_takes_its_count_to_another_file(ratchet: ModuleType, tmp_path: Path) -> None:
    tree = Tree(ratchet, tmp_path, a=BAD * 3, b=BAD)
    assert tree.check(a=BAD, b=BAD * 2, c=BAD) != []
    assert tree.write(a=BAD, b=BAD * 3, c=BAD) != [], "one more in all"
    assert tree.write(a=BAD, b=BAD * 2, c=BAD) == []
    assert tree.counts == "a.md: opening=1\nb.md: opening=2\nc.md: opening=1\n"


def test_no_rule_pays_for_another(ratchet: ModuleType, tmp_path: Path) -> None:
    tree = Tree(ratchet, tmp_path, a=BAD * 2)
    assert tree.write(a=f"{BAD}A peer waits in vain.\n")[0] == "a.md: old: 1, over the goal (scripts/prose.counts)"


def test_lines_of_both_sides_of_a_merge_become_one(ratchet: ModuleType, tmp_path: Path) -> None:
    tree = Tree(ratchet, tmp_path, a=BAD * 3, b=BAD)
    counts = tmp_path / "scripts/prose.counts"
    counts.write_text(counts.read_text() + "a.md: opening=2 old=1\n<<<<<<< ours\n")
    assert "run scripts/tidy --ratchet" in tree.check(a=BAD * 3, b=BAD)[0]
    assert tree.write(a=BAD, b=BAD) == []
    assert tree.counts == "a.md: opening=1\nb.md: opening=1\n"


def test_a_one_word_name_is_defined_eight_times_at_most(ratchet: ModuleType, tmp_path: Path) -> None:
    eight = "fn read() {}\nfn read_all() {}\n" * 8
    tree = Tree(ratchet, tmp_path, **{"a/src/a.rs": eight, "a/src/b.rs": "fn read_all() {}\n"})
    assert tree.counts == ""
    found = tree.check(**{"a/src/a.rs": eight, "a/src/b.rs": "fn read() {}\n"})
    assert found[0] == "fn read: function: 9, over the goal (scripts/prose.counts)"
    assert found[-1] == "a/src/b.rs:1: function: say in its name what it acts on: read"


def test_the_name_of_a_type_is_used_once(ratchet: ModuleType, tmp_path: Path) -> None:
    one = "pub struct State;\n"
    tree = Tree(ratchet, tmp_path, **{"a/src/a.rs": one, "a/src/b.rs": one, "python/c.py": "class State: ...\n"})
    assert tree.counts == "type State: type=2\n"
    found = tree.write(**{"a/src/a.rs": one, "a/src/b.rs": "enum Kind {}\n", "a/src/c.rs": "enum Kind {}\n"})
    assert found[0] == "type Kind: type: 2, over the goal (scripts/prose.counts)", "a name has no count of another"
