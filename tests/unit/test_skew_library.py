"""The structs of tests/skew/library.py equal those of the C header: the library writes past the end of a shorter one."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/skew"))
import library  # noqa: E402

STRUCT = re.compile(r"typedef struct Pillion(\w+) \{(.*?)\n\} Pillion\1;", re.DOTALL)
FIELD = re.compile(r"(\w+);$", re.MULTILINE)


def test_every_struct_has_the_fields_of_the_header() -> None:
    header = (ROOT / "connector-shim/include/pillion.h").read_text()
    stated = {name: FIELD.findall(body) for name, body in STRUCT.findall(header)}
    written = {
        name: [field[0] for field in kind._fields_]
        for name, kind in vars(library).items()
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and name in stated
    }
    assert {"SchedulerState", "WorkerOptions", "Loaded"} <= written.keys()
    assert written == {name: stated[name] for name in written}
