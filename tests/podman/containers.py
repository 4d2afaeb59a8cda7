"""Podman with the options of the tests, the sidecar's image, and the file system of an engine's container."""

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
# Podman's default limits may be above this machine's hard limits: then a container fails to start.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""
# The Debian release with the Python that runs the tests: a wheel is for one minor version.
SUITES = {11: "bookworm", 13: "trixie"}


class Podman:
    """Podman with a store of its own, and no use of systemd."""

    def __init__(self, folder: Path) -> None:
        """`folder` has a short path: podman allows 50 bytes for paths in it."""
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
        """The output of a command on both streams."""
        done = subprocess.run(
            [*self.command, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert done.returncode == 0, f"podman {words}: {done.stdout}"
        return done.stdout.strip()

    def inspect(self, container: str, what: str) -> str:
        """A part of a container's state."""
        return self("inspect", "--format", f"{{{{.State.{what}}}}}", container)


class Sidecar:
    """A sidecar in a container, from the image or another command, and the folders that it shares with an engine."""

    def __init__(
        self, podman: Podman, folder: Path, *options: object, start: tuple[object, ...] = (), more: tuple[str, ...] = ()
    ) -> None:
        """`options` are for podman; `start` is run in place of the image, and `more` are arguments of `serve`."""
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
        """Waits until the sidecar can serve engines."""

        def ready() -> bool:
            state = self._podman.inspect(self.name, "Status")
            assert state == "running", self._podman("logs", self.name)
            return fetch(f"http://{self._http}/readyz") is not None

        wait_for(ready, "sidecar in a container")

    def status(self) -> dict[str, str]:
        """The process's status fields in /proc; `root` has the options of its root folder's mount."""
        pid = self._podman.inspect(self.name, "Pid")
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mounts = (line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
        root = next(mount[5] for mount in mounts if mount[4] == "/")
        return dict(line.split(":\t", 1) for line in lines) | {"root": root}

    def logs(self) -> str:
        """The container's output so far."""
        return self._podman("logs", self.name)

    def wait_written(self, blocks: int) -> None:
        """Waits until so many blocks are on its disks."""

        def written() -> bool:
            return (
                metrics.totals(fetch(f"http://{self._http}/metrics") or "").get("pillion_ssd_written_blocks_total", 0) >= blocks
            )

        wait_for(written, f"{blocks} blocks on the disk")

    def stop(self) -> int:
        """Sends SIGTERM; the exit status."""
        self._podman("stop", "--time=60", self.name)
        return int(self._podman.inspect(self.name, "ExitCode"))

    def kill(self) -> None:
        """Kills the sidecar with SIGKILL."""
        self._podman("kill", "--signal=KILL", self.name)
        self._podman("wait", self.name)

    def start(self) -> None:
        """Starts the same container again, as a kubelet does."""
        self._podman("start", self.name)
        self.wait_ready()

    def remove(self) -> None:
        """Removes the container in any state."""
        self._podman("rm", "--force", "--time=0", self.name)


@contextlib.contextmanager
def started(podman: Podman, folder: Path, *options: object, more: tuple[str, ...] = ()) -> Iterator[Sidecar]:
    """A ready sidecar from the image."""
    sidecar = Sidecar(podman, folder, *options, more=more)
    try:
        sidecar.wait_ready()
        yield sidecar
    finally:
        sidecar.remove()


def debian() -> Path:
    """The file system of a Debian with Python and the libraries of vLLM's wheel; made once, kept under .cache."""
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
    """The words before a command that run it in a container, by Debian's Python with the packages of this one."""
    libraries = sysconfig.get_path("purelib")
    volumes = (f"--volume={libraries}:{libraries}", f"--volume={ROOT}/tests:{ROOT}/tests")
    run = (*podman.command, "run", "--rm", "--interactive", "--env-host", *volumes, *options, "--rootfs", str(debian()))
    # The command's first word is this machine's interpreter.
    return (*run, "sh", "-c", f'PYTHONPATH="$PYTHONPATH:{libraries}" PATH=/usr/bin:/bin exec python3 "$@"')
