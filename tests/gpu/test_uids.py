"""Sidecar and engine of different users and one group, as deploy/ runs them: CUDA shares memory between them.

Needs root, and files of Python and Pillion that are readable for everybody.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bare_process
import pytest

from testkit import sidecar

DRAM = "512MiB"
GROUP = 2000
SIDECAR_USER = 65532
ENGINE_USERS = {"another-user": 2000, "root": 0, "the-same-user": SIDECAR_USER}
LOADED_BLOCKS_MIN = 100
# Everybody may enter, and the group may write, as in a volume of Kubernetes with a group.
SHARED = 0o2775


def of(user: int) -> tuple[str, ...]:
    """The words before a command that run it as a user of the group, without root's capabilities."""
    number = ("setpriv", f"--reuid={user}", f"--regid={GROUP}", "--clear-groups", "--no-new-privs")
    return (*number, "--bounding-set=-all", "--inh-caps=-all")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder for both users: pytest's own is for its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="pillion-uids-"))
    try:
        os.chown(folder, SIDECAR_USER, GROUP)
        folder.chmod(SHARED)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("user", ENGINE_USERS.values(), ids=ENGINE_USERS)
def test_an_engine_of_another_user_is_served(shared: Path, user: int) -> None:
    """The engine compares every loaded word."""
    command = [*of(max(user, 1)), sys.executable, "-c", "import torch, pillion._shim; torch.zeros(1, device='cuda')"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"SKIPPED: other users cannot run an engine here: {' '.join(tried.stderr.splitlines()[-1:])}")
    group = ("--socket-group", str(GROUP))
    log = shared / "engine.log"
    with sidecar.serving(shared, DRAM, prefix=of(SIDECAR_USER), more=group) as keeper:
        assert Path(f"/proc/{keeper.pid}").stat().st_uid == SIDECAR_USER
        try:
            with bare_process.running(log, of(user), socket=str(keeper.socket)) as engine:
                assert Path(f"/proc/{engine.pid}").stat().st_uid == user
                while engine.found()["loaded"] < LOADED_BLOCKS_MIN:
                    pass
                found = engine.finish()
        except Exception as error:
            raise keeper.failed(f"{error}\n--- sidecar") from error
        print(f"sidecar {SIDECAR_USER}, engine {user}: {found['loaded']} blocks loaded", flush=True)
        assert found["failed"] == 0
        assert keeper.metrics()["pillion_load_failures_total"] == 0
