"""transformers' image processors for a checkpoint, the reference for our pixels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Processor = Callable[[Any], torch.Tensor]
"""Turns a PIL image into float rows."""
_LIBRARIES: list[torch.library.Library] = []
"""Keeps libraries alive, because operators vanish with their library."""


def load_processor(model: Path, backend: str) -> Processor:
    """Load the processor of a backend, `pil` or `torchvision`."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model, backend=backend, local_files_only=True)

    def rows(image: Any) -> torch.Tensor:
        pixel_values: torch.Tensor = processor(images=image, return_tensors="pt")["pixel_values"]
        return pixel_values

    return rows


def set_threads(num: int) -> None:
    torch.set_num_threads(num)


def prepare_torchvision() -> bool:
    """Return whether torchvision can be imported. Call this before importing transformers."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not _load_compiled(sorted(file for folder in folders for file in folder.glob("_C*.so"))):
        _declare_operators()
    return True


def _load_compiled(files: list[Path]) -> bool:
    """Load torchvision's compiled half. Return whether that worked."""
    try:
        for file in files:
            torch.ops.load_library(str(file))
    except OSError:
        return False
    return bool(files)


def _declare_operators() -> None:
    """Declare two operators of torchvision that image processors do not call.

    With a CPU build of torch, a CUDA build of torchvision cannot load its compiled half, and
    importing the rest fails without these operators.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
