"""Check the checkpoint, the environment, and the memory and disk space that a run needs."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import sightline
from sightline.config import AnyRun, EnvConfig, ModelConfig, RunFile, SftFile
from sightline.envs.drawing import DIGITS, draw_glyph, encode_png
from sightline.envs.environment_info import EnvironmentInfo, get_environment_info
from sightline.envs.protocol import build_environment
from sightline.errors import (
    SMALLER_IMAGES,
    ConfigError,
    DiskFull,
    EngineError,
    EnvironmentFailed,
    FamilyError,
    find_fix,
    format_command,
    summarize_traceback,
)
from sightline.families import Family, check_parallel, load_family, load_renderer
from sightline.families.checkpoint_files import read_json, read_shapes, resolve_checkpoint
from sightline.families.rope import check_length
from sightline.launch.checks.machine import SPARE_BYTES, read_available_memory
from sightline.launch.checks.settings import is_elsewhere
from sightline.media import MediaStore, open_store
from sightline.media.files import measure_free_space
from sightline.media.remote import START_DEADLINE_S
from sightline.message import user
from sightline.rollout.chat_sources import build_policy_chats
from sightline.rollout.client import GenerateClient
from sightline.rollout.engines import load_engine
from sightline.rollout.evaluation import build_eval_request
from sightline.rollout.player import RolloutPlayer
from sightline.run import RunDir
from sightline.run.machine import build_environ, runs_on_cpu
from sightline.trainer.conversations import check_rows_for_images
from sightline.trainer.export import FileSizes, measure_files
from sightline.wire.generate import GenerateRequest, GenerateResponse

NUM_TASKS = 3
MEASURED = "measured"
STATES_IN_TRAINING = 4
"""Copies in training, in float32: weights, gradients and AdamW's two moments."""
ENVIRONMENT_MODULE = "sightline.envs.environment_info"
MODULE_TIMEOUT_S = 300.0
"""Time limit for importing an environment. Large packages can take a minute."""


def resolve_model(config: AnyRun) -> AnyRun:
    """Return the run file with a model id on the Hub replaced by the model's folder."""
    folder = resolve_checkpoint(config.model.path, with_weights=True)
    return config.with_values("model", path=str(folder))


def find_family(config: RunFile | SftFile) -> Family:
    """Return the checkpoint's family. Raise if the checkpoint is incomplete or unknown, or if it
    does not support the images in the environment or the data."""
    if config.env is not None:
        python = config.rollout.python if isinstance(config, RunFile) else ""
        environment = describe_environment(config.env, python)
        shown_by, shows_media = f"[env] {environment.name!r}", environment.shows_media
    else:
        assert isinstance(config, SftFile) and config.data is not None
        shows_media = check_rows_for_images(config.data, config.run.seed)
        shown_by = f"[data] {config.data.path}"
    path = Path(config.model.path)
    if not path.is_dir():
        raise ConfigError(
            f"[model] path = {config.model.path!r} is not a folder",
            "set a checkpoint's folder, train this one first with `sightline sft FILE` if it is "
            "the output_dir of a warm-up, or create one with `sightline model tiny DIR`",
        )
    family = load_family(path, config.model.exact, **config.model.overrides())
    config.trainer.check_ranks(config.trainer.ranks)
    check_parallel(family, path, config.trainer, config.model.exact)
    if shows_media and not family.shows_media:
        raise ConfigError(
            f"{shown_by} has images, but [model] path = {config.model.path!r} has no vision tower",
            "choose a vision-language checkpoint, or conversations without images",
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"[model] path = {config.model.path!r} has no weights", "add its *.safetensors files"
        )
    teacher = config.algorithm.teacher
    is_loaded = teacher and not config.algorithm.teacher_server
    if is_loaded and not any(resolve_checkpoint(teacher, True).glob("*.safetensors")):
        raise ConfigError(
            f"[algorithm] teacher = {teacher!r} is no folder with weights",
            'set it to a checkpoint of the same family, or "" for the starting checkpoint',
        )
    if isinstance(config, SftFile):
        longest = config.trainer.max_sequence_tokens
        check_length(family.position_limit, longest, "[trainer] max_sequence_tokens")
    check_token_ids(config.model, family)
    return family


