"""scripts/edges: its import loops, and its errors where its lists differ from the code."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from testkit import script


@pytest.fixture
def edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a crate in `tmp_path` with empty lists."""
    module = script.loaded("edges", monkeypatch)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CRATE_EDGES", {})
    return module


def loops(edges: ModuleType, folder: Path, **files: str) -> list[list[str]]:
    """The loops of a crate with these files; `a__b` is a/b.rs."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.rs"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return [edges.members(loop) for loop in edges.loops(edges.rust_graph(folder / "lib.rs"))]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("use crate::b::B;", "use super::a::A;"),
        ("use crate::{c::C, b::{self, B}};", "fn f() { crate::a::f() }"),
        ("use crate::GivenOn;", "use crate::a::A as Other;"),
        ("use super::b;", "mod own { use super::super::a::A; }"),
    ],
)
def test_each_way_of_naming_a_module_is_an_edge(edges: ModuleType, tmp_path: Path, a: str, b: str) -> None:
    found = loops(edges, tmp_path, lib="mod a; mod b; mod c; pub use b::GivenOn;", a=a, b=b, c="pub struct C;")
    assert found == [["a", "b"]]


@pytest.mark.parametrize(
    "b",
    [
        "// use crate::a::A;\n/* use crate::a::A; */",
        'const TEXT: &str = r#"use crate::a::A;"#;',
        "#[cfg(test)]\nmod tests { use crate::a::A; }",
        "#[cfg(test)]\nuse crate::a::A;",
        "pub(in crate::a) struct B;",
        "use other::a::A;",
    ],
)
def test_what_is_no_edge(edges: ModuleType, tmp_path: Path, b: str) -> None:
    assert loops(edges, tmp_path, lib="mod a; mod b;", a="use crate::b::B;", b=b) == []


def test_a_child_belongs_to_its_parent(edges: ModuleType, tmp_path: Path) -> None:
    files = {"lib": "mod a; mod b;", "a": "mod child; use child::Child;", "a__child": "use super::A;"}
    assert loops(edges, tmp_path, **files, b="") == []
    assert loops(edges, tmp_path, **files | {"a__child": "use crate::b::B;"}, b="use crate::a::A;") == [["a", "b"]]
    assert edges.count_rooms(edges.rust_graph(tmp_path / "lib.rs")) == (2, 2)


def test_a_loop_is_told_with_its_edges(edges: ModuleType, tmp_path: Path) -> None:
    loops(edges, tmp_path, lib="mod a; mod b;", a="use crate::b::B;", b="use crate::a::A;")
    told = list(edges.loop_breaches("unit", edges.rust_graph(tmp_path / "lib.rs")))
    assert told[0].startswith("a loop in unit: a b;")
    assert told[1:] == ["  a.rs:1: crate::b::B", "  b.rs:1: crate::a::A"]


def test_edges_between_crates_are_the_allowed_ones(edges: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [
        {"name": "upper", "dependencies": [{"name": "lower", "kind": None, "path": "/"}, {"name": "libc", "kind": None}]},
        {"name": "lower", "dependencies": []},
    ]
    assert ["upper depends on lower" in line for line in edges.crate_breaches(packages)] == [True]
    monkeypatch.setattr(edges, "CRATE_EDGES", {("upper", "lower", ""): "why"})
    assert list(edges.crate_breaches(packages)) == []
    monkeypatch.setattr(edges, "CRATE_EDGES", {("upper", "lower", ""): "why", ("lower", "upper", "dev"): "why"})
    assert ["is no more" in line for line in edges.crate_breaches(packages)] == [True]


def test_python_modules(edges: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "pillion"
    package.mkdir()
    (package / "a.py").write_text("import torch\nfrom pillion.b import B\n")
    (package / "b.py").write_text("from . import c\n")
    (package / "c.py").write_text("from .a import A\n")
    assert [edges.members(loop) for loop in edges.loops(edges.python_graph(package))] == [["a", "b", "c"]]
