"""Tests that need torchvision. Run by `make test-torchvision`, which puts it on the path with
what declares its operators, in every process (tests/vllm/environment)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.torchvision)