def describe_environment(
    env: EnvConfig, python: str, version: str = sightline.__version__
) -> EnvironmentInfo:
    """Return the environment's name and whether it shows images, from the workers' interpreter.
    Raise if that interpreter has a different version of Sightline."""
    if not python:
        return get_environment_info(env)
    setting, command = f"[rollout] python = {python!r}", [python, "-m", ENVIRONMENT_MODULE]
    try:
        text = subprocess.run(
            command, input=env.model_dump_json(), capture_output=True, text=True,
            timeout=MODULE_TIMEOUT_S, env=build_environ(threads=1), check=True,
        ).stdout  # fmt: skip
        answer = json.loads(text.strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"{setting} cannot run {ENVIRONMENT_MODULE}: {output.strip().splitlines()[-1]}",
            "set it to the python of a virtual environment with sightline-rl and [env]'s package",
        ) from error
    if answer["version"] != version:
        raise ConfigError(
            f"{setting} has sightline {answer['version']}, and this is {version}",
            "install the same version there",
        )
    if "problem" in answer:
        raise ConfigError(f"{setting}: {answer['problem']}", answer["fix"])
    return EnvironmentInfo(answer["name"], answer["shows_media"])


def check_token_ids(model: ModelConfig, family: Family) -> None:
    """Raise if the checkpoint's files disagree about image tokens or end-of-turn tokens."""
    path, fix = Path(model.path), "copy all files from the same checkpoint"
    with tempfile.TemporaryDirectory(prefix="sightline-check-") as folder:
        store = MediaStore(Path(folder))
        renderer = load_renderer(path, store, family)
        if family.shows_media:
            rendered = renderer.render([user(store.put(draw_test_image()))])
            slot = rendered.slots[0]
            offsets = slot.offset + family.feature_offsets(slot.item)
            token_ids = {rendered.token_ids[offset] for offset in offsets}
            if not token_ids <= set(family.slot_token_ids):
                raise FamilyError(
                    f"{path}: the chat format writes an image as the tokens {sorted(token_ids)}, "
                    f"but config.json names {list(family.slot_token_ids)}",
                    fix,
                )
    for file in (path / "config.json", path / "generation_config.json"):
        setting = read_json(file).get("eos_token_id") if file.is_file() else None
        ends = {setting} if isinstance(setting, int) else set(setting or ())
        if ends and not ends & set(renderer.stop_token_ids):
            raise FamilyError(
                f"{file}: eos_token_id = {setting}, but the chat format ends a turn with one of "
                f"{list(renderer.stop_token_ids)}",
                fix,
            )


def draw_test_image() -> bytes:
    return encode_png(draw_glyph(DIGITS["5"], 30).convert("RGB").resize((64, 64)))


def describe_family(model: ModelConfig, family: Family, engine: str = "") -> str:
    """Describe properties of the model and the engine, such as the chat format."""
    with tempfile.TemporaryDirectory(prefix="sightline-check-") as folder:
        renderer = load_renderer(model.path, MediaStore(Path(folder)), family)
        lines = [*renderer.describe(), family.packing.description]
    lines.append(load_engine(engine).describe(family) if engine else "")
    return "\n".join(filter(None, lines))


def check_memory(config: RunFile | SftFile, available: int | None = None) -> str:
    """Raise if the model does not fit into this machine's memory, or `available` bytes, for
    training on the CPU."""
    if is_elsewhere(config, "trainer"):
        return "not checked: the trainer runs on another machine"
    num_parameters = sum(map(math.prod, read_shapes(Path(config.model.path)).values()))
    size = f"{num_parameters / 1e6:,.1f} million parameters"
    if not runs_on_cpu(config.trainer.device):
        return f"{size}, on the GPU"
    needed = num_parameters * 4 * (1 if config.lora.rank else STATES_IN_TRAINING)
    if isinstance(config, RunFile) and not config.inference.servers:
        needed += num_parameters * (4 if config.model.dtype == "float32" else 2)
    available = read_available_memory() if available is None else available
    if needed > available:
        raise ConfigError(
            f"{size} need {needed / 1e9:.2f} GB without activations, and {available / 1e9:.1f} GB "
            "of memory are free",
            "choose a smaller model, set [lora] rank, or use a larger machine",
        )
    return f"{needed / 1e9:.2f} GB of {available / 1e9:.1f} GB free"


