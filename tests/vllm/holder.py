"""Stops single threads of a process, as a machine without a free core does, and lets them go on.

Some tests need one thread of the sidecar to act while another stands still. The holder's thread serves the scripted engine's
process, which knows the moment.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from testkit import ptrace
from testkit.threads import named, state
from testkit.waiting import Failed, wait_for

POLL_S = 0.001
REQUEST_BYTES_MAX = 256

# Names of the sidecar's threads, or their beginnings.
COPIERS, DATA_THREAD = "pillion-copy", "pillion-data"


class Holder:
    """Obeys datagrams: `hold NAME`, `let NAME`, `idle NAME`; answers `done`, or the error."""

    def __init__(self, pid: int, address: Path) -> None:
        self.address = str(address)
        self._pid = pid
        self._held: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def end(self) -> None:
        """Ends the holder's thread, which lets every held thread go on."""
        # Wakes the thread out of accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                break
            with caller:
                caller.send(self._answer(caller.recv(REQUEST_BYTES_MAX).decode()).encode())
        self._let(self._held)

    def _answer(self, request: str) -> str:
        try:
            verb, name = request.split()
            threads = self._threads(name)
            match verb:
                case "hold":
                    self._hold(threads)
                case "let":
                    self._let(threads)
                case "idle":
                    self._wait_idle(threads)
                case _:
                    return f"unknown request {request!r}"
        except (OSError, ValueError, Failed) as error:
            return f"{request}: {error}"
        return "done"

    def _threads(self, name: str) -> set[int]:
        found = named(self._pid, name)
        if not found:
            raise ValueError(f"process {self._pid} has no thread {name}")
        return found

    def _hold(self, threads: set[int]) -> None:
        for thread in threads - self._held:
            ptrace.stop(thread)
            self._held.add(thread)

    def _let(self, threads: set[int]) -> None:
        for thread in threads & self._held:
            ptrace.let(thread)
            self._held = self._held - {thread}

    def _wait_idle(self, threads: set[int]) -> None:
        wait_for(lambda: all(state(self._pid, thread) == "S" for thread in threads), "idleness", poll_s=POLL_S)


@contextlib.contextmanager
def holding(pid: int, directory: Path) -> Iterator[Holder]:
    """A holder of a process's threads; all go on at the end. `pid` must be a child of this process."""
    holder = Holder(pid, directory / "holder.sock")
    try:
        yield holder
    finally:
        holder.end()
