"""The last lines of scripts/demo.py, and its one line for each failure that the reader can mend."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from testkit import script
from testkit.child import Child
from testkit.process import Process
from testkit.waiting import Failed

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    found = script.loaded("demo.py", monkeypatch)
    monkeypatch.setattr(found, "OUT", tmp_path / "demo-out")
    monkeypatch.setattr(found.model, "write", lambda *_: tmp_path)
    return found


def read_failure(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> str:
    """The only line of a demo that fails with status 1."""
    assert demo.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


def make_row(demo: ModuleType, tokens_equal: bool = True) -> Any:
    tokens = demo.prompts.hit_tokens(1_500)
    loaded = tokens // demo.engine.BLOCK_TOKENS * demo.BLOCK_BYTES
    row = demo.Row(1_500, 2.0, 0.05, tokens, loaded, tokens_equal=True, logprobs_equal=True)
    return dataclasses.replace(row, tokens_equal=tokens_equal)


def test_the_last_lines_have_both_times_and_the_comparison(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "play", lambda _: [make_row(demo)])
    assert demo.main() == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "First token of 1500 tokens: 2,000 ms computed, 50 ms from the cache after the engine's restart (40 x faster).",
        "Equal answers before and after the restart: 1 of 1.",
    ]


def test_a_different_answer_is_a_failure(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "play", lambda _: [make_row(demo, tokens_equal=False)])
    assert read_failure(demo, capsys) == "demo: FAILED: 1500: the warm tokens differ"


def test_a_sidecar_that_does_not_start(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    binary = tmp_path / "pillion"
    binary.write_text("#!/bin/sh\necho '2026-11-28T21:43:23Z ERROR 127.0.0.1:9 is in use; pass another --http' >&2\nexit 2\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PILLION_BINARY", str(binary))
    line = read_failure(demo, capsys)
    assert line.startswith("demo: FAILED: sidecar: ended with status 2: 127.0.0.1:9 is in use; pass another --http (log: ")


def test_no_executable(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PILLION_BINARY", "/no/such/pillion")
    assert "install Pillion's wheel" in read_failure(demo, capsys)


def test_an_error_of_the_engine_has_its_cause_from_the_log(demo: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "first-engine.log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-28 21:43:22 [core.py:1] ValueError: too little memory; lower VLLM_CPU_KVCACHE_SPACE\n"
        "(MainProcess pid=6) WARNING 11-28 22:21:59 [base.py:380] ValueError: Tokenizer not available\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    reason = "RuntimeError: Engine core initialization failed. See root cause above.\nmore"
    assert demo.explain(Failed(reason, "\n--- log", log)) == (
        "first-engine: RuntimeError: Engine core initialization failed. See root cause above."
        f": ValueError: too little memory; lower VLLM_CPU_KVCACHE_SPACE (log: {log})"
    )


def test_a_slow_start_says_how_to_wait_longer(demo: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "first-engine.log"
    child = Child(["sleep", "60"], log)
    try:
        with pytest.raises(Failed) as slow:
            child.hear(0.01)
    finally:
        child.close()
    line = f"no answer in 0.01 s; set WATCHDOG_FACTOR=3 to wait 0.03 s (log: {log})"
    assert demo.explain(slow.value) == f"first-engine: {line}"


def test_a_slow_exit_says_how_to_wait_longer() -> None:
    process = Process(subprocess.Popen(["sleep", "60"], process_group=0), ["sleep", "60"], None)
    try:
        with pytest.raises(Failed, match=r"^no exit in 0\.01 s; set WATCHDOG_FACTOR=3 to wait 0\.03 s: sleep 60$"):
            process.wait_exit(0.01)
    finally:
        process.kill()


@pytest.mark.parametrize(("given", "printed"), [("5", "5.0 300.0"), ("0", ""), ("nan", ""), ("long", "")])
def test_the_factor_of_watchdogs(given: str, printed: str) -> None:
    code = "from testkit import waiting; print(waiting.FACTOR, waiting.allow(waiting.WATCHDOG_S))"
    environment = os.environ | {"WATCHDOG_FACTOR": given, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == printed
    assert done.stderr == ("" if printed else f"WATCHDOG_FACTOR is {given!r}: make it a number above 0, such as 3\n")


def test_too_little_room(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "ROOM", {tmp_path: 1 << 60})
    line = read_failure(demo, capsys)
    assert f"{tmp_path} has " in line and line.endswith(f"the demo needs {1 << 40} MiB: make room, or enlarge it")


def test_a_disk_that_fills_up(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fill(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/demo-out/demo.json")

    monkeypatch.setattr(demo, "play", fill)
    assert "No space left on device: '/demo-out/demo.json': correct this" in read_failure(demo, capsys)
