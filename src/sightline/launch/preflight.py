"""Everything that can be refused before anything starts, in words that name the cure."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import sightline
from sightline.algo.registry import load_advantage, load_aggregation, load_credit, load_filters
from sightline.config import (
    AnyRun,
    EnvConfig,
    MediaConfig,
    ModelConfig,
    RunFile,
    SftFile,
    TrainerConfig,
)
from sightline.envs.environment_info import EnvironmentInfo, get_environment_info
from sightline.errors import ConfigError, DiskFull
from sightline.families import Family, load_family
from sightline.families.hub import resolve_checkpoint
from sightline.launch.external_servers import check_external_servers, leave_out_silent_servers
from sightline.launch.probes import (
    check_memory,
    check_probe_images,
    check_server_files,
    check_token_ids,
    describe_checkpoint,
    describe_versions,
)
from sightline.launch.processes import num_cores, reserve_port, split_threads
from sightline.launch.run_plan import TRAINER, find_resources, list_names, list_placed
from sightline.media import open_store
from sightline.media.open import OBJECT_STORES
from sightline.media.remote import START_DEADLINE_S
from sightline.rollout.engines import load_engine
from sightline.run import RunDir
from sightline.run.machine import build_environ, has_gpu, runs_on_cpu
from sightline.run.otel import check_otel
from sightline.trainer.conversations import check_rows_for_images
from sightline.view.sinks.protocol import check_sinks

STATES_PER_CHECKPOINT = 3
"""A checkpoint holds the weights and the two moments of AdamW."""
SPARE_BYTES = 1 << 30
DESCRIBE_TIMEOUT_S = 120.0
"""A cold disk may take a minute to import a large package."""
BYTES_PER_TOKEN = 16
"""A batch on disk has for each token its id, and logprob, advantage and version where it trains."""

Show = Callable[[str, str], None]
"""Hears the name of a check and its figure."""


def say_nothing(name: str, figure: str) -> None:
    pass


def resolve_model(config: AnyRun) -> AnyRun:
    """The run file with the folder of its model, which for an id of the hub is of one commit."""
    folder = resolve_checkpoint(config.model.path, with_weights=True)
    model = config.model.model_copy(update={"path": str(folder)})
    return config.model_copy(update={"model": model})


def check_model(model: ModelConfig, env: EnvConfig, python: str = "") -> Family:
    """The family of the checkpoint; refuses one that is not whole, not known, or cannot see what
    the environment shows.

    `python` is the interpreter that knows the environment, if this one need not.
    """
    environment = describe_environment(env, python)
    return check_checkpoint(model, f"[env] {environment.name!r}", environment.shows_media)


def describe_environment(
    env: EnvConfig, python: str, version: str = sightline.__version__
) -> EnvironmentInfo:
    """What `[env]` is, to the interpreter that the workers will run in; one that has another
    version of sightline is refused."""
    if not python:
        return get_environment_info(env)
    try:
        done = subprocess.run(
            [python, "-m", "sightline.envs.environment_info"],
            input=env.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=DESCRIBE_TIMEOUT_S,
            env=build_environ(threads=1),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"[rollout] python = {python!r} does not run: {error}",
            "name the python of a virtual environment that has sightline-rl and the environment",
        ) from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise ConfigError(
            f"[rollout] python = {python!r} cannot build the environment: {words[0]}",
            f"try `{python} -m sightline --version`; workers need sightline and [env]'s package",
        )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if found["version"] != version:
        raise ConfigError(
            f"[rollout] python = {python!r} has sightline {found['version']}, and this is "
            f"{version}",
            "install the same version there: they speak to one another",
        )
    if "problem" in found:
        raise ConfigError(f"[rollout] python = {python!r}: {found['problem']}", found["fix"])
    return EnvironmentInfo(found["name"], found["shows_media"])


def check_conversations(config: SftFile) -> Family:
    """The family of the checkpoint; refuses one that cannot see the images of [data], whose first
    rows are read."""
    assert config.data is not None
    shows = check_rows_for_images(config.data, config.run.seed)
    return check_checkpoint(config.model, f"[data] {config.data.path}", shows)


def check_checkpoint(model: ModelConfig, shown_by: str, shows_media: bool) -> Family:
    """The family of a checkpoint that holds weights, and sees if `shown_by` shows images."""
    path = Path(model.path)
    if not path.is_dir():
        raise ConfigError(
            f"[model] path = {model.path!r} is no folder",
            "make a checkpoint with `sightline model tiny DIR`, or name one that is there",
        )
    family = load_family(path, model.exact, **model.overrides())
    if shows_media and not family.shows_media:
        raise ConfigError(
            f"{shown_by} shows images and [model] path = {model.path!r} cannot see: it has no "
            "vision tower",
            "choose a vision-language checkpoint, or conversations without images",
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"[model] path = {model.path!r} holds no weights", "it needs *.safetensors files"
        )
    check_token_ids(model, family)
    return family


def describe_family(model: ModelConfig, family: Family, engine: str = "") -> str:
    """Return what a run does because of its model and engine, and why."""
    lines = [*describe_checkpoint(model, family), family.packing.description]
    lines.append(load_engine(engine).describe(family) if engine else "")
    return "\n".join(filter(None, lines))


def check_devices(config: RunFile | SftFile) -> None:
    """Refuses a device that no process of the run would find."""
    settings = {}
    if not _is_elsewhere(config, "trainer"):
        settings["[trainer] device"] = config.trainer.device
    if isinstance(config, RunFile) and not (
        config.inference.servers or _is_elsewhere(config, "server")
    ):
        settings["[inference] device"] = config.inference.device
    for setting, name in settings.items():
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
            raise ConfigError(f"{setting} = {name!r} is no device", "set cpu, cuda or auto")
        if name.startswith("cuda") and not has_gpu():
            raise ConfigError(
                f"{setting} = {name!r}, and this machine shows no GPU",
                'set it to "auto" or "cpu"; where there is a GPU, install its driver',
            )
    if "[trainer] device" in settings and runs_on_cpu(config.trainer.device):
        config.model.check_exact_on_cpu(config.trainer.ranks)


def check_extras(config: RunFile | SftFile) -> None:
    """Raises where this machine lacks a package that a setting asks for."""
    names = ["obstore"] if urlsplit(config.media.root).scheme in OBJECT_STORES else []
    if isinstance(config, RunFile) and config.launch.on == "ray":
        names.append("ray")
    if config.lora.rank and not _is_elsewhere(config, "trainer"):
        names.append("peft")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _is_elsewhere(config: RunFile | SftFile, name: str) -> bool:
    return isinstance(config, RunFile) and config.launch.is_elsewhere(name)


def check_store(media: MediaConfig, folder: Path, deadline_s: float = START_DEADLINE_S) -> None:
    """Refuses a store that cannot be written to, or reached; `folder` is that of a run without
    `[media] root`."""
    store = open_store(media.root or folder, deadline_s=deadline_s, **media.store_options())
    store.check_writable()
    store.check_room()


def check_disk(config: RunFile | SftFile, run_dir: RunDir, spare_bytes: int = SPARE_BYTES) -> str:
    """Refuses a disk that cannot hold what exists at one time: checkpoints, published versions and
    batches."""
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    settings = config.trainer
    # One more than is kept: the next is whole before the oldest goes.
    checkpoints = settings.keep_checkpoints + 1
    if settings.keep_checkpoints_every:
        checkpoints += config.run.steps // settings.keep_checkpoints_every
    copies = checkpoints * STATES_PER_CHECKPOINT + 1
    needed = spare_bytes
    if isinstance(config, RunFile):
        # Published versions; the best checkpoint, and its successor while it is written.
        copies += config.orchestrator.max_lag + 2 + 2 * (config.eval.every > 0)
        needed += _count_batch_bytes(config)
    needed += copies * weights
    # What a run that goes on has already written is counted in what it can need.
    needed -= _count_bytes(run_dir.checkpoints, run_dir.weights, run_dir.batches)
    existing = next(path for path in (run_dir.path, *run_dir.path.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        is_new = not run_dir.config.is_file()
        fix = "set [run] dir to a larger disk" if is_new else "move the run to a larger disk"
        raise DiskFull(
            f"{run_dir.path} has {free / 1e9:.1f} GB free; checkpoints, published weights and "
            f"batches can need {(needed - spare_bytes) / 1e9:.1f} GB, and {spare_bytes / 1e9:.1f} "
            "GB stay in reserve",
            f"free some space, or {fix}"
            + (", or lower keep_checkpoints" if free > spare_bytes else ""),
        )
    return f"{needed / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free"


def _count_batch_bytes(config: RunFile) -> int:
    settings = config.orchestrator
    # Where the newest checkpoint may turn out corrupt, the batches since the one before it stay.
    spans = min(config.trainer.keep_checkpoints, 2)
    kept = min(spans * config.trainer.checkpoint_every, config.run.steps)
    batches = kept + settings.max_lag + 1
    rollouts = batches * settings.groups_per_step * settings.group_size
    return rollouts * config.inference.max_model_len * BYTES_PER_TOKEN


def check_hosts(config: RunFile) -> None:
    """Refuses processes on other machines that could not reach what they need."""
    launch, has_server = config.launch, not config.inference.servers
    if launch.num_servers > 1 and has_server and not launch.is_elsewhere("server-1"):
        raise ConfigError(
            f"[launch] num_servers = {launch.num_servers} on one machine",
            "start them with `sightline serve`, and name them in [inference] servers",
        )
    if not launch.has_other_machines:
        return
    launch.check_patterns(list_names(config))
    for name in list_placed(config):
        find_resources(config, name)
    if config.eval.every and config.eval.tasks:
        raise ConfigError(
            "[eval] every needs a server beside the launcher, and [launch] has other machines",
            "set every = 0; the evaluations at the start and the end stay",
        )
    if not config.media.root:
        raise ConfigError(
            "[launch] with other machines and no [media] root: they do not see the run directory",
            "set it to the address of a store: s3://BUCKET/PREFIX, or that of a media service, "
            "which `sightline media serve` starts",
        )
    if config.trainer.publish != "store":
        raise ConfigError(
            f"[trainer] publish = {config.trainer.publish!r} does not reach other machines",
            'set publish = "store"',
        )
    traced = (name for name in list_names(config) if name != TRAINER)  # it records no spans
    if config.logging.otel == "file" and any(map(launch.is_elsewhere, traced)):
        raise ConfigError(
            '[logging] otel = "file" with servers or workers on other machines, whose files are '
            "not those of the run directory",
            "set it to the address of a collector that they reach",
        )


def check_compatible_settings(config: RunFile) -> None:
    """Refuses settings that are well alone and cannot work together."""
    if config.rollout.max_tokens >= config.inference.max_model_len:
        raise ConfigError(
            f"[rollout] max_tokens = {config.rollout.max_tokens} leaves no room for a prompt in "
            f"[inference] max_model_len = {config.inference.max_model_len}",
            "raise max_model_len, or lower max_tokens",
        )
    check_hosts(config)
    way = config.trainer.publish
    if config.trainer.compress_weights and way != "store":
        raise ConfigError(
            f"[trainer] compress_weights with publish = {way!r}: deltas are for "
            "weights in the store",
            'set publish = "store", or compress_weights = false',
        )
    if way in ("broadcast", "ipc") and config.eval.every > 0:
        raise ConfigError(
            f'[trainer] publish = "{way}" is for one server, and [eval] every needs another, and '
            "files for checkpoints/best",
            'set publish = "files", or every = 0',
        )
    engine = load_engine(config.inference.engine)
    if way not in ("auto", *engine.weight_transports):
        raise ConfigError(
            f'[trainer] publish = "{way}" does not work with [inference] engine = "{engine.name}"',
            f"set publish to one of: {', '.join(sorted(engine.weight_transports))}",
        )
    if config.model.exact and engine.inexact_reason:
        raise ConfigError(
            f'[model] exact = true does not work with [inference] engine = "{engine.name}": '
            f"{engine.inexact_reason}",
            "change one of the two settings",
        )
    if way == "ipc" and config.lora.publish == "adapter":
        raise ConfigError(
            '[trainer] publish = "ipc" with [lora] publish = "adapter": whole weights are shared',
            'set [lora] publish = "merged", or [trainer] publish = "files"',
        )
    if not engine.can_start and config.eval.every > 0:
        raise ConfigError(
            f"[eval] every starts a server of its own, and a run cannot start {engine.name!r}",
            "set every = 0; the evaluations at the start and the end stay",
        )
    if config.lora.publish == "adapter" and config.eval.every > 0:
        raise ConfigError(
            '[lora] publish = "adapter" with [eval] every: checkpoints/best is made of published '
            "weights, and adapters are none",
            'set publish = "merged", or every = 0',
        )
    for root in config.media.file_roots:
        if not Path(root).is_absolute():
            raise ConfigError(
                f"[media] file_roots has {root!r}, which is relative",
                "write the whole path: processes may run in other folders",
            )


def check_engine(config: RunFile, family: Family) -> None:
    """Raise if the engine, or a server that the run did not start, cannot serve the family."""
    load_engine(config.inference.engine).check(config, family)
    check_external_servers(config, family)


def check_algorithm(config: RunFile) -> None:
    """Refuses an advantage, credit, filter, aggregation or loss that cannot work, by its setting;
    one from outside is tried on a small batch."""
    orchestrator, trainer = config.orchestrator, config.trainer
    load_advantage(orchestrator.advantage, orchestrator.advantage_args)
    load_credit(orchestrator.credit)
    load_filters(config.filters)
    load_aggregation(trainer.loss_aggregation, trainer.loss_aggregation_args)
    if trainer.loss != TrainerConfig().loss or trainer.loss_args:
        # Losses need torch, which takes seconds to import; the default one is known to work.
        from sightline.algo.losses import load_loss

        load_loss(trainer.loss, trainer.loss_args)


def check_run(config: RunFile, run_dir: RunDir, show: Show = say_nothing) -> Family:
    """The family of the run's model, when nothing of the run file has to be refused; `show` hears
    of each check that was passed."""
    show("versions", describe_versions())
    family = check_model(config.model, config.env, config.rollout.python)
    show("model", f"{family.name} for [env] {config.env.name!r}: {config.model.path}")
    check_algorithm(config)
    check_sinks(config.logging.sinks)
    check_otel(config.logging.otel)
    threads = split_threads(config, num_cores())
    check_compatible_settings(config)
    show("settings", f"threads on {num_cores()} cores: {threads.server} and {threads.trainer}")
    answering = leave_out_silent_servers(config, run_dir)
    check_engine(answering, family)
    check_server_files(answering, family, run_dir)
    show("engine", ", ".join(config.inference.servers) or config.inference.engine)
    if not config.launch.is_elsewhere("server"):
        host, port = config.inference.host, config.inference.port
        port = reserve_port(host, port, "[inference] port")
        show("ports", f"{host}:{port} is free")
    show("images", check_probe_images(config, family))
    if not config.launch.is_elsewhere("trainer"):
        show("memory", check_memory(config))
    show("disk", check_disk(config, run_dir))
    return family


def _count_bytes(*folders: Path) -> int:
    files = (file for folder in folders if folder.is_dir() for file in folder.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())
