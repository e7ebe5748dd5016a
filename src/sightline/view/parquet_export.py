"""`samples/step_N.parquet`: rollouts with their images, for other programs.

    traces/step_N --one rollout at a time--> row --> parquet writer --a row group--> file
    media/        --each image once---------'

Memory use is limited to one row group. pandas, DuckDB and the `datasets` library can open the file.
`datasets` shows the `images` column as images.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from sightline.errors import ConfigError, MediaError, Misaligned
from sightline.media import MediaStore
from sightline.run.run_dir import RunDir
from sightline.trace import Trace
from sightline.view.dashboard import trace_files
from sightline.view.run_files import RunFiles, get_run_dir
from sightline.view.trace_export import openai_message

MAX_IMAGE_BYTES = 2_000_000
"""Larger images are replaced by reduced copies."""
MAX_ROLLOUT_BYTES = 16_000_000
"""Maximum bytes of images per rollout. Further images stay references."""
GROUP_BYTES = 8_000_000
"""Size at which a row group is written."""
GROUP_ROWS = 256
_SMALLER_SIDE = 1024

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


@dataclass(frozen=True, slots=True)
class ExportCounts:
    rollouts: int
    images: int
    """Number of images in the file."""
    left_out: int
    """Number of images that are missing, damaged or over the limit. Rows have their digests."""
    nbytes: int
    problems: tuple[str, ...] = ()
    """Descriptions of unreadable traces."""


def build_schema() -> pyarrow.Schema:
    """Return the schema, with metadata that declares the image column to `datasets`."""
    features: dict[str, Any] = {
        name: {"dtype": str(kind), "_type": "Value"}
        for name, kind in FIELDS.items()
        if not pyarrow.types.is_list(kind)
    }
    for name, kind in (("token_ids", "int32"), ("sampled", "bool"), ("logprobs", "float32"),
                       ("image_digests", "string")):  # fmt: skip
        features[name] = {"feature": {"dtype": kind, "_type": "Value"}, "_type": "List"}
    features["images"] = {"feature": {"_type": "Image"}, "_type": "List"}
    for name, feature in features.items():
        if feature.get("dtype") == "double":
            features[name] = {"dtype": "float64", "_type": "Value"}
    ordered = {name: features[name] for name in FIELDS}
    note = json.dumps({"info": {"features": ordered}}).encode()
    return pyarrow.schema(list(FIELDS.items()), metadata={b"huggingface": note})


def export_samples(
    run_dir: RunDir, steps: list[int] | None = None, max_rollout_bytes: int = MAX_ROLLOUT_BYTES
) -> Iterator[tuple[str, ExportCounts]]:
    """Write the files. Yield each file's name and counts after it was written."""
    run_dir = get_run_dir(run_dir.path)
    files = sorted(run_dir.traces.glob("step_*.msgpack"))
    if steps:
        files = [run_dir.traces_of(step) for step in steps]
    store = RunFiles(run_dir).open_store()
    for file in files:
        if not file.is_file():
            raise ConfigError(f"there is no {file}", "name a step that has traces")
        name = f"{file.stem}.parquet"
        verdicts = trace_files.read_verdicts(run_dir, file.stem)
        target = run_dir.samples / name
        yield name, export_step(file, target, store, verdicts, max_rollout_bytes)


