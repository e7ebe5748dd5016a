"""Checks, while tests run, that tensors have the shapes and kinds of numbers of their annotations.

`pytest --jaxtyping-packages=MODULE,...,shape_checks.check_shapes` (pyproject.toml) has jaxtyping
decorate every function of these modules with `check_shapes` as they are imported. Annotations of
other kinds are the type checker's business and are left alone.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from jaxtyping import AbstractArray


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    hints: dict[str, Any] | None = None

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        nonlocal hints
        if hints is None:
            hints = typing.get_type_hints(function)
        for name, value in signature.bind(*args, **options).arguments.items():
            check_value(value, hints.get(name), f"{function.__qualname__}: {name}")
        result = function(*args, **options)
        check_value(result, hints.get("return"), f"{function.__qualname__}: what it returns")
        return result

    return checked


def check_value(value: Any, hint: Any, where: str) -> None:
    """Raises TypeError where an array is not of the shape that its annotation says."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        if isinstance(value, (torch.Tensor, np.ndarray)) and not isinstance(value, hint):
            raise TypeError(f"{where} is {value.dtype} {tuple(value.shape)}, and not {hint}")
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        arrays = [one for one in typing.get_args(hint) if one is not type(None)]
        if value is not None and len(arrays) == 1:
            check_value(value, arrays[0], where)
    elif typing.get_origin(hint) is tuple and isinstance(value, tuple):
        inner = typing.get_args(hint)
        if len(inner) == len(value) and Ellipsis not in inner:
            for number, (one, one_hint) in enumerate(zip(value, inner, strict=True)):
                check_value(one, one_hint, f"{where}[{number}]")
