"""Evaluate a model on held-out tasks: `sightline eval`, and `evaluate` in Python."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sightline.config import RunFile, validate_config
from sightline.config.secret_refs import resolve_secret
from sightline.envs import Environment, load_environment
from sightline.envs.openai_endpoint import OpenAIClient
from sightline.errors import ConfigError
from sightline.launch.processes import temporary_server
from sightline.media import MediaStore
from sightline.rollout.chat_sources import ChatSource, OpenAIChats, build_policy_chats
from sightline.rollout.evaluation import EvalSummary, build_eval_request, play_tasks
from sightline.rollout.player import PlayedRollout, RolloutPlayer

_TAKEN = {
    "eval": ("tasks", "temperature"),
    "rollout": ("max_tokens", "max_turns", "timeout_s"),
    "inference": ("max_model_len", "device"),
    "run": ("seed",),
    "model": ("dtype", "max_pixels"),
}
SECTION_OF = {name: section for section, names in _TAKEN.items() for name in names}
"""Section of each run file setting that `evaluate` accepts by its name alone."""


def evaluate(
    env: Environment | type[Environment] | str,
    model: str | Path,
    *,
    tasks: int = 256,
    **options: Any,
) -> EvalSummary:
    """Evaluate `model`, a checkpoint or the url of an OpenAI endpoint, on held-out tasks.

    The environment runs in this process, so that a notebook may define it. `options` are run file
    settings (temperature, max_tokens, max_turns, max_model_len, timeout_s, seed, device, dtype,
    max_pixels) and the keyword arguments of `play_evaluation`.
    """
    if isinstance(env, str):
        env = load_environment(env, {})
    env = env() if isinstance(env, type) else env
    is_url = str(model).startswith(("http://", "https://"))
    settings = {name: options.pop(name) for name in SECTION_OF.keys() & options.keys()}
    settings["tasks"] = tasks
    values: dict[str, Any] = {"env": {"name": env.name}}
    config = build_eval_config(values, "" if is_url else str(model), settings)
    played = play_evaluation(env, config, endpoint=str(model) if is_url else "", **options)
    return EvalSummary([rollout.trace for rollout in played])


def build_eval_config(values: dict[str, Any], checkpoint: str, settings: dict[str, Any]) -> RunFile:
    """Return the settings for an evaluation: a run file's `values`, updated with `settings`."""
    values.setdefault("model", {})["path"] = checkpoint
    values.setdefault("inference", {}).pop("token", None)
    for name, value in settings.items():
        values.setdefault(SECTION_OF[name], {})[name] = value
    config = validate_config(RunFile, values, "evaluation")
    if config.eval.tasks < 1:
        raise ConfigError(f"tasks = {config.eval.tasks} is too small", "set 1 or more")
    return config


def play_evaluation(
    env: Environment,
    config: RunFile,
    *,
    endpoint: str = "",
    model_name: str = "",
    api_key: str = "",
    media: str | Path | None = None,
    split: str = "eval",
    max_concurrent: int = 32,
    threads: int = 1,
    player_kind: Callable[..., RolloutPlayer] = RolloutPlayer,
) -> list[PlayedRollout]:
    """Play `[eval] tasks` of a split as in a run, with the same player, seeds and limits.

    Without `endpoint`, a temporary server with `threads` threads serves the checkpoint. `media` is
    a folder for the images. An endpoint that can read it gets references. `api_key` is the
    endpoint's key or a reference to it: env:NAME or file:PATH.
    """
    if max_concurrent < 1:
        raise ConfigError(f"max_concurrent = {max_concurrent} is too small", "set 1 or more")

    async def play_all() -> list[PlayedRollout]:
        seed, temperature = config.run.seed, config.eval.temperature
        player = player_kind(env, chats, config.rollout.timeout_s)
        try:
            if isinstance(chats, OpenAIChats):
                await chats.client.choose_model()
            return await play_tasks(
                lambda task: player.play(build_eval_request(task, split, seed, temperature)),
                range(config.eval.tasks),
                max_concurrent,
            )
        finally:
            await player.close()

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sightline-eval-"))
        folder = Path(media or scratch)
        store = MediaStore(folder)
        chats: ChatSource
        if endpoint:
            url = endpoint.rstrip("/")
            url += "" if urlsplit(url).path else "/v1"
            chats = OpenAIChats(
                store=store,
                max_tokens=config.rollout.max_tokens,
                max_turns=config.rollout.max_turns,
                client=OpenAIClient(url, model_name, token=resolve_secret(api_key, "--api-key")),
                shares_store=media is not None,
            )
        else:
            if not Path(config.model.path).is_dir():
                raise ConfigError(
                    f"{config.model.path!r} is not a checkpoint's folder",
                    "pass one, or an endpoint's url. `sightline model tiny DIR` writes one",
                )
            server = temporary_server(
                Path(config.model.path), folder, _list_server_options(config), threads
            )
            chats = build_policy_chats(config, [stack.enter_context(server)], store)
        # Use another thread, because a notebook already runs an event loop in this one.
        pool = stack.enter_context(ThreadPoolExecutor(1))
        return pool.submit(asyncio.run, play_all()).result()


def _list_server_options(config: RunFile) -> list[str]:
    served = ("engine", "python", "device", "max_num_seqs", "max_model_len", "prefill_chunk_tokens")
    options = {name: getattr(config.inference, name) for name in served}
    options |= {"dtype": config.model.dtype, **config.model.overrides()}
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
