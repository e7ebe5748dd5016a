"""When server and trainer were busy, and how much of that was at once.

`busy` events hold the server's intervals, whoever wrote them down; every `train` event holds one
of the trainer's. Both are by the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sightline.view.chart import ticks, wrap_svg
from sightline.wire.event import Event

Interval = tuple[float, float]

WINDOW_S = 10.0
_STEPS_IN_WINDOW = 4
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 720, 70, 16, 34, 24


@dataclass(frozen=True, slots=True)
class Timeline:
    server: list[Interval]
    trainer: list[Interval]
    """Disjoint intervals in order, in seconds since 1970."""
    steps: list[tuple[int, Interval]]
    """The trainer's intervals as it told them, with their steps."""

    @property
    def both(self) -> list[Interval]:
        return intersect_intervals(self.server, self.trainer)

    @property
    def server_s(self) -> float:
        """Busy while the trainer trained its first to its last step: evaluations do not count."""
        if not self.trainer:
            return 0.0
        return total_s(
            intersect_intervals(self.server, [(self.trainer[0][0], self.trainer[-1][1])])
        )

    @property
    def trainer_s(self) -> float:
        return total_s(self.trainer)

    @property
    def both_s(self) -> float:
        return total_s(self.both)

    @property
    def share(self) -> float | None:
        """Fraction of the trainer's busy time in which the server was busy too."""
        return self.both_s / self.trainer_s if self.trainer_s else None


def build_timeline(events: Iterable[Event]) -> Timeline:
    server: list[Interval] = []
    steps: list[tuple[int, Interval]] = []
    for event in events:
        if event.kind == "busy":
            intervals = event.values.get("intervals")
            server += [i for i in map(_parse_interval, intervals or ()) if i]
        elif event.kind == "train" and (interval := _parse_interval(event.values.get("busy"))):
            steps.append((event.step, interval))
    steps.sort(key=lambda pair: pair[1])
    return Timeline(
        merge_intervals(server), merge_intervals(interval for _, interval in steps), steps
    )


def _parse_interval(value: Any) -> Interval | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    start, end = value
    if not all(isinstance(side, int | float) for side in (start, end)) or end <= start:
        return None
    return float(start), float(end)


def merge_intervals(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Their union, in order; those no more than `gap` apart become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect_intervals(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The intersection of two lists of disjoint intervals in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def total_s(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def find_window(timeline: Timeline) -> Interval | None:
    """A stretch around the middle step that is long enough to show a few of them."""
    if not timeline.steps:
        return None
    first, last = timeline.steps[0][1][0], timeline.steps[-1][1][1]
    starts = [interval[0] for _, interval in timeline.steps]
    gaps = sorted(b - a for a, b in zip(starts, starts[1:], strict=False))
    length = WINDOW_S
    if gaps:
        length = max(length, _STEPS_IN_WINDOW * gaps[len(gaps) // 2])
    # Around a step, not the middle of the time: a run that was resumed has a hole in it.
    middle = sum(timeline.steps[len(timeline.steps) // 2][1]) / 2
    start = max(first, min(middle - length / 2, last - length))
    return start, min(start + length, last)


def draw_timeline(timeline: Timeline) -> str:
    """The strip of server and trainer in `find_window`, as SVG; empty when nothing trained."""
    window = find_window(timeline)
    if window is None:
        return ""
    start, end = window
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - start)
    rows = (("server", timeline.server), ("trainer", timeline.trainer), ("both", timeline.both))
    floor = 30 + _ROW * len(rows)
    title = f"{end - start:.0f} s in the middle of the run"
    body = [f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>']
    for value in ticks(0, end - start, 11):
        x = _LEFT + value * scale
        body.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="28" y2="{floor}"/>')
        body.append(
            f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{round(value, 6):g}s</text>'
        )
    for row, (name, intervals) in enumerate(rows):
        y = 32 + row * _ROW
        body.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{name}</text>')
        # Gaps under half a pixel cannot be seen, and a long run has very many of them.
        for left, right in merge_intervals(
            intersect_intervals(intervals, [window]), gap=0.5 / scale
        ):
            x, width = _LEFT + (left - start) * scale, max(0.5, (right - left) * scale)
            body.append(
                f'<rect class="f{row}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" '
                f'rx="2"><title>{name}: {left - start:.2f} to {right - start:.2f} s</title></rect>'
            )
    body += _step_labels(timeline, window, scale)
    return wrap_svg(title, _WIDTH, floor + 26, body)


def _step_labels(timeline: Timeline, window: Interval, scale: float) -> list[str]:
    y = 32 + _ROW + 16
    labels: list[str] = []
    for step, (left, right) in timeline.steps:
        inside = window[0] <= left and right <= window[1]
        if inside and (right - left) * scale >= 8 * len(str(step)) + 6:
            x = _LEFT + ((left + right) / 2 - window[0]) * scale
            labels.append(
                f'<text class="inside" x="{x:.1f}" y="{y}" text-anchor="middle">{step}</text>'
            )
    return labels
