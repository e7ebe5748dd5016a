from __future__ import annotations

from pathlib import Path

import pytest
from sampling import take_sample

from loop.jobs import EXAMPLES, sightline

SMALL = (
    "run.name=job",
    "orchestrator.groups_per_step=4",
    "orchestrator.group_size=4",
    "eval.tasks=16",
    "trainer.checkpoint_every=4",
)
"""Overrides that make a step of the example take a blink."""
ALWAYS = ("test_laws", "test_learns")
NUM_JOBS = 6
"""Of the other tests, each of which takes a minute, so many that the commit seeds."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [i for i in items if i.path.parent == here and not i.get_closest_marker("torchvision")]
    others = [i for i in own if i.path.stem not in ALWAYS]
    left = {id(item) for item in others} - {id(item) for item in take_sample(others, NUM_JOBS)}
    if left and len(others) > 2 * NUM_JOBS:  # not where somebody names a few
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
        items[:] = [item for item in items if id(item) not in left]


@pytest.fixture(scope="session")
def warm_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's models in it: tiny, and warmed up."""
    home = tmp_path_factory.mktemp("home")
    sightline("model", "tiny", "models/tiny", cwd=home)
    sightline("sft", EXAMPLES / "warmup.toml", cwd=home)
    return home


@pytest.fixture
def home(warm_home: Path, tmp_path: Path) -> Path:
    """A folder of its own to run in, which shares the models."""
    (tmp_path / "models").symlink_to(warm_home / "models")
    return tmp_path
