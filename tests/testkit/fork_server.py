"""A process that imports a module once and is copied many times: a copy runs the module's `main`.

vLLM takes tens of seconds to import, and its import starts no thread, so a copy is as good as a new process.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from testkit.process import Process, start


class Forked:
    """A copy with the interface of `subprocess.Popen` and pipes for its standard input and output."""

    def __init__(self, pid: int, stdin: int, stdout: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb", buffering=0)
        self._status = os.fdopen(status, "rb", buffering=0)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        status = self._await(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"copy {self.pid}", timeout or 0)
        return status

    def _await(self, timeout: float | None) -> int | None:
        if select.select([self._status], [], [], timeout)[0]:
            # Several threads may wait for one end, and the server sends the status once.
            with self._lock:
                if self.returncode is None:
                    said = self._status.read(16)
                    # The server sends the status, unless it was killed with all its copies.
                    self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode


class ForkServer(Process):
    """The process to copy. It ends when its socket is closed."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        """`command` runs this module; the socket's number is its last argument."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number, log = theirs.fileno(), Path(os.devnull)
            served = [*command, str(number)]
            started = start(served, log, stdin=subprocess.DEVNULL, environment=environment, keep=[number])
            super().__init__(started, served, log)

    def fork(self) -> Forked:
        """One more copy; it waits until the module is imported."""
        (their_in, our_in), (our_out, their_out), (our_status, their_status) = os.pipe(), os.pipe(), os.pipe()
        theirs = [their_in, their_out, their_status]
        socket.send_fds(self._socket, [b"fork"], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        answer = self._socket.recv(16)
        if not answer:
            raise self.failed("no copy, since the process ended")
        return Forked(int(answer), our_in, our_out, our_status)


def _serve(control: socket.socket) -> list[int] | None:
    """Copies this process at each request: returns input and output in a copy, and None in the server at its end."""
    awake, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    running: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([control, awake], [], [])
        if awake in readable:
            awake.recv(1 << 10)
            _report_ended(running)
        if control not in readable:
            continue
        asked, descriptors, _, _ = socket.recv_fds(control, 16, 3)
        if not asked:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (control, awake, wake):
                one.close()
            for status in (*running.values(), descriptors[2]):
                os.close(status)
            return descriptors[:2]
        running[pid] = descriptors[2]
        for descriptor in descriptors[:2]:
            os.close(descriptor)
        control.send(str(pid).encode())


def _report_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        said = running.pop(pid)
        os.write(said, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(said)


def main() -> None:
    """Imports the module of the first argument, and serves; the second is the socket's number."""
    module = importlib.import_module(sys.argv[1])
    # Imported objects stay shared between copies.
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[2])) as control:
        descriptors = _serve(control)
    if descriptors:
        os.setpgrp()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        module.main()


if __name__ == "__main__":
    main()
