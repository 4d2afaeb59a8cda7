#!/usr/bin/env python3
"""Draws JSON lines of the benchmarks as bars, without any library: `picture.py RESULTS.jsonl > docs/gpu.svg`.

The first line of each benchmark counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, TOP = 860, 130, 190, 20
BAR, ROW, HEAD = 18, 24, 46
INK, PAPER = "#1f2430", "#ffffff"
COLOURS = {"pillion": "#d9480f"}
OTHER = "#8a93a6"
MS = "ms"
NAMES = {
    "none": "no connector",
    "roomy": "all fits the GPU",
    "offloading": "vLLM offloading",
    "pegaflow": "PegaFlow",
    "pillion": "Pillion",
}
Figure = tuple[str, str, Callable[[dict[str, Any]], float | None], str]
# (benchmark, title, its figure of a mode, unit)
FIGURES: list[Figure] = [
    (
        "gpu/ttft",
        "First token of 10,240 tokens, KV reloaded (less is better)",
        lambda m: m.get("reload_ms", {}).get("median"),
        "ms",
    ),
    ("gpu/multiturn", "24 conversations of 6 turns, output (more is better)", lambda m: m.get("output_tok_s"), "tokens/s"),
    ("gpu/multiturn", "Their gaps between tokens, p99 (less is better)", lambda m: m.get("itl_p99_ms"), MS),
]


def panel(y: float, title: str, bars: list[tuple[str, float]], unit: str) -> list[str]:
    """A title and a bar for each mode."""
    scale = (WIDTH - LEFT - RIGHT) / max(value for _, value in bars)
    parts = [f'<text x="20" y="{y + 24:.0f}" fill="{INK}" font-size="16">{title}</text>']
    for index, (mode, value) in enumerate(bars):
        top, colour = y + HEAD - 8 + index * ROW, COLOURS.get(mode, OTHER)
        parts += [
            f'<text x="{LEFT - 10}" y="{top + 14:.0f}" fill="{INK}" text-anchor="end">{NAMES.get(mode, mode)}</text>',
            f'<rect x="{LEFT}" y="{top:.0f}" width="{value * scale:.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
            f'<text x="{LEFT + value * scale + 8:.1f}" y="{top + 14:.0f}" fill="{INK}">{value:,.1f} {unit}</text>',
        ]
    return parts


def svg(results: list[dict[str, Any]]) -> str:
    """The whole picture."""
    parts: list[str] = []
    y = float(TOP)
    for bench, title, figure, unit in FIGURES:
        modes: dict[str, Any] = next((result["modes"] for result in results if result["bench"] == bench), {})
        bars = [(mode, value) for mode, measured in modes.items() if (value := figure(measured)) is not None]
        if bars:
            parts += panel(y, title, bars, unit)
            y += HEAD + len(bars) * ROW + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}" '
        f'font-family="sans-serif" font-size="13"><rect width="{WIDTH}" height="{y:.0f}" fill="{PAPER}"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(svg([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
