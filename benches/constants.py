"""The eviction policy with one constant changed at a time: constants chosen on two traces are judged on the third.

Each variant is built in a copy of the last commit. `benches/run policy --constants` prints a JSON object for each trace and
variant, and as its last line the choices, by held-out trace.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TODAY = "today"
VARIANTS = (
    *(TODAY, "KINDS=1", "KINDS=5", "TURNS=1", "LEVELS=2", "TICKS_PER_ROOM=32", "TICKS_PER_ROOM=128"),
    *("SAMPLED_MIN=1024", "SAMPLED_MIN=4096", "ROOMS_SAMPLED=16", "ROOMS_SAMPLED=32"),
    *("FADE=0.99", "FADE=0.999", "FADE=1.0", "GUESS=8.0", "GUESS=12.0", "GUESS=16.0", "GUESS=96.0"),
)
# A share below LRU's by more breaks a promise.
BELOW_LRU_MAX = 0.003
MODES = ("", "_gpu", "_once")


def change(source: Path, variant: str) -> None:
    """Gives a constant of the policy another value, in a copy of the sources."""
    name, value = variant.split("=")
    changed = 0
    tiers = source / "tiers/src"
    for path in (tiers / "standing.rs", tiers / "policy.rs", *(tiers / "policy").glob("*.rs")):
        text, count = re.subn(rf"(const {name}: \w+ =) [^;]+;", rf"\1 {value};", path.read_text())
        path.write_text(text)
        changed += count
    if changed != 1:
        raise ValueError(f"the policy has {changed} constants {name}")


def figures(trace: str, cells: Mapping[str, float]) -> dict[str, Any]:
    """A trace's gains, and the lowest share above LRU's in any room: alone, behind a GPU's cache, with copies kept once."""
    said: dict[str, Any] = {"trace": trace}
    for mode in MODES:
        ours = re.compile(rf"{trace}{mode}_(\d+)_pillion")
        rooms = [found[1] for name in cells if (found := ours.fullmatch(name))]
        above = (cells[f"{trace}{mode}_{room}_pillion"] - cells[f"{trace}{mode}_{room}_lru"] for room in rooms)
        said |= {f"gain{mode}": cells[f"{trace}{mode}_gain"], f"lowest{mode}": round(min(above), 4)}
    return said


def choices(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By held-out trace: the variant with the best mean gain on the others, its gain on this one, today's, and the best one."""
    gains: dict[str, dict[str, float]] = {}
    low = set()
    for run in runs:
        gains.setdefault(run["trace"], {})[run["constants"]] = run["gain"]
        if min(run[f"lowest{mode}"] for mode in MODES if f"lowest{mode}" in run) < -BELOW_LRU_MAX:
            low.add((run["trace"], run["constants"]))
    table = {}
    for held, own in gains.items():
        pair = [trace for trace in gains if trace != held]
        allowed = [name for name in own if not any((trace, name) in low for trace in pair)]
        chosen = max(allowed, key=lambda name: sum(gains[trace][name] for trace in pair))
        best = max(own, key=lambda name: own[name])
        table[held] = {"chosen": chosen, "gain": own[chosen], TODAY: own[TODAY], "best": best, "best_gain": own[best]}
    return table


def compare(bench: tuple[str, ...], replayed: Mapping[str, tuple[str, ...]]) -> None:
    """Runs the bench with each variant on traces: its arguments, by trace."""
    environment = os.environ | {"CARGO_TARGET_DIR": str(ROOT / "target/constants"), "CARGO_PROFILE_BENCH_LTO": "off"}
    runs = []
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as copy:
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", copy], input=archive.stdout, check=True)
            if variant != TODAY:
                change(Path(copy), variant)
            for trace, arguments in replayed.items():
                said = subprocess.run(
                    [*bench, *arguments], cwd=copy, env=environment, check=True, stdout=subprocess.PIPE, text=True
                )
                cells = json.loads(said.stdout.splitlines()[-1])
                runs.append({"constants": variant} | figures(trace, cells))
                print(json.dumps(runs[-1]), flush=True)
    print(json.dumps(choices(runs)))
