"""Line charts of the documentation as SVG files, for light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Point = tuple[float, float]

STYLE = """
.sl{--ink:#1f2933;--soft:#6b7785;--rule:#e3e7eb;--c0:#2a6fdb;--c1:#d9622b;--c2:#1a8a6e;--c3:#8a4fc7;
font:12px system-ui,-apple-system,"Segoe UI",sans-serif;max-width:100%;height:auto}
@media (prefers-color-scheme:dark){.sl{--ink:#e6eaee;--soft:#98a4b0;--rule:#333b44;--c0:#6ea8ff;
--c1:#f0925f;--c2:#4cc3a3;--c3:#bb8df0}}
.sl text{fill:var(--soft)}.sl .title{fill:var(--ink);font-size:13px;font-weight:600}
.sl .rule{stroke:var(--rule);stroke-width:1}.sl .axis{stroke:var(--soft);stroke-width:1}
.sl .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.sl .faint{fill:none;stroke-width:1;opacity:.4}
.sl .k0{stroke:var(--c0)}.sl .k1{stroke:var(--c1)}.sl .k2{stroke:var(--c2)}.sl .k3{stroke:var(--c3)}
.sl .f0{fill:var(--c0)}.sl .f1{fill:var(--c1)}.sl .f2{fill:var(--c2)}.sl .f3{fill:var(--c3)}
"""
NUM_COLOURS = 4

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 46, 40
_MOST_POINTS = 600
_MOST_DOTS = 40


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float | None]]
    """Points in the order of x. Points whose y is None or infinite are skipped."""
    look: Literal["line", "faint", "dots"] = "line"
    colour: int = 0
    bars: Sequence[tuple[float, float]] = ()
    """The lowest and highest value of each point, drawn as error bars."""

    def drawn(self) -> list[Point]:
        """Return the valid points, averaged to at most `_MOST_POINTS`."""
        valid = [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]
        size = math.ceil(len(valid) / _MOST_POINTS)
        if size <= 1:
            return valid
        parts = [valid[i : i + size] for i in range(0, len(valid), size)]
        return [
            (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part))
            for part in parts
        ]


@dataclass(frozen=True, slots=True)
class _PlotArea:
    """Maps values to places in the chart."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int
    height: int

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str = "step",
    y_range: tuple[float, float] | None = None,
    width: int = 720,
    height: int = 280,
) -> str:
    """Return an SVG chart. `y_range` is widened to contain all values."""
    drawn = [(line, line.drawn()) for line in series]
    bars = [[(x, y) for x, *ends in _error_bars(line) for y in ends] for line in series]
    plane = _build_plot_area([*(points for _, points in drawn), *bars], y_range, width, height)
    body = [f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>']
    if plane:
        body += _draw_axes(plane, x_label)
        for line, points in drawn:
            body += _draw_series(line, points, plane)
        body += _draw_legend([line for line, points in drawn if points])
    else:
        body.append(
            f'<text x="{width / 2}" y="{height / 2}" text-anchor="middle">nothing measured</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sl" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">'
        f"<style>{STYLE}</style>{''.join(body)}</svg>"
    )


def _error_bars(line: Series) -> list[tuple[float, float, float]]:
    """Return the x, low end and high end of each bar."""
    if not line.bars:
        return []
    return [(x, *ends) for (x, _), ends in zip(line.points, line.bars, strict=True)]


def smooth(points: Sequence[tuple[float, float | None]], window: int) -> list[Point]:
    """Return the means over windows of `window` points that end at each point."""
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    means: list[Point] = []
    total = 0.0
    for i, (x, y) in enumerate(known):
        total += y
        if i >= window:
            total -= known[i - window][1]
        means.append((x, total / min(i + 1, window)))
    return means


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return about `most` round numbers from `low` to `high`."""
    raw = (high - low) / max(most - 1, 1)
    unit = 10 ** math.floor(math.log10(raw))
    gap = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return [float(i * gap) for i in range(first, last + 1)]


def _build_plot_area(
    curves: Sequence[Sequence[Point]],
    y_range: tuple[float, float] | None,
    width: int,
    height: int,
) -> _PlotArea | None:
    xs = [x for curve in curves for x, _ in curve]
    ys = [y for curve in curves for _, y in curve]
    if not xs:
        return None
    ys += y_range or ()
    x_low, x_high = _widen_bounds(min(xs), max(xs))
    y_low, y_high = _widen_bounds(min(ys), max(ys))
    if not y_range or (y_low, y_high) != y_range:
        # Extend to the next round number, so that no curve touches the frame.
        marks = ticks(y_low, y_high)
        gap = marks[1] - marks[0] if len(marks) > 1 else y_high - y_low
        y_low, y_high = math.floor(y_low / gap) * gap, math.ceil(y_high / gap) * gap
    return _PlotArea(x_low, x_high, y_low, y_high, width, height)


def _widen_bounds(low: float, high: float) -> tuple[float, float]:
    """Return the bounds, widened if they are equal."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    room = abs(low) * 0.5 or 1.0
    return low - room, high + room


def _draw_axes(plane: _PlotArea, x_label: str) -> list[str]:
    left, right = _LEFT, plane.width - _RIGHT
    floor = plane.height - _BOTTOM
    parts: list[str] = []
    for value in ticks(plane.y_low, plane.y_high):
        y = plane.y(value)
        parts.append(f'<line class="rule" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{round(value, 6):g}</text>'
        )
    for value in ticks(plane.x_low, plane.x_high, 8):
        if not value.is_integer():
            continue  # steps are whole numbers
        x = plane.x(value)
        parts.append(f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    parts.append(
        f'<text x="{(left + right) / 2}" y="{plane.height - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    return parts


def _draw_series(line: Series, points: Sequence[Point], plane: _PlotArea) -> list[str]:
    colour = line.colour % NUM_COLOURS
    placed = [(plane.x(x), plane.y(y)) for x, y in points]
    parts: list[str] = []
    if line.look != "dots" and len(placed) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path class="{line.look} k{colour}" d="{path}"/>')
    if line.look == "dots" or (line.look == "line" and len(placed) <= _MOST_DOTS):
        radius = 4.5 if line.look == "dots" else 2.5
        parts += [
            f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in placed
        ]
    for x, low, high in _error_bars(line):
        ends = f'y1="{plane.y(low):.1f}" y2="{plane.y(high):.1f}"'
        at = f"{plane.x(x):.1f}"
        parts.append(f'<line class="k{colour}" x1="{at}" x2="{at}" {ends} opacity=".6"/>')
    return parts


def _draw_legend(series: Sequence[Series]) -> list[str]:
    """Draw one entry for each series. A single series needs none."""
    if len(series) < 2:
        return []
    parts: list[str] = []
    x = float(_LEFT)
    for line in series:
        colour = line.colour % NUM_COLOURS
        if line.look == "dots":
            mark = f'<circle class="f{colour}" cx="{x + 9}" cy="32" r="4.5"/>'
        else:
            mark = f'<path class="{line.look} k{colour}" d="M{x} 32h18"/>'
        parts.append(f'{mark}<text x="{x + 24}" y="36">{escape(line.name)}</text>')
        x += 42 + 6.6 * len(line.name)
    return parts