def check_store(
    config: RunFile | SftFile, run_dir: RunDir, deadline_s: float = START_DEADLINE_S
) -> str:
    """Raise if the store cannot be reached or written to. Without [media] root, it is part of the
    run directory."""
    root = config.media.root or run_dir.media
    store = open_store(root, deadline_s=deadline_s, **config.media.store_options())
    store.check_writable()
    store.check_room()
    return f"{config.media.root or 'the run directory'} is writable"


def check_disk(config: RunFile | SftFile, run_dir: RunDir, spare_bytes: int = SPARE_BYTES) -> str:
    """Raise if the disk cannot hold the checkpoints and published versions that exist at the same
    time. Batches are small in comparison."""
    num_bytes = count_disk_bytes(config, measure_files(config))
    # A resumed run has already written some of these files.
    written = [*run_dir.checkpoints.rglob("*.safetensors"), *run_dir.weights.rglob("*.safetensors")]
    needed = spare_bytes + num_bytes - sum(file.stat().st_size for file in written)
    space = measure_free_space(run_dir.path)
    free = space.num_bytes
    if free < needed:
        is_new = not run_dir.config.is_file()
        fix = "set [run] dir to a larger disk" if is_new else "move the run to a larger disk"
        raise DiskFull(
            f"the disk of {run_dir.path} has {space}; checkpoints and published weights can "
            f"need {(needed - spare_bytes) / 1e9:.1f} GB, and {spare_bytes / 1e9:.1f} GB stay in "
            "reserve",
            f"free some space, or {fix}"
            + (", or lower keep_checkpoints" if free > spare_bytes else ""),
        )
    return f"{needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free"


def count_disk_bytes(config: RunFile | SftFile, sizes: FileSizes) -> int:
    """Return the most bytes of checkpoints, versions and exports that exist at the same time."""
    settings = config.trainer
    # One more than is kept, because the next is written before the oldest is deleted.
    written_in_all = -(-config.run.steps // settings.checkpoint_every)
    checkpoints = min(settings.keep_checkpoints + 1, written_in_all)
    if settings.keep_checkpoints_every:
        checkpoints += config.run.steps // settings.keep_checkpoints_every
    num_bytes, exports = checkpoints * sizes.checkpoint, 1
    if isinstance(config, RunFile):
        num_bytes += (config.orchestrator.max_lag + 2) * sizes.version
        # The best checkpoint, and its replacement while it is written.
        exports += 2 * (config.eval.every > 0)
    return num_bytes + exports * sizes.export


@dataclass
class _PromptMeter(GenerateClient):
    """Records the length of each prompt and sends no request."""

    lengths: list[int] = field(default_factory=list, kw_only=True)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        self.lengths.append(len(request.token_ids))
        raise EngineError("the prompt was measured", "", kind=MEASURED)


def check_prompts(config: RunFile | SftFile) -> str:
    """Raise if a task's first prompt leaves no room for an answer. Plays up to that prompt."""
    if not isinstance(config, RunFile) or config.rollout.python:
        return "not measured: no environment in this interpreter"
    limit, meter = config.inference.max_model_len, _PromptMeter("http://none.invalid")

    async def play(folder: str) -> None:
        chats = build_policy_chats(config, [meter.base_url], MediaStore(Path(folder)))
        chats = replace(chats, client=meter, max_model_len=0)
        player = RolloutPlayer(build_environment(config.env), chats, config.rollout.timeout_s)
        command = format_command("sightline", "try", config.env.name, "--model", config.model.path)
        try:
            for task in range(NUM_TASKS):
                trace = (await player.play(build_eval_request(task, "train", 0, 1.0))).trace
                if trace.error and trace.error_kind != MEASURED:
                    raise EnvironmentFailed(
                        f"task {task} of [env] {config.env.name!r} failed before its first "
                        f"answer: {summarize_traceback(trace.error)}",
                        f"{find_fix(trace.error)}play it: `{command}`",
                    )
                if trace.limit:  # the renderer refuses long texts before it counts their tokens
                    raise ConfigError(
                        f"the first prompt of task {task} of [env] {config.env.name!r} is too "
                        f"long: {trace.limit}",
                        f"raise [inference] max_model_len, send less text, or {SMALLER_IMAGES}",
                    )
                if not meter.lengths:
                    raise ConfigError(
                        f"task {task} of [env] {config.env.name!r} ended without a model call",
                        "call chat.send, or let an agent use chat.base_url, before the rollout "
                        "returns",
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
    return f"the longest of {NUM_TASKS} first prompts has {longest} tokens of {limit}"
