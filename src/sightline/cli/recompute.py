"""`sightline recompute`: compute a step of a run again, with other settings, and compare.

Rebuild the step's batch from its traces and start from the checkpoint before it. Print the loss,
the gradient's norm and cosine, the effective sample size, the clipped share, and the tokens that
differ most. Nothing in the run changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.wire.micro_batch import StepScores

SECTIONS = ("algorithm", "model", "trainer")
METRICS = {
    "loss": "loss", "gradient norm": "grad_norm", "learning rate": "lr", "entropy": "entropy",
    "mismatch KL": "mismatch_kl", "clipped share": "clip_fraction",
}  # fmt: skip
"""Metrics of a step by the name in the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--step", type=int, required=True, help="the step to compute")
    parser.add_argument("--tokens", type=int, default=10, help="tokens to print; default: 10")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value",
        help=f"settings of {', '.join(f'[{name}]' for name in SECTIONS)} to change",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from sightline.cli.training import check_packages
    from sightline.config import RunFile, load_config
    from sightline.families import load_renderer
    from sightline.media import open_store
    from sightline.trace import flatten
    from sightline.trainer import recompute
    from sightline.view.events import by_step, read_events
    from sightline.view.formatting import NOTHING
    from sightline.view.inspect import read_candidates, read_scores
    from sightline.view.run_files import get_run_dir

    check_packages()
    for override in args.overrides:
        if override.partition(".")[0] not in SECTIONS:
            raise ConfigError(
                f"{override} does not change how a step is computed from its samples",
                f"change settings of {', '.join(f'[{name}]' for name in SECTIONS)}",
            )
    run_dir = get_run_dir(args.folder)
    before = load_config(RunFile, run_dir.config)
    changed = load_config(RunFile, run_dir.config, args.overrides)
    if before.algorithm.teacher_server:
        raise ConfigError("the teacher's scores are not in the traces", "choose another run")
    kept = read_scores(run_dir, args.step)
    start = recompute.find_checkpoint(run_dir, args.step)
    store = open_store(before.media.root or run_dir.media, **before.media.store_options())
    traces = read_candidates(run_dir, args.step, before.orchestrator.replay_max_age)
    samples = [sample for trace in traces for sample in flatten(trace)]
    steps = [
        recompute.recompute_step(config, store, samples, args.step, start)
        for config in (before, changed)[: 1 + bool(args.overrides)]
    ]
    recorded = by_step([*read_events(run_dir.metrics)], "train").get(args.step)
    console = Console()
    origin = "the initial weights" if start is None else start.name
    console.print(f"step {args.step} of {run_dir.path} from {origin}, {len(samples)} samples")
    table = Table("", "recorded", "again", *(["changed"] if args.overrides else []), box=None)
    for label, name in METRICS.items():
        values = [recorded.values if recorded else {}, *(step.metrics for step in steps)]
        numbers = [values_of.get(name) for values_of in values]
        cells = [NOTHING if number is None else f"{number:.6g}" for number in numbers]
        if set(cells) != {NOTHING}:
            table.add_row(label, *cells)
    table.add_row("effective sample size", NOTHING, *(f"{s.effective_samples:.1%}" for s in steps))
    tokens = [compare_tokens(kept, step.scores) for step in steps]
    largest = [f"{ordered[0][0]:.2g}" if ordered else NOTHING for ordered in tokens]
    table.add_row("largest difference of a logprob", NOTHING, *largest)
    if args.overrides:
        cosine = recompute.measure_cosine(steps[0].gradient, steps[1].gradient)
        table.add_row("cosine with the gradient again", NOTHING, "1", f"{cosine:.6f}")
    console.print(table)
    by_id = {trace.id: trace for trace in traces}
    renderer = load_renderer(before.model.path, store)
    table = Table("rollout", "node", "token", "text", "sampler", "recorded", "now", box=None)
    for _, trace_id, number, at, *logprobs in tokens[-1][: args.tokens]:
        node = by_id[trace_id].nodes[number]
        text = repr(renderer.decode([int(node.token_ids.numpy()[node.sampled_start + at])]))
        shown = map("{:.6f}".format, (node.logprobs.numpy()[at], *logprobs))
        table.add_row(trace_id, str(number), str(at), text, *shown)
    console.print(table)
    return 0


def compare_tokens(
    kept: StepScores, again: StepScores
) -> list[tuple[float, str, int, int, float, float]]:
    """Return each token that both scored: by how much the logprobs differ, its rollout, node and
    index among the node's sampled tokens, and both logprobs. The largest difference is first."""
    places = {(o.trace_id, o.node): (o.start, o.stop) for o in again.origins}
    mine, theirs = kept.logprobs.numpy().tolist(), again.logprobs.numpy().tolist()
    tokens = []
    for origin in kept.origins:
        start, stop = places.get((origin.trace_id, origin.node), (0, 0))
        pairs = zip(mine[origin.start : origin.stop], theirs[start:stop], strict=False)
        for at, (a, b) in enumerate(pairs):
            tokens.append((abs(b - a), origin.trace_id, origin.node, at, a, b))
    return sorted(tokens, reverse=True)
