"""`sightline eval ENV`: held-out tasks against an OpenAI endpoint, or against a checkpoint."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.rollout.endpoint_evaluator import EvalResult


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("eval", help="score a model on an environment's held-out tasks")
    parser.add_argument("env", metavar="ENV", help="a built-in environment, or 'module:Class'")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--endpoint", metavar="URL", help="base url of an OpenAI endpoint (.../v1)")
    where.add_argument("--checkpoint", type=Path, metavar="DIR", help="serve this one meanwhile")
    parser.add_argument(
        "--env-args", type=json.loads, default={}, metavar="JSON", help="arguments of ENV"
    )
    parser.add_argument("--model", help="name at the endpoint; default: the one that it lists")
    parser.add_argument("--api-key", default="none", help="key of the endpoint")
    parser.add_argument(
        "--media", type=Path, metavar="DIR",
        help="a store that the endpoint reads too: images go there by reference",
    )  # fmt: skip
    parser.add_argument("--tasks", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--split", default="eval", choices=("eval", "train"))
    parser.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="a turn; default: %(default)s")
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=4096,
        help="most tokens of a sequence, with --checkpoint",
    )
    parser.add_argument(
        "--max-concurrent", type=int, default=32, help="rollouts at a time; default: %(default)s"
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="seconds for one rollout")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="compute threads, with --checkpoint")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto, with --checkpoint")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="a JSON line for each rollout")


def run(args: argparse.Namespace) -> int:
    for name in ("tasks", "max_tokens", "max_concurrent"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}", "take 1 or more")
    if not isinstance(args.env_args, dict):
        raise ConfigError(f"--env-args {args.env_args!r}", "write them as a JSON object")
    from sightline.envs import load_environment

    env = load_environment(args.env, args.env_args)
    with tempfile.TemporaryDirectory(prefix="sightline-eval-") as scratch:
        media = args.media or Path(scratch)
        with _open_endpoint(args, media) as base_url:
            began = time.monotonic()
            scored = asyncio.run(_score(args, env, base_url, media))
    if args.output:
        lines = [json.dumps(asdict(one)) + "\n" for one in scored]
        args.output.write_text("".join(lines))
    print_table(scored, args.env, time.monotonic() - began)
    return 0 if any(one.reward is not None for one in scored) else 1


@contextlib.contextmanager
def _open_endpoint(args: argparse.Namespace, media: Path) -> Iterator[str]:
    if args.endpoint:
        yield args.endpoint
        return
    from sightline.launch.temporary_server import temporary_server

    more = ["--max-model-len", str(args.max_model_len)]
    more += ["--device", args.device, "--dtype", args.dtype]
    with temporary_server(args.checkpoint, media, more, args.threads) as address:
        yield f"{address}/v1"


async def _score(
    args: argparse.Namespace, env: Any, base_url: str, media: Path
) -> list[EvalResult]:
    from sightline.media import MediaStore
    from sightline.rollout.endpoint_evaluator import EndpointEvaluator
    from sightline.rollout.openai_client import OpenAIClient

    sampling = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    endpoint = OpenAIClient(base_url, args.model or "", args.api_key, sampling)
    try:
        await endpoint.wait_reachable()
        if not endpoint.model:
            listed = await endpoint.models()
            if len(listed) != 1:
                raise ConfigError(
                    f"{base_url} lists {len(listed)} models: {', '.join(listed[:8])}",
                    "choose one with --model",
                )
            endpoint.model = listed[0]
        scorer = EndpointEvaluator(
            env,
            endpoint,
            MediaStore(media),
            shares_store=bool(args.checkpoint or args.media),
            split=args.split,
            seed=args.seed,
            at_once=args.max_concurrent,
            timeout_s=args.timeout_s,
        )
        return await scorer.evaluate_all(args.tasks)
    finally:
        await endpoint.close()


def print_table(scored: list[EvalResult], name: str, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from sightline.run.confidence import confidence_interval

    table = Table(title=f"{name}: {len(scored)} held-out tasks")
    for column in ("", "mean", "95% interval", "rollouts"):
        table.add_column(column, justify="left" if not column else "right")
    for label, values in collect_measures(scored):
        low, high = confidence_interval(values)
        table.add_row(
            label, f"{statistics.fmean(values):.3f}", f"{low:.3f} to {high:.3f}", str(len(values))
        )
    console = Console(highlight=False)
    console.print(table)
    broken = [one for one in scored if one.reward is None]
    truncated = sum(one.truncated for one in scored)
    tokens, calls = sum(one.num_tokens for one in scored), sum(one.num_calls for one in scored)
    console.print(
        f"{len(broken)} broken, {truncated} cut short; {calls} model calls, {tokens} tokens in "
        f"{seconds:.1f} s"
    )
    if broken:
        console.print(f"the first that broke, task {broken[0].task}: {broken[0].error.strip()}")


def collect_measures(scored: list[EvalResult]) -> list[tuple[str, list[float]]]:
    """Reward and parts; of each environment too, where several were played."""
    whole = [one for one in scored if one.reward is not None]
    envs = sorted({one.env for one in whole})
    groups = [("", whole)]
    if len(envs) > 1:
        groups += [(f"{env}: ", [one for one in whole if one.env == env]) for env in envs]
    rows: list[tuple[str, list[float]]] = []
    for label, group in groups:
        if not group:
            continue
        rows.append((f"{label}reward", [one.reward or 0.0 for one in group]))
        for part in dict.fromkeys(part for one in group for part in one.parts):
            rows.append((label + part, [one.parts[part] for one in group if part in one.parts]))
    return rows
