"""Engines in processes of their own: process 1 of a container, several ranks, several GPUs, a GPU with its memory taken.

Each is a bare engine that compares every loaded word.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import bare_process
import pytest
import torch

from testkit import sidecar

DRAM = "512MiB"
# Lines of an engine until a test goes on; it loads some hundred blocks meanwhile.
LINES = 15
LOADED_BLOCKS_MIN = 100
# A process namespace of its own, as a container has: the command is process 1 there, and ends with `unshare`.
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
MEMORY_PART = 0.9
# The keys that a killed engine may have used after its last line.
KEYS_APART = 1_000_000


def go_on(process: bare_process.Process) -> None:
    """Waits until it has loaded blocks for a while."""
    for _ in range(LINES):
        process.found()
    while process.found()["loaded"] < LOADED_BLOCKS_MIN:
        pass


def number_inside(pid: int) -> int:
    """The number in its own namespace of the first process below `unshare`."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    status = Path(f"/proc/{children[0]}/status").read_text()
    return int(status.partition("NSpid:")[2].splitlines()[0].split()[-1])


def test_both_are_process_1(tmp_path: Path) -> None:
    """CUDA refuses to share memory between equal process numbers; in a pod both containers begin with 1."""
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this machine does not let us make a process namespace: {tried.stderr.strip()}")
    keeper = sidecar.Sidecar(tmp_path, DRAM, prefix=CONTAINER)
    try:
        keeper.wait_ready()
        with bare_process.running(tmp_path / "engine.log", CONTAINER, socket=str(keeper.socket)) as engine:
            assert number_inside(keeper.pid) == number_inside(engine.pid) == engine.last["pid"] == 1
            go_on(engine)
            found = engine.finish()
        print(f"both process 1: {found['loaded']} blocks loaded", flush=True)
        assert found["failed"] == 0
        assert keeper.metrics()["pillion_load_failures_total"] == 0
    finally:
        keeper.kill()
        keeper.pool.unlink(missing_ok=True)


@pytest.mark.supports("ranks")
@pytest.mark.parametrize("devices", [(0, 0), (0, 1)], ids=["two-ranks-on-one-gpu", "a-gpu-for-each-rank"])
def test_every_rank_gets_its_own_shards(tmp_path: Path, devices: tuple[int, int]) -> None:
    """A block is kept when every rank's part is, and loaded when every rank has its own."""
    if torch.cuda.device_count() <= max(devices):
        pytest.skip(f"SKIPPED: this machine has {torch.cuda.device_count()} GPU, this needs {max(devices) + 1}")
    with (
        sidecar.serving(tmp_path, DRAM) as keeper,
        bare_process.running(tmp_path / "engine.log", socket=str(keeper.socket), devices=devices) as engine,
    ):
        assert keeper.metrics()["pillion_sessions"] == 1 + len(devices)
        go_on(engine)
        found = engine.finish()
        print(f"ranks on GPUs {devices}: {found['loaded']} blocks loaded, both ranks' together", flush=True)
        assert found["failed"] == 0


def test_a_killed_engine_gives_its_memory_back(tmp_path: Path) -> None:
    """Although the sidecar has the memory open, the next engine gets the same part of the GPU, and finds the blocks of the
    first one."""
    with sidecar.serving(tmp_path, DRAM) as keeper:
        spare = bare_process.Process(tmp_path / "second.log")
        try:
            with bare_process.running(tmp_path / "first.log", socket=str(keeper.socket), memory_part=MEMORY_PART) as first:
                go_on(first)
                first.kill()
            killed = time.monotonic()
            kept = {"prompts": first.last["prompts"], "next_key": first.last["next_key"] + KEYS_APART}
            spare.start(socket=str(keeper.socket), memory_part=MEMORY_PART, **kept)
            spare.found()
            # The next engine waits for room for a few seconds at most, and ends without it.
            print(f"{MEMORY_PART:.0%} of the GPU: taken again {time.monotonic() - killed:.2f} s after the kill", flush=True)
            go_on(spare)
            assert spare.finish()["inherited"] > 0
        finally:
            spare.kill()
