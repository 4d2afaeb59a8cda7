"""Bytes a second of saves and loads, against plain copies of page-locked memory, in every form a block can have.

No vLLM: this process is an engine of two sessions with a torch tensor as KV, beside a real `pillion serve`. A save is timed
from its post to its end in the scheduler's session, a load from its post until the engine's stream goes on behind it. Loaded
bytes are compared with the saved ones, every time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benches import harness
from benches.gpu import compute, rig
from pillion.geometry import describe_layers
from testkit.sessions import Sessions
from testkit.waiting import Failed, wait_for

BLOCK_BYTES = 2 << 20
# Layers of a block, and whether they lie side by side. 8 KV heads x 128 x 16 tokens x (K, V) in bf16 are 64 KiB a layer.
FORMS = {"2m": (32, True), "64k": (32, False), "32k": (64, False)}
# By scale: blocks of one transfer, blocks of the device, samples, and the sidecar's memory in GiB: with huge pages less.
SCALES = {"full": (512, 2048, 7, 24, 6), "quick": (64, 256, 5, 4, 1), "tiny": (4, 16, 2, 1, 0)}
QUERY_BUDGET_US = 10_000_000
WATCHDOG_S = 30
# A page-locked GiB takes 0.3 s.
LOCK_WATCHDOG_S = 120
HUGE_PAGE_BYTES = 2 << 20
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
# The pool's own words, beside the blocks.
POOL_EXTRA_BYTES = 256 << 20


class Engine(Sessions):
    """KV memory of one form, and a stream without computation."""

    def __init__(self, socket: Path, form: str, blocks: int) -> None:
        layers, outermost = FORMS[form]
        words = BLOCK_BYTES // layers // 8
        shape = (blocks, layers, words) if outermost else (layers, blocks, words)
        memory = torch.randint(-(1 << 62), 1 << 62, shape, dtype=torch.int64, device="cuda")
        self._blocks = memory if outermost else memory.transpose(0, 1)
        geometry = describe_layers([(f"layer.{layer}", self._blocks[:, layer]) for layer in range(layers)], blocks)
        self.runs = len(geometry.regions)
        self._stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        name = f"raw-{uuid.uuid4()}"
        super().__init__(
            socket,
            name,
            blocks,
            geometry.regions,
            {"engine": name},
            pointers=[storage.data_ptr() for storage in geometry.storages],
            cuts=geometry.cuts,
            stream=self._stream.cuda_stream,
            budget_us=QUERY_BUDGET_US,
        )

    def transfer(self, save: tuple[list[bytes], list[int]], load: tuple[list[bytes], list[int]]) -> tuple[float, float]:
        """Saves some blocks and loads others, at once; seconds of each. One without keys is left out."""
        before = self.scheduler.stats()["blocks_committed"]
        saving, loading = self.log(save[0]), self.log(load[0])
        if load[0]:
            wait_for(lambda: self.scheduler.query(loading, 0, len(load[0])) == len(load[0]), "keys that are kept", WATCHDOG_S)
        begun = time.perf_counter()
        if save[0]:
            # A step of its own: the save waits for its end, and the loading step ends behind the load.
            assert self.scheduler.save(saving, 0, save[1], self.next_step), "no room for the save"
            with self.step():
                pass
        plans = self.scheduler.load(loading, 0, load[1], self.next_step, True) if load[0] else []
        assert plans or not load[0], "no lease"
        with self.step():
            for plan in plans:
                failed = self.worker.load(plan, self.stream)
                assert not failed, f"{failed} were not loaded"
        loaded = torch.cuda.Event()
        loaded.record(self._stream)
        ends = dict(until(begun, {"save": self.saved, "load": loaded.query}))
        self.scheduler.close(saving)
        self.scheduler.close(loading)
        self.scheduler.end_step()
        committed = self.scheduler.stats()["blocks_committed"] - before
        assert committed == len(save[0]), f"{len(save[0]) - committed} blocks were not saved"
        return ends["save"], ends["load"]

    def same(self, left: list[int], right: list[int]) -> bool:
        """True if blocks hold the same bytes; then those on the right are spoiled, for the next time."""
        at = torch.tensor(right, device="cuda")
        equal = bool(torch.equal(self._blocks[torch.tensor(left, device="cuda")], self._blocks[at]))
        self._blocks[at] = 0
        torch.cuda.synchronize()
        return equal


class Bench:
    """One engine's transfers."""

    def __init__(self, engine: Engine, transfer_blocks: int, blocks: int, samples: int) -> None:
        self._engine = engine
        self._count, self._samples = transfer_blocks, samples
        # For each order: the saved blocks, then the loaded ones. Block 0 belongs to vLLM.
        ids = list(range(1, 1 + 2 * transfer_blocks))
        shuffled = random.Random(1).sample(range(1, blocks), 2 * transfer_blocks)
        self.orders = {"consecutive": ids, "shuffled": shuffled}
        self._next_key = 0

    def keys(self) -> list[bytes]:
        """Unused keys."""
        first, self._next_key = self._next_key, self._next_key + self._count
        return [hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(first, self._next_key)]

    def rates(self, ids: list[int]) -> dict[str, list[float]]:
        """GB/s of every sample: saves alone, loads alone, both at once. The first round is a warm-up."""
        source, target = ids[: self._count], ids[self._count :]
        seconds: dict[str, list[float]] = {name: [] for name in ("save", "load", "both_save", "both_load")}
        for _ in range(self._samples + 1):
            saved = self.keys()
            save, _ = self._engine.transfer((saved, source), ([], []))
            _, load = self._engine.transfer(([], []), (saved, target))
            assert self._engine.same(source, target), "loaded bytes differ from saved ones"
            both = self._engine.transfer((self.keys(), source), (saved, target))
            assert self._engine.same(source, target), "loaded bytes differ from saved ones"
            for name, took in zip(seconds, (save, load, *both), strict=True):
                seconds[name].append(took)
        return {name: [self._count * BLOCK_BYTES / took / 1e9 for took in samples[1:]] for name, samples in seconds.items()}

    def keep_going(self, ids: list[int]) -> Callable[[], int]:
        """A function that saves, loads the save before, and returns the number of bytes."""
        source, target = ids[: self._count], ids[self._count :]
        kept = [self.keys()]
        self._engine.transfer((kept[0], source), ([], []))

        def once() -> int:
            kept.append(self.keys())
            self._engine.transfer((kept[1], source), (kept.pop(0), target))
            return 2 * self._count * BLOCK_BYTES

        return once


