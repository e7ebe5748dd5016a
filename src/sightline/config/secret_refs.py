"""Secrets of settings: a reference stands where a secret would, and is read where it is used.

`env:NAME` is a variable of the environment, `file:PATH` a file. What is written, shown or handed to
another process is the reference; a secret itself is refused at load. What was read is masked in
whatever text of a failure holds it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sightline.errors import ConfigError, mask_from_now_on

FORM = "write env:NAME for a variable of the environment, or file:PATH for a file that holds it"
_REFERENCE = re.compile(r"env:[A-Za-z_]\w*|file:(?!//).+")
_NAME = (
    r"(?:(?i:[\w-]*[_-])?(?i:api)?(?i:key|token|secret|password|authorization)"
    r"|\w*[a-z](?:Key|Token|Secret|Password))"
)
_ADDRESS = rf"""\w://(?:[^\s/?#"']*@|[^\s"']*[?&](?:{_NAME}|(?i:[\w-]*sig(?:nature)?))=[^\s&"'])"""
"""An address with a name or a password before its host, or with a key in its query."""
_ASSIGNED_ADDRESS = re.compile(rf"""("[^"\n]*{_ADDRESS}[^"\n]*"|'[^'\n]*{_ADDRESS}[^'\n]*')""")
_ASSIGNED = re.compile(
    rf"""(?<![\w-])("?{_NAME}"?\s*=\s*)(?!["'](?:env|file):)("[^"\n]+"|'[^'\n]+')"""
)


def is_secret_name(name: str) -> bool:
    """Whether a value of this name is a secret: api_key, hf_token, password and the like."""
    return re.fullmatch(_NAME, name) is not None


def is_reference(value: str) -> bool:
    return _REFERENCE.fullmatch(value) is not None


def check_reference(value: str) -> str:
    """Refuses, without showing it, a secret that is not a reference."""
    if value and not is_reference(value):
        raise ValueError(f"this is a secret itself, and settings are written and shown: {FORM}")
    return value


def read_reference(word: str) -> str:
    """An option that names where a secret is; the commands of others can be seen, and so its words
    are no place for the secret."""
    try:
        return check_reference(word)
    except ValueError:
        raise ConfigError("a secret on the command line can be seen by others", FORM) from None


def check_table(table: dict[str, Any]) -> dict[str, Any]:
    """Refuses a table that holds a secret under a name that says so, or an address with one in it,
    at any depth."""
    for name, value in table.items():
        inner = value if isinstance(value, list) else [value]
        for one in inner:
            if isinstance(one, dict):
                check_table(one)
            elif isinstance(one, str) and re.search(_ADDRESS, one):
                raise ValueError(
                    f"{name}: this address has a secret in it, and settings are written and shown: "
                    f"give the key apart, or all of the address, as a reference; {FORM}"
                )
            elif isinstance(one, str) and is_secret_name(name):
                try:
                    check_reference(one)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
    return table


def resolve_references(value: Any) -> Any:
    """`value` with what its references name in their places, at any depth of tables and lists."""
    if isinstance(value, dict):
        return {name: resolve_references(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [resolve_references(inner) for inner in value]
    return resolve_secret(value) if isinstance(value, str) and is_reference(value) else value


def resolve_secret(reference: str) -> str:
    """What `reference` names; a text that is no reference is the secret itself."""
    found = _read_secret(reference) if is_reference(reference) else reference
    mask_from_now_on(found)
    return found


def _read_secret(reference: str) -> str:
    kind, _, where = reference.partition(":")
    if kind == "env":
        found = os.environ.get(where, "")
    else:
        try:
            found = Path(where).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{reference} cannot be read: {error}", "check the path") from error
    if not found:
        raise ConfigError(
            f"{reference} is empty or not set", "set it, where the command is started"
        )
    return found


def hide_secrets(text: str) -> str:
    """The text of a `config.toml` of an earlier version, which may hold secrets, without them."""
    return _ASSIGNED_ADDRESS.sub('"env:HIDDEN"', _ASSIGNED.sub(r'\1"env:HIDDEN"', text))
