"""A script of scripts/ as a module, for the tests of its functions."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Loads the script again, so a test may change its constants. Python knows the module during the test: its data classes
    need that.

    Its imports from scripts/ are found beside it.
    """
    monkeypatch.syspath_prepend(str(SCRIPTS))
    loader = SourceFileLoader(name, str(SCRIPTS / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    loader.exec_module(module)
    return module
