"""Objects that a run file names as "module:name": environments, parsers, algorithm functions."""

from __future__ import annotations

import importlib
from typing import Any

from sightline.errors import ConfigError


def load_object(path: str, setting: str) -> Any:
    """The object `path` names, imported; `setting` is where it was named, for the error."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting} = {path!r}: there is no module {error.name!r}",
            "check the spelling, and that the folder of the module is on PYTHONPATH, or install it",
        ) from error
    if not hasattr(module, name):
        raise ConfigError(
            f"{setting} = {path!r}: {module_name} has no {name!r}", "check the spelling"
        )
    return getattr(module, name)
