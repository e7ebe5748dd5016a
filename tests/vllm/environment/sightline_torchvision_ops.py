"""Make a CUDA build of torchvision importable with a CPU build of torch.

There is no CPU build of torchvision on the registry, and vLLM needs the package for its image
processors. Importing it fails because its compiled operators are missing: they are declared here,
without an implementation, just before torchvision is imported. `make` puts this file into the
environment of vLLM with a .pth file that imports it, so that vLLM's child processes have it too,
and next to the torchvision of its tests, where Python imports it as sitecustomize.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")
_kept: list[Any] = []
"""Operators live as long as the library object that defined them."""


class _Declaring(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        self._loader.exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._is_looking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torchvision" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Declaring(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
