"""Checks that try a thing: images, prompts and memory. Each returns its figure, or refuses."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from sightline.config import ModelConfig, RunFile, SftFile
from sightline.envs.drawing import DIGITS, draw_glyph, encode_png
from sightline.envs.mix import build_environment
from sightline.errors import (
    SMALLER_IMAGES,
    ConfigError,
    EngineError,
    EnvironmentFailed,
    FamilyError,
    PixelMismatch,
    find_fix,
    summarize_traceback,
)
from sightline.families import Family, load_renderer
from sightline.families.checkpoint_files import read_json, read_shapes
from sightline.media import MediaStore, is_address, open_store
from sightline.media.remote import START_DEADLINE_S
from sightline.message import user
from sightline.pixels.probe import ProbeAnswer, ProbedImage, ProbeRequest, probe
from sightline.rollout.chat_sources import build_policy_chats
from sightline.rollout.client import GenerateClient
from sightline.rollout.engines import load_engine
from sightline.rollout.evaluation import build_eval_request
from sightline.rollout.player import RolloutPlayer
from sightline.run import RunDir
from sightline.run.machine import build_environ, runs_on_cpu
from sightline.run.stages import NO_STAGE, Stage
from sightline.transport.http_client import bearer
from sightline.wire.generate import GenerateRequest, GenerateResponse

SIZES = ((64, 64), (150, 91), (420, 236))
NUM_TASKS = 3
PROBE_TIMEOUT_S = 300.0
MEASURED = "measured"
PACKAGES = ("torch", "transformers", "tokenizers", "pillow", "safetensors", "vllm")
OPTIMIZER_STATES = 4
"""Training holds weights, gradients and the two moments of AdamW, in float32."""


def check_token_ids(model: ModelConfig, family: Family) -> None:
    """Refuses a checkpoint whose files do not mean the same tokens: those of images, and those that
    end a turn."""
    path, fix = Path(model.path), "use the files that belong to the checkpoint"
    with tempfile.TemporaryDirectory(prefix="sightline-check-") as folder:
        store = MediaStore(Path(folder))
        renderer = load_renderer(path, store, family, number_images=model.number_images)
        if family.shows_media:
            rendered = renderer.render([user(store.put(_draw_probe(*SIZES[0])[0]))])
            at = rendered.slots[0]
            places = at.offset + family.feature_offsets(at.item)
            fills = {rendered.token_ids[place] for place in places}
            if not fills <= set(family.slot_token_ids):
                raise FamilyError(
                    f"{path}: the chat format shows an image by the tokens {sorted(fills)}, and "
                    f"config.json names {list(family.slot_token_ids)}",
                    fix,
                )
    for file in (path / "config.json", path / "generation_config.json"):
        named = read_json(file).get("eos_token_id") if file.is_file() else None
        ends = {named} if isinstance(named, int) else set(named or ())
        if ends and not ends & set(renderer.stop_token_ids):
            raise FamilyError(
                f"{file}: eos_token_id = {named}, and a turn of the chat format ends with one of "
                f"{list(renderer.stop_token_ids)}",
                fix,
            )


def describe_checkpoint(model: ModelConfig, family: Family) -> list[str]:
    """What the checkpoint's chat format is and takes, a line each."""
    with tempfile.TemporaryDirectory(prefix="sightline-check-") as folder:
        store = MediaStore(Path(folder))
        renderer = load_renderer(model.path, store, family, number_images=model.number_images)
        return renderer.describe()


def check_server_files(config: RunFile, family: Family, run_dir: RunDir) -> None:
    """Refuses a server of `[inference] servers` that another run holds, that takes no weights from
    where this one publishes, or that does not find an image of its store."""
    if not config.inference.servers or not load_engine(config.inference.engine).takes_leases:
        return
    token, control_token = config.inference.read_token(), config.inference.read_control_token()
    own = run_dir.read_id() if run_dir.id_file.is_file() else ""
    options = config.media.store_options()
    store = open_store(config.media.root, deadline_s=START_DEADLINE_S, **options)
    # Of its own bytes, so that no other store has it, and gone when it was asked for.
    noise = draw_glyph(DIGITS["5"], 30).convert("RGB").resize(SIZES[0])
    noise.frombytes(os.urandom(len(noise.tobytes())))
    image = store.put(noise)
    url = {"type": "image_url", "image_url": {"url": image.url}}
    chat = {"messages": [{"role": "user", "content": [url]}], "max_tokens": 1}
    # There is no such version; a server that may not look there refuses it by its option.
    version = {"manifest": str(run_dir.path / "none" / "manifest.json")}
    try:
        for address in config.inference.servers:
            where = f"[inference] servers: {address}"
            holder = _ask(address, "/health", token).get("leased_to", "")
            if holder not in ("", own):
                fix = "end that run, or use another server"
                raise ConfigError(f"{where} is leased to run {holder}", fix)
            refusal = _ask(address, "/sightline/v1/adopt", control_token, version).get("error", {})
            takes_files = config.trainer.publish in ("auto", "files")
            if takes_files and "--weights-root" in (fix := str(refusal.get("fix"))):
                raise ConfigError(f"{where} takes no weights from {run_dir.path}", fix)
            answer = (
                _ask(address, "/v1/chat/completions", token, chat) if family.shows_media else {}
            )
            code = str(answer.get("error", {}).get("code"))
            if code.startswith("media_") and code != "media_missing":
                raise ConfigError(
                    f"{where} cannot read an image that is in [media] root = {store.root}: "
                    f"{answer['error'].get('message')}",
                    "start it with the --media and --media-token of this store",
                )
            if code == "media_missing":
                raise ConfigError(
                    f"{where} does not find an image that is in [media] root = {store.root}",
                    "start it with --media of this folder, or set [media] root to its own",
                )
    finally:
        if not is_address(config.media.root):  # elsewhere gc removes it
            store.path(image.digest).unlink(missing_ok=True)


