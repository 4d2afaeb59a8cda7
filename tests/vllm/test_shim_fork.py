"""A session must not be used by a forked child: the mappings, the thread and the sidecar's trust belong to the parent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pillion import _shim


def _worker(socket: Path) -> _shim.WorkerSession:
    memory = os.memfd_create("kv")
    os.truncate(memory, 2 * 4096)
    return _shim.WorkerSession(str(socket), "engine", 1, 0, 0, 1, 2, [(0, 0, 4096, 4096)], [memory], "engine", {})


def _scheduler(socket: Path) -> _shim.SchedulerSession:
    return _shim.SchedulerSession(str(socket), "engine", 1, bytes(16), 0, True, False)


@pytest.mark.parametrize("make", [_worker, _scheduler])
def test_a_forked_child_is_refused(
    tmp_path: Path, make: Callable[[Path], _shim.WorkerSession | _shim.SchedulerSession]
) -> None:
    """The child's call fails with the remedy; the parent's call goes on."""
    session = make(tmp_path / "pillion.sock")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            session.stats()
        except _shim.ShimError as error:
            status = 0 if "make a new one" in str(error) else 2
        del session
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session.stats()
