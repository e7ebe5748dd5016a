"""Libraries that only some environments need: imported when one is built."""

from __future__ import annotations

import importlib
from typing import Any

from sightline.errors import ConfigError


def import_extra(module: str, extra: str) -> Any:
    """The module; where it is missing, the error says which extra of the package brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{extra}: there is no module {error.name!r} here",
            f"pip install 'sightline-rl[{extra}]' where the workers run",
        ) from error
