"""`sightline eval ENV`: score a model on an environment's held-out tasks.

The model is an OpenAI endpoint or a checkpoint, which is played as a run evaluates it: the same
player, seeds, prompts and limits. `--run` takes all of these from a run, so that its own evaluation
is measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.config import RunFile
    from sightline.rollout.chat_sources import ChatSource
    from sightline.rollout.player import PlayedRollout

SETTINGS: dict[str, tuple[str, type, str]] = {
    "tasks": ("eval", int, "default: 256, or as in the run"),
    "temperature": ("eval", float, "default: 1.0, or as in the run"),
    "max_tokens": ("rollout", int, "of a turn; default: 64, or as in the run"),
    "max_turns": ("rollout", int, "of a rollout; default: any number"),
    "max_model_len": ("inference", int, "of a sequence; default: 2048"),
    "timeout_s": ("rollout", float, "of one rollout; default: 600"),
    "seed": ("run", int, "default: 0, or as in the run"),
    "device": ("inference", str, "of a served checkpoint; default: auto"),
}
"""Options that take the place of a setting of the same name: its section, their type and help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "env", metavar="ENV", nargs="?", help="a built-in environment, or 'module:Class'"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--endpoint", metavar="URL", help="an OpenAI endpoint, http://HOST:PORT/v1")
    where.add_argument("--checkpoint", type=Path, metavar="DIR", help="serve this one meanwhile")
    parser.add_argument(
        "--run", type=Path, dest="run_dir", metavar="DIR",
        help="a run directory: its environment, seed and limits where no option says otherwise",
    )  # fmt: skip
    parser.add_argument("--env-args", type=json.loads, default={}, metavar="JSON", help="for ENV")
    parser.add_argument("--model", help="name at the endpoint; default: the one that it lists")
    parser.add_argument("--api-key", default="none", help="key of the endpoint")
    parser.add_argument(
        "--media", type=Path, metavar="DIR",
        help="a store that the endpoint reads too: images go there by reference",
    )  # fmt: skip
    parser.add_argument("--split", default="eval", choices=("eval", "train"))
    for name, (_, kind, words) in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=words)
    parser.add_argument(
        "--max-concurrent", type=int, default=32, help="rollouts at once; default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a served checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a JSON line for each rollout")


def run(args: argparse.Namespace) -> int:
    if args.max_concurrent < 1:
        raise ConfigError(f"--max-concurrent {args.max_concurrent}", "take 1 or more")
    if not isinstance(args.env_args, dict):
        raise ConfigError(f"--env-args {args.env_args!r}", "write them as a JSON object")
    from sightline.envs.mix import build_environment
    from sightline.rollout.player import RolloutPlayer
    from sightline.view.eval_table import print_eval_table, to_line

    config = _read_settings(args)
    if config.eval.tasks < 1:
        raise ConfigError(f"--tasks {config.eval.tasks}", "take 1 or more")
    env = build_environment(config.env)
    with (
        tempfile.TemporaryDirectory(prefix="sightline-eval-") as scratch,
        _open_chats(args, config, args.media or Path(scratch)) as chats,
    ):
        began = time.monotonic()
        player = RolloutPlayer(env, chats, config.rollout.timeout_s)
        played = asyncio.run(_play_all(args, config, player))
    if args.output:
        args.output.write_text("".join(json.dumps(to_line(one)) + "\n" for one in played))
    print_eval_table(played, args.env or env.name, time.monotonic() - began)
    return 0 if any(one.trace.reward is not None for one in played) else 1


def _read_settings(args: argparse.Namespace) -> RunFile:
    """The settings of the given run, or the usual ones, with the options in their places."""
    from sightline.config import RunFile, load_stored_config, validate_config

    values: dict[str, Any] = {"model": {"path": ""}}
    if args.run_dir is not None:
        values = load_stored_config(RunFile, args.run_dir / "config.toml").model_dump()
    elif args.env is None:
        raise ConfigError("no environment", "name it, or a run with --run")
    if args.env is not None:
        values["env"] = {"name": args.env, "args": args.env_args}
    values["model"]["path"] = str(args.checkpoint or "")
    inference = values.setdefault("inference", {})
    # What is served here is a server of ours, whatever the run asked.
    inference["engine"] = "vllm" if inference.get("engine") == "vllm" else "torch"
    sections = {name: section for name, (section, _, _) in SETTINGS.items()} | {"dtype": "model"}
    for name, section in sections.items():
        if getattr(args, name) is not None:
            values.setdefault(section, {})[name] = getattr(args, name)
    return validate_config(RunFile, values, "sightline eval")


@contextlib.contextmanager
def _open_chats(args: argparse.Namespace, config: RunFile, media: Path) -> Iterator[ChatSource]:
    from sightline.media import MediaStore
    from sightline.rollout.chat_sources import OpenAIChats, build_policy_chats
    from sightline.rollout.openai_chat import OpenAIClient

    store = MediaStore(media)
    if args.endpoint:
        url = args.endpoint.rstrip("/")
        url += "" if urlsplit(url).path else "/v1"
        yield OpenAIChats(
            store=store,
            max_tokens=config.rollout.max_tokens,
            max_turns=config.rollout.max_turns,
            client=OpenAIClient(url, args.model or "", args.api_key),
            shares_store=args.media is not None,
        )
        return
    from sightline.launch.processes import temporary_server

    model, inference = config.model, config.inference
    served = ("engine", "python", "device", "max_num_seqs", "max_model_len", "prefill_chunk_tokens")
    options = {name: getattr(inference, name) for name in served}
    options |= {"dtype": model.dtype, **model.overrides()}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with temporary_server(args.checkpoint, media, words, args.threads) as address:
        yield build_policy_chats(config, [address], store)


async def _play_all(args: argparse.Namespace, config: RunFile, player: Any) -> list[PlayedRollout]:
    from sightline.rollout.evaluation import build_eval_request, play_tasks

    def request(task: int) -> Any:
        return build_eval_request(task, args.split, config.run.seed, config.eval.temperature)

    try:
        if args.endpoint:
            await player.chats.client.choose_model()
        return await play_tasks(
            lambda task: player.play(request(task)), range(config.eval.tasks), args.max_concurrent
        )
    finally:
        await player.close()
