"""Draws the demo's bars as SVG, without any library."""

from __future__ import annotations

import dataclasses

WIDTH, LEFT, RIGHT, TOP = 860, 130, 130, 92
BAR, GAP, PAIR = 20, 4, 66
COLD, WARM, INK, PAPER = "#8a93a6", "#d9480f", "#1f2430", "#ffffff"


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt: its time to first token, cold and warm."""

    label: str
    cold_s: float
    warm_s: float


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" {more}>{text}</text>'


def _bar(y: float, width: float, colour: str, label: str) -> list[str]:
    return [
        f'<rect x="{LEFT}" y="{y:.1f}" width="{max(width, 1.5):.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
        _text(LEFT + max(width, 1.5) + 8, y + 15, label),
    ]


def _legend(x: float, colour: str, label: str) -> list[str]:
    return [
        f'<rect x="{x}" y="58" width="14" height="14" rx="2" fill="{colour}"/>',
        _text(x + 20, 70, label),
    ]


def svg(pairs: list[Pair]) -> str:
    """The whole picture."""
    scale = (WIDTH - LEFT - RIGHT) / max(max(pair.cold_s, pair.warm_s) for pair in pairs)
    height = TOP + PAIR * len(pairs) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        _text(20, 34, "Time to first token, before and after the engine was killed", 'font-size="18"'),
        *_legend(20, COLD, "cold: a new prompt, computed"),
        *_legend(250, WARM, "warm: a new engine, KV loaded from the Pillion sidecar"),
    ]
    for index, pair in enumerate(pairs):
        y = TOP + PAIR * index
        parts.append(_text(LEFT - 10, y + BAR + 6, pair.label, 'text-anchor="end"'))
        parts += _bar(y, pair.cold_s * scale, COLD, _milliseconds(pair.cold_s))
        faster = f"{_milliseconds(pair.warm_s)} ({pair.cold_s / pair.warm_s:.0f} x faster)"
        parts += _bar(y + BAR + GAP, pair.warm_s * scale, WARM, faster)
    return "\n".join([*parts, "</svg>"]) + "\n"
