from __future__ import annotations

from pathlib import Path

import pytest

from loop.jobs import EXAMPLES, sightline

SMALL = (
    "run.name=job",
    "orchestrator.groups_per_step=4",
    "orchestrator.group_size=4",
    "eval.tasks=16",
    "trainer.checkpoint_every=4",
)
"""Overrides that make a step of the example fast."""


@pytest.fixture(scope="session")
def warm_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's models in it: tiny, and warmed up."""
    home = tmp_path_factory.mktemp("home")
    sightline("model", "tiny", "models/tiny", cwd=home)
    sightline("sft", EXAMPLES / "warmup.toml", cwd=home)
    return home


@pytest.fixture
def home(warm_home: Path, tmp_path: Path) -> Path:
    """A separate folder to run in, which shares the models."""
    (tmp_path / "models").symlink_to(warm_home / "models")
    return tmp_path