def plain(count: int, samples: int) -> dict[str, list[float]]:
    """The reference: torch's copies between page-locked memory and the device, each way and both at once."""
    size = count * BLOCK_BYTES
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    rates: dict[str, list[float]] = {name: [] for name in ("save", "load", "both_save", "both_load")}

    def copy(ways: list[int]) -> list[float]:
        torch.cuda.synchronize()
        begun, ended = time.perf_counter(), {}
        for way in ways:
            with torch.cuda.stream(streams[way]):
                pair = (devices[1], hosts[1]) if way else (hosts[0], devices[0])
                pair[0].copy_(pair[1], non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                ended[str(way)] = event.query
        return [size / took / 1e9 for _, took in sorted(until(begun, ended))]

    for _ in range(samples + 1):
        for name, rate in zip(rates, copy([0]) + copy([1]) + copy([0, 1]), strict=True):
            rates[name].append(rate)
    return {name: found[1:] for name, found in rates.items()}


def until(begun: float, conditions: dict[str, Callable[[], bool]]) -> Iterator[tuple[str, float]]:
    """Seconds from `begun` until each condition held."""
    waiting = dict(conditions)
    while waiting:
        for name in [name for name, holds in waiting.items() if holds()]:
            del waiting[name]
            yield name, time.perf_counter() - begun
        assert time.perf_counter() < begun + WATCHDOG_S, f"no end of {', '.join(waiting)}"


@contextlib.contextmanager
def served(options: argparse.Namespace, gib: int, *more: str) -> Iterator[Path]:
    """A sidecar with a page-locked pool; yields its socket."""
    with (
        tempfile.TemporaryDirectory(prefix="pillion-raw-") as folder,
        rig.sidecar(Path(folder), options, gib, Path(folder) / "serve.log", *more) as keeper,
    ):

        def locked() -> bool:
            values = keeper.metrics()
            # On huge pages the pool's headers, locked too, reach to the end of one.
            return values.get("pillion_pool_pinned_bytes", -1) >= values["pillion_pool_bytes"]

        if torch.cuda.is_available():
            keeper.wait_for(locked, "page-locked pool", LOCK_WATCHDOG_S)
        yield keeper.socket


@contextlib.contextmanager
def huge_pages(gib: int) -> Iterator[Path]:
    """A mount with enough huge pages for a pool of this size. An OSError has the reason if there is none."""
    if not gib:
        raise OSError("not at this scale")
    before = HUGE_PAGES.read_text()
    wanted = ((gib << 30) + POOL_EXTRA_BYTES) // HUGE_PAGE_BYTES
    with tempfile.TemporaryDirectory(prefix="pillion-huge-") as folder:
        try:
            HUGE_PAGES.write_text(str(int(before) + wanted))
            if int(HUGE_PAGES.read_text()) < int(before) + wanted:
                raise OSError(f"{HUGE_PAGES}: {HUGE_PAGES.read_text().strip()} pages instead of {int(before) + wanted}")
            # A mount without a size does not state its room.
            command = ["mount", "-t", "hugetlbfs", "-o", f"size={wanted * HUGE_PAGE_BYTES}", "none", folder]
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
            if mounted.returncode != 0:
                raise OSError(mounted.stderr.strip())
            try:
                yield Path(folder)
            finally:
                subprocess.run(["umount", "-l", folder], check=False)
        finally:
            with contextlib.suppress(OSError):
                HUGE_PAGES.write_text(before)


def ratios(name: str, rates: dict[str, list[float]], reference: dict[str, list[float]]) -> dict[str, float]:
    """Medians, as parts of the reference medians."""
    medians = {way: harness.spread(samples)["median"] for way, samples in rates.items()}
    return {f"{way}_ratio_{name}": round(medians[way] / harness.spread(reference[way])["median"], 3) for way in rates}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the whole matrix."""
    count, blocks, samples, gib, huge_gib = SCALES[options.scale]
    result: dict[str, Any] = {}
    with served(options, gib) as socket:
        reference = plain(count, samples)
        result["plain_gb_s"] = {way: harness.spread(rates) for way, rates in reference.items()}
        harness.say(f"plain copies: {result['plain_gb_s']}")
        for form in FORMS:
            engine = Engine(socket, form, blocks)
            bench = Bench(engine, count, blocks, samples)
            for order, ids in bench.orders.items():
                name = form if order == "consecutive" else f"{form}_{order}"
                rates = bench.rates(ids)
                result[f"gb_s_{name}"] = {way: harness.spread(found) for way, found in rates.items()}
                result |= ratios(name, rates, reference)
                harness.say(f"{form}, {engine.runs} runs a block, {order}: {ratios(name, rates, reference)}")
            if form != "32k":
                found = compute.beside(bench.keep_going(bench.orders["shuffled"]), options.scale)
                result |= {f"{key}_{form}": value for key, value in found.items()}
                harness.say(f"{form}, beside compute: {found}")
            engine.close()
            del engine, bench
            torch.cuda.empty_cache()
    try:
        with huge_pages(huge_gib) as folder, served(options, huge_gib, "--pool-path", str(folder / "pool")) as socket:
            engine = Engine(socket, "2m", blocks)
            rates = Bench(engine, count, blocks, samples).rates(list(range(1, 1 + 2 * count)))
            result |= ratios("2m_hugepages", rates, reference)
            engine.close()
    except (OSError, Failed) as error:
        result["hugepages_skipped"] = " ".join(str(error).splitlines()[:2])
    return result


def main() -> None:
    """Prints one JSON line last."""
    parser = harness.parser(__doc__)
    harness.add_sidecar(parser)
    harness.add_scale(parser)
    options = parser.parse_args()
    line: dict[str, Any] = {"bench": "gpu/raw", "scale": options.scale}
    try:
        line |= measure(options) | {"device": torch.cuda.get_device_name(), "ok": True}
    except (Failed, RuntimeError) as error:
        # RuntimeError: torch finds no GPU.
        line |= rig.failure("raw", error)
    harness.report(line)


if __name__ == "__main__":
    main()
