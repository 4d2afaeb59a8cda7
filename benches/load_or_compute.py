"""The time until the first token of a prompt on a disk, by the rate of the disk: beside loading all of it, computing all of
it, and the rule for an engine of unknown rate (2 s).

The parts are a real sidecar with a disk throttled by the kernel (blkio.throttle or io.max, so only as root), and a scripted
scheduler. It asks as vLLM's does, once a millisecond, and states the rate of an H200 with an 8B model. Missing tokens are not
computed but counted by this rate. Bytes are scaled: a token has 8 KiB in place of 128, and the disk a sixteenth of its named
rate, so every time is one of full size. Copies to the device are left out.

Each point has a new sidecar with empty memory. It reads 56 MiB first, so the rate of its disk is known, and by threads:
io_uring locks each GiB of a new pool at the first read into it, for 0.8 s. A changing rate changes 3 s after the question.

With `--pool PART` memory is PART of the longest prompt. Longer prompts than memory go on to an engine's host memory in parts,
and their times include the copies: the same 64 blocks take all parts, and blocks from the first failed one on are computed.

    benches/run load-or-compute [--quick] [--pool 0.125]
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benches import harness, rig
from pillion import _shim
from testkit.sidecar import Sidecar, serving

MIB, GB = 1 << 20, 10**9
SCALE = 16
# Llama-3.1-8B; a token here is smaller by the scale.
FULL_TOKEN_BYTES = 131_072
BLOCK_TOKENS = 256
BLOCK_BYTES = BLOCK_TOKENS * FULL_TOKEN_BYTES // SCALE
# 20,000 tokens/s at a prompt's begin, half of it at 60,000 tokens: 106,000 take 10 s.
TOKEN_NS, SLOPE_NS = 50_000.0, 0.84
PROMPTS = (32_768, 105_984, 235_776, 499_968)
# GB/s at full size.
RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# A part of a load on a GPU.
PART_BYTES = 16 * MIB
# The first blocks to read: a few without a throttle.
FIRST_BLOCKS, WARM_BLOCKS = 4, 28
WAIT_MAX_MS = 120_000
CHANGE_S = 3.0
# The prompt, the rate before and after; 0: the disk stops.
CHANGES = ((235_776, 4.0, 0.5), (235_776, 4.0, 0.0), (499_968, 8.0, 1.0), (105_984, 1.0, 4.0))
LOOK_S = 0.001


def compute_s(first: int, end: int) -> float:
    """Seconds of computing tokens `first..end`."""
    return (end - first) * (TOKEN_NS + SLOPE_NS * (first + end) / 2) / 1e9


def load_s(tokens: int, rate: float) -> float:
    """Seconds of a disk of so many GB/s, at full size, for a prompt's blocks."""
    return tokens * FULL_TOKEN_BYTES / (rate * GB)


class Throttle:
    """A limit for the reads of a process from the device of a folder, by a cgroup of its own."""

    def __init__(self, folder: Path) -> None:
        number = os.stat(folder).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        whole = Path(f"/sys/dev/block/{device}").resolve()
        if (whole / "partition").exists():
            device = (whole.parent / "dev").read_text().strip()
        self._device, name = device, f"pillion-bench-{os.getpid()}"
        first = Path("/sys/fs/cgroup/blkio")
        self._is_first = first.exists()
        self._group = (first if self._is_first else Path("/sys/fs/cgroup")) / name
        self._group.mkdir()

    def bind(self, pid: int) -> None:
        """The process and its threads read no faster from now on."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def set(self, rate: float) -> None:
        """GB/s at full size; 0: nothing but a byte a second."""
        bytes_s = max(1, int(rate * GB / SCALE))
        if self._is_first:
            (self._group / "blkio.throttle.read_bps_device").write_text(f"{self._device} {bytes_s}")
        else:
            (self._group / "io.max").write_text(f"{self._device} rbps={bytes_s}")

    def free(self) -> None:
        """As fast as the device."""
        if self._is_first:
            (self._group / "blkio.throttle.read_bps_device").write_text(f"{self._device} 0")
        else:
            (self._group / "io.max").write_text(f"{self._device} rbps=max")

    def remove(self) -> None:
        """Once no process is in it."""
        self._group.rmdir()


def keys(prompt: int) -> list[bytes]:
    """The keys of a prompt's blocks; 0: of the first blocks."""
    blocks = prompt // BLOCK_TOKENS or WARM_BLOCKS
    return [b"%010d%06d" % (prompt, block) for block in range(blocks)]


