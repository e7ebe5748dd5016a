"""`samples/step_N.parquet`: rollouts with their images, for other programs.

    traces/step_N --one rollout at a time--> row --> parquet writer --a row group--> file
    media/        --each image once---------'

Memory use is limited to one row group. pandas, DuckDB and the `datasets` library can open the file.
`datasets` shows the `images` column as images. Pairs have one row per group, for DPO.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from sightline.errors import ConfigError, MediaError, SightlineError
from sightline.media import MediaStore
from sightline.regular_file import open_file
from sightline.run.run_dir import RunDir
from sightline.trace import Trace
from sightline.trace.codec import read_records
from sightline.view.dashboard import trace_files
from sightline.view.run_files import RunFiles, get_run_dir
from sightline.view.trace_export import openai_message

MAX_ROLLOUT_BYTES = 16_000_000
"""Maximum bytes of images per rollout. Further images stay references."""
GROUP_BYTES = 8_000_000
"""Size at which a row group is written."""
GROUP_ROWS = 256

_IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
FIELDS = {
    "step": pyarrow.int64(),
    "trace_id": pyarrow.string(),
    "group_id": pyarrow.string(),
    "env": pyarrow.string(),
    "task": pyarrow.int64(),
    "split": pyarrow.string(),
    "verdict": pyarrow.string(),
    "reward": pyarrow.float64(),
    "rewards": pyarrow.string(),
    "error": pyarrow.string(),
    "messages": pyarrow.string(),
    "num_tokens": pyarrow.int64(),
    "num_sampled": pyarrow.int64(),
    "token_ids": pyarrow.list_(pyarrow.int32()),
    "sampled": pyarrow.list_(pyarrow.bool_()),
    "logprobs": pyarrow.list_(pyarrow.float32()),
    "image_digests": pyarrow.list_(pyarrow.string()),
    "images": pyarrow.list_(_IMAGE),
}
PAIR_FIELDS = {
    **{name: FIELDS[name] for name in ("step", "group_id", "env", "task")},
    "chosen_reward": pyarrow.float64(),
    "rejected_reward": pyarrow.float64(),
    "prompt": pyarrow.string(),
    "chosen": pyarrow.string(),
    "rejected": pyarrow.string(),
    **{name: FIELDS[name] for name in ("image_digests", "images")},
}
_COPIED = ("group_id", "env", "task", "split", "reward", "error", "num_tokens", "num_sampled")
"""Columns that are a trace's attributes."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The rollouts or pairs to write. By default, all rollouts."""

    best: int | None = None
    """Number of rollouts per group, those with the highest rewards."""
    min_reward: float | None = None
    """Least reward of a rollout."""
    min_gap: float | None = None
    """Write pairs: the best and the worst rollout of each group whose rewards differ by this."""

    def find_ids(self, traces: Path) -> set[str] | None:
        """Return the ids of the selected rollouts, without failed ones, or None for all."""
        if self == ALL:
            return None
        groups: dict[str, list[tuple[float, str]]] = {}
        for record in read_records(traces):
            if isinstance(record, SightlineError):
                continue
            trace = record.trace
            if trace.reward is not None and not trace.error:
                groups.setdefault(trace.group_id, []).append((trace.reward, trace.id))
        if self.min_gap is not None:
            ends = [(max(rollouts), min(rollouts)) for rollouts in groups.values()]
            gaps = [(best[0] - worst[0], best[1], worst[1]) for best, worst in ends]
            return {name for gap, *ids in gaps if gap >= self.min_gap and gap > 0 for name in ids}
        return {
            trace_id
            for rollouts in groups.values()
            for reward, trace_id in sorted(rollouts, reverse=True)[: self.best]
            if self.min_reward is None or reward >= self.min_reward
        }


ALL = Selection()


@dataclass(slots=True)
class ExportCounts:
    rollouts: int = 0
    """Number of rows: rollouts or pairs."""
    images: int = 0
    """Number of images in the file."""
    left_out: int = 0
    """Number of images that are missing, damaged or over the limit. Rows have their digests."""
    unreadable: int = 0
    """Number of unreadable traces."""
    nbytes: int = 0


def build_schema(fields: dict[str, pyarrow.DataType]) -> pyarrow.Schema:
    """Return the schema, with metadata that declares the image column to `datasets`."""
    features = {name: _describe_feature(kind) for name, kind in fields.items()}
    note = json.dumps({"info": {"features": features}}).encode()
    return pyarrow.schema(list(fields.items()), metadata={b"huggingface": note})


def _describe_feature(kind: pyarrow.DataType) -> dict[str, Any]:
    if pyarrow.types.is_list(kind):
        return {"feature": _describe_feature(kind.value_type), "_type": "List"}
    if kind == _IMAGE:
        return {"_type": "Image"}
    names = {"double": "float64", "float": "float32"}
    return {"dtype": names.get(str(kind), str(kind)), "_type": "Value"}


def export_samples(
    run_dir: RunDir,
    steps: list[int] | None = None,
    max_rollout_bytes: int = MAX_ROLLOUT_BYTES,
    selection: Selection = ALL,
    folder: Path | None = None,
) -> Iterator[tuple[str, ExportCounts]]:
    """Write the files. Yield each file's name and counts after it was written."""
    run_dir = get_run_dir(run_dir.path)
    files = sorted(run_dir.traces.glob("step_*.msgpack"))
    if steps:
        files = [run_dir.traces_of(step) for step in steps]
    store = RunFiles(run_dir).open_store()
    for file in files:
        if not file.is_file():
            raise ConfigError(f"there is no {file}", "pass a step that has traces")
        step = trace_files.find_step(file.name)
        verdicts = trace_files.read_verdicts(run_dir, [step]).get(step, {})
        target = (folder or run_dir.samples) / f"{file.stem}.parquet"
        counts = export_step(file, target, store, verdicts, max_rollout_bytes, selection)
        yield target.name, counts


