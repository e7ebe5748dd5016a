"""A file of settings, read, checked and written; and the objects that it names."""

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
    find_new_name,
    spell_setting,
    translate_old_names,
)
from sightline.config.secret_refs import hide_secrets, is_secret_name
from sightline.config.section import ConfigSection, get_section_class
from sightline.errors import ConfigError

_CHECKSUM_LINE = re.compile(
    r"\A# sha256 ([0-9a-f]{64})\n|^# sha256 ([0-9a-f]{64})\n?\Z", re.MULTILINE
)
"""At the top, where no cut takes it away alone; earlier versions wrote it at the end."""
AnyFile = TypeVar("AnyFile", bound=ConfigSection)


def load_config(kind: type[AnyFile], path: Path, overrides: Sequence[str] = ()) -> AnyFile:
    """The run file at `path`, with `section.key=value` overrides."""
    values = read_run_file(path)
    _check_command(kind, values, path)
    apply_overrides(values, overrides)
    names = [word.partition("=")[0] for word in overrides]
    where = f"{path} with {' '.join(names)}" if overrides else str(path)
    return validate_config(kind, values, where)


def _check_command(kind: type[AnyFile], values: dict[str, Any], path: Path) -> None:
    """Refuses the run file of another command."""
    command = "sft" if "sft" in values else "rl" if "orchestrator" in values else ""
    if command and (command == "sft") != ("sft" in kind.model_fields):
        raise ConfigError(
            f"{path} is a run file of `sightline {command}`", f"`sightline {command} {path}`"
        )


def load_stored_config(kind: type[AnyFile], path: Path, overrides: Sequence[str] = ()) -> AnyFile:
    """The `config.toml` of a run directory, for reading it: names of earlier versions are known."""
    values = translate_old_names(read_run_file(path, is_stored=True))
    apply_overrides(values, overrides)
    return validate_config(kind, values, str(path))


def read_run_file(path: Path, is_stored: bool = False) -> dict[str, Any]:
    """The sections of the file, not checked yet; of a stored one without secrets."""
    try:
        text = path.read_text()
        _check_unchanged(text, path)
        return tomllib.loads(hide_secrets(text) if is_stored else text)
    except FileNotFoundError:
        raise ConfigError(f"no run file at {path}", "check the path") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder, not a run file",
            f"name a TOML file; for a checkpoint, add model.path={path} behind it",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "mend the line that it names") from None


def validate_config(kind: type[AnyFile], values: dict[str, Any], where: str) -> AnyFile:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _build_error(kind, error, where) from None


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Puts `section.key=value` into the values of a file."""
    for override in overrides:
        key, equals, text = override.partition("=")
        *sections, name = key.strip().split(".")
        if not equals or not sections:
            raise ConfigError(f"override {override!r} names no section", "write section.key=value")
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        table = values
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                problem = f"override {override!r}: {section} is a value"
                raise ConfigError(problem, "name a section first")
        table[name] = value


def expand_overrides(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep: `a.b=1,2` stands for one run with each value, several
    of these for every combination. A text with a comma in it is quoted: `a.b='"x,y"'`."""
    choices = []
    for override in overrides:
        key, _, text = override.partition("=")
        values = text.split(",")
        is_sweep = len(values) > 1 and all(values) and not re.search(r"[\s\[\]{}\"']", text)
        choices.append([f"{key}={value}" for value in values] if is_sweep else [override])
    return [list(combination) for combination in itertools.product(*choices)]


def _build_error(kind: type[ConfigSection], error: ValidationError, where: str) -> ConfigError:
    errors = error.errors()
    # A key by its old name is missing under its new one: that it is unknown says more.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    names = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    fix = getattr(first.get("ctx", {}).get("error"), "fix", "give a value that fits")
    if not names:  # settings that each are well, and do not go together
        return ConfigError(f"{where}: {message}", fix)
    key = spell_setting(names)
    if first["type"] == "extra_forbidden":
        if (new := find_new_name(names)) is not None:
            return ConfigError(f"{where}: {key} is now called {new}", f"write {new}")
        if (cure := REMOVED.get(".".join(names))) is not None:
            return ConfigError(f"{where}: {key} is no setting any more", cure)
        known = _known_names(kind, names[:-1])
        near = difflib.get_close_matches(names[-1], known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        here = OF_OTHER_FRAMEWORKS.get(names[-1], "").split(".")
        if here[0] in kind.model_fields:
            fix = f"it is {spell_setting(here)} here"
        return ConfigError(f"{where}: unknown key {key}", fix)
    if first["type"] == "missing":
        return ConfigError(f"{where}: {key} is missing", f"add {key}")
    if isinstance(first["input"], dict) and first["type"] == "value_error":  # a whole section
        return ConfigError(f"{where}: {key}: {message}", fix)
    shown = "" if is_secret_name(names[-1]) else f" = {first['input']!r}"
    return ConfigError(f"{where}: {key}{shown}: {message}", fix)


def _known_names(kind: type[ConfigSection], names: list[str]) -> list[str]:
    for name in (name for name in names if not name.isdigit()):  # the place in a list of tables
        kind = get_section_class(kind.model_fields[name].annotation)
    return list(kind.model_fields)


def dump_toml(file: ConfigSection) -> str:
    """The file as TOML, every setting spelled out."""
    return tomli_w.dumps(file.model_dump(exclude_none=True))


def dump_checked_toml(file: ConfigSection) -> str:
    """The file as a run keeps it: its first line is a checksum of the others."""
    text = dump_toml(file)
    return f"# sha256 {hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _check_unchanged(text: str, path: Path) -> None:
    found = _CHECKSUM_LINE.search(text)
    if found is None:
        return
    others = text[: found.start()] + text[found.end() :]
    if hashlib.sha256(others.encode()).hexdigest() != (found[1] or found[2]):
        raise ConfigError(
            f"{path} is not as the run wrote it: its checksum is of other text",
            "put it back from a copy; a change is made by section.key=value, and a file that is "
            "yours has no such line",
        )


def load_object(path: str, setting: str) -> Any:
    """The object that `setting` names as "module:name", such as an environment, imported."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting} = {path!r}: there is no module {error.name!r}",
            "check the spelling, and start it in the folder of the module, or set PYTHONPATH",
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        raise ConfigError(
            f"{setting} = {path!r}: {module_name} has no {name!r}",
            f"did you mean {near[0]!r}?" if near else "check the spelling",
        )
    return getattr(module, name)
