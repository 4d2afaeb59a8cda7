"""The image of `make dist`, run as in a pod: no root, no capabilities, a read-only root folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy

from containers import ROOT, USER, Podman, started
from pillion.engine import Engine
from testkit import namespaces
from testkit.waiting import wait_for

LAYERS, HEADS, TOKENS, DIM = 16, 8, 32, 32
# Blocks of 1 MiB: memory has room for two thirds of them, the disk for all.
BLOCKS, PROMPTS = 4, 6
TIERS = ("--dram=16MiB", "--ssd=/var/lib/pillion:64MiB:create", "--gpu=off")


def prompt(number: int) -> list[int]:
    """Tokens of this prompt alone."""
    return list(range(1000 * number, 1000 * number + BLOCKS * TOKENS))


def kv(number: int) -> Any:
    """K and V of a prompt, computed from its number."""
    shape = (2, LAYERS, HEADS, BLOCKS * TOKENS, DIM)
    return numpy.random.default_rng(number).standard_normal(shape, dtype=numpy.float32)


def joined(socket: Path) -> Engine:
    """An engine connected to the sidecar."""
    known = namespaces.new(layers=LAYERS, heads=HEADS, tokens=TOKENS, dim=DIM)
    return Engine(socket, "engine", known, BLOCKS, check_every=0)


def loaded(socket: Path) -> int:
    """The number of kept blocks of all prompts; each must have the saved bytes."""
    found = 0
    with joined(socket) as engine:
        for number in range(PROMPTS):
            with engine.load([*prompt(number), 0]) as request:
                for read, right in zip(engine.read(request), kv(number), strict=True):
                    assert numpy.array_equal(read, right[:, :, : request.held])
                found += request.held // TOKENS
    return found


def test_it_runs_without_rights_and_ends_when_it_is_told_to(podman: Podman, tmp_path: Path) -> None:
    """Under the shipped seccomp profile, where the disk uses io_uring."""
    profile = ROOT / "deploy/seccomp/pillion.json"
    with started(podman, tmp_path, "--network=host", f"--security-opt=seccomp={profile}", more=TIERS) as sidecar:
        status = sidecar.status()
        assert {*status["Uid"].split(), *status["Gid"].split()} == {str(USER)}
        assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert "ro" in status["root"].split(",")
        assert "threads read and write the disks" not in sidecar.logs()
        assert sidecar.stop() == 0


def test_its_disk_works_by_threads_under_the_default_profile(podman: Podman, tmp_path: Path) -> None:
    """More than memory holds is saved and loaded, with equal bytes; then again by the next sidecar, from the disk alone."""
    with started(podman, tmp_path, "--network=host", more=TIERS) as sidecar:
        assert "threads read and write the disks" in sidecar.logs()
        with joined(sidecar.socket) as engine:
            for number in range(PROMPTS):
                with engine.load(prompt(number)) as request:
                    assert engine.save(request, prompt(number), *kv(number)) == BLOCKS
                # Memory evicts a block, written or not, once there is no room.
                sidecar.wait_written((number + 1) * BLOCKS)
        assert loaded(sidecar.socket) == PROMPTS * BLOCKS
        assert sidecar.stop() == 0
    with started(podman, tmp_path, "--network=host", more=TIERS) as again:
        assert loaded(again.socket) == PROMPTS * BLOCKS


def test_it_starts_by_its_own_defaults(podman: Podman) -> None:
    """No volume is mounted, and no folder named: the image's user makes the socket."""
    image = podman("images", "--quiet", "localhost/pillion")
    name = podman("run", "--detach", "--network=none", image, "serve", "--dram=64MiB", "--gpu=off").splitlines()[-1]
    try:
        wait_for(lambda: "serving socket=/run/pillion/pillion.sock" in podman("logs", name), "a sidecar by its defaults")
    finally:
        podman("rm", "--force", "--time=0", name)


def test_it_brings_the_connector(podman: Podman, tmp_path: Path) -> None:
    """The init container of `pillion inject` copies it from there. Any Python can load it, with vLLM's entry point."""
    os.chown(tmp_path, USER, USER)
    image = podman("images", "--quiet", "localhost/pillion")
    rights = ("--network=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")
    podman("run", "--rm", *rights, f"--volume={tmp_path}:/opt/pillion", image, "connector", "--into=/opt/pillion")
    program = (
        "import importlib.metadata, pillion._shim;"
        "print(pillion._shim.__file__, *(e.value for e in importlib.metadata.entry_points(group='vllm.general_plugins')))"
    )
    told = subprocess.run(
        [sys.executable, "-S", "-c", program], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == [f"{tmp_path}/pillion/_shim.abi3.so", "pillion.plugin:register_names"]
