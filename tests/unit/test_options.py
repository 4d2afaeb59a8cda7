"""scripts/options: an option becomes an item of docs/options.md."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from pillion.config import Config
from testkit import script

OPTION = {"flag": "a-b", "values": ["SIZE"], "value_needed": True, "variable": "P_A_B", "key": "mesh.b", "required": False}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    return script.loaded("options", monkeypatch)


@pytest.mark.parametrize(
    ("more", "item"),
    [
        (
            {"help": "What --it is [default: 4]\n\nAt most 9."},
            "- **`--a-b SIZE`, `P_A_B`, `mesh.b`** (default: 4)<br>\n  What `--it` is. At most 9.",
        ),
        (
            {"values": ["x|y"], "value_needed": False, "help": "One\nof | two."},
            "- **`--a-b[=x|y]`, `P_A_B`, `mesh.b`**<br>\n  One of | two.",
        ),
        ({"help": "It (required)", "key": None}, "- **`--a-b SIZE`, `P_A_B`** (required)<br>\n  It."),
        ({"help": "It", "default": "z", "variable": None, "key": None}, "- **`--a-b SIZE`** (default: z)<br>\n  It."),
        (
            {"help": "Files", "flag": None, "values": ["A", "B"], "variable": None, "key": None},
            "- **`A B`**<br>\n  Files.",
        ),
        (
            {"help": "Disk", "flag": "ssd", "variable": None, "key": None},
            "- **`--ssd SIZE`**<br>\n  Disk. [More](configuration.md#disks).",
        ),
    ],
)
def test_an_option_is_an_item(options: ModuleType, more: dict[str, Any], item: str) -> None:
    assert options.listed(OPTION | {"default": ""} | more) == item


def test_every_key_of_the_connector_has_an_item(options: ModuleType) -> None:
    items = [line for line in options.connector() if line.startswith("- **`pillion.")]
    assert len(items) == len(Config.__dataclass_fields__)
    assert all("; default: " in item for item in items)
