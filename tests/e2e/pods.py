"""Pods of a mesh: a sidecar and an engine beside it, on a host of their own."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import network
from testkit import engine, sidecar

OUTPUT_TOKENS = 8
# A prompt takes several steps, so its blocks come one after the other.
BATCHED_TOKENS = 256
# Peers announce blocks at the first port, and give them at the second.
CONTROL_PORT, BLOCK_PORT = 9441, 9442


@dataclasses.dataclass
class Pod:
    """A sidecar and the engine beside it."""

    host: network.Host
    directory: Path
    sidecar: sidecar.Sidecar
    engine: engine.Engine

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        """The answer to a prompt."""
        return self.engine.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]

    def end(self) -> None:
        """Kills the current sidecar and removes its pool."""
        self.sidecar.kill()
        self.sidecar.pool.unlink(missing_ok=True)

    def hits(self) -> int:
        """Tokens loaded from outside the engine so far."""
        return self.engine.metrics()["external_hits"]


def start_sidecar(
    host: network.Host, directory: Path, pool_file: Path | None = None, more: tuple[str, ...] = (), dram: str = "128MiB"
) -> sidecar.Sidecar:
    """A sidecar for the mesh."""
    listen = f"{host.address}:{CONTROL_PORT}"
    mesh = ("--mesh-listen", listen, "--etcd", network.ETCD_URL, "--node-id", host.name, "--mesh-plaintext", *more)
    started = sidecar.Sidecar(directory, dram, pool_file, prefix=host.prefix, http=f"{host.address}:9440", more=mesh)
    started.wait_ready()
    return started


def start_engine(stack: contextlib.ExitStack, options: engine.Options, log: Path) -> engine.Engine:
    """An engine that is not waited for: several start at the same time."""
    started = engine.Engine(options, log)
    stack.callback(started.kill)
    return started


def start_pod(stack: contextlib.ExitStack, options: engine.Options, host: network.Host, directory: Path, **more: Any) -> Pod:
    """A sidecar, with `more` for `start_sidecar`, and an engine, still starting."""
    directory.mkdir()
    beside = start_sidecar(host, directory, **more)
    connected = dataclasses.replace(options, socket=beside.socket, prefix=host.prefix, batched_tokens=BATCHED_TOKENS)
    pod = Pod(host, directory, beside, start_engine(stack, connected, directory / "engine.log"))
    stack.callback(pod.end)
    return pod
