"""Decode and count the data that a run sent to its trainer.

    batches/step_N, if kept ---------------------.
                                                  >-- samples -- pack -- counts
    traces/step_N + scores/step_N, otherwise ----'

A batch is removed when a checkpoint covers it, unless `[orchestrator] keep_batches` is set. Its
samples are then rebuilt from the traces and from the nodes that the trainer scored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from sightline import config
from sightline.algo.verdicts import NO_SIGNAL, TRAIN
from sightline.config import RunFile
from sightline.errors import WireError
from sightline.families import load_family
from sightline.media import MediaRef, open_store
from sightline.pack import PackSize, pack, truncate
from sightline.regular_file import read_bytes
from sightline.run.run_dir import RunDir
from sightline.trace import Node, Trace, flatten, read_traces
from sightline.view.dashboard.trace_files import read_verdicts
from sightline.view.run_files import get_run_dir
from sightline.wire.array import Array
from sightline.wire.file import read_lines
from sightline.wire.micro_batch import MicroBatch, StepScores
from sightline.wire.sample import Batch, Sample, digest_batch

PER_TOKEN = {"token_ids", "trained", "logprobs", "advantages", "versions"}
"""Arrays with one number per token that a sample or a node may hold."""
MAX_LIST_LENGTH = 4096
"""A longer list of numbers counts as an array."""
DATA_URLS = (b"data:image", b";base64,")
SIGNATURES = (
    b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0\x00\x10JFIF", b"Exif\x00\x00", b"WEBPVP8", b"GIF87a",
    b"GIF89a", b"iVBORw0KGgo", b"/9j/4AAQSkZJRg",
)  # fmt: skip
"""The first bytes of image files, the last two in base64. They do not occur by chance."""
IMAGE_FOLDERS = {"media", "report", "samples", "sinks", "view"}
"""The folders of a run that may contain images."""


@dataclass
class Inspection:
    """Counts of a run, in the order in which they are printed."""

    steps: int = 0
    rollouts: int = 0
    """Number of rollouts in all steps, with any verdict."""
    eval_rollouts: int = 0
    batches_as_sent: int = 0
    """Number of batches decoded from the announced bytes, whose digest is in the ledger."""
    batches_rebuilt: int = 0
    samples: int = 0
    micro_batches: int = 0
    micro_batches_with_references: int = 0
    slots: int = 0
    """Number of image and video-step slots in samples."""
    video_slots: int = 0
    """Number of video-step slots."""
    descriptors: int = 0
    """Number of items in micro-batches. Repeated images in a micro-batch count once."""
    distinct_files: int = 0
    """Number of distinct images that descriptors or traces refer to."""
    eager_tensors: int = 0
    """Number of arrays in batches that are not per-token numbers."""
    data_urls: int = 0
    """Number of data URLs and encoded images outside the folders that may contain images."""
    missing_files: int = 0
    """Number of referenced images that are not in the store."""
    missing: list[MediaRef] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return self.eager_tensors == self.data_urls == self.missing_files == 0


def inspect_run(run_dir: RunDir) -> Inspection:
    run_dir = get_run_dir(run_dir.path)
    run_file = config.load_config(RunFile, run_dir.config)
    store = open_store(run_file.media.root or run_dir.media, **run_file.media.store_options())
    counts = Inspection()
    refs: dict[str, MediaRef] = {}
    for batch, raw, as_sent, micro_batches in read_packs(run_dir, run_file):
        counts.steps += 1
        counts.batches_as_sent += as_sent
        counts.batches_rebuilt += not as_sent
        counts.eager_tensors += sum(1 for _ in find_eager_tensors(msgspec.msgpack.decode(raw)))
        counts.samples += len(batch.samples)
        counts.slots += sum(len(sample.slots) for sample in batch.samples)
        items = (sample.items[slot.item] for sample in batch.samples for slot in sample.slots)
        counts.video_slots += sum(item.step is not None for item in items)
        for micro_batch in micro_batches:
            counts.micro_batches += 1
            counts.micro_batches_with_references += bool(micro_batch.items)
            counts.descriptors += len(micro_batch.items)
            packed_refs = (ref for packed in micro_batch.items for ref in packed.item.refs)
            refs |= {ref.digest: ref for ref in packed_refs}
    for file in sorted(run_dir.traces.glob("*.msgpack")):
        for trace in read_traces(file):
            if file.stem.startswith("step_"):
                counts.rollouts += 1
            else:
                counts.eval_rollouts += 1
            slots = (slot for node in trace.nodes for slot in node.slots)
            refs |= {ref.digest: ref for slot in slots for ref in slot.item.refs}
    counts.distinct_files = len(refs)
    counts.missing = [ref for ref in refs.values() if not store.has(ref)]
    counts.missing_files = len(counts.missing)
    counts.data_urls = sum(count_images_in(file) for file in list_image_free_files(run_dir))
    return counts


def find_eager_tensors(value: Any, name: str = "") -> Iterator[str]:
    """Yield the paths of possible pixel values in a message that was decoded without a schema."""
    if isinstance(value, dict):
        if value.keys() == {"dtype", "shape", "data"}:
            if name.rpartition(".")[2] not in PER_TOKEN or len(value["shape"]) != 1:
                yield name
            return
        for key, inner in value.items():
            yield from find_eager_tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        if len(value) > MAX_LIST_LENGTH and isinstance(value[0], (int, float)):
            yield name
            return
        for i, inner in enumerate(value):
            yield from find_eager_tensors(inner, f"{name}[{i}]")
    elif isinstance(value, (bytes, memoryview)):
        yield name


def list_image_free_files(run_dir: RunDir) -> list[Path]:
    """Return the files of a run that must not contain images."""
    return [
        path
        for path in sorted(run_dir.path.rglob("*"))
        if path.is_file() and path.relative_to(run_dir.path).parts[0] not in IMAGE_FOLDERS
    ]


def count_images_in(file: Path) -> int:
    """Count data URLs and image files in a file. Weights are skipped: they are random bytes."""
    if file.suffix == ".safetensors":
        return 0
    data = read_bytes(file)
    # A data URL matches both patterns, so the larger count is the number of URLs.
    return max(data.count(mark) for mark in DATA_URLS) + sum(map(data.count, SIGNATURES))


def print_inspection(counts: Inspection) -> None:
    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for entry in fields(Inspection):
        value = getattr(counts, entry.name)
        if isinstance(value, int):
            bad = value and entry.name in ("eager_tensors", "data_urls", "missing_files")
            name = entry.name.replace("_", " ").replace("micro batches", "micro-batches")
            table.add_row(name.replace("data urls", "data URLs"), f"{value:,}",
                          style="bold red" if bad else "")  # fmt: skip
    console.print(table)
    for ref in counts.missing[:10]:
        console.print(f"missing: {ref.url}", highlight=False, soft_wrap=True)


def read_packs(
    run_dir: RunDir, run_file: RunFile
) -> Iterator[tuple[Batch, bytes, bool, list[MicroBatch]]]:
    """Yield each step's batch, its bytes, whether exactly these were sent, and its micro-batches,
    packed again."""
    model, path = run_file.model, Path(run_file.model.path)
    path = path if path.is_dir() else run_dir.checkpoints / "final"
    family = load_family(path, model.exact, **model.overrides())
    limit = PackSize(run_file.trainer.max_micro_batch_tokens, run_file.trainer.micro_batch_patches)
    for batch, raw, as_sent in _read_batches(run_dir, run_file.orchestrator.replay_max_age):
        # The trainer computes the advantages before packing. Their values change no count.
        samples = [
            replace(sample, advantages=Array.of(np.zeros(len(sample.trained)), "float32"))
            for sample in batch.samples
        ]
        if cut := run_file.trainer.max_sequence_tokens:
            samples, _ = truncate(samples, cut)
        yield batch, raw, as_sent, pack(samples, batch.step, family, limit)


def _read_batches(run_dir: RunDir, max_age: int) -> Iterator[tuple[Batch, bytes, bool]]:
    """Yield each step's batch, its bytes, and whether exactly these bytes were sent."""
    entries = map(json.loads, read_lines(run_dir.ledger))
    for step, digest in sorted((entry["step"], entry["batch"]) for entry in entries):
        file = run_dir.batch(step)
        if file.is_file():
            raw = read_bytes(file)
            if digest_batch(raw) != digest:
                raise WireError(
                    f"{file} is not the batch that step {step} trained on",
                    "the file was changed, or comes from another run",
                )
            yield _decode_batch(raw, file), raw, True
        else:
            batch = Batch(step, _rebuild_samples(run_dir, step, max_age))
            yield batch, batch.to_bytes(), False


