"""Hosts on one machine: network namespaces on a bridge, each with its own address, and faults on the way between them."""

from __future__ import annotations

import contextlib
import ipaddress
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.server import Server

# From the range reserved for benchmarks of networks: no machine has an address in it.
SUBNET = ipaddress.ip_network("198.18.77.0/24")
BRIDGE, BRIDGE_ADDRESS = "pillion-test", str(SUBNET[1])
ETCD_URL = f"http://{BRIDGE_ADDRESS}:2379"


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Host:
    """A network namespace and its one link to the bridge."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address = f"pillion-test-{name}", str(SUBNET[1 + number])
        # The words before a command that run it on this host.
        self.prefix = ("ip", "netns", "exec", self.name)
        link = f"pillion-{name}"
        _do("ip", "netns", "add", self.name)
        _do("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _do("ip", "link", "set", link, "master", BRIDGE, "up")
        for link in ("lo", "eth0"):
            _do("ip", "-n", self.name, "link", "set", link, "up")
        _do("ip", "-n", self.name, "address", "add", f"{self.address}/{SUBNET.prefixlen}", "dev", "eth0")

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Within this block the link is down."""
        _do("ip", "-n", self.name, "link", "set", "eth0", "down")
        try:
            yield
        finally:
            _do("ip", "-n", self.name, "link", "set", "eth0", "up")

    @contextlib.contextmanager
    def deaf_to(self, address: str) -> Iterator[None]:
        """Within this block packets from this address are dropped without an answer."""
        rule = f"table inet pillion {{\nchain in {{\ntype filter hook input priority 0;\nip saddr {address} drop\n}}\n}}\n"
        _do(*self.prefix, "nft", rule)
        try:
            yield
        finally:
            _do(*self.prefix, "nft", "delete table inet pillion")

    @contextlib.contextmanager
    def diverted(self, address: str, ports: dict[int, int]) -> Iterator[None]:
        """Within this block connections from here to these ports of a host go to other ports of the bridge. Open connections
        are cut."""
        ways = [f"ip daddr {address} tcp dport {port} dnat to {BRIDGE_ADDRESS}:{other}\n" for port, other in ports.items()]
        rule = f"table ip pillion {{\nchain out {{\ntype nat hook output priority -100;\n{''.join(ways)}}}\n}}\n"
        try:
            _do(*self.prefix, "nft", rule)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine's kernel does not translate addresses: {error.stderr.strip()}")
        cut = [*self.prefix, "ss", "--tcp", "--kill", "dst", address]
        try:
            _do(*cut)
            yield
        finally:
            _do(*self.prefix, "nft", "delete table ip pillion")
            _do(*cut)


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Hosts that reach each other and this machine. Skips the test where network namespaces are forbidden."""
    missing = [tool for tool in ("ip", "nft", "etcd") if shutil.which(tool) is None]
    assert not missing, f"{', '.join(missing)} missing: scripts/setup tests installs what the tests need"
    _remove(names)
    try:
        try:
            _do("ip", "link", "add", BRIDGE, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not let us make networks of our own: {error.stderr.strip()}")
        _do("ip", "address", "add", f"{BRIDGE_ADDRESS}/{SUBNET.prefixlen}", "dev", BRIDGE)
        _do("ip", "link", "set", BRIDGE, "up")
        yield [Host(name, number) for number, name in enumerate(names, 1)]
    finally:
        _remove(names)


def _remove(names: tuple[str, ...]) -> None:
    # Also removes the links and hosts of a killed run.
    for command in [*(["ip", "netns", "delete", f"pillion-test-{name}"] for name in names), ["ip", "link", "delete", BRIDGE]]:
        subprocess.run(command, check=False, capture_output=True)


class Etcd:
    """A real etcd on the bridge; its data outlives its death."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.start()

    def start(self) -> None:
        """Starts etcd, after a kill too, and waits until it answers."""
        peers = f"http://{BRIDGE_ADDRESS}:2380"
        command = ["etcd", "--data-dir", str(self._directory / "etcd"), "--listen-client-urls", ETCD_URL]
        command += ["--advertise-client-urls", ETCD_URL, "--listen-peer-urls", peers]
        command += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        self._server = Server(command, self._directory / "etcd.log", f"{ETCD_URL}/health")
        self._server.wait_ready()

    def kill(self) -> None:
        """Kills etcd with SIGKILL."""
        self._server.kill()
