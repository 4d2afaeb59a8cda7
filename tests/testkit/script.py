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
    """It anew, so that a test may change its constants; known to Python for the time of the test, as its data classes need.

    What it imports of scripts/ is found beside it.
    """
    monkeypatch.syspath_prepend(str(SCRIPTS))
    loader = SourceFileLoader(name, str(SCRIPTS / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    loader.exec_module(module)
    return module
