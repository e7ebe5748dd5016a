"""Actions of `sightline trace`: show, export, diff and replay."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from sightline import config
from sightline.config import MediaConfig, ModelConfig
from sightline.config.secret_refs import resolve_secret
from sightline.errors import ConfigError, SightlineError
from sightline.families import Family, load_family, load_renderer
from sightline.media import MediaStore, open_store
from sightline.render import Renderer
from sightline.rollout.client import GenerateClient
from sightline.trace import Node, Trace, read_traces
from sightline.view.trace_export import branch_records, copy_images
from sightline.view.trace_replay import (
    ReplayReport,
    ServerPromptScorer,
    describe_tokens,
    first_difference,
    replay_trace,
)
from sightline.view.transcript import describe_trace, format_transcript
from sightline.wire.file import write_atomic

MAX_WIDTH = 100
_FIELDS_BEFORE_NODES = ("env", "task", "split", "seed", "temperature")
_FIELDS_AFTER_NODES = (
    "forks", "reward", "rewards", "per_turn", "truncated", "limit", "error", "error_kind",
    "refused_requests",
)  # fmt: skip
_NODE_FIELDS = ("message", "sampled_start", "slots", "finish_reason", "versions")


def read_wanted_traces(path: Path, wanted: str | None) -> list[Trace]:
    """Return all traces of a file, or only one by its id or number."""
    if path.is_dir():
        files = sorted(p.name for p in (path / "traces").glob("*") if p.is_file())
        example = f", for example {path / 'traces' / files[-1]}" if files else ""
        raise ConfigError(f"{path} is a folder", f"name a trace file{example}")
    try:
        traces = list(read_traces(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "name a trace file") from error
    if wanted is None:
        return traces
    chosen = [trace for trace in traces if trace.id == wanted]
    if not chosen and wanted.isdigit() and int(wanted) < len(traces):
        chosen = [traces[int(wanted)]]
    if not chosen:
        some = ", ".join(trace.id for trace in traces[:4])
        raise ConfigError(
            f"{path} has no trace {wanted!r}",
            f"name one of its {len(traces)} traces by id ({some}...) or by number from 0",
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
    try:
        renderer = load_model(args)[1]
    except (SightlineError, OSError):  # without a model, tokens are shown as ids
        if args.model is not None:
            raise
        renderer = None
    for number, (trace, other) in enumerate(zip(traces, others, strict=False)):
        difference = find_trace_difference(trace, other, renderer)
        if difference is not None:
            print(f"trace {number} ({trace.id}, {other.id}): {difference.where}")
            print(f"  {args.file}: {difference.one}")
            print(f"  {args.other}: {difference.other}")
            return 1
    if len(traces) != len(others):
        print(f"{args.file} has {len(traces)} traces, {args.other} has {len(others)}")
        return 1
    print(f"{len(traces)} traces, no difference")
    return 0


class TraceDifference(NamedTuple):
    where: str
    one: str
    other: str


def find_trace_difference(
    one: Trace, other: Trace, renderer: Renderer | None = None
) -> TraceDifference | None:
    """Return the first difference between two traces in the order of events, or None.

    `renderer`, if given, decodes the tokens around it.
    """
    for where, a, b in _list_fields(one, other):
        if a == b:
            continue
        if where.endswith("token"):
            at = first_difference(a, b)
            if where.endswith("sampled token"):
                return TraceDifference(f"{where} {at}", f"{a[at]}", f"{b[at]}")
            texts = (describe_tokens(ids, at, renderer) for ids in (a, b))
            return TraceDifference(f"{where} {at}", *texts)
        return TraceDifference(where, f"{a!r}", f"{b!r}")
    return None


def _list_fields(one: Trace, other: Trace) -> Iterator[tuple[str, Any, Any]]:
    for name in _FIELDS_BEFORE_NODES:
        yield name, getattr(one, name), getattr(other, name)
    for number, (a, b) in enumerate(zip_longest(one.nodes, other.nodes)):
        if a is None or b is None:
            yield f"node {number}", _describe_node(a), _describe_node(b)
            return
        where = f"node {a.id} ({a.message.role})"
        yield f"{where}, parent", a.parent, b.parent
        yield f"{where}, token", a.token_ids.numpy().tolist(), b.token_ids.numpy().tolist()
        for name in _NODE_FIELDS:
            yield f"{where}, {name}", getattr(a, name), getattr(b, name)
        logprobs = (node.logprobs.numpy().tolist() for node in (a, b))
        yield f"{where}, logprob of sampled token", *logprobs
        yield f"{where}, tools", one.get_toolset(a.tools), other.get_toolset(b.tools)
    for name in _FIELDS_AFTER_NODES:
        yield name, getattr(one, name), getattr(other, name)


def _describe_node(node: Node | None) -> str:
    return "no such node" if node is None else f"{node.message.role}: {node.message.text!r}"


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


def _get_run_folder(path: Path) -> Path:
    """Return the run directory of a trace file."""
    return path.absolute().parent.parent


def open_media_store(args: argparse.Namespace) -> MediaStore:
    """Open the store from --media, or the run's own store."""
    run_dir = _get_run_folder(args.file)
    file, media = run_dir / "config.toml", MediaConfig()
    if file.is_file():
        media = config.load_stored_config(config.RunFile, file).media
    root = media.root if args.media is None else args.media
    return open_store(root or run_dir / "media", **media.store_options())


def get_model_settings(args: argparse.Namespace) -> ModelConfig:
    """Return the run's [model] section, with the checkpoint from --model."""
    file = _get_run_folder(args.file) / "config.toml"
    overrides = [] if args.model is None else [f"model.path={args.model}"]
    if file.is_file():
        return config.load_stored_config(config.RunFile, file, overrides).model
    if args.model is None:
        raise ConfigError(f"there is no run file at {file}", "name the checkpoint with --model DIR")
    return config.ModelConfig(path=str(args.model))


def load_model(args: argparse.Namespace) -> tuple[Family, Renderer]:
    model, store = get_model_settings(args), open_media_store(args)
    family = load_family(model.path, **model.overrides())
    return family, load_renderer(model.path, store, family)
