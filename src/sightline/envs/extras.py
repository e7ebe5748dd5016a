"""Import libraries that only some environments need."""

from __future__ import annotations

import importlib
from typing import Any

from sightline.errors import ConfigError


def import_extra(module: str, extra: str) -> Any:
    """Import a module, or raise an error that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{extra}: the module {error.name!r} is not installed",
            f"run `pip install 'sightline-rl[{extra}]'` where the workers run",
        ) from error
