"""Every GPU benchmark starts without a GPU: its command line, its servers and its processes, up to where vLLM is imported."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benches.gpu import rig
from testkit.child import python_path

NAMES = re.findall(r"^gpu/(\w+)$", (rig.ROOT / "benches/run").read_text(), re.MULTILINE)
COMMANDS = re.findall(r"^benches/run gpu/(\w+) *(.*)$", (rig.ROOT / "benches/gpu/README.md").read_text(), re.MULTILINE)
# A benchmark ends here with the import of vLLM, or with torch's search for a GPU.
END = "this vLLM is a test's"
NO_GPU = re.compile("NVIDIA driver|CUDA")
ARGUMENTS = {"limits": ["--cpu", "--quick", "--cases", "cpu bf16$"]}
RUN_WATCHDOG_S = 120


@pytest.fixture(scope="session")
def without_vllm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without an importable vLLM."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").write_text(f"raise ImportError({END!r})\n")
    return os.environ | python_path([folder, rig.ROOT])


@pytest.mark.parametrize("name", NAMES)
def test_it_starts(name: str, without_vllm: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", f"benches.gpu.{name}", *ARGUMENTS.get(name, ["--tiny"])]
    if name == "limits":
        command += ["--logs", str(tmp_path)]
    ran = subprocess.run(command, env=without_vllm, capture_output=True, text=True, timeout=RUN_WATCHDOG_S, check=False)
    said = ran.stdout + ran.stderr + "".join(log.read_text() for log in tmp_path.iterdir())
    assert ran.returncode == 1, said
    assert NO_GPU.search(said) if name == "raw" else END in said, said
    assert "AttributeError" not in said, said


@pytest.mark.parametrize(("name", "arguments"), COMMANDS)
def test_a_documented_command_line_is_understood(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = getattr(importlib.import_module(f"benches.gpu.{name}"), "BENCH", None)
    if bench is None:
        assert not arguments, "a benchmark that reads its own command line"
        return
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments)])
    rig.arguments(bench)
