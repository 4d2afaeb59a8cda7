"""Pictures as SVG, in the colours of a light or a dark page, without any library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

LINE = 17
STYLE = """
text { font: 13px sans-serif; fill: #1f2430 }
.name { font-weight: bold }
.small { font-size: 12px; fill: #4a5163 }
.page { fill: #ffffff }
.outer { fill: none; stroke: #8a93a6; stroke-dasharray: 5 4 }
.code { fill: #e3ebfa; stroke: #4470b8 }
.memory { fill: #fdebd9; stroke: #c5661a }
.line { fill: none; stroke: #4a5163; stroke-width: 1.5 }
.head { fill: #4a5163 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9f0 } .small { fill: #b6bdcc } .page { fill: #14171f } .outer { stroke: #6b7488 }
.code { fill: #1d2c4a; stroke: #6f9be0 } .memory { fill: #452a12; stroke: #e08a3c }
.line { stroke: #b6bdcc } .head { fill: #b6bdcc }
}
"""

Point = tuple[int, int]


class Picture:
    """One SVG. Later parts cover earlier ones."""

    def __init__(self, width: int, height: int, title: str) -> None:
        marker = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0 0 10 5 0 10z"/></marker>'
        )
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}</style><defs>{marker}</defs>",
            f'<rect class="page" width="{width}" height="{height}"/>',
        ]

    def text(self, x: int, y: int, text: str, kind: str = "small", anchor: str = "start") -> None:
        """One line of text, `y` being its base line."""
        self._parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, kind: str, corner: Point, size: Point, name: str, lines: Iterable[str] = ()) -> None:
        """A box with its name and its lines."""
        (x, y), (width, height) = corner, size
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>')
        self.text(x + 10, y + 20, name, "name")
        for number, line in enumerate(lines):
            self.text(x + 10, y + 38 + number * LINE, line)

    def bar(self, kind: str, corner: Point, size: Point) -> None:
        """A box without a name."""
        (x, y), (width, height) = corner, size
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="3"/>')

    def arrow(self, points: Iterable[Point], label: str = "", at: Point = (0, 0), both: bool = False) -> None:
        """A line through points, with its head at the last; the label's middle is at `at`."""
        path = " ".join(f"{x},{y}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(f'<polyline class="line" points="{path}" marker-end="url(#head)"{start}/>')
        if label:
            self.text(*at, label, anchor="middle")

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Bar:
    """One value of a chart: its name, and its text."""

    name: str
    value: float
    text: str
    # The kind of the box: `memory` for Pillion, `code` for the others.
    kind: str


# Sizes of a chart, in pixels: its width, the left end of bars, the room behind the longest, and heights.
CHART_WIDTH, CHART_LEFT, CHART_RIGHT = 860, 150, 190
CHART_HEAD, CHART_ROW, CHART_BAR, CHART_GAP = 38, 24, 18, 24


def charts(title: str, panels: Sequence[tuple[str, Sequence[Bar]]]) -> Picture:
    """Bars below their headings; those below one heading have one scale."""
    height = sum(CHART_HEAD + CHART_ROW * len(bars) + CHART_GAP for _, bars in panels)
    picture = Picture(CHART_WIDTH, height, title)
    y = 0
    for heading, bars in panels:
        picture.text(20, y + 28, heading, "name")
        y += CHART_HEAD
        scale = (CHART_WIDTH - CHART_LEFT - CHART_RIGHT) / max(bar.value for bar in bars)
        for bar in bars:
            # A far shorter bar than the others is still visible.
            width = max(2, round(bar.value * scale))
            picture.text(CHART_LEFT - 10, y + 14, bar.name, anchor="end")
            picture.bar(bar.kind, (CHART_LEFT, y), (width, CHART_BAR))
            picture.text(CHART_LEFT + width + 8, y + 14, bar.text)
            y += CHART_ROW
        y += CHART_GAP
    return picture
