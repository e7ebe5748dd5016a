"""Read, validate and write run files, and import the objects that they name."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import itertools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from sightline.config.renamed import (
    OF_OTHER_FRAMEWORKS,
    REMOVED,
    RENAMED,
    spell_setting,
    translate_old_names,
)
from sightline.config.secret_refs import hide_secrets, is_secret_name
from sightline.config.section import ConfigSection, get_section_class
from sightline.errors import ConfigError, format_command
from sightline.regular_file import read_text

_CHECKSUM_LINE = re.compile(
    r"\A# sha256 ([0-9a-f]{64})\n|^# sha256 ([0-9a-f]{64})\n?\Z", re.MULTILINE
)
"""Checksum line at the start, where truncation cannot remove it. It used to be at the end."""
AnyFile = TypeVar("AnyFile", bound=ConfigSection)


def load_config(kind: type[AnyFile], path: Path, overrides: Sequence[str] = ()) -> AnyFile:
    """Load a run file or the `config.toml` of a run, with `section.key=value` overrides."""
    values = read_run_file(path)
    _check_command(kind, values, path)
    apply_overrides(values, overrides)
    names = [word.partition("=")[0] for word in overrides]
    where = f"{path} with {' '.join(names)}" if overrides else str(path)
    return validate_config(kind, values, where)


def _check_command(kind: type[AnyFile], values: dict[str, Any], path: Path) -> None:
    """Raise if the run file belongs to the other command."""
    command = "sft" if "sft" in values else "rl" if "orchestrator" in values else ""
    if command and (command == "sft") != ("sft" in kind.model_fields):
        raise ConfigError(
            f"{path} is a run file for `sightline {command}`",
            f"run `{format_command('sightline', command, path)}`",
        )


def read_run_file(path: Path) -> dict[str, Any]:
    """Return a file's sections without validation.

    A run may have written the file with an earlier version. Old names are then translated, and
    secrets are hidden.
    """
    try:
        text = read_text(path)
        if _check_checksum(text, path):
            return translate_old_names(tomllib.loads(hide_secrets(text)))
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"no run file at {path}", "check the path") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder, not a run file",
            f"pass a TOML file. For a checkpoint, append model.path={path}",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", "fix the line named in the message"
        ) from None


def validate_config(kind: type[AnyFile], values: dict[str, Any], where: str) -> AnyFile:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _build_error(kind, error, where) from None


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set each `section.key=value` in a file's values."""
    for override in overrides:
        key, equals, text = override.partition("=")
        *sections, name = key.strip().split(".")
        if not equals or not sections:
            raise ConfigError(f"override {override!r} has no section", "write section.key=value")
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        table = values
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                problem = f"override {override!r}: {section} is not a section"
                raise ConfigError(problem, "write section.key=value")
        table[name] = value


def expand_overrides(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides for each run of a sweep.

    `a.b=1,2` gives one run per value. Several of these give every combination. Quote a string that
    contains a comma: `a.b='"x,y"'`.
    """
    choices = []
    for override in overrides:
        key, _, text = override.partition("=")
        values = text.split(",")
        is_sweep = len(values) > 1 and all(values) and not re.search(r"[\s\[\]{}\"']", text)
        choices.append([f"{key}={value}" for value in values] if is_sweep else [override])
    return [list(combination) for combination in itertools.product(*choices)]


def _build_error(kind: type[ConfigSection], error: ValidationError, where: str) -> ConfigError:
    errors = error.errors()
    # A renamed key is both unknown and missing. The error for "unknown" is more helpful.
    first = next((detail for detail in errors if detail["type"] == "extra_forbidden"), errors[0])
    names = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    fix = getattr(first.get("ctx", {}).get("error"), "fix", "set a valid value")
    if not names:  # valid settings that conflict
        return ConfigError(f"{where}: {message}", fix)
    key = spell_setting(names)
    if first["type"] == "extra_forbidden":
        old = ".".join(names)
        if old in RENAMED:
            new = spell_setting(RENAMED[old].split("."))
            return ConfigError(f"{where}: {key} is now called {new}", f"write {new}")
        if old in REMOVED:
            return ConfigError(f"{where}: {key} no longer exists", REMOVED[old])
        section = kind
        for name in names[:-1]:
            if name in section.model_fields:  # not an index in a list, or a key of a table
                section = get_section_class(section.model_fields[name].annotation)
        known = section.model_fields
        near = difflib.get_close_matches(names[-1], known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        equivalent = OF_OTHER_FRAMEWORKS.get(names[-1], "").split(".")
        if equivalent[0] in kind.model_fields:
            fix = f"use {spell_setting(equivalent)}"
        return ConfigError(f"{where}: unknown key {key}", fix)
    if first["type"] == "missing":
        return ConfigError(f"{where}: {key} is missing", f"add {key}")
    if isinstance(first["input"], dict) and first["type"] == "value_error":  # a whole section
        return ConfigError(f"{where}: {key}: {message}", fix)
    value = "" if is_secret_name(names[-1]) else f" = {first['input']!r}"
    return ConfigError(f"{where}: {key}{value}: {message}", fix)


def dump_toml(file: ConfigSection) -> str:
    """Return the file as TOML, with every setting."""
    return tomli_w.dumps(file.model_dump(exclude_none=True))


def dump_checked_toml(file: ConfigSection) -> str:
    """Return the file as TOML, with a checksum as its first line."""
    text = dump_toml(file)
    return f"# sha256 {hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _check_checksum(text: str, path: Path) -> bool:
    """Return whether a run wrote the text, with a checksum. Raise if it was changed since."""
    checksum = _CHECKSUM_LINE.search(text)
    if checksum is None:
        return False
    others = text[: checksum.start()] + text[checksum.end() :]
    if hashlib.sha256(others.encode()).hexdigest() != (checksum[1] or checksum[2]):
        raise ConfigError(
            f"{path} was changed after the run wrote it: its checksum does not match",
            "restore it from a copy and change settings with section.key=value. To use it as a new "
            "run file, delete the checksum line",
        )
    return True


def load_object(path: str, setting: str) -> Any:
    """Import the object that `setting` names as "module:name", such as an environment."""
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{setting} = {path!r} does not name a module", "write 'module:name'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting} = {path!r}: no module named {error.name!r}",
            "check the spelling, and run the command in the module's folder or set PYTHONPATH",
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        raise ConfigError(
            f"{setting} = {path!r}: {module_name} has no {name!r}",
            f"did you mean {near[0]!r}?" if near else "check the spelling",
        )
    return getattr(module, name)
