"""`sightline try ENV`: run a few tasks of an environment and check it for problems.

Use a tiny random model unless `--model` names one. Print images, prompts, answers and rewards, and
exit with status 1 if there is a problem. The rollouts are kept in a run directory.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from sightline.cli.main import add_env_args
from sightline.errors import format_command

NUMBERS = {
    "tasks": (4, "number of tasks"),
    "max_tokens": (16, "maximum tokens per answer"),
    "max_model_len": (2048, "maximum tokens per sequence"),
}
"""Default and help of options that set the evaluation setting of the same name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", metavar="ENV", help="a built-in environment, or 'module:Class'")
    add_env_args(parser)
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint; default: a tiny random one"
    )
    for name, (default, text) in NUMBERS.items():
        option = f"--{name.replace('_', '-')}"
        text = f"{text}; default: %(default)s"
        parser.add_argument(option, type=int, default=default, help=text)
    parser.add_argument(
        "--max-pixels", type=int, help="maximum pixels per image; default: the checkpoint's limit"
    )


def run(args: argparse.Namespace) -> int:
    from sightline.config import EnvConfig, dump_toml, validate_config
    from sightline.envs.protocol import build_environment
    from sightline.families import load_family, load_renderer, registry
    from sightline.launch.claim import claim_run_dir
    from sightline.launch.evaluate import build_eval_config, play_evaluation
    from sightline.media import MediaStore
    from sightline.rollout.evaluation import EvalSummary
    from sightline.run import EventLog
    from sightline.trace import write_traces
    from sightline.view.preview import PreviewPlayer, print_preview
    from sightline.view.run_status import PREVIEW
    from sightline.view.summary import summarize

    values: dict[str, Any] = {"env": {"name": args.env, "args": args.env_args}}
    env = build_environment(validate_config(EnvConfig, values["env"], "[env]"))
    run_dir = claim_run_dir("runs", f"try-{env.name}")
    run_dir.make()
    if args.model is None:
        args.model = run_dir.path / "model"
        print("writing a tiny random model", flush=True)
        registry.write_tiny(registry.get_default_family(), args.model, seed=0)
    options = {name: getattr(args, name) for name in (*NUMBERS, "max_pixels")}
    config = build_eval_config(values, str(args.model), options)
    run_dir.config.write_text(dump_toml(config))

    events = EventLog(run_dir.metrics, PREVIEW)
    events.write("state", phase="starting")
    print(f"serving {args.model} and playing {args.tasks} tasks", flush=True)
    raised: dict[str, BaseException] = {}
    player = partial(PreviewPlayer, raised=raised)
    played = play_evaluation(
        env, config, media=run_dir.media, split="train", max_concurrent=1, player_kind=player
    )
    traces = [rollout.trace for rollout in played]
    write_traces(run_dir.eval_traces("try"), traces)
    events.write("eval", name="try", **EvalSummary(traces).event_values)
    summarize(run_dir)

    store = MediaStore(run_dir.media)
    renderer = load_renderer(args.model, store, load_family(args.model, **config.model.overrides()))
    num_problems = print_preview(env, traces, raised, store, renderer, args.max_model_len)
    print(f"view it: {format_command('sightline', 'view', run_dir.path)}")
    return 1 if num_problems else 0
