"""Checks, while tests run, that tensors have the shapes and kinds of numbers of their annotations.

`pytest --shapes MODULE,...` decorates every function and dataclass of these modules with
`check_shapes` as they are imported. Annotations of other kinds are the type checker's business and
are left alone. jaxtyping says whether an array is of its annotation. Its own decorator would ask at
every call, for each argument twice, which is a third of the time of a test of the engine: here
arguments and a result of shapes that were found right once are not looked at again.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import jaxtyping
import numpy as np
import torch


def check_shapes(decorated: Any) -> Any:
    """A function that checks the arrays that it is called with and what it returns."""
    if not inspect.isclass(decorated):
        return checked(decorated)
    if dataclasses.is_dataclass(decorated):
        decorated.__init__ = checked(decorated.__init__)  # type: ignore[misc]
    return decorated


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    hints: dict[str, Any] | None = None
    right: set[object] = set()

    @wraps(function)
    def check(*args: Any, **options: Any) -> Any:
        nonlocal hints
        if hints is None:  # at the first call: then all names that annotations use are there
            hints = hints_of(function)
        if not hints or jaxtyping.config.jaxtyping_disable:
            return function(*args, **options)
        arguments = (
            layout_of(args),
            *((name, layout_of(value)) for name, value in options.items()),
        )
        if arguments not in right:
            with jaxtyping.jaxtyped("context"):
                check_arguments(args, options)
            right.add(arguments)
        result = function(*args, **options)
        if "return" in hints and (arguments, layout_of(result)) not in right:
            with jaxtyping.jaxtyped("context"):
                check_arguments(args, options)
                check_value(result, hints["return"], f"{function.__qualname__}: what it returns")
            right.add((arguments, layout_of(result)))
        return result

    def check_arguments(args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for name, value in signature.bind(*args, **options).arguments.items():
            check_value(value, (hints or {}).get(name), f"{function.__qualname__}: {name}")

    return check


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function that hold an array."""
    hints = {}
    for name, hint in inspect.get_annotations(function).items():
        try:
            read = eval(hint, function.__globals__) if isinstance(hint, str) else hint
        except NameError:  # imported for the type checker alone, which no array's is
            continue
        if holds_array(read):
            hints[name] = read
    return hints


def holds_array(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(holds_array(inner) for inner in typing.get_args(hint))


def layout_of(value: Any) -> object:
    """Return the properties of a value that an annotation describes: dtypes and shapes."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.dtype, tuple(value.shape)
    return tuple(map(layout_of, value)) if isinstance(value, tuple) else None


def check_value(value: Any, hint: Any, where: str) -> None:
    """Raise TypeError if an array does not have the annotated shape."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        if isinstance(value, (torch.Tensor, np.ndarray)) and not isinstance(value, hint):
            raise TypeError(f"{where} is {value.dtype} {tuple(value.shape)}, and not {hint}")
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        arrays = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if value is not None and len(arrays) == 1:
            check_value(value, arrays[0], where)
    elif typing.get_origin(hint) is tuple and isinstance(value, tuple):
        inner = typing.get_args(hint)
        if len(inner) == len(value) and Ellipsis not in inner:
            for number, (arg, one_hint) in enumerate(zip(value, inner, strict=True)):
                check_value(arg, one_hint, f"{where}[{number}]")


class CheckingLoader(SourceFileLoader):
    """Loads a module with its functions and classes decorated."""

    def get_code(self, fullname: str) -> types.CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                decorator = ast.parse("__import__('shape_checks').check_shapes", mode="eval").body
                # Check classes after they become dataclasses, functions before properties.
                at = 0 if isinstance(node, ast.ClassDef) else len(node.decorator_list)
                node.decorator_list.insert(at, decorator)
                for part in ast.walk(decorator):
                    ast.copy_location(part, node)
        return compile(tree, self.path, "exec", dont_inherit=True)


class CheckingFinder(MetaPathFinder):
    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not any(f"{fullname}.".startswith(f"{module}.") for module in self.modules):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = CheckingLoader(spec.loader.name, spec.loader.path)
        return spec


def install(modules: Sequence[str]) -> None:
    """Has these modules, and those in them, checked: before any of them is imported."""
    if early := [module for module in modules if module in sys.modules]:
        raise RuntimeError(f"{', '.join(early)} cannot be checked: imported already")
    sys.meta_path.insert(0, CheckingFinder(modules))
