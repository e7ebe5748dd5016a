"""`sightline serve MODEL`: serve a checkpoint.

Options have the names of the settings in [model] and [inference] of a run file. Some options exist
only for a server.
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sightline.config import InferenceConfig, ModelConfig
from sightline.inference.server_spec import ServerSpec
from sightline.rollout.engines import load_engine

OPTIONS: dict[type[BaseModel], tuple[str, ...]] = {
    InferenceConfig: (
        "python", "host", "port", "token", "control_token", "tls_cert", "tls_key", "device",
        "threads", "max_num_seqs", "max_model_len", "prefill_chunk_tokens", "pixel_cache_mb",
        "feature_cache_mb", "pixel_threads", "keep_kv_over_updates",
    ),
    ModelConfig: ("dtype", "exact", "min_pixels", "max_pixels"),
    ServerSpec: (
        "max_waiting", "max_waiting_mb", "max_media_gb", "media_token", "media_cache_dir",
        "media_cache_gb", "enable_prefix_caching", "weights", "weights_root",
    ),
}  # fmt: skip
"""Settings that are also options, by section."""
KINDS: dict[Any, type] = {int: int, int | None: int, float: float, Path | None: Path}
"""Parser for option values, by the setting's type. Other values are strings."""
COMMAND_DEFAULTS = {"port": 8000, "threads": 1}
"""Defaults for settings that the launcher chooses in a run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="MODEL", help="folder of the checkpoint")
    parser.add_argument(
        "--engine", default="torch", help="inference engine, as in [inference] engine"
    )
    parser.add_argument(
        "--media", action="append", metavar="ROOT", dest="media_roots",
        help="image store, a folder or a URL; repeat it for more stores "
        "(default: a folder that is deleted at the end)",
    )  # fmt: skip
    for section, names in OPTIONS.items():
        for name in names:
            add_setting(parser, name, section.model_fields[name])


def add_setting(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """Add an option with the name, description and default of a setting."""
    default = COMMAND_DEFAULTS.get(name, field.default)
    default_text = f" Default: {default}." if default not in (None, "") else ""
    option = f"--{name.replace('_', '-')}"
    text = f"{field.description}{default_text}".replace("%", "%%")
    if field.annotation is bool:
        parser.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
    else:
        parser.add_argument(option, type=KINDS.get(field.annotation, str), help=text)


def run(args: argparse.Namespace) -> int:
    names = {*ServerSpec.model_fields, *ModelConfig.model_fields, *InferenceConfig.model_fields}
    given = {name: value for name, value in vars(args).items() if value is not None}
    options = {name: given[name] for name in names & given.keys()}
    if "media_roots" not in options:
        folder = tempfile.mkdtemp(prefix="sightline-serve-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        print(f"images are stored in {folder} until the end. --media DIR keeps them", flush=True)
        options["media_roots"] = [folder]
    load_engine(args.engine).serve(ServerSpec.of(**(COMMAND_DEFAULTS | options)))
    return 0
