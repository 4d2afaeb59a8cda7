"""An engine of one rank from two sessions and KV memory, for benchmarks and tests of `_shim` itself."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pillion import _shim
from testkit.waiting import Failed, wait_for

# The scheduler waits for answers: misses would not be measured.
QUERY_BUDGET_US = 1_000_000
# The awaited events take some 10 us.
POLL_S = 0.0002


class Sessions:
    """The rank's session and the scheduler's, both connected; `stream` is the CUstream for the launches of steps."""

    def __init__(
        self,
        socket: Path,
        name: str,
        blocks: int,
        regions: Sequence[tuple[int, int, int, int]],
        facts: dict[str, str],
        *,
        copier: Literal["sidecar", "engine"] = "sidecar",
        files: Sequence[int] = (),
        pointers: Sequence[int] = (),
        cuts: Sequence[int] = (),
        stream: int = 0,
        budget_us: int = QUERY_BUDGET_US,
        wait_max_ms: int | None = None,
        part_blocks: int = 0,
    ) -> None:
        """Memory is host memory, in `files`, or a GPU's, at `pointers`. With `part_blocks` loads come in parts."""
        # An id for this run alone.
        self.run = uuid.uuid4().bytes
        self.stream = stream
        self.next_step = 1
        self.worker = _shim.WorkerSession(
            socket,
            name,
            world_size=1,
            rank=0,
            shard=0,
            shards=1,
            blocks=blocks,
            regions=list(regions),
            fds=list(files),
            copy=copier,
            facts=facts,
            pointers=list(pointers),
            cuts=list(cuts),
            stream=stream,
        )
        self.scheduler = _shim.SchedulerSession(
            socket,
            name,
            world_size=1,
            run=self.run,
            budget_us=budget_us,
            by_engine=copier == "engine",
            early=copier == "sidecar",
            wait_max_ms=wait_max_ms,
            part_blocks=part_blocks,
        )
        wait_for(self._connected, "connection", failed=self.failed)

    def _connected(self) -> bool:
        # The sidecar serves nothing before the ranks have joined.
        self.worker.join(self.run)
        self.scheduler.end_step()
        return self.worker.connected and self.scheduler.connected and self.scheduler.namespace != 0

    def failed(self, reason: str) -> Failed:
        """An error with the notices of both sessions."""
        return Failed(f"{reason}: {self.worker.take_notices()} {self.scheduler.take_notices()}")

    def log(self, hashes: list[bytes]) -> int:
        """A log of these keys."""
        log = self.scheduler.open()
        if self.scheduler.append(log, hashes, 0) != len(hashes):
            raise self.failed("a key log found no room")
        return log

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Plays the step `next_step` with its planned work: the rank does the block's work within it, and the step is
        accepted."""
        self.scheduler.end_step()
        self.worker.join(self.run)
        self.worker.start(self.next_step, self.stream)
        yield
        self.worker.done(self.next_step, True, self.stream)
        self.scheduler.accept(self.next_step)
        self.next_step += 1

    def saved(self) -> bool:
        """True if every save has ended."""
        self.scheduler.end_step()
        return self.scheduler.saving == 0

    def keep(self, hashes: list[bytes], block_ids: list[int]) -> None:
        """Saves these blocks under these keys, and returns once they are saved."""
        log = self.log(hashes)
        if not self.scheduler.save(log, 0, block_ids, self.next_step):
            raise self.failed("a save found no room")
        with self.step():
            pass
        wait_for(self.saved, "end of a save", poll_s=POLL_S, failed=self.failed)
        self.scheduler.close(log)

    def close(self) -> None:
        """Disconnects both sessions from the sidecar."""
        self.scheduler.disconnect()
        self.worker.disconnect()
