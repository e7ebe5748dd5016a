"""Checks before a run starts, and the checks of `sightline doctor`.

`table` lists the checks. `sightline check`, `sightline doctor` and the start of a run use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Finding(NamedTuple):
    """One result of a check. A result with a fix is a problem."""

    text: str
    """A figure, a file that is intact, or the problem."""
    fix: str = ""
    """The solution of a problem; empty if all is well."""
    blocks: bool = False
    """Whether the problem prevents a resume."""


class Check(NamedTuple):
    """A row of the table."""

    name: str
    stages: tuple[str, ...]
    needs: str
    """The facts that the function takes as arguments."""
    function: Callable[..., Iterable[Finding] | str | None]
    """Returns a figure or findings. Raises SightlineError for what prevents a start."""

    def run(self, facts: object = None) -> Iterator[Finding]:
        result = self.function(*(getattr(facts, need) for need in self.needs.split()))
        if isinstance(result, str):
            yield Finding(result)
        else:
            yield from result or ()
