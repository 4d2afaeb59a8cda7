"""The rules of texts and names: scripts/prose.py finds a breach of each in each kind of file, and none in good texts."""

from __future__ import annotations

from types import ModuleType

import pytest

from testkit import script

LONG = " ".join(["word"] * 26)
OPENINGS = [
    "Who asks is answered.",
    "Whoever asks is answered.",
    "What a peer sent is kept.",
    "Which blocks are kept.",
    "Where a peer is down, nothing is sent.",
    "Of the blocks two are kept.",
    "Else the block is dropped.",
    "So it is dropped.",
    "So does a peer.",
    "None does after that.",
]
BAD = {
    "opening": ["Where a peer is down, nothing is sent."],
    "possessive": ["The memory is the caller's.", "The peers' memory is the peers'."],
    "old": [
        "The block is read anew.",
        "The peer waits in vain.",
        "The file is kept all the same.",
        "The session ends for good.",
        "The peer reads, nor does it write.",
        "The peer keeps whatever it reads.",
        "The disk keeps all save the last block.",
        "The pool is hitherto full.",
    ],
}
GOOD = [
    "The pool keeps the block of the caller.",
    "Of course a pool keeps blocks.",
    "What's new here?",
    "So the pool keeps it.",
    "None: the pool keeps no block.",
    "The flag is 'yours'.",
    "Start for good reasons, in all the same files.",
    "The word `anew` is code, and so is `the caller's`.",
]


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script.loaded("prose.py", monkeypatch)


def found(prose: ModuleType, name: str, text: str) -> list[tuple[str, str]]:
    """Place and rule of each breach of the file; three relatives of a comment count as those of a short file."""
    return [(breach.place, breach.rule) for breach in prose.read_prose(name, text).over()]


# A text as each kind of file has it, in its second line.
PLACES = {
    "a/src/doc.rs": "\n/// {}\n",
    "a/src/comment.rs": "\nlet it = 1; // {}\n",
    "a/src/block.rs": "\n/* {} */\n",
    "a/src/help.rs": "struct Options {{\n    /// {}\n    #[arg(long)]\n    it: bool,\n}}\n",
    "a/src/log.rs": '\ntracing::warn!("{}");\n',
    "a/src/error.rs": '\n#[error("{}")]\n',
    "a/src/metric.rs": '\ngauge("pillion_it", r#"{}"#);\n',
    "a/tests/doc.rs": "\n/// {}\n",
    "python/pillion/doc.py": 'def _it():\n    """{}"""\n',
    "python/pillion/comment.py": "\nit = 1  # {}\n",
    "python/pillion/log.py": '\nlogger.warning("{}")\n',
    "python/pillion/error.py": '\nraise ValueError(f"{}")\n',
    "scripts/setup.sh": "\n# {}\n",
    "deploy/it.yaml": "it:\n  # {}\n",
    "deploy/monitoring/rules.yaml": "\n          summary: {}\n",
    "tests/foreign-engine/it.c": "\n// {}\n",
    "docs/paragraph.md": "\n{}\n",
    "docs/item.md": "\n- {}\n",
    "docs/cell.md": "\n| {} |\n",
}


@pytest.mark.parametrize("name", PLACES)
def test_breaches_are_found_in_each_kind_of_text_and_none_in_good_ones(prose: ModuleType, name: str) -> None:
    for rule, texts in BAD.items():
        for text in texts:
            assert found(prose, name, PLACES[name].format(text)) == [(f"{name}:2", rule)], text
    for text in GOOD:
        assert found(prose, name, PLACES[name].format(text)) == [], text


def test_a_sentence_begins_with_its_subject(prose: ModuleType) -> None:
    for text in OPENINGS:
        assert ("page.md:1", "opening") in found(prose, "page.md", f"A pool keeps blocks. {text}\n"), text


@pytest.mark.parametrize(
    "text",
    [
        "# Where everything is\n",
        "| what it shows | where it runs |\n|---|---|\n| a table | here |\n",
        "```\nWhere it is.\n```\n",
        "What does a block cost?\n",
        "<!-- Where it is. -->\n",
        "<!-- Written by scripts/options -->\n\nWhere it is.\n",
    ],
)
def test_titles_code_questions_and_written_pages_are_free(prose: ModuleType, text: str) -> None:
    assert found(prose, "page.md", text) == []


def test_a_page_is_checked_behind_its_written_part(prose: ModuleType) -> None:
    page = "<!-- Written by scripts/support -->\nWhere it is.\n<!-- End of what scripts/support writes. -->\n\nWhere it is.\n"
    assert found(prose, "README.md", page) == [("README.md:5", "opening")]


