"""`sightline recompute`: compute a step of a run again, with other settings, and compare.

Rebuild the step's batch from its traces and start from the checkpoint before it. Print the loss,
the gradient's norm and cosine, the effective sample size, the clipped share, and the tokens that
differ most. Nothing in the run changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.render import Renderer
    from sightline.trace import Trace
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
    from sightline.run import RunDir
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
    run_dir: RunDir = get_run_dir(args.folder)
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
        cells = [_format(values_of.get(name)) for values_of in values]
        if set(cells) != {NOTHING}:
            table.add_row(label, *cells)
    sizes = [NOTHING, *(f"{step.effective_samples:.1%}" for step in steps)]
    table.add_row("effective sample size", *sizes)
    table.add_row("largest difference of a logprob", NOTHING, *(
        f"{max((abs(token.change) for token in compare_tokens(kept, step.scores)), default=0):.2g}"
        for step in steps
    ))  # fmt: skip
    if args.overrides:
        cosine = recompute.measure_cosine(steps[0].gradient, steps[1].gradient)
        table.add_row("cosine with the gradient again", NOTHING, "1", f"{cosine:.6f}")
    console.print(table)
    tokens = compare_tokens(kept, steps[-1].scores)
    tokens.sort(key=lambda token: -abs(token.change))
    print_tokens(tokens[: args.tokens], traces, load_renderer(before.model.path, store), console)
    return 0


class TokenChange(NamedTuple):
    trace: str
    node: int
    at: int
    """The token's index among those that the node sampled."""
    logprobs: tuple[float, float]

    @property
    def change(self) -> float:
        return self.logprobs[1] - self.logprobs[0]


def compare_tokens(kept: StepScores, again: StepScores) -> list[TokenChange]:
    """Return the logprobs of each token that both scored."""
    places = {(o.trace_id, o.node): (o.start, o.stop) for o in again.origins}
    mine, theirs = kept.logprobs.numpy(), again.logprobs.numpy()
    changes: list[TokenChange] = []
    for origin in kept.origins:
        start, stop = places.get((origin.trace_id, origin.node), (0, 0))
        pairs = zip(mine[origin.start : origin.stop], theirs[start:stop], strict=False)
        changes += [
            TokenChange(origin.trace_id, origin.node, i, (float(a), float(b)))
            for i, (a, b) in enumerate(pairs)
        ]
    return changes


def print_tokens(
    tokens: list[TokenChange], traces: list[Trace], renderer: Renderer, console: Any
) -> None:
    from rich.table import Table

    by_id = {trace.id: trace for trace in traces}
    table = Table("rollout", "node", "token", "text", "sampler", "recorded", "now", box=None)
    for token in tokens:
        node = by_id[token.trace].nodes[token.node]
        token_id = int(np.asarray(node.token_ids.numpy())[node.sampled_start + token.at])
        numbers = (float(node.logprobs.numpy()[token.at]), *token.logprobs)
        place = (token.trace, str(token.node), str(token.at))
        table.add_row(*place, repr(renderer.decode([token_id])), *map("{:.6f}".format, numbers))
    console.print(table)


def _format(value: Any) -> str:
    from sightline.view.formatting import NOTHING

    return f"{value:.6g}" if isinstance(value, int | float) else NOTHING
