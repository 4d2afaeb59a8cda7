"""Two engines, a sidecar and a router by one command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testkit import model, ports, sidecar, tokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/prefill_decode.py"
WATCHDOG_S = 900


@pytest.mark.supports("handover")
def test_one_command_prints_an_answer_of_two_engines(tmp_path: Path) -> None:
    """Most of the prompt comes from the other engine; all four programs end, and none of their ports stays open."""
    shape = model.write(tmp_path / "model", model.TINY)
    tokenizer.write(shape)
    port = ports.free_port()
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command: list[str | Path] = [sys.executable, EXAMPLE, shape, "--dram", "256MiB", "--port", str(port), "--once"]
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in settings.items()), *command, "--dtype", "float32", "--enforce-eager"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{sidecar.find_binary().parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"loaded (\d+) of the prompt's (\d+) tokens", done.stdout)
    assert found, done.stdout
    loaded, tokens = map(int, found.groups())
    assert tokens > 2000 and loaded > 0.9 * tokens