def _decode_batch(raw: bytes, file: Path) -> Batch:
    try:
        return Batch.from_bytes(raw)
    except WireError as error:
        tensors = ", ".join(find_eager_tensors(msgspec.msgpack.decode(raw))) or "none"
        raise WireError(
            f"{file} is not a batch: {error}; tensors in it: {tensors}",
            "send samples with references: the trainer makes the pixels",
        ) from error


def _rebuild_samples(run_dir: RunDir, step: int, max_age: int) -> list[Sample]:
    """Return the samples of a step, with only the nodes that it trained."""
    trained: dict[str, set[int]] = {}
    for origin in read_scores(run_dir, step).origins:
        trained.setdefault(origin.trace_id, set()).add(origin.node)
    samples: list[Sample] = []
    for trace in read_candidates(run_dir, step, max_age):
        if nodes := trained.get(trace.id):
            # Only counts matter here, so all advantages are zero.
            samples += flatten(trace, partial(_get_zero, nodes))
    return samples


def _get_zero(nodes: set[int], node: Node) -> float | None:
    return 0.0 if node.id in nodes else None


def read_scores(run_dir: RunDir, step: int) -> StepScores:
    for file in (run_dir.scores_of(step), run_dir.traces_of(step)):
        if not file.is_file():
            raise WireError(
                f"{file} is missing",
                "choose a step that has trained. `sightline prune` also removes files",
            )
    return StepScores.from_bytes(read_bytes(run_dir.scores_of(step)))


def read_candidates(run_dir: RunDir, step: int, max_age: int) -> list[Trace]:
    """Return the traces that a step trained, and their siblings that set a baseline.

    The step's own file lacks the traces that it trained again.
    """
    origins = read_scores(run_dir, step).origins
    missing, groups = {o.trace_id for o in origins}, {o.group_id for o in origins}
    traces: list[Trace] = []
    first = max(step - max_age, 1)
    for played in range(step, first - 1, -1):
        if not missing:
            break
        verdicts = read_verdicts(run_dir, [played]).get(played, {})
        for trace in read_traces(run_dir.traces_of(played)):
            is_candidate = verdicts.get(trace.id) in (TRAIN, NO_SIGNAL)
            if trace.id in missing or (trace.group_id in groups and is_candidate):
                missing.discard(trace.id)
                traces.append(trace)
    if missing:
        raise WireError(
            f"step {step} trained on {len(missing)} traces that are not in the files of steps "
            f"{first} to {step}, the first {min(missing)}",
            "the run directory is incomplete. Copy it again",
        )
    return traces
