"""What the index keeps of one rollout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from sightline.errors import SightlineError, WireError
from sightline.media import MediaRef
from sightline.message import Message
from sightline.trace import Trace, decode_trace
from sightline.trace.codec import FILE_MAGIC

MAX_ANSWER_CHARS = 160
BROKEN = "broken"
UNKNOWN = ""
"""The verdict of a rollout that no list of verdicts names: an evaluation, or of an older run."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One trace and its place in its file."""

    number: int
    start: int
    """Offset of its bytes, behind their length."""
    size: int
    trace: Trace


def read_records(path: Path) -> Iterator[TraceRecord | str]:
    """The traces of a file with their places; a problem, in words, for what cannot be read.

    A trace that is damaged costs itself; a file that ends early costs what is cut off.
    """
    with open(path, "rb") as file:
        if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
            yield "not a file of traces"
            return
        end = os.fstat(file.fileno()).st_size
        number = 0
        while head := file.read(4):
            start, size = file.tell(), int.from_bytes(head, "big")
            if len(head) < 4 or start + size > end:
                yield f"ends inside trace {number}"
                return
            try:
                yield TraceRecord(
                    number, start, size, decode_trace(file.read(size), f"trace {number}")
                )
            except SightlineError as error:
                yield error.problem
            number += 1


def read_trace(path: Path, start: int, size: int) -> Trace:
    """The one trace at a place that `read_records` gave."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(size)
    if len(data) < size:
        raise WireError(f"{path.name} is shorter than it was", "reload: the file was written anew")
    return decode_trace(data, path.name)


def find_step(file: str) -> int | None:
    """The step of a file of traces or scores; None for an evaluation and for foreign files."""
    digits = file.removesuffix(".msgpack").removeprefix("step_")
    is_step = file.startswith("step_") and digits.isascii() and digits.isdigit()
    return int(digits) if is_step and len(digits) <= 18 else None


def pick_first_and_last(traces: Path) -> list[Path]:
    """Return the trace files of the last and the first step; without steps, of evaluations."""
    steps = sorted(traces.glob("step_*.msgpack"))
    evals = [file for name in ("final", "start") for file in traces.glob(f"eval_{name}*.msgpack")]
    return list(dict.fromkeys([*steps[-1:], *steps[:1]])) or evals[:2]


def build_row(record: TraceRecord, file: str, verdict: str | None) -> dict[str, object]:
    """The columns of table `rollouts`, but for the id and what the trainer adds."""
    trace = record.trace
    turns = trace.turns
    step = find_step(file)
    oldest = trace.oldest_version
    return {
        "file": file,
        "number": record.number,
        "start": record.start,
        "size": record.size,
        "trace_id": trace.id,
        "group_id": trace.group_id,
        "env": trace.env,
        "task": trace.task,
        "split": trace.split,
        "step": step,
        "reward": trace.reward,
        "rewards": json.dumps(trace.rewards),
        "verdict": verdict or (BROKEN if trace.error else UNKNOWN),
        "error": _find_cause(trace),
        "turns": len(turns),
        "branches": len(trace.branches()),
        "tokens": trace.num_tokens,
        "sampled": trace.num_sampled,
        "images": trace.num_images_shown,
        "lag": None if step is None or oldest is None else max(0, step - 1 - oldest),
        "seconds": trace.ended - trace.started if trace.ended > trace.started > 0 else None,
        "answer": _answer(turns[-1].message) if turns else "",
    }


def _find_cause(trace: Trace) -> str:
    """The last line of what broke a rollout or cut it short, which names the exception."""
    lines = [line.strip() for line in (trace.error or trace.limit).splitlines() if line.strip()]
    if len(lines) > 1 and lines[-1].startswith("fix: "):
        lines.pop()
    return lines[-1][:MAX_ANSWER_CHARS] if lines else trace.error_kind


def _answer(message: Message) -> str:
    answer = message.text.strip()
    if not answer and message.tool_calls:
        call = message.tool_calls[0]
        answer = f"{call.name}({call.arguments})"
    return answer[:MAX_ANSWER_CHARS]


def collect_texts(trace: Trace) -> dict[bytes, str]:
    """Every distinct text of a rollout by its digest; most are shared with its siblings."""
    found: dict[bytes, str] = {}
    for node in trace.nodes:
        calls = (f"{call.name}({call.arguments})" for call in node.message.tool_calls)
        for text in (node.message.text, node.message.reasoning or "", *calls):
            if text:
                found[blake2b(text.encode(), digest_size=12).digest()] = text
    return found


def collect_images(trace: Trace) -> list[tuple[MediaRef, int, int]]:
    """Every place of an image: its ref, the node, and which image of the node it is."""
    return [
        (slot.item.ref, node.id, place)
        for node in trace.nodes
        for place, slot in enumerate(node.slots)
    ]
