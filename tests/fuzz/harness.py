"""Mutated inputs for a parser of outside bytes, guided by the lines of the package that they reach.

An input passes when the parser returns or raises a `SightlineError`, within `CPU_S` seconds of the
process's own time. Inputs that reach lines which none reached before are mutated further.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
from fuzzing import broken, mutate

import sightline
from sightline.errors import SightlineError

CORPUS = Path(__file__).parent / "corpus"
CPU_S = 10
MAX_BYTES = 65_536
_PACKAGE = str(Path(sightline.__file__).parent)
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Target:
    """`parse` takes the bytes.

    `form` says which structure is mutated: json, msgpack or bytes. `repair` makes a mutated input
    consistent again, such as its checksums.
    """

    name: str
    parse: Callable[[bytes], object]
    form: str = "bytes"
    repair: Callable[[bytes], bytes] | None = None


@dataclass
class FuzzReport:
    name: str
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    new_lines: int = 0
    """Lines that mutated inputs reached and the corpus did not."""
    kept: int = 0
    seconds: float = 0.0

    HEAD = "| parser | inputs | refused | accepted | new lines | inputs kept | seconds |"

    def __str__(self) -> str:
        return (
            f"| {self.name} | {self.inputs:,} | {self.refused:,} | {self.accepted:,} | "
            f"{self.new_lines} | {self.kept} | {self.seconds:.0f} |"
        )


class LineCoverage:
    """Counts lines of the package that run for the first time."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._unseen: dict[CodeType, set[int]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        unseen = self._unseen.get(code)
        if unseen is None:
            inside = code.co_filename.startswith(_PACKAGE)
            unseen = {line for *_, line in code.co_lines() if line} if inside else set()
            self._unseen[code] = unseen
        return self._on_line if unseen else None

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Any:
        unseen = self._unseen[frame.f_code]
        if frame.f_lineno in unseen:
            unseen.discard(frame.f_lineno)
            self.num_lines += 1
        return self._on_line


def read_corpus(name: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def fuzz(target: Target, num_inputs: int, seed: str) -> FuzzReport:
    rng = random.Random(f"{seed} {target.name}")
    report = FuzzReport(target.name)
    coverage = LineCoverage()
    pool = read_corpus(target.name)
    began = time.monotonic()
    outcomes = [_try_input(target, data, coverage) for data in pool]
    assert any(outcomes), f"{target.name} accepts nothing of its corpus"
    known = coverage.num_lines
    for number in range(num_inputs):
        data = mutate_input(target, pool, rng)
        before = coverage.num_lines
        # Lines that only rare inputs reach are found by tracing a part of the inputs.
        report.accepted += _try_input(target, data, coverage if number % 3 == 0 else None)
        if coverage.num_lines > before:
            pool.append(data)
            report.kept += 1
    report.inputs, report.refused = num_inputs, num_inputs - report.accepted
    report.new_lines, report.seconds = coverage.num_lines - known, time.monotonic() - began
    return report


def _try_input(target: Target, data: bytes, coverage: LineCoverage | None) -> bool:
    """Return whether the target accepts the input."""
    with _cpu_limit(), coverage.watch() if coverage else nullcontext():
        try:
            target.parse(data)
        except SightlineError as error:
            assert error.problem and error.fix, (target.name, data)
            return False
        except Exception as error:
            error.add_note(f"{target.name} was given {data!r}"[:20_000])
            raise
    return True


@contextmanager
def _cpu_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"more than {CPU_S} s of CPU for one input")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def mutate_input(target: Target, pool: Sequence[bytes], rng: random.Random) -> bytes:
    data = rng.choice(pool)
    for _ in range(rng.choice([1, 1, 1, 1, 1, 2, 4])):
        changed = _mutate_structure(data, target.form, rng) if rng.random() < 0.6 else None
        data = mutate_bytes(data, pool, rng) if changed is None else changed
        data = data[:MAX_BYTES]
    if target.repair is not None and rng.random() < 0.7:
        data = target.repair(data)
    return data


def _mutate_structure(data: bytes, form: str, rng: random.Random) -> bytes | None:
    """Return the structure with one change, or None if nothing can be changed."""
    try:
        if form == "json":
            return json.dumps(mutate(json.loads(data), rng)).encode()
        if form == "msgpack":
            return msgspec.msgpack.encode(mutate(msgspec.msgpack.decode(data), rng))
    except (ValueError, msgspec.MsgspecError, OverflowError, TypeError, RecursionError):
        pass
    return None


def mutate_bytes(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    if not data:
        return rng.choice(pool)
    at = rng.randrange(len(data))
    match rng.randrange(8):
        case 0:  # a number of another value
            size, order = rng.choice([1, 2, 4, 8]), rng.choice(["big", "little"])
            number = rng.choice(_NUMBERS) % 256**size
            return data[:at] + number.to_bytes(size, order) + data[at + size :]
        case 1:  # a part twice
            end = min(len(data), at + rng.randrange(1, 64))
            return data[:end] + data[at:]
        case 2:  # a part of another input
            other = rng.choice(pool)
            cut = rng.randrange(len(other)) if other else 0
            return data[:at] + other[cut : cut + rng.randrange(1, 256)] + data[at:]
        case 3:  # a part left out
            return data[:at] + data[at + rng.randrange(1, 64) :]
        case 4:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case _:
            return broken(data, rng)
