"""torchvision with and without its compiled half."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest
import torch

from benchmarks.harness.reference_processors import prepare_torchvision


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not prepare_torchvision()


@pytest.mark.parametrize("loads", [True, False])
def test_operators_are_declared_only_where_the_compiled_half_is_missing(
    loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Declared twice they would end the process."""
    spec = importlib.machinery.ModuleSpec("torchvision", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    (tmp_path / "_C.so").write_bytes(b"not a library")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    declared: list[str] = []

    class Library:
        def __init__(self, name: str, kind: str) -> None:
            declared.append(name)

        def define(self, schema: str) -> None:
            declared.append(schema)

    monkeypatch.setattr(torch.library, "Library", Library)
    if loads:
        monkeypatch.setattr(torch.ops, "load_library", lambda file: None)
    assert prepare_torchvision()
    assert bool(declared) is not loads
