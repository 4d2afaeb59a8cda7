"""Podman as the tests call it, the sidecar's image, and the file system of an engine's container."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import metrics, ports
from testkit.server import fetch
from testkit.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
# The user of the image.
USER = 65532
# Podman's own limits may be above those of this machine, and what nobody may raise fails the start.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""
# The Debian whose Python is of the minor version that runs the tests: wheels are of one minor version.
SUITES = {11: "bookworm", 13: "trixie"}


class Podman:
    """Podman with a store of its own, and no use of systemd."""

    def __init__(self, folder: Path) -> None:
        """`folder` has a short path: podman takes 50 bytes for what lies in it."""
        options = {"root": folder / "store", "runroot": folder / "run", "storage-driver": "vfs", "runtime": "runc"}
        options |= {"cgroup-manager": "cgroupfs", "events-backend": "file"}
        configuration = folder / "containers.conf"
        configuration.write_text(CONFIGURATION)
        self.command = (
            "env",
            f"CONTAINERS_CONF={configuration}",
            "podman",
            *(f"--{name}={value}" for name, value in options.items()),
        )

    def __call__(self, *words: object) -> str:
        """What a command prints on both streams."""
        done = subprocess.run(
            [*self.command, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert done.returncode == 0, f"podman {words}: {done.stdout}"
        return done.stdout.strip()

    def inspect(self, container: str, what: str) -> str:
        """A part of a container's state."""
        return self("inspect", "--format", f"{{{{.State.{what}}}}}", container)


class Sidecar:
    """A sidecar in a container, from the image or from what is given, and the folders that it shares with an engine."""

    def __init__(
        self, podman: Podman, folder: Path, *options: object, start: tuple[object, ...] = (), more: tuple[str, ...] = ()
    ) -> None:
        """`options` of podman's; `start` is what is run in place of the image, `more` are arguments of `serve`."""
        self._podman = podman
        self.socket = folder / "socket/pillion.sock"
        self._http = f"127.0.0.1:{ports.free_port()}"
        for shared in ("socket", "disk"):
            (folder / shared).mkdir(exist_ok=True)
            os.chown(folder / shared, USER, USER)
        rights = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")
        volumes = (f"--volume={folder}/socket:/run/pillion", f"--volume={folder}/disk:/var/lib/pillion")
        image = start or (podman("images", "--quiet", "localhost/pillion"),)
        serve = ("serve", "--socket=/run/pillion/pillion.sock", f"--http={self._http}", *more)
        self.name = podman("run", "--detach", *rights, *volumes, *options, *image, *serve).splitlines()[-1]

    def wait_ready(self) -> None:
        """Until engines can be served."""

        def ready() -> bool:
            state = self._podman.inspect(self.name, "Status")
            assert state == "running", self._podman("logs", self.name)
            return fetch(f"http://{self._http}/readyz") is not None

        wait_for(ready, "sidecar in a container")

    def status(self) -> dict[str, str]:
        """What the kernel says of the process; `root` are the options of the mount of its root folder."""
        pid = self._podman.inspect(self.name, "Pid")
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mounts = (line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
        root = next(mount[5] for mount in mounts if mount[4] == "/")
        return dict(line.split(":\t", 1) for line in lines) | {"root": root}

    def logs(self) -> str:
        """What it wrote so far."""
        return self._podman("logs", self.name)

    def wait_written(self, blocks: int) -> None:
        """Until so many blocks are on its disks."""

        def written() -> bool:
            return (
                metrics.totals(fetch(f"http://{self._http}/metrics") or "").get("pillion_ssd_written_blocks_total", 0) >= blocks
            )

        wait_for(written, f"{blocks} blocks on the disk")

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self._podman("stop", "--time=60", self.name)
        return int(self._podman.inspect(self.name, "ExitCode"))

    def kill(self) -> None:
        """SIGKILL."""
        self._podman("kill", "--signal=KILL", self.name)
        self._podman("wait", self.name)

    def start(self) -> None:
        """The same container again, as a kubelet starts it."""
        self._podman("start", self.name)
        self.wait_ready()

    def remove(self) -> None:
        """Whatever state it is in."""
        self._podman("rm", "--force", "--time=0", self.name)


@contextlib.contextmanager
def started(podman: Podman, folder: Path, *options: object, more: tuple[str, ...] = ()) -> Iterator[Sidecar]:
    """A sidecar from the image that is ready."""
    sidecar = Sidecar(podman, folder, *options, more=more)
    try:
        sidecar.wait_ready()
        yield sidecar
    finally:
        sidecar.remove()


def debian() -> Path:
    """The file system of a Debian with Python and what vLLM's wheel links; made once, kept under .cache."""
    suite = SUITES.get(sys.version_info.minor)
    if suite is None:
        pytest.skip(f"SKIPPED: no Debian has Python 3.{sys.version_info.minor}; these have one: {SUITES}")
    folder = ROOT / ".cache" / f"debian-{suite}"
    if not folder.exists():
        unfinished = folder.with_suffix(".new")
        # vLLM compiles some of its kernels when it starts.
        packages = "--include=python3-dev,libnuma1,g++,openssl"
        subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", packages, suite, unfinished], check=True)
        unfinished.rename(folder)
    return folder


def in_debian(podman: Podman, *options: str) -> tuple[str, ...]:
    """What runs a command of this Python in a container, by Debian's Python with the packages of this one."""
    libraries = sysconfig.get_path("purelib")
    volumes = (f"--volume={libraries}:{libraries}", f"--volume={ROOT}/tests:{ROOT}/tests")
    run = (*podman.command, "run", "--rm", "--interactive", "--env-host", *volumes, *options, "--rootfs", str(debian()))
    # The command's first word is this machine's interpreter.
    return (*run, "sh", "-c", f'PYTHONPATH="$PYTHONPATH:{libraries}" PATH=/usr/bin:/bin exec python3 "$@"')
