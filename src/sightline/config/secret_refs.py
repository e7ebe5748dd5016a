"""References to secrets in settings: `env:NAME` is an environment variable, `file:PATH` a file.

Run files, logs and messages between processes hold only references. A run file that contains a
secret is rejected. A secret is read where it is used, and from then on masked in all error texts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sightline.errors import ConfigError, mask_from_now_on
from sightline.regular_file import read_text

FORM = "write env:NAME for an environment variable, or file:PATH for a file"
_MISSPELLED = re.compile(r"(?i:env|file):.*|\$\{?\w+\}?")
_REFERENCE = re.compile(r"env:[A-Za-z_]\w*|file:(?!//).+")
_NAME = (
    r"(?:(?i:[\w-]*[_-])?(?i:api)?(?i:key|token|secret|password|authorization)"
    r"|\w*[a-z](?:Key|Token|Secret|Password))"
)
_ADDRESS = rf"""\w://(?:[^\s/?#"']*@|[^\s"']*[?&](?:{_NAME}|(?i:[\w-]*sig(?:nature)?))=[^\s&"'])"""
"""Matches a URL with a user name or password before its host, or with a key in its query."""
_ASSIGNED_ADDRESS = re.compile(rf"""("[^"\n]*{_ADDRESS}[^"\n]*"|'[^'\n]*{_ADDRESS}[^'\n]*')""")
_ASSIGNED = re.compile(
    rf"""(?<![\w-])("?{_NAME}"?\s*=\s*)(?!["'](?:env|file):)("[^"\n]+"|'[^'\n]+')"""
)


class InvalidSetting(ValueError):
    """A validator's error about a setting, with a fix."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.fix = fix


def is_secret_name(name: str) -> bool:
    """Return whether settings with this name are secrets, such as api_key or hf_token."""
    return re.fullmatch(_NAME, name) is not None


def is_reference(value: str) -> bool:
    return _REFERENCE.fullmatch(value) is not None


def check_reference(value: str) -> str:
    """Raise if a secret is not a reference. The error does not show the secret."""
    if value and not is_reference(value):
        if _MISSPELLED.fullmatch(value):
            raise InvalidSetting(
                "this is not a reference to a secret", f"{FORM}, in lower case and without $"
            )
        raise InvalidSetting("this is a secret, but settings are stored and shown", FORM)
    return value


def read_reference(word: str) -> str:
    """Check an option that takes a reference, since other users can see command lines."""
    try:
        return check_reference(word)
    except ValueError:
        raise ConfigError("other users can see a secret on the command line", FORM) from None


def check_table(table: dict[str, Any]) -> dict[str, Any]:
    """Raise if a table contains, at any depth, a secret under a known name or in a URL."""
    for name, value in table.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                check_table(item)
            elif isinstance(item, str) and re.search(_ADDRESS, item):
                raise InvalidSetting(
                    f"{name}: this URL contains a secret, but settings are stored and shown",
                    f"pass the key separately, or make the whole URL a reference: {FORM}",
                )
            elif isinstance(item, str) and is_secret_name(name):
                try:
                    check_reference(item)
                except InvalidSetting as error:
                    raise InvalidSetting(f"{name}: {error}", error.fix) from None
    return table


def resolve_references(value: Any, setting: str) -> Any:
    """Replace references with their secrets, at any depth of tables and lists."""
    if isinstance(value, dict):
        return {
            name: resolve_references(inner, f"{setting}.{name}") for name, inner in value.items()
        }
    if isinstance(value, list):
        return [resolve_references(inner, f"{setting}[{i}]") for i, inner in enumerate(value)]
    is_secret = isinstance(value, str) and is_reference(value)
    return resolve_secret(value, setting) if is_secret else value


def resolve_secret(reference: str, setting: str) -> str:
    """Return the secret that `reference` names. Any other text is the secret itself."""
    secret = _read_secret(reference, setting) if is_reference(reference) else reference
    mask_from_now_on(secret)
    return secret


def _read_secret(reference: str, setting: str) -> str:
    kind, _, name = reference.partition(":")
    where = f"{setting} = {reference!r}"
    if kind == "env":
        if name not in os.environ:
            fix = f"export {name} before you start the command"
            raise ConfigError(f"{where}: the variable is not set", fix)
        secret, fix = os.environ[name], f"set {name} to the secret"
    else:
        try:
            secret, fix = read_text(Path(name)).strip(), "write the secret into it"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}", "check the path") from error
    if not secret:
        raise ConfigError(f"{where}: the {'variable' if kind == 'env' else 'file'} is empty", fix)
    return secret


def hide_secrets(text: str) -> str:
    """Hide secrets in the text of a `config.toml` that an earlier version wrote."""
    return _ASSIGNED_ADDRESS.sub('"env:HIDDEN"', _ASSIGNED.sub(r'\1"env:HIDDEN"', text))
