"""Format numbers as text, for the terminal and the report. None becomes a dash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

NOTHING = "-"
_BARS = "▁▂▃▄▅▆▇█"


def count(value: float | None) -> str:
    """Format large numbers with a letter: 812, 1.9k, 24k, 3.1M."""
    if value is None:
        return NOTHING
    size, letter = abs(value), ""
    for bound, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Slightly below the bound, because 999.96 would be rounded to 1000.
        if size >= bound * 0.9995:
            size, letter = size / bound, name
            break
    digits = 1 if letter and size < 9.95 else 0
    return f"{'-' if value < 0 else ''}{size:.{digits}f}{letter}"


def whole(value: float | None) -> str:
    """Format numbers with all digits: 57,600."""
    return NOTHING if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Format as minutes and seconds, or hours, minutes and seconds."""
    if seconds is None:
        return NOTHING
    total = max(0, round(seconds))
    hours, minutes = total // 3600, total // 60 % 60
    if hours:
        return f"{hours}:{minutes:02d}:{total % 60:02d}"
    return f"{minutes}:{total % 60:02d}"


def fixed(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    """Format numbers of any size with few digits: 3.2e-08, 0.0123, 1.4, 150."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e6:
        return f"{value:.1e}"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f}%"


def clean(text: object) -> str:
    """Return the text as one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the newest values as a line of bars."""
    recent = values[-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    if high - low <= 1e-12 * max(abs(high), abs(low), 1e-12):
        return _BARS[0] * len(recent)
    top = len(_BARS) - 1
    return "".join(_BARS[round((v - low) / (high - low) * top)] for v in recent)


def pairs_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of labels and texts, without a frame."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(clean(text)))
    return table