def export_step(
    traces: Path,
    target: Path,
    store: MediaStore,
    verdicts: trace_files.Verdicts,
    max_rollout_bytes: int = MAX_ROLLOUT_BYTES,
    selection: Selection = ALL,
) -> ExportCounts:
    """Write a trace file's rollouts, or pairs of them, to `target` atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    counts = ExportCounts()
    try:
        is_pairs = selection.min_gap is not None
        schema = build_schema(PAIR_FIELDS if is_pairs else FIELDS)
        with pyarrow.parquet.ParquetWriter(part, schema, compression="zstd") as writer:
            selected = _iterate_selected(traces, selection.find_ids(traces), counts)
            rows = _iterate_pairs(selected) if is_pairs else _iterate_rows(selected, verdicts)
            group: list[dict[str, Any]] = []
            num_bytes = 0
            for row_traces, row in rows:
                counts.rollouts += 1
                row["step"] = trace_files.find_step(traces.name)
                row |= _read_images(row_traces, store, max_rollout_bytes, counts)
                group.append(row)
                texts = sum(len(value) for value in row.values() if isinstance(value, str))
                images = sum(len(image["bytes"]) for image in row["images"])
                num_bytes += images + texts + 9 * len(row.get("token_ids", ())) + 500
                if num_bytes >= GROUP_BYTES or len(group) >= GROUP_ROWS:
                    writer.write_batch(pyarrow.RecordBatch.from_pylist(group, schema))
                    group, num_bytes = [], 0
            if group:
                writer.write_batch(pyarrow.RecordBatch.from_pylist(group, schema))
        with open_file(part) as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    counts.nbytes = target.stat().st_size
    return counts


def _iterate_selected(traces: Path, ids: set[str] | None, counts: ExportCounts) -> Iterator[Trace]:
    for record in read_records(traces):
        if isinstance(record, SightlineError):
            counts.unreadable += 1
        elif ids is None or record.trace.id in ids:
            yield record.trace


def _get_last_path(trace: Trace) -> list[int]:
    leaf = trace.turns[-1].id if trace.turns else len(trace.nodes) - 1
    return trace.path(leaf) if trace.nodes else []


Rows = Iterator[tuple[Sequence[Trace], dict[str, Any]]]
"""The traces of each row, and its columns without the step and the images."""


def _iterate_pairs(traces: Iterator[Trace]) -> Rows:
    """Yield a row for each group, whose best and worst rollouts are selected."""
    first_of: dict[str, Trace] = {}
    for trace in traces:
        if (other := first_of.pop(trace.group_id, None)) is None:
            first_of[trace.group_id] = trace
            continue
        pair = sorted((trace, other), key=lambda trace: trace.reward or 0.0, reverse=True)
        chosen, rejected = (
            [openai_message(trace.nodes[n].message) for n in _get_last_path(trace)]
            for trace in pair
        )
        if not chosen or not rejected or chosen == rejected:
            continue
        equal = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        num_shared = min(len(list(equal)), len(chosen) - 1, len(rejected) - 1)
        parts = (chosen[:num_shared], chosen[num_shared:], rejected[num_shared:])
        row: dict[str, Any] = {name: getattr(trace, name) for name in ("group_id", "env", "task")}
        row |= {"chosen_reward": pair[0].reward, "rejected_reward": pair[1].reward}
        for name, messages in zip(("prompt", "chosen", "rejected"), parts, strict=True):
            row[name] = json.dumps(messages, ensure_ascii=False)
        yield pair, row


def _iterate_rows(traces: Iterator[Trace], verdicts: trace_files.Verdicts) -> Rows:
    for trace in traces:
        path = _get_last_path(trace)
        nodes = [trace.nodes[n] for n in path]
        messages = [openai_message(node.message) for node in nodes]
        columns = {
            **{name: getattr(trace, name) for name in _COPIED},
            "verdict": verdicts.get(trace.id, ""),
            "trace_id": trace.id,
            "rewards": json.dumps(trace.rewards),
            "messages": json.dumps(messages, ensure_ascii=False),
            "token_ids": trace.tokens(path),
            "sampled": [i >= n.sampled_start for n in nodes for i in range(len(n.token_ids))],
            "logprobs": [value for node in nodes for value in node.logprobs.numpy().tolist()],
        }
        yield [trace], columns


def _read_images(
    traces: Sequence[Trace], store: MediaStore, max_bytes: int, counts: ExportCounts
) -> dict[str, Any]:
    """Return each image once, even if the rollouts contain it several times."""
    slots = (slot for trace in traces for node in trace.nodes for slot in node.slots)
    refs = {ref.digest: ref for slot in slots for ref in slot.item.refs}
    images, num_bytes = [], 0
    for digest, ref in refs.items():
        data = None
        if not ref.is_video:  # the column holds images only
            with suppress(MediaError):
                data = store.get(store.get_ref(digest))
        if data is None or num_bytes + len(data) > max_bytes:
            counts.left_out += 1
            continue
        num_bytes += len(data)
        images.append({"bytes": data, "path": digest})
    counts.images += len(images)
    return {"image_digests": list(refs), "images": images}