FACTS = {"block_tokens": str(BLOCK_TOKENS)}


@dataclass
class Point:
    """One prompt and one rate."""

    tokens: int
    rate: float
    after: float | None = None


class Bench:
    """A disk with all prompts, and its throttle."""

    def __init__(self, folder: Path, binary: Path | None, prompts: tuple[int, ...], pool: float | None) -> None:
        self._folder, self._binary, self.throttle = folder, binary, Throttle(folder)
        total = sum(len(keys(prompt)) for prompt in (0, *prompts)) * BLOCK_BYTES
        # A log takes four fifths of its size. While it is written, memory holds the longest prompt.
        self._log_bytes = total * 3 // 2 + 512 * MIB
        longest = max(len(keys(prompt)) for prompt in prompts) * BLOCK_BYTES
        self._pool_bytes = longest * 5 // 4 + 512 * MIB
        self._part_blocks = 0 if pool is None else PART_BYTES // BLOCK_BYTES
        with self._sidecar() as sidecar:
            self.throttle.free()
            engine = rig.Engine(sidecar.socket, 64, BLOCK_BYTES, more=FACTS)
            for prompt in (0, *prompts):
                for first in range(0, len(keys(prompt)), 64):
                    engine.save(keys(prompt)[first : first + 64])
                    sidecar.wait_for(lambda: sidecar.metrics()["pillion_ssd_queued_blocks"] < 64, "writes", 120)
            sidecar.wait_for(lambda: sidecar.metrics()["pillion_ssd_queued_blocks"] == 0, "writes", 120)
            engine.close()
        self._pool_bytes = self._pool_bytes if pool is None else int(longest * pool)
        harness.say(f"{total / GB:.1f} GB of blocks lie on the disk")

    @contextlib.contextmanager
    def _sidecar(self) -> Iterator[Sidecar]:
        more = ("--ssd", f"{self._folder}/log:{self._log_bytes // MIB}MiB:create", "--ssd-io", "threads")
        with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder:
            dram = f"{self._pool_bytes // MIB}MiB"
            with serving(Path(folder), dram, anonymous=True, more=more, binary=self._binary) as running:
                self.throttle.bind(running.pid)
                yield running

    def first_token_s(self, point: Point, *, judged: bool) -> tuple[float, float, int]:
        """Seconds until the first token, until the answer, and tokens found. `judged`: the engine's rate is known."""
        with self._sidecar() as sidecar:
            self.throttle.free()
            sidecar.wait_for(lambda: sidecar.get("/readyz") == "ready\n", "readiness", 120)
            recovering = "pillion_ssd_recovering"
            sidecar.wait_for(lambda: sidecar.metrics()[recovering] == 0, "the blocks of the disk", 120)
            more, parts = FACTS, self._part_blocks
            engine = rig.Engine(sidecar.socket, 64, BLOCK_BYTES, more=more, wait_max_ms=WAIT_MAX_MS, part_blocks=parts)
            session = engine.scheduler
            warm = engine.log(keys(0))
            self._ask(session, warm, FIRST_BLOCKS, lambda _: None, closes=False)
            self.throttle.set(point.rate)
            self._ask(session, warm, WARM_BLOCKS, lambda _: None)
            if judged:
                session.tell_prefill(TOKEN_NS, SLOPE_NS)
                # The sidecar looks at it every 100 ms.
                time.sleep(0.3)
            changes = [] if point.after is None else [point.after]

            def change(waited_s: float) -> None:
                if changes and waited_s >= CHANGE_S:
                    self.throttle.set(changes.pop())

            wanted = keys(point.tokens)
            log = engine.log(wanted)
            waited_s, hits = self._ask(session, log, len(wanted), change, closes=False)
            if session.arriving(log):
                begun = time.monotonic() - waited_s
                hits = self._load(engine, log, hits, lambda: change(time.monotonic() - begun))
                waited_s = time.monotonic() - begun
            self.throttle.free()
            engine.close()
        found = hits * BLOCK_TOKENS
        return waited_s + compute_s(found, point.tokens), waited_s, found

    @staticmethod
    def _load(engine: rig.Engine, log: int, hits: int, look: Callable[[], None]) -> int:
        """Loads the hits, in parts, into the same blocks; returns those before the first failed part."""
        blocks = [1 + block % engine.blocks for block in range(hits)]
        plans = engine.scheduler.load(log, 0, blocks, engine.next_step, False)
        with engine.step():
            for plan in plans:
                engine.worker.load(plan)
        ended: dict[int, bool] = {}
        while len(ended) < len(plans):
            ended |= {op: not failed for op, failed in engine.worker.finished(1000)}
            look()
        whole = [ended[op] for op in sorted(ended)]
        parts = whole.index(False) if False in whole else len(whole)
        return min(hits, parts * len(_shim.plan_blocks(plans[0])))

    @staticmethod
    def _ask(
        session: _shim.SchedulerSession, log: int, count: int, look: Callable[[float], None], *, closes: bool = True
    ) -> tuple[float, int]:
        """Asks as vLLM does, until the answer; its time in seconds, and the hits."""
        begun = time.monotonic()
        while (hits := session.query(log, 0, count)) < 0:
            session.end_step()
            look(time.monotonic() - begun)
            time.sleep(LOOK_S)
        waited_s = time.monotonic() - begun
        if closes:
            session.close(log)
        return waited_s, hits


