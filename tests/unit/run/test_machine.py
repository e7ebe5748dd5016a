"""GPUs that are hidden from a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.run import machine


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, True), ("0", True), ("", False), ("-1", False)]
)
def test_hidden_gpus_do_not_count(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: bool
) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, name: iter([self / name]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.has_gpu() == expected
    assert machine.runs_on_cpu("auto") != expected
    assert machine.runs_on_cpu("cpu")
