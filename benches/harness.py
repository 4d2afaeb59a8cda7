"""The harness of all benchmarks: command lines, sizes, turns, progress, figures, and the JSON object of the last line."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

BEGUN = time.monotonic()
# "quick" is a smoke run, and "tiny" one on a CPU.
SCALES = ("full", "quick", "tiny")
Sample = TypeVar("Sample")


def parser(text: str | None) -> argparse.ArgumentParser:
    """A command line with the text of a benchmark."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_sidecar(parser: argparse.ArgumentParser) -> None:
    """Options of the sidecar of a benchmark."""
    parser.add_argument("--binary", help="the sidecar's binary")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="more of `pillion serve`; repeatable")


def add_scale(parser: argparse.ArgumentParser, rooms: Sequence[str] = ()) -> None:
    """The scale of a run, or a room of the full one."""
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--quick", dest="scale", action="store_const", const="quick", default="full", help="a smoke run")
    scale.add_argument("--tiny", dest="scale", action="store_const", const="tiny", help=argparse.SUPPRESS)
    if rooms:
        scale.add_argument("--room", dest="scale", choices=rooms, help="sizes with other room for what is kept")


def changed(sizes: dict[str, int], given: Iterable[str]) -> dict[str, int]:
    """The sizes with those of the command line, each KEY=N."""
    pairs = dict(option.partition("=")[::2] for option in given)
    if unknown := pairs.keys() - sizes.keys():
        sys.exit(f"--size: unknown {', '.join(sorted(unknown))}; known are: {', '.join(sizes)}")
    return sizes | {key: int(value) for key, value in pairs.items()}


def say(text: str) -> None:
    """Progress, with the seconds since the start."""
    print(f"[{time.monotonic() - BEGUN:6.1f} s] {text}", file=sys.stderr, flush=True)


def report(line: Mapping[str, Any]) -> None:
    """The last line. A benchmark without `ok` in it ends here, as failed."""
    print(json.dumps(line), flush=True)
    if not line.get("ok", True):
        sys.exit(1)


def turns(rounds: int, acts: Mapping[str, Callable[[int], Sample]]) -> dict[str, list[Sample]]:
    """Samples of acts in turns. Every other round goes backwards: an act finds the caches and the heat of the one before."""
    samples: dict[str, list[Sample]] = {name: [] for name in acts}
    for number in range(rounds):
        for name in list(acts)[:: 1 - 2 * (number % 2)]:
            samples[name].append(acts[name](number))
    return samples


# === Figures ===

# The quarters of a steady baseline are closer than this part of its median.
STEADY = 0.1


def percentile(samples: Sequence[float], part: float) -> float:
    """The value above `part` of the samples, to a tenth."""
    ordered = sorted(samples)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * part))], 1)


def median(samples: Iterable[float], digits: int = 1) -> float:
    """The median to a tenth, or to `digits` digits."""
    return round(statistics.median(samples), digits)


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, least and most, and the quarters between, in the samples' unit, to a hundredth."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    figures = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    figures |= {"p25": ordered[round(last * 0.25)], "p75": ordered[round(last * 0.75)]}
    return {name: round(value, 2) for name, value in figures.items()}


def is_steady(samples: Sequence[float]) -> bool:
    """True if a baseline is steady enough for differences from it to be read."""
    figures = spread(samples)
    return figures["p75"] - figures["p25"] <= STEADY * figures["median"]