def main() -> None:
    """Prints one JSON line last."""
    parser = harness.parser(__doc__)
    harness.add_scale(parser)
    parser.add_argument("--binary", type=Path, help="another sidecar's executable")
    parser.add_argument("--pool", type=float, help="memory, as a part of the longest prompt")
    options = parser.parse_args()
    is_full = options.scale == "full"
    prompts, rates = (PROMPTS, RATES) if is_full else (PROMPTS[:2], (0.25, 2.0, 8.0))
    changes = CHANGES if is_full else ((105_984, 2.0, 0.5), (105_984, 2.0, 0.0))
    result: dict[str, object] = {}
    where = Path(__file__).resolve().parent.parent / "target"
    where.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=where) as folder:
        bench = Bench(Path(folder), options.binary, prompts, options.pool)
        worst = 0.0
        for tokens in prompts:
            for rate in rates:
                load, compute = load_s(tokens, rate), compute_s(0, tokens)
                took, waited, found = bench.first_token_s(Point(tokens, rate), judged=True)
                today, _, _ = bench.first_token_s(Point(tokens, rate), judged=False)
                ratio = took / min(load, compute)
                worst = max(worst, ratio)
                name = f"{tokens // 1000}k_{rate:g}"
                result[name] = [round(each, 2) for each in (took, today, load, compute, ratio)]
                harness.say(
                    f"{name}: {took:.2f} s (waited {waited:.2f}, found {found}), today {today:.2f}, load {load:.2f}, "
                    f"compute {compute:.2f}, ratio {ratio:.3f}"
                )
        changed_ok = True
        for tokens, before, after in changes:
            took, waited, found = bench.first_token_s(Point(tokens, before, after), judged=True)
            # A load goes on by the better way, a computation as it is.
            loads = load_s(tokens, before) < compute_s(0, tokens)
            spent = CHANGE_S if loads else 0.0
            given = min(tokens, int(spent * before * GB / FULL_TOKEN_BYTES))
            rest = compute_s(given, tokens)
            if after and loads:
                rest = min(rest, load_s(tokens - given, after))
            most = 1.1 * (spent + rest) + (0.5 if after else 2.0)
            changed_ok &= took <= most
            name = f"{tokens // 1000}k_{before:g}_{after:g}"
            result[name] = [round(each, 2) for each in (took, most, waited)]
            harness.say(f"{name}: {took:.2f} s of {most:.2f} (waited {waited:.2f}, found {found})")
        bench.throttle.remove()
    harness.report({"worst_ratio": round(worst, 3), "changes_within": changed_ok, **result})


if __name__ == "__main__":
    main()
