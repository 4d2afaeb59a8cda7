"""vLLM's requests and steps are read in two modules: the others get numbers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python/pillion"
READERS = {"scheduler.py", "vllm_compat.py"}
TYPES = {"Request", "LoRARequest", "SchedulerOutput", "KVCacheBlocks", "BlockPool"}
# Names of the same things where they have no type.
NAMES = {"request", "scheduler_output", "output", "pool", "block_pool"}
OTHERS = {"StepOutput", "KVConnectorOutput"}


def annotated(argument: ast.arg) -> str:
    """The name of an argument's type."""
    return ast.unparse(argument.annotation).split(" | ")[0] if argument.annotation else ""


def attributes_read(source: str) -> list[str]:
    """Attributes of arguments of these types, as `line: name.attribute`. Classes of the module itself are no types of vLLM."""
    found, module = [], ast.parse(source)
    own = {each.name for each in module.body if isinstance(each, ast.ClassDef)}
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        meant = {
            each.arg
            for each in arguments
            if annotated(each) in TYPES - own or (each.arg in NAMES and annotated(each) not in OTHERS | own)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in meant:
                found.append(f"{node.lineno}: {node.value.id}.{node.attr}")
    return found


@pytest.mark.parametrize("module", sorted(path.name for path in PACKAGE.glob("*.py") if path.name not in READERS))
def test_no_other_module_reads_them(module: str) -> None:
    assert attributes_read((PACKAGE / module).read_text()) == []


def test_a_reader_is_noticed() -> None:
    assert attributes_read("def f(a: Request): return a.num_tokens") == ["1: a.num_tokens"]
    assert attributes_read("def f(output: StepOutput): return output.step") == []
    assert attributes_read("class Request: ...\ndef f(request: Request): return request.number") == []
    assert all(attributes_read((PACKAGE / reader).read_text()) for reader in READERS)
