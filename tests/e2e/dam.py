"""A TCP connection that stops after a number of bytes. The kernel carries the bytes, so the wire is not slow before it
stops."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading

# The bytes in a full pipe: so many fewer than allowed may have come through.
CARRIED_BYTES = 64 << 10


class Dam:
    """Lets `through_bytes` of a host's bytes through, of all connections together, and holds the rest back until `open`."""

    def __init__(self, listen: str, host: str, port: int, through_bytes: int) -> None:
        self._listener = socket.create_server((listen, 0))
        self._to = (host, port)
        # The port to connect to, by the host's port.
        self.ports = {port: int(self._listener.getsockname()[1])}
        self._left = through_bytes
        self._open = False
        self._changed = threading.Condition()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Dam:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cuts every connection."""
        self.open()
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    @property
    def holds(self) -> bool:
        """True if bytes are held back."""
        with self._changed:
            return self._left < 0 and not self._open

    def open(self) -> None:
        """Lets all bytes through."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                far = socket.create_connection(self._to)
                self._ends.append(far)
                for source, sink, dammed in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(target=self._carry, args=(source, sink, dammed))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, dammed: bool) -> None:
        out, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, CARRIED_BYTES)
        try:
            while carried := os.splice(source.fileno(), into, CARRIED_BYTES):
                if dammed:
                    self._await(carried)
                while carried:
                    carried -= os.splice(out, sink.fileno(), carried)
        except OSError:
            pass
        finally:
            os.close(out)
            os.close(into)
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _await(self, carried: int) -> None:
        with self._changed:
            self._left -= carried
            self._changed.wait_for(lambda: self._left >= 0 or self._open)
