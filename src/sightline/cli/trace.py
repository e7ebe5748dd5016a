"""`sightline trace`: read, export, compare and replay the traces of a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import ConfigError, SightlineError

if TYPE_CHECKING:
    from sightline.config import ModelConfig
    from sightline.families import Family
    from sightline.render import Renderer
    from sightline.trace import ReplayReport, Trace

WIDEST = 100


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("trace", help="read, export, compare and replay traces")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print the conversations of a trace")
    show.add_argument("--full", action="store_true", help="do not shorten long messages")
    show.set_defaults(run=run_show)
    export = actions.add_parser("export", help="print branches as JSON lines, images by reference")
    export.add_argument(
        "--output", type=Path, metavar="FILE", help="write here, not to the terminal"
    )
    export.add_argument("--images", type=Path, metavar="DIR", help="copy the images here")
    export.set_defaults(run=run_export)
    differ = actions.add_parser("diff", help="find where traces first differ; exits 1 if they do")
    differ.set_defaults(run=run_diff)
    replay = actions.add_parser(
        "replay", help="render and score traces again; exits 1 if something differs"
    )
    replay.add_argument("--server", metavar="URL", help="score against this server")
    replay.add_argument("--tolerance", type=float, default=1e-3, metavar="X",
                        help="of a logprob (default: %(default)s)")  # fmt: skip
    replay.set_defaults(run=run_replay)
    for action in (show, export, differ, replay):
        action.add_argument("file", type=Path, metavar="FILE", help="a file of a run's traces/")
        if action is differ:
            action.add_argument("other", type=Path, metavar="OTHER")
        action.add_argument("--trace", metavar="ID", help="only this trace: its id, or its number")
    for action in (differ, replay):
        action.add_argument("--model", type=Path, metavar="DIR",
                            help="checkpoint (default: the run's)")  # fmt: skip
    for action in (export, differ, replay):
        action.add_argument("--media", type=Path, metavar="DIR", help="store (default: the run's)")


# --- which traces


def read_wanted_traces(path: Path, wanted: str | None) -> list[Trace]:
    """The traces of a file, or the one that is wanted."""
    from sightline.trace import read_traces

    if path.is_dir():
        files = sorted(p.name for p in (path / "traces").glob("*") if p.is_file())
        told = f", such as {path / 'traces' / files[-1]}" if files else ""
        raise ConfigError(f"{path} is a folder", f"name a file of traces{told}")
    try:
        traces = list(read_traces(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "name a file of traces") from error
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


def run_show(args: argparse.Namespace) -> int:
    from sightline.view.transcript import describe_trace, format_transcript

    traces = read_wanted_traces(args.file, args.trace)
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    if len(traces) == 1:
        for line in format_transcript(traces[0], width, args.full):
            print(line)
        return 0
    for number, trace in enumerate(traces):
        print(f"{number:4d}  {describe_trace(trace)}")
    print(f"{len(traces)} traces; --trace ID shows one")
    return 0


def run_export(args: argparse.Namespace) -> int:
    from sightline.media import MediaStore
    from sightline.view.trace_export import branch_records, copy_images
    from sightline.wire.file import write_atomic

    traces = read_wanted_traces(args.file, args.trace)
    lines = [
        json.dumps(line, ensure_ascii=False) + "\n"
        for trace in traces
        for line in branch_records(trace)
    ]
    if args.images is not None:
        num = copy_images(traces, MediaStore(get_media_root(args)), args.images)
        print(f"{num} images in {args.images}", file=sys.stderr)
    if args.output is None:
        sys.stdout.writelines(lines)
    else:
        write_atomic(args.output, "".join(lines).encode())
        print(f"{len(lines)} branches of {len(traces)} traces in {args.output}", file=sys.stderr)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    from sightline.trace.diff import find_trace_difference

    ours, others = (
        read_wanted_traces(args.file, args.trace),
        read_wanted_traces(args.other, args.trace),
    )
    renderer = find_renderer(args)
    for number, (one, other) in enumerate(zip(ours, others, strict=False)):
        found = find_trace_difference(one, other, renderer)
        if found is not None:
            print(f"trace {number} ({one.id}, {other.id}): {found.where}")
            print(f"  {args.file}: {found.one}")
            print(f"  {args.other}: {found.other}")
            return 1
    if len(ours) != len(others):
        print(f"{args.file} has {len(ours)} traces, {args.other} has {len(others)}")
        return 1
    print(f"{len(ours)} traces, no difference")
    return 0


def run_replay(args: argparse.Namespace) -> int:
    traces = read_wanted_traces(args.file, args.trace)
    family, renderer = load_model(args)
    reports = asyncio.run(replay(traces, family, renderer, args.server, args.tolerance))
    for report in reports:
        for difference in report.differences:
            print(f"trace {report.trace_id} node {difference.node}: {difference.what} differ")
            print(f"  {difference.detail}")
    _print_totals(reports, traces)
    return 1 if any(report.differences for report in reports) else 0


async def replay(
    traces: list[Trace], family: Family, renderer: Renderer, server: str | None, tolerance: float
) -> list[ReplayReport]:
    from sightline.rollout.client import GenerateClient
    from sightline.rollout.prompt_scorer import ServerPromptScorer
    from sightline.trace import replay_trace

    client = None if server is None else GenerateClient(server.rstrip("/"), deadline_s=10.0)
    score = None if client is None else ServerPromptScorer(client, family.modality)
    try:
        return [await replay_trace(trace, renderer, score, tolerance) for trace in traces]
    finally:
        if client is not None:
            await client.close()


def _print_totals(reports: list[ReplayReport], traces: list[Trace]) -> None:
    turns = [turn for report in reports for turn in report.turns]
    ways = {
        way: sum(turn.prompt_origin == way for turn in turns) for way in ("bridged", "rendered")
    }
    print(
        f"{len(reports)} traces, {len(turns)} turns rendered again ({ways['bridged']} bridged, "
        f"{ways['rendered']} whole), {sum(len(r.differences) for r in reports)} differences"
    )
    changes = [r.max_logprob_change for r in reports if r.max_logprob_change is not None]
    if changes:
        scored = ", ".join(sorted(set().union(*(report.versions for report in reports))))
        sampled = sorted({version for trace in traces for version, _ in trace.policies})
        print(
            f"{sum(turn.num_sampled for turn in turns)} sampled tokens scored by version {scored} "
            f"(sampled by {', '.join(map(str, sampled))}): at most {max(changes):.2e} apart; "
            f"{sum(report.num_digests for report in reports)} pixel digests compared"
        )


# --- the run that a file belongs to


def get_run_folder(path: Path) -> Path:
    """The run directory of a trace file."""
    return path.absolute().parent.parent


def get_media_root(args: argparse.Namespace) -> Path:
    """The store that was named, or that of the run."""
    from sightline import config

    if args.media is not None:
        return Path(args.media)
    run_dir = get_run_folder(args.file)
    file = run_dir / "config.toml"
    root = config.load_stored_config(config.RunFile, file).media.root if file.is_file() else ""
    return Path(root) if root else run_dir / "media"


def get_model_settings(args: argparse.Namespace) -> ModelConfig:
    """The [model] of the run, with the checkpoint that was named on the command line."""
    from sightline import config

    file = get_run_folder(args.file) / "config.toml"
    overrides = [] if args.model is None else [f"model.path={args.model}"]
    if file.is_file():
        return config.load_stored_config(config.RunFile, file, overrides).model
    if args.model is None:
        raise ConfigError(f"no run file at {file}", "name the checkpoint with --model DIR")
    return config.ModelConfig(path=str(args.model))


def load_model(args: argparse.Namespace) -> tuple[Family, Renderer]:
    from sightline.families import load_family, load_renderer
    from sightline.media import MediaStore

    model, store = get_model_settings(args), MediaStore(get_media_root(args))
    family = load_family(model.path, **model.overrides())
    renderer = load_renderer(model.path, store, family, number_images=model.number_images)
    return family, renderer


def find_renderer(args: argparse.Namespace) -> Renderer | None:
    """To spell tokens out; a comparison does without where there is none."""
    try:
        return load_model(args)[1]
    except (SightlineError, OSError):
        if args.model is not None:
            raise
        return None
