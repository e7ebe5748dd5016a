"""`sightline config show|schema`: show a run file, or every setting."""

from __future__ import annotations

import argparse
import json
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from sightline import config

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

INTRODUCTION = """\
# Settings

Made by `sightline config schema`. A run file is TOML; each key stands in the section of its
heading. On the command line, `section.key=value` after the file wins over it. `sightline rl`
reads every section but {only_sft}; `sightline sft` reads {sft}.
A key marked "yes" under resume may change when a run is resumed; any other is refused by name.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print a run file with every setting spelled out")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("overrides", nargs="*", metavar="section.key=value")
    show.set_defaults(run=run_show)
    schema = actions.add_parser("schema", help="print every setting, as markdown")
    schema.add_argument("--json", action="store_true", help="as JSON schema, for editors")
    schema.set_defaults(run=run_schema)


def run_show(args: argparse.Namespace) -> int:
    file = config.load_config(detect_file_kind(args.file), args.file, args.overrides)
    print(config.dump_toml(file), end="")
    return 0


def run_schema(args: argparse.Namespace) -> int:
    if args.json:
        either: TypeAdapter[Any] = TypeAdapter(config.RunFile | config.SftFile)
        print(json.dumps(either.json_schema(), indent=2))
    else:
        print(format_markdown(), end="")
    return 0


def detect_file_kind(path: Path) -> type[config.RunFile] | type[config.SftFile]:
    """The kind of a run file, by its [sft] section; `load_config` says what is wrong with it."""
    try:
        sections = tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return config.RunFile
    return config.SftFile if "sft" in sections else config.RunFile


def format_markdown() -> str:
    """Every setting, a table for each section."""
    sft = ", ".join(f"[{section}]" for section in config.SftFile.model_fields)
    only = config.SftFile.model_fields.keys() - config.RunFile.model_fields.keys()
    only_sft = " and ".join(f"[{section}]" for section in sorted(only))
    lines = [INTRODUCTION.format(sft=sft, only_sft=only_sft).rstrip()]
    fields = {**config.RunFile.model_fields, **config.SftFile.model_fields}
    for section, section_field in fields.items():
        lines += ["", f"## [{section}]", "", "| key | type | default | resume | meaning |"]
        lines.append("|---|---|---|---|---|")
        for name, field in config.get_section_class(section_field.annotation).model_fields.items():
            extra = field.json_schema_extra
            mutable = "yes" if isinstance(extra, dict) and extra.get("mutable") else ""
            cells = [f"`{name}`", format_type(field), format_default(field), mutable]
            lines.append(f"| {' | '.join(cells)} | {' '.join((field.description or '').split())} |")
    return "\n".join(lines) + "\n"


def format_type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(bound, name)
    ]
    return " ".join([_format_annotation(field.annotation), ", ".join(bounds)]).strip()


def _format_annotation(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(
            "none" if part is type(None) else _format_annotation(part) for part in inner
        )
    if origin is tuple:
        return f"list of {_format_annotation(inner[0])}"
    if kind is dict or origin is dict:
        return "table"
    return str(kind.__name__)


def format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"
