"""Actions of `sightline trace`: show, export, diff and replay."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from sightline import config
from sightline.config import MediaConfig, ModelConfig, RunFile
from sightline.config.secret_refs import resolve_secret
from sightline.errors import ConfigError
from sightline.families import Family, load_family, load_renderer
from sightline.media import MediaStore, open_store
from sightline.render import Renderer
from sightline.rollout.client import GenerateClient
from sightline.trace import Trace, read_traces
from sightline.view.trace_export import branch_records, copy_images
from sightline.view.trace_replay import ReplayReport, ServerPromptScorer, replay_trace
from sightline.view.transcript import describe_trace, format_transcript
from sightline.wire.array import Array
from sightline.wire.file import write_atomic

MAX_WIDTH = 100
MAX_VALUE_CHARS = 500
NOT_COMPARED = ("id", "group_id", "started", "ended", "run")
"""Fields of traces and of their policies that differ between equal runs."""


def read_wanted_traces(path: Path, wanted: str | None) -> list[Trace]:
    """Return all traces of a file, or only one by its id or number."""
    if path.is_dir():
        files = sorted(p.name for p in (path / "traces").glob("*") if p.is_file())
        example = f", for example {path / 'traces' / files[-1]}" if files else ""
        raise ConfigError(f"{path} is a folder", f"pass a trace file{example}")
    try:
        traces = list(read_traces(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "pass a trace file") from error
    if wanted is None:
        return traces
    chosen = [trace for trace in traces if trace.id == wanted]
    if not chosen and wanted.isdigit() and int(wanted) < len(traces):
        chosen = [traces[int(wanted)]]
    if not chosen:
        some = ", ".join(trace.id for trace in traces[:4])
        raise ConfigError(
            f"{path} has no trace {wanted!r}",
            f"pass one of its {len(traces)} traces by id ({some}...) or by number from 0",
        )
    return chosen


def show_traces(args: argparse.Namespace) -> int:
    traces = read_wanted_traces(args.file, args.trace)
    width = min(shutil.get_terminal_size((80, 24)).columns, MAX_WIDTH)
    if len(traces) == 1:
        for line in format_transcript(traces[0], width, args.full):
            print(line)
        return 0
    for number, trace in enumerate(traces):
        print(f"{number:4d}  {describe_trace(trace)}")
    print(f"{len(traces)} traces; --trace ID shows one")
    return 0


def export_traces(args: argparse.Namespace) -> int:
    traces = read_wanted_traces(args.file, args.trace)
    lines = [
        json.dumps(record, ensure_ascii=False) + "\n"
        for trace in traces
        for record in branch_records(trace)
    ]
    if args.images is not None:
        num_images = copy_images(traces, open_media_store(args), args.images)
        print(f"{num_images} images in {args.images}", file=sys.stderr)
    if args.output is None:
        sys.stdout.writelines(lines)
    else:
        write_atomic(args.output, "".join(lines).encode())
        print(f"{len(lines)} branches of {len(traces)} traces in {args.output}", file=sys.stderr)
    return 0


def diff_traces(args: argparse.Namespace) -> int:
    traces, others = (read_wanted_traces(file, args.trace) for file in (args.file, args.other))
    for number, (trace, other) in enumerate(zip(traces, others, strict=False)):
        difference = next(iter_differences(trace, other), None)
        if difference is not None:
            where, *values = difference
            print(f"trace {number} ({trace.id}, {other.id}): {where}")
            for file, value in zip((args.file, args.other), values, strict=True):
                print(f"  {file}: {value!r:.{MAX_VALUE_CHARS}}")
            return 1
    if len(traces) != len(others):
        print(f"{args.file} has {len(traces)} traces, {args.other} has {len(others)}")
        return 1
    print(f"{len(traces)} traces, no difference")
    return 0


def iter_differences(one: Any, other: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path of each difference between two traces, with both values."""
    if isinstance(one, Array) and isinstance(other, Array):
        one, other = one.numpy().tolist(), other.numpy().tolist()
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        for name in one.__struct_fields__:
            if name not in NOT_COMPARED:
                path = f"{where}.{name}".lstrip(".")
                yield from iter_differences(getattr(one, name), getattr(other, name), path)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for i, (a, b) in enumerate(zip_longest(one, other)):
            yield from iter_differences(a, b, f"{where}[{i}]")
    elif one != other:
        yield where, one, other


