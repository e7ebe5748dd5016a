"""Checks that try something: each interpreter's pixels, and the environment's first prompts."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from sightline.config import RunFile, SftFile
from sightline.envs.protocol import build_environment
from sightline.errors import (
    SMALLER_IMAGES,
    ConfigError,
    EngineError,
    EnvironmentFailed,
    PixelMismatch,
    find_fix,
    summarize_traceback,
)
from sightline.families import Family
from sightline.launch.checks.model import draw_probe_images, run_module
from sightline.media import MediaStore, is_address
from sightline.pixels.pixel_check import (
    CheckedImage,
    PixelCheckRequest,
    PixelCheckResult,
    check_pixels,
)
from sightline.rollout.chat_sources import build_policy_chats
from sightline.rollout.client import GenerateClient
from sightline.rollout.engines import load_engine
from sightline.rollout.evaluation import build_eval_request
from sightline.rollout.player import RolloutPlayer
from sightline.run.stages import NO_STAGE, Stage
from sightline.wire.generate import GenerateRequest, GenerateResponse

NUM_TASKS = 3
MEASURED = "measured"


def check_probe_images(config: RunFile, family: Family) -> str:
    """Raise if the run's interpreters do not produce the same tokens and pixels from an image."""
    if not family.shows_media:
        return "none: the environment shows no images"
    pythons = {"[rollout] python": config.rollout.python}
    if not config.inference.servers:
        engine = load_engine(config.inference.engine)
        pythons["[inference] python"] = engine.find_python(config.inference)
    others = {k: python for k, python in pythons.items() if python not in ("", sys.executable)}
    with tempfile.TemporaryDirectory(prefix="sightline-check-") as folder:
        store = MediaStore(Path(folder))
        refs = [store.put(data) for data in draw_probe_images()]
        model = config.model
        writable = "" if is_address(config.media.root) else config.media.root
        request = PixelCheckRequest(model.path, model.overrides(), folder, refs, writable)
        images = check_pixels(request)
        for setting, python in others.items():
            their_images = _check_pixels_with(setting, python, request)
            for ref, ours, theirs in zip(refs, images, their_images, strict=True):
                if ours != theirs:
                    raise PixelMismatch(
                        f"an image of {ref.width}x{ref.height} ({ref.mime}) becomes {ours} here, "
                        f"but {theirs} in {setting} = {python!r}",
                        "install the same versions there (constraints.txt): decoders differ",
                    )
    tokens = sorted({image.num_tokens for image in images})
    interpreters = f"in {1 + len(others)} interpreters" if others else "in this interpreter"
    return f"{len(images)} of {tokens[0]} to {tokens[-1]} tokens, {interpreters}"


def _check_pixels_with(setting: str, python: str, request: PixelCheckRequest) -> list[CheckedImage]:
    text = msgspec.json.encode(request).decode()
    line = run_module(f"{setting} = {python!r}", python, "sightline.pixels.pixel_check", text)
    answer = msgspec.json.decode(line, type=PixelCheckResult)
    if answer.problem:
        raise ConfigError(f"{setting} = {python!r}: {answer.problem}", answer.fix)
    return answer.images


@dataclass
class _PromptMeter(GenerateClient):
    """Records the length of each prompt, and answers none."""

    lengths: list[int] = field(default_factory=list, kw_only=True)

    async def generate(self, request: GenerateRequest, turn: Stage = NO_STAGE) -> GenerateResponse:
        self.lengths.append(len(request.token_ids))
        raise EngineError("the prompt was measured", "", kind=MEASURED)


def check_prompts(config: RunFile | SftFile) -> str:
    """Raise if the first prompt of a task leaves no room for an answer. Plays up to that prompt."""
    if not isinstance(config, RunFile):
        return "not measured: a supervised run has none"
    if config.rollout.python:
        return "not measured: the environment is in [rollout] python"
    limit, meter = config.inference.max_model_len, _PromptMeter("http://none.invalid")

    async def play(folder: str) -> None:
        chats = build_policy_chats(config, [meter.base_url], MediaStore(Path(folder)))
        chats = replace(chats, client=meter, max_model_len=0)
        player = RolloutPlayer(build_environment(config.env), chats, config.rollout.timeout_s)
        try:
            for task in range(NUM_TASKS):
                trace = (await player.play(build_eval_request(task, "train", 0, 1.0))).trace
                if trace.error and trace.error_kind != MEASURED:
                    raise EnvironmentFailed(
                        f"task {task} of [env] {config.env.name!r} failed before its first "
                        f"answer: {summarize_traceback(trace.error)}",
                        f"{find_fix(trace.error)}play it: `sightline try {config.env.name} "
                        f"--model {config.model.path}`",
                    )
        finally:
            await player.close()

    with tempfile.TemporaryDirectory(prefix="sightline-check-") as folder:
        asyncio.run(play(folder))
    longest, answer = max(meter.lengths, default=0), config.rollout.max_tokens
    if (needed := longest + answer) > limit:
        raise ConfigError(
            f"a first prompt of [env] {config.env.name!r} has {longest} tokens and with [rollout] "
            f"max_tokens = {answer} needs {needed}; [inference] max_model_len = {limit}",
            f"raise max_model_len to {needed} or more, lower max_tokens, or {SMALLER_IMAGES}",
        )
    return (
        f"the longest of {NUM_TASKS} first prompts has {longest} tokens; with max_tokens = "
        f"{answer}, {limit - needed} tokens are left for later turns"
    )
