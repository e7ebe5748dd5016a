"""`sightline serve MODEL`: serve a checkpoint.

Options carry the names of settings: those of [model] and [inference] in a run file, and those that
a server alone has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pydantic.fields import FieldInfo

from sightline.cli.training import check_packages
from sightline.config import InferenceConfig, ModelConfig
from sightline.errors import ConfigError

ENGINES = ("torch", "vllm")
MODEL_OPTIONS = ("dtype", "min_pixels", "max_pixels", "number_images")
INFERENCE_OPTIONS = (
    "python", "host", "port", "device", "threads", "max_num_seqs", "max_model_len",
    "prefill_chunk_tokens", "pixel_cache_mb", "feature_cache_mb", "pixel_threads",
    "keep_kv_over_updates",
)  # fmt: skip
COMMAND_DEFAULTS = {"port": 8000, "threads": 1}
"""Settings whose default in a run file is that the launcher chooses; nobody does here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="MODEL", help="folder of the checkpoint")
    parser.add_argument("--engine", default="torch", help=f"one of: {', '.join(ENGINES)}")
    parser.add_argument(
        "--media", type=Path, action="append", required=True, metavar="DIR", dest="media_roots",
        help="a root of the store; may be given again for further ones",
    )  # fmt: skip
    for name in INFERENCE_OPTIONS:
        add_setting(parser, name, InferenceConfig.model_fields[name])
    for name in MODEL_OPTIONS:
        add_setting(parser, name, ModelConfig.model_fields[name])
    parser.add_argument("--max-waiting", type=int, help="requests that may wait; default: 4096")
    parser.add_argument("--max-waiting-mb", type=float, help="their memory; default: 4096")
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction,
        help="keep the KV cache of a turn for the next one; default: yes",
    )  # fmt: skip
    parser.add_argument("--weights", type=Path, help="manifest of the weights to begin with")
    parser.add_argument(
        "--otel", metavar="TO",
        help="OpenTelemetry spans: the address of an OTLP/HTTP collector, or a file",
    )  # fmt: skip


def add_setting(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """An option for a setting, under its name and with its description and default."""
    default = COMMAND_DEFAULTS.get(name, field.default)
    option, text = f"--{name.replace('_', '-')}", field.description or ""
    if field.annotation is bool:
        parser.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        return
    shown = f" Default: {default}." if default not in (None, "") else ""
    kind = int if field.annotation in (int, int | None) else str
    parser.add_argument(option, type=kind, help=(text + shown).replace("%", "%%"))


def run(args: argparse.Namespace) -> int:
    from sightline.inference.server_spec import ServerSpec

    if args.engine not in ENGINES:
        raise ConfigError(
            f"no engine {args.engine!r}", f"choose one that is available: {', '.join(ENGINES)}"
        )
    names = {*ServerSpec.model_fields, *ModelConfig.model_fields, *InferenceConfig.model_fields}
    given = {name: value for name, value in vars(args).items() if name in names}
    given = {name: value for name, value in given.items() if value is not None}
    spec = ServerSpec.of(**(COMMAND_DEFAULTS | given))
    if args.engine == "vllm":
        from sightline.launch.vllm_server import serve_vllm

        serve_vllm(spec)
    else:
        check_packages()
        from sightline.inference.serve import serve

        serve(spec)
    return 0
