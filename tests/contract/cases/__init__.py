"""One file per family: the checkpoints that every family and renderer suite runs on."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from tests.contract.case import Case


@cache
def read_cases(module: str | None = None) -> tuple[Case, ...]:
    """The `CASES` of a module, or of every file in this folder by default."""
    found = [f"{__name__}.{file.name}" for file in pkgutil.iter_modules(__path__)]
    modules = found if module is None else [module]
    return tuple(case for name in modules for case in importlib.import_module(name).CASES)
