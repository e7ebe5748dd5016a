"""Read traces and verdicts, and extract the data that the index keeps of each rollout."""

from __future__ import annotations

import json
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path

from sightline.errors import WireError, summarize_traceback
from sightline.message import Message
from sightline.regular_file import open_file
from sightline.run.run_dir import RunDir
from sightline.trace import Trace, decode_trace
from sightline.trace.codec import TraceRecord
from sightline.wire.file import read_lines

MAX_ANSWER_CHARS = 160
BROKEN = "broken"
UNKNOWN = ""
"""Verdict for rollouts without one, in evaluations and older runs."""

Verdicts = dict[str, str]
"""Verdicts by rollout."""


def read_trace(path: Path, start: int, size: int) -> Trace:
    """Read the trace at a position from `read_records`."""
    with open_file(path) as file:
        file.seek(start)
        data = file.read(size)
    if len(data) < size:
        raise WireError(
            f"{path.name} has become shorter", "reload the page: the file was rewritten"
        )
    return decode_trace(data, path.name)


def find_step(file: str) -> int | None:
    """Return the step of a trace or score file; None for evaluations and other files."""
    digits = file.removesuffix(".msgpack").removeprefix("step_")
    is_step = file.startswith("step_") and digits.isascii() and digits.isdigit()
    return int(digits) if is_step and len(digits) <= 18 else None


def pick_first_and_last(traces: Path) -> list[Path]:
    """Return the trace files of the last and first step, or of evaluations if there are none."""
    steps = sorted(traces.glob("step_*.msgpack"))
    evals = [file for name in ("final", "start") for file in traces.glob(f"eval_{name}*.msgpack")]
    return list(dict.fromkeys([*steps[-1:], *steps[:1]])) or evals[:2]


def build_row(record: TraceRecord, file: str, verdict: str | None) -> dict[str, object]:
    """Return a row of the `rollouts` table, without the id and the trainer's scores."""
    trace = record.trace
    turns = trace.turns
    step = find_step(file)
    oldest = trace.oldest_version
    cause = summarize_traceback(trace.error or trace.limit).strip() or trace.error_kind
    return {
        "file": file,
        "number": record.number,
        "start": record.start,
        "size": record.size,
        "trace_id": trace.id,
        **{name: getattr(trace, name) for name in ("group_id", "env", "task", "split", "reward")},
        "step": step,
        "rewards": json.dumps(trace.rewards),
        "verdict": verdict or (BROKEN if trace.error else UNKNOWN),
        "error": cause[:MAX_ANSWER_CHARS],
        "turns": len(turns),
        "branches": len(trace.branches()),
        "tokens": trace.num_tokens,
        "sampled": trace.num_sampled,
        "images": trace.num_images_shown,
        "lag": None if step is None or oldest is None else max(0, step - 1 - oldest),
        "seconds": trace.ended - trace.started if trace.ended > trace.started > 0 else None,
        "answer": _answer(turns[-1].message) if turns else "",
    }


def _answer(message: Message) -> str:
    answer = message.text.strip()
    if not answer and message.tool_calls:
        call = message.tool_calls[0]
        answer = f"{call.name}({call.arguments})"
    return answer[:MAX_ANSWER_CHARS]


def collect_texts(trace: Trace) -> dict[bytes, str]:
    """Return a rollout's distinct texts by digest. Siblings share most of them."""
    texts: dict[bytes, str] = {}
    for node in trace.nodes:
        calls = (f"{call.name}({call.arguments})" for call in node.message.tool_calls)
        for text in (node.message.text, node.message.reasoning or "", *calls):
            if text:
                texts[blake2b(text.encode(), digest_size=12).digest()] = text
    return texts


def read_verdicts(run_dir: RunDir, steps: Collection[int | None]) -> dict[int | None, Verdicts]:
    """Return the verdicts of some steps. The last line of a step counts."""
    parsed = map(_parse_verdicts, read_lines(run_dir.verdicts))
    return {step: verdicts for step, verdicts in parsed if step in steps}


def _parse_verdicts(line: bytes) -> tuple[int, Verdicts]:
    """Return a line's step and verdicts; -1 as the step if it is unreadable."""
    try:
        record = json.loads(line)
        verdicts = {name: v for v, names in record["verdicts"].items() for name in names}
        return int(record["step"]), verdicts
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return -1, {}
