"""Sidecars that find each other by one name, as the pods of a headless service do: every address of it is a peer."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from testkit import ports
from testkit.sidecar import Sidecar

NAME = "pods.pillion.test"
# Loopback addresses: a process can listen at any of them.
ADDRESSES = ["127.0.77.2", "127.0.77.3", "127.0.77.4"]
NEW_ADDRESS = "127.0.77.5"
# In a mount namespace of the sidecar's own: $0 is its /etc/hosts, and nothing of the machine changes.
WITH_HOSTS = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file over /etc/hosts")


class Pods:
    """Sidecars with one file of hosts: the same options for each but its own address and name."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self._hosts, self._port = directory / "hosts", ports.free_port(ADDRESSES[0])

    def resolve(self, addresses: list[str]) -> None:
        """Gives the name these addresses from now on. The file is rewritten in place, because it is mounted."""
        lines = ["127.0.0.1 localhost", *(f"{address} {NAME}" for address in addresses)]
        self._hosts.write_text("\n".join(lines) + "\n")

    def start(self, node: str, address: str) -> Sidecar:
        """A sidecar that is still starting."""
        directory = self._directory / f"{node}-{address}"
        directory.mkdir()
        mesh = (f"--mesh-listen={address}:{self._port}", f"--peer={NAME}:{self._port}", f"--node-id={node}", "--mesh-plaintext")
        prefix = (*WITH_HOSTS, str(self._hosts))
        started = Sidecar(directory, dram="64MiB", anonymous=True, gpu=False, prefix=prefix, more=mesh)
        self._stack.callback(started.kill)
        return started


def wait_peers(pod: Sidecar, peers: int) -> None:
    """Waits until so many peers are members, and every address of the name has one."""

    def whole() -> bool:
        found = pod.metrics()
        return (found["pillion_mesh_peers"], found["pillion_mesh_endpoints_empty"]) == (peers, 0)

    pod.wait_for(whole, f"{peers} peers")


def wait_joined(pod: Sidecar, address: str) -> None:
    """Waits until the log names a peer with blocks at this address."""
    pod.wait_for(lambda: f"address={address}:" in pod.log.read_text(), f"a peer at {address}")


def test_every_address_of_a_name_is_a_peer_and_one_that_moves_is_found_again(tmp_path: Path) -> None:
    """Three sidecars behind one name; one is killed and starts again at another address."""
    with contextlib.ExitStack() as stack:
        pods = Pods(tmp_path, stack)
        pods.resolve(ADDRESSES)
        began = time.monotonic()
        started = [pods.start(f"pod-{number}", address) for number, address in enumerate(ADDRESSES)]
        for pod in started:
            pod.wait_ready()
            wait_peers(pod, 2)
        print(f"all are peers of all after {time.monotonic() - began:.1f} s")

        *stay, last = started
        last.kill()
        pods.resolve([*ADDRESSES[:2], NEW_ADDRESS])
        began = time.monotonic()
        again = pods.start("pod-2", NEW_ADDRESS)
        again.wait_ready()
        for pod in (*stay, again):
            wait_peers(pod, 2)
        for pod in stay:
            wait_joined(pod, NEW_ADDRESS)
        print(f"the one that moved was found after {time.monotonic() - began:.1f} s")
        for pod in (*stay, again):
            pod.terminate()
            assert "--node-id" not in pod.log.read_text()
