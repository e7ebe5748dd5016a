"""Checks before a run starts, and the checks of `sightline doctor`.

`table` lists the checks. `sightline check`, `sightline doctor` and the start of a run use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Finding(NamedTuple):
    """One result of a check. A result with a fix is a problem."""

    text: str
    """A measured value, an intact file, or the problem."""
    fix: str = ""
    """The fix for the problem. Empty if there is none."""
    blocks: bool = False
    """Whether the problem prevents a resume."""


class Check(NamedTuple):
    """A check, as a row of the table."""

    name: str
    stages: tuple[str, ...]
    needs: str
    """Names of the facts that `function` takes as arguments, separated by spaces."""
    function: Callable[..., Iterable[Finding] | str | None]
    """Returns a text or findings. Raises SightlineError if the run cannot start."""

    def run(self, facts: object = None) -> Iterator[Finding]:
        result = self.function(*(getattr(facts, need) for need in self.needs.split()))
        if isinstance(result, str):
            yield Finding(result)
        else:
            yield from result or ()
