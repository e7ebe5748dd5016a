"""Tests that need torchvision; run by `make test-torchvision`, which puts it on the path.

The wheel that the registry has for this torch is built for CUDA. Beside a CPU build its compiled
half does not load, and importing the rest fails on two operators that nothing here calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.torchvision)


@pytest.fixture(scope="session", autouse=True)
def operators() -> object:
    """Declares what the compiled half would have, where it is missing."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401 - fails here, not in the middle of a test

    return library
