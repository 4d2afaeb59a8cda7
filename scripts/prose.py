"""Rules of texts and names, for sentences understood at the first reading; docs/CONTRIBUTING.md states them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from names import Name, own_names
from texts import file_texts

# A shorter text is a label.
SENTENCE_WORDS_MIN = 3
CELL_WORDS_MAX = 25
# One of so many sentences may begin without its subject; one of so many words of comment may be a relative, and two in a file.
SENTENCES_PER_OPENING, WORDS_PER_RELATIVE, RELATIVES_FREE = 100, 50, 2
# Definitions of a one-word function name, and of a type name: the C library has its own types by the names of Rust types.
FUNCTIONS_MAX, TYPES_MAX = 8, 2

VERB = r"(?:do|does|did|is|are|was|were|has|have|had|can|could|may|might|must|will|would)"
OPENING = re.compile(
    r"[\"'(*_]*(who(?:ever|se)?|what(?:ever)?|which(?:ever)?|where(?:ver)?|else|nor|of(?! course)"
    rf"|so (?:it|they|{VERB})|none {VERB})\b(?!')",
    re.IGNORECASE,
)
# A message may be the end of another literal's sentence.
CONTINUED = ("of ", "which ")
RELATIVE = re.compile(r"\b(?:that|which|whose|whom|who|what|whoever|whatever)\b", re.IGNORECASE)
# An apostrophe behind no letter begins a quotation.
POSSESSIVE = re.compile(r"(?:[^']|(?<=\w)')*\w(?:'s|s')[.:;!]?")
OLD = {
    r"who(?:m)?ever": "any client",
    r"whatever": "any",
    r"in vain": "without effect",
    r"anew": "again",
    r"all the same(?! \w)": "still",
    r"for good(?! reason)": "permanently",
    r"by\sand\sby": "gradually",
    r"hitherto": "until now",
    r"nor": "or",
    r"ere": "before",
    r"(?:all|none|nothing|nobody|every\w+|any\w+|no \w+),? save(?= (?:for|the|those|that|in|where|one)\b)": "except",
}
OLD_WORD = re.compile(rf"\b(?:{'|'.join(OLD)})\b", re.IGNORECASE)
# A part of a page written by a script. Its texts count in their source, so only cells of tables count here.
WRITTEN = re.compile(r"^<!-- Written by .*?(?:<!-- End of what|\Z)", re.DOTALL | re.MULTILINE)
BARE_NAME = "a free public function has a verb and a noun in its name"
INLINE_TESTS = re.compile(r"^#\[cfg\(test\)\]\n(?:#\[.*\]\n)*(?:pub(?:\(.*\))? )?mod \w+ \{$", re.MULTILINE)
TESTS = {"tests", "benches", "fuzz"}


class Breach(NamedTuple):
    """A breach of a rule: its place, the advice, and the text."""

    place: str
    rule: str
    advice: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.advice}: {self.text}"


class Prose(NamedTuple):
    """The breaches of a file in the order of its lines, its sentences, the words of its comments, and its names."""

    breaches: list[Breach]
    sentences: int
    words: int
    names: list[Name]

    def over(self) -> list[Breach]:
        """The breaches of each rule with more of them than its goal."""
        counts = Counter(breach.rule for breach in self.breaches)
        counts["opening"] -= self.sentences // SENTENCES_PER_OPENING
        counts["relative"] -= max(RELATIVES_FREE, self.words // WORDS_PER_RELATIVE)
        return [breach for breach in self.breaches if counts[breach.rule] > 0]


def is_test(name: str) -> bool:
    """True for tests, benchmarks and their shared files."""
    folders = name.split("/")
    return bool(TESTS & set(folders)) or folders[-1] in {"tests.rs", "conftest.py"}


def shipped_part(name: str, source: str) -> str:
    """The source without its tests, the end of a Rust file."""
    tests = INLINE_TESTS.search(source)
    return "" if is_test(name) else source[: tests.start()] if tests else source


def sentence_faults(kind: str, sentence: str) -> Iterator[tuple[str, str]]:
    """The rules broken by a sentence, each with advice."""
    if len(sentence.split()) >= SENTENCE_WORDS_MIN:
        opening = OPENING.match(sentence)
        free = kind == "heading" or sentence.endswith("?") or (kind == "message" and sentence.startswith(CONTINUED))
        if opening and not free:
            yield "opening", f"begin with the subject, a noun, not with {opening[1]!r}"
        if POSSESSIVE.fullmatch(sentence):
            yield "possessive", "end on the noun"
    for old in OLD_WORD.finditer(sentence):
        modern = next(modern for word, modern in OLD.items() if re.match(word, sentence[old.start() :], re.IGNORECASE))
        yield "old", f"{old[0]!r} is an old word: say {modern!r}"
    if kind == "comment":
        for relative in RELATIVE.findall(sentence):
            yield "relative", f"call the thing by its name, not by a clause with {relative!r}"


def cell_faults(text: str) -> Iterator[tuple[str, str]]:
    """The rule broken by a cell of a table, with advice."""
    words = sum(re.search(r"[\w`]", word) is not None for word in text.split())
    if words > CELL_WORDS_MAX:
        yield "cell", f"{words} words (limit {CELL_WORDS_MAX}); more is a section"


def read_prose(name: str, source: str) -> Prose:
    """The prose of a file."""
    written = [
        (source.count("\n", 0, part.start()) + 1, source.count("\n", 0, part.end()) + 1) for part in WRITTEN.finditer(source)
    ]
    shipped = shipped_part(name, source)
    own = own_names(name, shipped)
    bare = [function for function in own if function.free and function.one_word]
    found = [Breach(f"{name}:{function.line}", "name", BARE_NAME, function.name) for function in bare]
    sentences = words = 0
    for text in file_texts(name, source):
        if text.kind == "message" and text.line > shipped.count("\n"):
            continue
        if text.kind == "cell":
            found += [Breach(f"{name}:{text.line}", *fault, text.text) for fault in cell_faults(text.text)]
        if any(first <= text.line <= last for first, last in written):
            continue
        for line, sentence in text.sentences():
            length = len(sentence.split())
            sentences += length >= SENTENCE_WORDS_MIN
            words += length if text.kind == "comment" else 0
            found += [Breach(f"{name}:{line}", *fault, sentence) for fault in sentence_faults(text.kind, sentence)]
    return Prose(found, sentences, words, own)


def name_breaches(files: Mapping[str, Prose]) -> Iterator[Breach]:
    """The functions with a one-word name and the types, if their names are defined too often."""
    found = defaultdict[str, list[Breach]](list)
    for file, prose in files.items():
        for name in prose.names:
            rule = "type" if name.item in {"type", "class"} else "function"
            if rule == "type" or name.one_word:
                advice = "put its subject into its name" if rule == "type" else "say in its name what it acts on"
                found[f"{name.item} {name.name}"].append(Breach(f"{file}:{name.line}", rule, advice, name.name))
    for breaches in found.values():
        if len(breaches) > (TYPES_MAX if breaches[0].rule == "type" else FUNCTIONS_MAX):
            yield from breaches


def prose_breaches(files: Mapping[str, Prose]) -> Iterator[str]:
    """All breaches over the goals."""
    yield from (str(breach) for prose in files.values() for breach in prose.over())
    yield from map(str, name_breaches(files))