def test_a_sentence_has_the_line_that_it_begins_in(prose: ModuleType) -> None:
    page = "A pool keeps\n`blocks\n  of` bytes.\nThe peer reads.\nWhere it is.\n"
    assert found(prose, "page.md", page) == [("page.md:5", "opening")]
    source = 'bail!(\n    "the pool is full; \\\n     The block is read anew"\n)\n'
    assert found(prose, "a/src/it.rs", source) == [("a/src/it.rs:3", "old")]
    source = 'logger.error(\n    f"the pool is {full}, read "\n    f"in vain",\n)\n'
    assert found(prose, "python/it.py", source) == [("python/it.py:2", "old")]


def test_one_sentence_of_a_hundred_may_begin_otherwise(prose: ModuleType) -> None:
    assert found(prose, "page.md", "The pool is full. " * 98 + "Where it is.\n") != []
    assert found(prose, "page.md", "The pool is full. " * 99 + "Where it is.\n") == []


@pytest.mark.parametrize("comment", ["// {}\n", "# {}\n"])
def test_two_of_a_hundred_words_of_comment_are_relatives(prose: ModuleType, comment: str) -> None:
    name = "a/src/it.rs" if comment[0] == "/" else "python/it.py"
    clauses = "A pool that keeps a block which a peer has, in memory whose owner waits."
    assert found(prose, name, comment.format(clauses)) == [(f"{name}:1", "relative")] * 3
    assert found(prose, name, comment.format(clauses) + comment.format("word " * 140)) == []
    assert found(prose, "page.md", f"{clauses}\n") == []


def test_strings_of_tests_and_of_programs_are_no_messages(prose: ModuleType) -> None:
    text = 'panic!("the block is read anew");\n'
    assert found(prose, "a/tests/it.rs", text) == []
    assert found(prose, "a/src/it.rs", f"#[cfg(test)]\nmod tests {{\n    {text}}}\n") == []
    assert found(prose, "a/src/it.rs", 'let it = "anew"; let quote = \'"\'; let other = "of x"; // The pool is full.\n') == []


def test_a_cell_has_25_words_at_most(prose: ModuleType) -> None:
    assert found(prose, "page.md", f"| {LONG[5:]} | `{LONG}` |\n") == []
    assert found(prose, "page.md", f"\n| one | {LONG} |\n") == [("page.md:2", "cell")]
    assert found(prose, "page.md", f"<!-- Written by scripts/options -->\n| {LONG} |\n") == [("page.md:2", "cell")]


RUST = """
pub fn open() {}
fn shut() {}
pub struct Pool;
impl Pool {
    pub fn push(&self) -> impl Fn() { || {} }
}
impl Drop for Pool {
    fn drop(&mut self) {}
}
pub fn open_pool() { let text = "pub fn read() {"; }
// pub fn write() {}
mod inner {
    pub(super) async fn take() {}
}
#[cfg(test)]
mod tests {
    pub fn start() {}
}
"""
PYTHON = (
    'def open():\n    """Opens."""\n\n\ndef _shut(): ...\n\n\ndef open_pool(): ...\n\n\nclass Pool:\n    def push(self): ...\n'
)


@pytest.mark.parametrize(
    ("name", "source", "free", "own"),
    [
        ("a/src/it.rs", RUST, ["2", "14"], ["open", "shut", "Pool", "push", "open_pool", "take"]),
        ("python/pillion/it.py", PYTHON, ["1"], ["open", "_shut", "open_pool", "Pool", "push"]),
        ("a/tests/it.rs", RUST, [], []),
        ("scripts/it.py", PYTHON, [], []),
    ],
)
def test_a_free_public_function_has_two_words(
    prose: ModuleType, name: str, source: str, free: list[str], own: list[str]
) -> None:
    assert found(prose, name, source) == [(f"{name}:{line}", "name") for line in free]
    assert [known.name for known in prose.read_prose(name, source).names] == own


def test_a_name_is_defined_no_more_often_than_its_bound(prose: ModuleType) -> None:
    """Eight functions may have one word as their name, two types one name; Python and Rust count apart."""

    def breaches(*sources: tuple[str, str]) -> list[str]:
        return list(prose.prose_breaches({name: prose.read_prose(name, source) for name, source in sources}))

    eight = ("a/src/a.rs", "fn read() {}\nfn read_all() {}\n" * 8)
    assert breaches(eight, ("a/src/b.rs", "fn read_all() {}\n")) == []
    found = breaches(eight, ("a/src/b.rs", "fn read() {}\n"))
    assert len(found) == 9
    assert found[-1] == "a/src/b.rs:1: function: say in its name what it acts on: read"
    one = "pub struct State;\n"
    two = [("a/src/a.rs", one), ("a/src/b.rs", one), ("python/c.py", "class State: ...\n")]
    assert breaches(*two) == []
    assert breaches(*two, ("a/src/c.rs", one))[-1] == "a/src/c.rs:1: type: put its subject into its name: State"
