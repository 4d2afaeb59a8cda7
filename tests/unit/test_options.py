"""scripts/options: how an option becomes a row of docs/options.md, and what is said of a page that differs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from testkit import script

OPTION = {"flag": "a-b", "values": ["SIZE"], "value_needed": True, "variable": "P_A_B", "key": "mesh.b", "required": False}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    return script.loaded("options", monkeypatch)


@pytest.mark.parametrize(
    ("more", "row"),
    [
        (
            {"help": "What --it is [default: 4]\n\nAt most 9."},
            ["`--a-b SIZE`<br>`P_A_B`<br>`mesh.b`", "4", "What `--it` is. At most 9."],
        ),
        (
            {"values": ["x|y"], "value_needed": False, "help": "One\nof | two."},
            ["`--a-b[=x\\|y]`<br>`P_A_B`<br>`mesh.b`", "off", "One of \\| two."],
        ),
        ({"help": "It (required)", "key": None}, ["`--a-b SIZE`<br>`P_A_B`", "required", "It."]),
        ({"help": "It", "default": "z", "variable": None, "key": None}, ["`--a-b SIZE`", "z", "It."]),
        ({"help": "Files", "flag": None, "values": ["A", "B"], "variable": None, "key": None}, ["`A B`", "none", "Files."]),
    ],
)
def test_an_option_is_a_row(options: ModuleType, more: dict[str, Any], row: list[str]) -> None:
    assert options.row(OPTION | {"default": ""} | more) == row


def test_every_key_of_the_connector_has_a_row(options: ModuleType) -> None:
    rows = [line for line in options.connector() if line.startswith("| `pillion.")]
    assert len(rows) == len(options.config.Config.__dataclass_fields__)
    assert all(len(row.replace("\\|", "").split("|")) == 6 for row in rows)