def replay_traces(args: argparse.Namespace) -> int:
    traces = read_wanted_traces(args.file, args.trace)
    family, renderer = load_model(args)
    reports = asyncio.run(_replay_all(args, traces, family, renderer))
    for report in reports:
        for difference in report.differences:
            print(f"trace {report.trace_id} node {difference.node}: {difference.what} differ")
            print(f"  {difference.detail}")
    _print_totals(reports, traces)
    return 1 if any(report.differences for report in reports) else 0


async def _replay_all(
    args: argparse.Namespace, traces: list[Trace], family: Family, renderer: Renderer
) -> list[ReplayReport]:
    if args.server is None:
        return [await replay_trace(trace, renderer, None, args.tolerance) for trace in traces]
    token = resolve_secret(args.token, "--token")
    client = GenerateClient(args.server.rstrip("/"), token=token, deadline_s=10.0)
    scorer = ServerPromptScorer(client, family.modality)
    try:
        return [await replay_trace(trace, renderer, scorer, args.tolerance) for trace in traces]
    finally:
        await client.close()


def _print_totals(reports: list[ReplayReport], traces: list[Trace]) -> None:
    turns = [turn for report in reports for turn in report.turns]
    bridged, rendered = (
        sum(turn.prompt_origin == origin for turn in turns) for origin in ("bridged", "rendered")
    )
    print(
        f"{len(reports)} traces, {len(turns)} turns rendered again ({bridged} bridged, "
        f"{rendered} whole), {sum(len(r.differences) for r in reports)} differences"
    )
    changes = [r.max_logprob_change for r in reports if r.max_logprob_change is not None]
    if changes:
        scored_by = ", ".join(sorted(set().union(*(report.versions for report in reports))))
        sampled_by = sorted({version for trace in traces for version, _ in trace.policies})
        print(
            f"{sum(turn.num_sampled for turn in turns)} sampled tokens scored by version "
            f"{scored_by} (sampled by {', '.join(map(str, sampled_by))}): logprobs differ by at "
            f"most {max(changes):.2e}; {sum(r.num_digests for r in reports)} pixel digests compared"
        )


def load_run_file(args: argparse.Namespace, overrides: Sequence[str] = ()) -> RunFile | None:
    """Return the settings of the run that the trace file belongs to, or None."""
    file = args.file.absolute().parent.parent / "config.toml"
    return config.load_config(RunFile, file, overrides) if file.is_file() else None


def open_media_store(args: argparse.Namespace) -> MediaStore:
    """Open the store from --media, or the run's own store."""
    run_file = load_run_file(args)
    media = MediaConfig() if run_file is None else run_file.media
    root = media.root if args.media is None else args.media
    run_store = args.file.absolute().parent.parent / "media"
    return open_store(root or run_store, **media.store_options())


def load_model(args: argparse.Namespace) -> tuple[Family, Renderer]:
    """Load the run's model, or the checkpoint from --model with the run's settings."""
    run_file = load_run_file(args, [] if args.model is None else [f"model.path={args.model}"])
    if run_file is None and args.model is None:
        raise ConfigError(
            f"{args.file} is in no run directory", "pass the checkpoint with --model DIR"
        )
    model = ModelConfig(path=str(args.model)) if run_file is None else run_file.model
    family = load_family(model.path, **model.overrides())
    return family, load_renderer(model.path, open_media_store(args), family)
