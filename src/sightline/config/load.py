"""A file of settings, read, checked and written."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from sightline.config.section import Section
from sightline.errors import ConfigError

AnyFile = TypeVar("AnyFile", bound=Section)


def load(kind: type[AnyFile], path: Path, overrides: Sequence[str] = ()) -> AnyFile:
    """The file at `path`, with `section.key=value` overrides."""
    try:
        values = tomllib.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"no run file at {path}", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "mend the line that it names") from None
    apply_overrides(values, overrides)
    return check(kind, values, str(path))


def check(kind: type[AnyFile], values: dict[str, Any], where: str) -> AnyFile:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explain(kind, error, where) from None


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Puts `section.key=value` into the values of a file."""
    for override in overrides:
        _apply(values, override)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or len(names) < 2:
        raise ConfigError(f"override {override!r}", "write it as section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    place = values
    for name in names[:-1]:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: {name} is a value", "name a section first")
    place[names[-1]] = value


def _explain(kind: type[Section], error: ValidationError, where: str) -> ConfigError:
    first = error.errors()[0]
    names = [str(part) for part in first["loc"]]
    said = first["msg"].removeprefix("Value error, ")
    if not names:  # settings that each are well, and do not go together
        return ConfigError(f"{where}: {said}", "give settings that go together")
    key = _spell(names)
    if first["type"] == "extra_forbidden":
        known = _known_names(kind, names[:-1])
        near = difflib.get_close_matches(names[-1], known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return ConfigError(f"{where}: unknown key {key}", fix)
    if first["type"] == "missing":
        return ConfigError(f"{where}: {key} is missing", f"add {key}")
    if isinstance(first["input"], dict) and first["type"] == "value_error":  # a whole section
        return ConfigError(f"{where}: {key}: {said}", "give settings that go together")
    return ConfigError(f"{where}: {key} = {first['input']!r}: {said}", "give a value that fits")


def _spell(names: list[str]) -> str:
    return f"[{names[0]}]" if len(names) == 1 else f"[{'.'.join(names[:-1])}] {names[-1]}"


def _known_names(kind: type[BaseModel], names: list[str]) -> list[str]:
    for name in names:
        annotation = kind.model_fields[name].annotation
        inner = [
            one
            for one in (annotation, *get_args(annotation))
            if isinstance(one, type) and issubclass(one, BaseModel)
        ]
        if not inner:
            return []
        kind = inner[0]
    return list(kind.model_fields)


def dump(file: Section) -> str:
    """The file as TOML, every setting spelled out."""
    lines: list[str] = []
    for section, values in file.model_dump().items():
        if values is None:
            continue
        lines.append(f"[{section}]")
        nested = {k: v for k, v in values.items() if isinstance(v, dict)}
        for name, value in values.items():
            if value is not None and name not in nested:
                lines.append(f"{name} = {_toml(value)}")
        for name, inner in nested.items():
            if inner:
                lines.append(f"\n[{section}.{name}]")
                lines += [f"{_key(key)} = {_toml(value)}" for key, value in inner.items()]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes as TOML does, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)
