"""`sightline eval ENV`: score a model on an environment's held-out tasks.

The model is an OpenAI endpoint or a checkpoint. It is evaluated as in a run: with the same code,
seeds, prompts and limits. `--run` takes all of these from a run, to repeat its evaluation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.cli.main import add_env_args
from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.config import RunFile

SETTINGS: dict[str, tuple[type, str]] = {
    "tasks": (int, "number of tasks; default: 256, or as in the run"),
    "temperature": (float, "sampling temperature; default: 1.0, or as in the run"),
    "max_tokens": (int, "maximum tokens per turn; default: 64, or as in the run"),
    "max_turns": (int, "maximum turns per rollout; default: no limit"),
    "max_model_len": (int, "maximum tokens per sequence; default: 2048"),
    "max_pixels": (int, "maximum pixels per image; default: the checkpoint's limit"),
    "timeout_s": (float, "seconds per rollout; default: 600"),
    "seed": (int, "random seed; default: 0, or as in the run"),
    "device": (str, "device for --checkpoint: cpu, cuda or auto; default: auto"),
}
"""Type and help of options that override the setting of the same name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("env", metavar="ENV", nargs="?", help="a built-in environment, or 'module:Class'")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--endpoint", metavar="URL", help="an OpenAI endpoint, http://HOST:PORT/v1")
    where.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="a checkpoint to serve and evaluate"
    )
    option(
        "--run", type=Path, dest="run_dir", metavar="DIR",
        help="take environment, seed and limits from this run directory; options override them",
    )  # fmt: skip
    add_env_args(parser)
    option("--model", help="model name at the endpoint; default: the one that it lists")
    option(
        "--api-key", default="", metavar="REF",
        help="reference to the endpoint's API key: env:NAME or file:PATH",
    )  # fmt: skip
    option(
        "--media", type=Path, metavar="DIR",
        help="a store that the endpoint can read: images are sent as references",
    )  # fmt: skip
    option("--split", default="eval", choices=("eval", "train"), help="default: %(default)s")
    for name, (kind, help_text) in SETTINGS.items():
        option(f"--{name.replace('_', '-')}", type=kind, help=help_text)
    option(
        "--max-concurrent", type=int, default=32, help="concurrent rollouts; default: %(default)s"
    )
    option("--threads", type=int, default=1, help="compute threads for --checkpoint; default: 1")
    option("--dtype", choices=("float32", "bfloat16"), help="default: float32")
    option("--output", type=Path, metavar="FILE", help="write one JSON line per rollout to FILE")


def run(args: argparse.Namespace) -> int:
    from sightline.config.secret_refs import read_reference
    from sightline.envs.protocol import build_environment
    from sightline.launch.evaluate import play_evaluation
    from sightline.view.eval_table import print_eval_table, to_line

    read_reference(args.api_key)
    config = _read_settings(args)
    output = args.output and args.output.absolute()  # the environment may change the directory
    env = build_environment(config.env)
    same = ("api_key", "media", "split", "max_concurrent", "threads")
    played = play_evaluation(
        env,
        config,
        endpoint=args.endpoint or "",
        model_name=args.model or "",
        **{name: getattr(args, name) for name in same},
    )
    if output:
        output.write_text("".join(json.dumps(to_line(rollout)) + "\n" for rollout in played))
    seconds = max(rollout.trace.ended for rollout in played) - min(
        rollout.trace.started for rollout in played
    )
    print_eval_table(played, args.env or env.name, seconds)
    return 0 if any(rollout.trace.reward is not None for rollout in played) else 1


def _read_settings(args: argparse.Namespace) -> RunFile:
    """Return the run's settings, or the defaults, overridden by the options."""
    from sightline.config import RunFile, load_config
    from sightline.launch.evaluate import build_eval_config

    values: dict[str, Any] = {}
    if args.run_dir is not None:
        values = load_config(RunFile, args.run_dir / "config.toml").model_dump()
    elif args.env is None:
        raise ConfigError("no environment given", "pass one, or a run with --run")
    if args.env is not None:
        values["env"] = {"name": args.env, "args": args.env_args}
    options = {name: getattr(args, name) for name in (*SETTINGS, "dtype")}
    options = {name: value for name, value in options.items() if value is not None}
    return build_eval_config(values, str(args.checkpoint or ""), options)