def _ask(address: str, path: str, token: str, body: object = None) -> dict[str, Any]:
    """The JSON object that a server answers, or refuses with; an empty one for anything else."""
    data = None if body is None else json.dumps(body).encode()
    headers = bearer(token) | {"content-type": "application/json"}
    request = urllib.request.Request(address.rstrip("/") + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:
            found = json.loads(answer.read())
    except (OSError, ValueError) as error:
        found = None
        if isinstance(error, urllib.error.HTTPError):
            with error, suppress(ValueError):
                found = json.loads(error.read())
    return found if isinstance(found, dict) else {}


def check_probe_images(config: RunFile, family: Family) -> str:
    """Refuses interpreters of the run that do not make the same tokens and pixels of an image."""
    if not family.shows_media:
        return "none: the environment shows no images"
    others = {"[rollout] python": config.rollout.python}
    if not config.inference.servers:
        engine = load_engine(config.inference.engine)
        others["[inference] python"] = engine.find_python(config.inference)
    with tempfile.TemporaryDirectory(prefix="sightline-check-") as folder:
        store = MediaStore(Path(folder))
        refs = [store.put(data) for size in SIZES for data in _draw_probe(*size)]
        model = config.model
        writable = "" if is_address(config.media.root) else config.media.root
        request = ProbeRequest(model.path, model.overrides(), folder, refs, writable)
        own = probe(request)
        pythons = {
            name: python for name, python in others.items() if python not in ("", sys.executable)
        }
        for setting, python in pythons.items():
            for ref, ours, theirs in zip(
                refs, own, _ask_probe(setting, python, request), strict=True
            ):
                if ours != theirs:
                    raise PixelMismatch(
                        f"an image of {ref.width}x{ref.height} ({ref.mime}) is {ours} here, and "
                        f"{theirs} to {setting} = {python!r}",
                        "install the same versions there (constraints.txt): decoders differ",
                    )
    tokens = sorted({image.num_tokens for image in own})
    return f"{len(own)} of {tokens[0]} to {tokens[-1]} tokens, in {1 + len(pythons)} interpreters"


def _draw_probe(width: int, height: int) -> list[bytes]:
    """One picture as PNG and as JPEG, whose decoders differ the most."""
    image = draw_glyph(DIGITS["5"], 30).convert("RGB").resize((width, height))
    file = io.BytesIO()
    image.save(file, "JPEG")
    return [encode_png(image), file.getvalue()]


def _ask_probe(setting: str, python: str, request: ProbeRequest) -> list[ProbedImage]:
    done = subprocess.run(
        [python, "-m", "sightline.pixels.probe"],
        input=msgspec.json.encode(request), capture_output=True, timeout=PROBE_TIMEOUT_S,
        check=False, env=build_environ(threads=1),
    )  # fmt: skip
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        problem = f"{setting} = {python!r} cannot make an image: {''.join(words)}"
        raise ConfigError(problem, "install the same version of sightline there")
    answer = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=ProbeAnswer)
    if answer.problem:
        raise ConfigError(f"{setting} = {python!r}: {answer.problem}", answer.fix)
    return answer.images


@dataclass
class _PromptMeter(GenerateClient):
    """Answers no request, and keeps the lengths of their prompts."""

    lengths: list[int] = field(default_factory=list, kw_only=True)

    async def generate(self, request: GenerateRequest, turn: Stage = NO_STAGE) -> GenerateResponse:
        self.lengths.append(len(request.token_ids))
        raise EngineError("the prompt was measured", "", kind=MEASURED)


def check_prompts(config: RunFile) -> str:
    """Refuses tasks whose first prompt leaves no room for an answer; plays up to it."""
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
                    last = summarize_traceback(trace.error)
                    raise EnvironmentFailed(
                        f"task {task} of [env] {config.env.name!r} broke before its first answer: "
                        f"{last}",
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
        f"the longest of {NUM_TASKS} tasks begins with {longest} tokens; max_tokens = {answer} fit "
        f"behind it, and {limit - needed} of later turns"
    )


def check_memory(config: RunFile | SftFile, available: int | None = None) -> str:
    """Refuses a model that the memory of this machine, or `available` bytes, cannot train, where it
    trains on the CPU."""
    num_parameters = sum(map(math.prod, read_shapes(Path(config.model.path)).values()))
    needed = num_parameters * 4 * (1 if config.lora.rank else OPTIMIZER_STATES)
    if isinstance(config, RunFile) and not config.inference.servers:
        needed += num_parameters * (4 if config.model.dtype == "float32" else 2)
    if not runs_on_cpu(config.trainer.device):
        return f"{num_parameters / 1e6:,.1f} million parameters, on the GPU"
    available = read_available_memory() if available is None else available
    figure = f"{needed / 1e9:.2f} GB of {available / 1e9:.1f} GB that are free"
    if needed > available:
        raise ConfigError(
            f"{num_parameters / 1e6:,.1f} million parameters need {figure}, before activations",
            "take a smaller model, [lora] rank, or a larger machine",
        )
    return figure


def read_available_memory() -> int:
    """Bytes that processes can have before the machine swaps."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
    }
    return found["MemAvailable"] * 1024


def find_version(package: str) -> str:
    """The version of an installed package; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def describe_versions() -> str:
    found = {name: find_version(name) for name in PACKAGES}
    own = f"python {sys.version.split()[0]}"
    return ", ".join([own, *(f"{name} {number}" for name, number in found.items() if number)])
