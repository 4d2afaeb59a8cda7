"""The stub of the native module has its signatures: a signature changed on one side alone is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / "python"


def test_the_stub_is_that_of_the_module() -> None:
    # This checkout's stub, and the module of the installed wheel.
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "pillion._shim"]
    environment = os.environ | {"MYPYPATH": str(PYTHON)}
    compared = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert compared.returncode == 0, compared.stdout + compared.stderr
