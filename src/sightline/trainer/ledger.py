"""Which batch each step of the surviving weights was trained on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sightline.errors import ResumeRefused
from sightline.wire.file import add_checksum, append_line, read_checked_lines, write_atomic


class LedgerLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    batch: str


class Ledger:
    """Every step in the history of the surviving weights, once."""

    def __init__(self, path: Path, step: int) -> None:
        # Steps after the checkpoint are about to be played again: they leave the ledger first.
        self._path = path
        lines = read_ledger(path, step)
        self._before = {line.step: line.batch for line in lines}
        kept = [line for line in lines if line.step <= step]
        write_atomic(path, b"".join(_encode(line) + b"\n" for line in kept))

    def add(self, step: int, batch: str) -> None:
        known = self._before.get(step)
        if known is not None and known != batch:
            raise ResumeRefused(
                f"step {step} was trained on batch {known[:12]} and is to be replayed on "
                f"{batch[:12]}",
                "restore batches/ of the run, or start a new run",
            )
        append_line(self._path, _encode(LedgerLine(step, batch)), sync=True)


def read_ledger(path: Path, step: int = 0) -> list[LedgerLine]:
    """Its lines. One that is damaged is refused by its number, and a ledger that does not hold
    every step up to `step`, the checkpoint's."""
    fix = "put it back from a copy; checkpoints and batches are not touched"
    lines = read_checked_lines(path, LedgerLine, fix)
    if [line.step for line in lines if line.step <= step] != list(range(1, step + 1)):
        problem = f"{path} does not hold every step up to the checkpoint's {step}"
        raise ResumeRefused(problem, "put it back from a copy, or start a new run")
    return lines


def _encode(line: LedgerLine) -> bytes:
    return add_checksum(msgspec.json.encode(line))