def export_step(
    traces: Path,
    target: Path,
    store: MediaStore,
    verdicts: dict[str, str] | None = None,
    max_rollout_bytes: int = MAX_ROLLOUT_BYTES,
) -> ExportCounts:
    """Write a trace file's rollouts to `target` atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    counts = _ExportTally()
    try:
        with pyarrow.parquet.ParquetWriter(part, build_schema(), compression="zstd") as writer:
            rows: list[dict[str, Any]] = []
            num_bytes = 0
            for row in _iterate_rows(traces, store, verdicts or {}, max_rollout_bytes, counts):
                rows.append(row)
                num_bytes += _estimate_bytes(row)
                if num_bytes >= GROUP_BYTES or len(rows) >= GROUP_ROWS:
                    writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, build_schema()))
                    rows, num_bytes = [], 0
            if rows:
                writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, build_schema()))
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return ExportCounts(
        counts.rollouts, counts.images, counts.left_out, target.stat().st_size,
        tuple(counts.problems),
    )  # fmt: skip


class _ExportTally:
    def __init__(self) -> None:
        self.rollouts = self.images = self.left_out = 0
        self.problems: list[str] = []


def _estimate_bytes(row: dict[str, Any]) -> int:
    return (
        sum(len(image["bytes"]) for image in row["images"])
        + 9 * len(row["token_ids"]) + len(row["messages"]) + 500
    )  # fmt: skip


def _iterate_rows(
    traces: Path,
    store: MediaStore,
    verdicts: dict[str, str],
    max_rollout_bytes: int,
    counts: _ExportTally,
) -> Iterator[dict[str, Any]]:
    step = trace_files.find_step(traces.name)
    for record in trace_files.read_records(traces):
        if isinstance(record, str):
            counts.problems.append(record)
            continue
        counts.rollouts += 1
        yield _build_row(record.trace, step, store, verdicts, max_rollout_bytes, counts)


def _build_row(
    trace: Trace,
    step: int | None,
    store: MediaStore,
    verdicts: dict[str, str],
    max_rollout_bytes: int,
    counts: _ExportTally,
) -> dict[str, Any]:
    leaf = trace.turns[-1].id if trace.turns else len(trace.nodes) - 1
    path = trace.path(leaf) if trace.nodes else []
    nodes = [trace.nodes[n] for n in path]
    # Write each image once, even if the rollout contains it several times.
    slots = (slot for node in trace.nodes for slot in node.slots)
    refs = {ref.digest: ref for slot in slots for ref in slot.item.refs}
    images, num_bytes = [], 0
    for digest, ref in refs.items():
        if ref.is_video:  # the column holds images only
            counts.left_out += 1
            continue
        try:
            data = _read_inline_image(store, digest)
        except MediaError:
            counts.left_out += 1
            continue
        if num_bytes + len(data) > max_rollout_bytes:
            counts.left_out += 1
            continue
        num_bytes += len(data)
        counts.images += 1
        images.append({"bytes": data, "path": digest})
    sampled = [i >= node.sampled_start for node in nodes for i in range(len(node.token_ids))]
    token_ids = trace.tokens(path) if path else []
    if len(sampled) != len(token_ids):
        raise Misaligned(
            f"trace {trace.id}: {len(sampled)} marks for {len(token_ids)} tokens", "report this bug"
        )
    return {
        "step": step,
        "trace_id": trace.id,
        "group_id": trace.group_id,
        "env": trace.env,
        "task": trace.task,
        "split": trace.split,
        "verdict": verdicts.get(trace.id, ""),
        "reward": trace.reward,
        "rewards": json.dumps(trace.rewards),
        "error": trace.error,
        "messages": json.dumps(
            [openai_message(node.message) for node in nodes], ensure_ascii=False
        ),
        "num_tokens": trace.num_tokens,
        "num_sampled": trace.num_sampled,
        "token_ids": token_ids,
        "sampled": sampled,
        "logprobs": [value for node in nodes for value in node.logprobs.numpy().tolist()],
        "image_digests": list(refs),
        "images": images,
    }


def _read_inline_image(store: MediaStore, digest: str) -> bytes:
    ref = store.get_ref(digest)
    data = store.get(ref)
    if len(data) <= MAX_IMAGE_BYTES:
        return data
    image = store.image(ref)
    image.thumbnail((_SMALLER_SIDE, _SMALLER_SIDE))
    smaller = io.BytesIO()
    image.save(smaller, format="JPEG", quality=88)
    return smaller.getvalue()
