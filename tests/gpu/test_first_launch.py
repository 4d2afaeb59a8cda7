"""A kernel's first launch behind a load: it holds the driver's lock until the load has ended.

As a program: an engine with a sidecar frozen after its promise of a load, and a first launch behind the load.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import bare_engine
import bare_rank
import pytest
import torch

from testkit import sidecar

# Kernels without another launch here.
UNUSED = ["bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "airy_ai", "erfcx", "ndtri", "log_ndtr", "i0e", "i1e", "entr"]
ROUNDS = 200
# The watchdog of the rank takes the load back after 2 s and is itself taken for stuck after 30 s.
CHILD_WATCHDOG_S = 90


def launch_first_behind_loads(names: list[str]) -> None:
    """From now on every check of a load launches one kernel for the first time, until none is left."""
    values, check = torch.rand(1024, device="cuda"), bare_rank.Rank._check

    def checked(rank: bare_rank.Rank, *arguments: Any) -> None:
        if names:
            getattr(torch.special, names.pop())(values)
        check(rank, *arguments)

    setattr(bare_rank.Rank, "_check", checked)  # noqa: B010 - a method is replaced


@pytest.mark.parametrize("copier", ["engine", "sidecar"])
def test_first_launches_do_not_hold_up_a_load(tmp_path: Path, copier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load ends and every word of it is right, whichever side copies."""
    monkeypatch.setattr(bare_rank.Rank, "_check", bare_rank.Rank._check)
    names = list(UNUSED[:5] if copier == "engine" else UNUSED[5:])
    with sidecar.serving(tmp_path, "1GiB", gpu=copier == "sidecar") as keeper:
        engine = bare_engine.Engine(bare_engine.Options(keeper.socket, copier=copier, step_s=0.006))
        try:
            launch_first_behind_loads(names)
            found = engine.run(ROUNDS)
        finally:
            engine.end()
    assert not names, "no load: nothing was tested"
    assert found.wrong_words == 0 and found.failed == 0


def test_a_first_launch_behind_a_dead_promise_ends_within_a_minute(tmp_path: Path) -> None:
    """The load is rescued, or the worker ends with an error; it must not hang."""
    with sidecar.serving(tmp_path, "1GiB") as keeper:
        command = [sys.executable, __file__, str(keeper.socket), str(keeper.pid)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        child = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_WATCHDOG_S, check=False, env=environment)
        keeper.kill()
    print(f"exit status {child.returncode}: {child.stderr[-300:]}", flush=True)
    assert "promised" in child.stdout, f"no load was promised: nothing was tested\n{child.stderr}"
    if child.returncode == 0:
        assert "wrong 0" in child.stdout
    else:
        assert child.returncode == -signal.SIGABRT and "pillion: FATAL" in child.stderr, child.stderr


class Promised:
    """A scheduler's session whose sidecar freezes before its next load."""

    def __init__(self, engine: bare_engine.Engine, keeper: int) -> None:
        self._engine, self._session, self._keeper = engine, engine._scheduler, keeper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def load(self, *arguments: Any) -> list[bytes]:
        """Freezes the sidecar before the load, and puts the real session back."""
        os.kill(self._keeper, signal.SIGSTOP)
        print("promised", flush=True)
        self._engine._scheduler = self._session
        return self._session.load(*arguments)


def main(socket: Path, keeper: int) -> None:
    """Plays until the sidecar has promised a load, and freezes it then."""
    engine = bare_engine.Engine(bare_engine.Options(socket))
    engine.play(ROUNDS)
    engine._scheduler = cast("Any", Promised(engine, keeper))
    launch_first_behind_loads(UNUSED[:1])
    engine.play(ROUNDS)
    print(f"wrong {engine.rest().wrong_words}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
