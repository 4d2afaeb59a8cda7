"""Every overridden hook of PillionConnector exists in vLLM, with its parameters and spelling; the same holds for wrapped
methods.

The installed vLLM is inspected; others are known from signatures.json (scripts/capture-vllm-signatures).
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pillion import vllm_compat, watch

Parameters = list[list[Any]]
Captured = dict[str, dict[str, Parameters]]
SECTIONS: dict[str, Captured] = json.loads(Path(__file__).with_name("signatures.json").read_text())
CAPTURED: Captured = {version: sections["hooks"] for version, sections in SECTIONS.items()}
# The wrapped methods were not captured for 0.29.
WATCHED: Captured = {version: sections["watched"] for version, sections in SECTIONS.items() if "watched" in sections}
INSTALLED = "0.32.0"
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.VAR_POSITIONAL: "args",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}


def _function(owner: Any, name: str) -> Callable[..., Any]:
    member = inspect.getattr_static(owner, name)
    if isinstance(member, property):
        assert member.fget is not None
        return member.fget
    return member.__func__ if isinstance(member, (classmethod, staticmethod)) else member


def _parameters(owner: Any, name: str, bound: bool = True) -> Parameters:
    signature = inspect.signature(_function(owner, name))
    found = [[p.name, KINDS[p.kind], p.default is not p.empty] for p in signature.parameters.values()]
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    found = found[1:] if bound and not static else found
    return [[name, kind, True if kind in ("args", "kwargs") else default] for name, kind, default in found]


def _accepts(ours: Parameters, theirs: Parameters) -> bool:
    """True if every call that fits `theirs`, by position or by name, fits `ours`."""
    kinds = {kind for _, kind, _ in ours}
    positional = [parameter for parameter in ours if parameter[1] == "positional"]
    by_name = {name: default for name, kind, default in ours if kind in ("positional", "keyword")}
    for index, (name, kind, default) in enumerate(theirs):
        if kind in ("args", "kwargs"):
            if kind not in kinds:
                return False
            continue
        if name not in by_name and "kwargs" not in kinds:
            return False
        in_place = index < len(positional) and positional[index][0] == name
        if kind == "positional" and not in_place and "args" not in kinds:
            return False
        if default and not by_name.get(name, True):
            return False
    known = {name for name, _, _ in theirs}
    return all(default or name in known for name, _, default in ours)


def _connector() -> type:
    connector: type = importlib.import_module("pillion.connector").PillionConnector
    return connector


def _overridden() -> list[str]:
    """Hooks defined by Pillion's own classes, and every other public name they have."""
    owners = [owner for owner in _connector().__mro__ if owner.__module__.startswith("pillion")]
    names = {name for owner in owners for name in vars(owner)}
    return sorted(name for name in names if name == "__init__" or not name.startswith("_"))


def test_installed_vllm_is_what_was_captured() -> None:
    """The capture script reads the same signatures as Python does; a new vLLM needs a new capture."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    for name, expected in CAPTURED[INSTALLED].items():
        owner = base.KVConnectorBase_V1 if hasattr(base.KVConnectorBase_V1, name) else base.SupportsHMA
        if name == "__init__" or name in vars(owner):
            assert _parameters(owner, name) == expected, name


def test_connector_overrides_what_a_cache_must() -> None:
    """The abstract methods of vLLM, and the methods with a default unfit for a cache."""
    needed = {"start_load_kv", "wait_for_save", "get_num_new_matched_tokens", "update_state_after_alloc"}
    needed |= {"build_connector_meta", "request_finished_all_groups", "get_finished", "reset_cache"}
    assert needed <= set(_overridden())


@pytest.mark.parametrize("version", CAPTURED)
def test_every_hook_fits(version: str) -> None:
    """Each hook accepts the arguments of this vLLM; a hook unknown to it is a newer one, never misspelt."""
    known_anywhere = {name for hooks in CAPTURED.values() for name in hooks}
    for name in _overridden():
        assert name in known_anywhere, f"{name} is a hook of no vLLM: misspelled, or wrongly public"
        if name not in CAPTURED[version]:
            later = {other for other in CAPTURED if name in CAPTURED[other]}
            assert version < min(later), f"{name} is gone in vLLM {version}"
            continue
        ours, theirs = _parameters(_connector(), name), CAPTURED[version][name]
        assert _accepts(ours, theirs), f"{name}{ours} does not take what vLLM {version} passes: {theirs}"


# --- wrapped methods ---


def test_installed_classes_are_what_was_captured() -> None:
    """As for the hooks."""
    modules = {"EngineCore": "vllm.v1.engine.core", "BlockPool": "vllm.v1.core.block_pool"}
    for name, expected in WATCHED[INSTALLED].items():
        owner, _, method = name.partition(".")
        if method:
            assert _parameters(getattr(importlib.import_module(modules[owner]), owner), method) == expected, name


@pytest.mark.parametrize("version", WATCHED)
def test_every_wrapped_method_is_defined_once(version: str) -> None:
    """No class derived from the engine core's bypasses the wrapped methods."""
    methods = {name for name in WATCHED[version] if "." in name}
    assert methods == {f"EngineCore.{name}" for name in watch.AROUND} | {"BlockPool.reset_prefix_cache"}


@pytest.mark.parametrize("version", WATCHED)
def test_wrapped_methods_are_called_as_known(version: str) -> None:
    """Pillion's wrappers rely on the names and places of these parameters."""
    first = {name: parameters[0][0] for name, parameters in WATCHED[version].items() if parameters and "." in name}
    assert first["EngineCore.collective_rpc"] == "method"
    assert first["EngineCore.add_lora"] == "lora_request"
    assert first["EngineCore.remove_lora"] == "lora_id"
    assert WATCHED[version]["BlockPool.reset_prefix_cache"] == []
    fields = {name for name, _, _ in WATCHED[version]["LoRARequest"]}
    assert {"lora_name", "lora_int_id", "lora_path", "load_inplace", "is_3d_lora_weight"} <= fields


@pytest.mark.parametrize("version", WATCHED)
def test_the_wrapped_hasher_is_made_as_vllm_makes_it(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM passes its arguments by position or by name."""
    core = importlib.import_module("vllm.v1.engine.core")
    monkeypatch.setattr(core, "get_request_block_hasher", core.get_request_block_hasher)
    vllm_compat.wrap_next_block_hasher(lambda vllms, *block: vllms)
    assert _accepts(_parameters(core, "get_request_block_hasher", bound=False), WATCHED[version]["get_request_block_hasher"])


# --- the comparison itself ---


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ([["a", "positional", False]], [["a", "positional", False]], True),
        ([["b", "positional", False]], [["a", "positional", False]], False),
        ([["a", "positional", False]], [["a", "positional", True]], False),
        ([["a", "positional", False], ["b", "positional", True]], [["a", "positional", False]], True),
        ([["a", "positional", False], ["b", "positional", False]], [["a", "positional", False]], False),
        ([["args", "args", True], ["kw", "kwargs", True]], [["a", "positional", False]], True),
        ([["a", "positional", False]], [["a", "positional", False], ["kw", "kwargs", True]], False),
    ],
)
def test_the_comparison_itself(ours: Parameters, theirs: Parameters, fits: bool) -> None:
    """The other tests rely on this rule."""
    assert _accepts(ours, theirs) is fits
