"""Check the run file alone: combinations of settings, devices, packages and the algorithm."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from sightline.algo.algorithms import ALGORITHMS, load_algorithm
from sightline.algo.registry import load_aggregation, load_filters
from sightline.compute.weight_transport import find_transport, list_transports, load_transport
from sightline.config import AlgorithmConfig, RunFile, SftFile
from sightline.errors import ConfigError
from sightline.launch.processes import num_cores, reserve_port, split_threads
from sightline.launch.run_plan import find_resources, list_names, list_placed
from sightline.media.open import OBJECT_STORES
from sightline.orchestrator.task_order import load_task_order
from sightline.rollout.engines import load_engine
from sightline.run.machine import has_gpu
from sightline.view.sinks import check_sinks


def check_extras(config: RunFile | SftFile) -> None:
    """Raise ModuleNotFoundError if a setting needs a package that is not installed."""
    names = ["obstore"] if urlsplit(config.media.root).scheme in OBJECT_STORES else []
    if isinstance(config, RunFile) and config.logging.upload_samples_to:
        names += ["obstore", "pyarrow"]
    if isinstance(config, RunFile) and config.launch.on == "ray":
        names.append("ray")
    if config.lora.rank and not is_elsewhere(config, "trainer"):
        names.append("peft")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def check_devices(config: RunFile | SftFile) -> None:
    """Raise if the trainer or the server would not find its GPU on this machine."""
    devices = [("trainer", "trainer", config.trainer.device)]
    if isinstance(config, RunFile) and not config.inference.servers:
        devices.append(("server", "inference", config.inference.device))
    for name, section, device in devices:
        if device.startswith("cuda") and not is_elsewhere(config, name) and not has_gpu():
            raise ConfigError(
                f"[{section}] device = {device!r}, but this machine has no GPU",
                'set it to "auto" or "cpu", or install the GPU\'s driver',
            )


def is_elsewhere(config: RunFile | SftFile, name: str) -> bool:
    return isinstance(config, RunFile) and config.launch.is_elsewhere(name)


def check_algorithm(config: RunFile) -> None:
    """Raise if the algorithm or one of its functions does not load. Try external code on a small
    batch."""
    settings, groups = config.algorithm, config.orchestrator.groups_per_step
    algorithm = load_algorithm(settings)
    load_filters(config.filters)
    load_task_order(config.orchestrator)
    load_aggregation(settings.aggregation, settings.aggregation_args)
    if groups < settings.minibatches:
        raise ConfigError(
            f"[algorithm] minibatches = {settings.minibatches} is more than [orchestrator] "
            f"groups_per_step = {groups}, and groups stay whole",
            "use at most as many minibatches as groups",
        )
    default = AlgorithmConfig()
    if (settings.name, settings.loss, settings.loss_args) == (default.name, default.loss, {}):
        return
    # Losses need torch, which takes seconds to import. The default loss is known to work.
    from sightline.algo.losses import check_algorithm_loss, load_loss

    load_loss(settings.loss, settings.loss_args)
    if settings.name not in ALGORITHMS:
        check_algorithm_loss(settings.name, algorithm.loss, algorithm.needs)


def check_settings(config: RunFile) -> str:
    """Check sinks, threads and combinations of settings."""
    check_sinks(config.logging.sinks)
    threads = split_threads(config, num_cores())
    check_compatible_settings(config)
    return f"{threads.server} server and {threads.trainer} trainer threads on {num_cores()} cores"


def check_port(config: RunFile) -> str:
    host, port = config.inference.host, config.inference.port
    if config.launch.is_elsewhere("server"):
        return "chosen on the server's machine"
    return f"{host}:{reserve_port(host, port, '[inference] port')} is free"


def check_compatible_settings(config: RunFile) -> None:
    """Raise if settings conflict with each other."""
    check_hosts(config)
    find_transport(config).check(config)
    for conflicts, problem, fix in _list_conflicts(config):
        if conflicts:
            raise ConfigError(problem, fix)


def _list_conflicts(config: RunFile) -> Iterator[tuple[bool, str, str]]:
    """Yield, for pairs of settings, whether they conflict, the problem, and the fix."""
    transport, engine = find_transport(config), load_engine(config.inference.engine)
    max_tokens = config.rollout.max_tokens
    yield (
        max_tokens >= config.inference.max_model_len,
        f"[rollout] max_tokens = {max_tokens} leaves no room for a prompt in [inference] "
        f"max_model_len = {config.inference.max_model_len}",
        "raise max_model_len, or lower max_tokens",
    )
    adoptable = (name for name in list_transports() if engine.can_adopt(load_transport(name)))
    yield (
        not engine.can_adopt(transport),
        f'[trainer] publish = "{transport.name}" does not work with [inference] engine = '
        f'"{engine.name}"',
        f"set publish to one of: {', '.join(adoptable)}",
    )
    yield (
        config.model.exact and bool(engine.inexact_reason),
        f'[model] exact = true does not work with [inference] engine = "{engine.name}": '
        f"{engine.inexact_reason}",
        "change one of the two settings",
    )
    relative = [root for root in config.media.file_roots if not Path(root).is_absolute()]
    yield (
        bool(relative),
        f"[media] file_roots contains relative paths: {', '.join(relative)}",
        "write absolute paths: processes may run in different folders",
    )


def check_hosts(config: RunFile) -> None:
    """Raise if processes on other machines could not reach the services that they need."""
    launch = config.launch
    has_server = not config.inference.servers
    if launch.num_servers > 1 and has_server and not launch.is_elsewhere("server-1"):
        raise ConfigError(
            f"[launch] num_servers = {launch.num_servers}, but a run starts one server on this "
            "machine",
            "start the servers with `sightline serve`, and list them in [inference] servers",
        )
    if not launch.has_other_machines:
        return
    launch.check_patterns(list_names(config))
    for name in list_placed(config):
        find_resources(config, name)
    if config.eval.every and config.eval.tasks:
        raise ConfigError(
            "[eval] every needs a server on the launcher's machine, and [launch] uses others",
            "set every = 0: the run is still evaluated at its start and its end",
        )
    if not config.media.root:
        raise ConfigError(
            "[launch] uses other machines, which cannot read images in the run directory",
            "set [media] root to s3://BUCKET/PREFIX, or to the address of `sightline media serve`",
        )
