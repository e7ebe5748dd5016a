from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sampling import take_sample

from sightline.families.registry import write_tiny

NUM_TESTS = 12
"""Each starts several processes: so many that the commit seeds, all of them with `FULL=1`."""
QUICK = """
[run]
name = "job"
steps = 4
[model]
path = "tiny"
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 6
workers = 1
[orchestrator]
groups_per_step = 2
group_size = 2
[trainer]
ranks = 2
checkpoint_every = 2
micro_batch_tokens = 64
[inference]
max_num_seqs = 16
max_model_len = 128
[eval]
tasks = 0
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    quick = [item for item in mine if item.get_closest_marker("thorough") is None]
    left = {id(item) for item in quick} - {id(item) for item in take_sample(quick, NUM_TESTS)}
    if left and len(quick) > 2 * NUM_TESTS:  # not where somebody names a few
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
        items[:] = [item for item in items if id(item) not in left]


@pytest.fixture
def quick_home(tmp_path: Path) -> Path:
    """A folder with `run.toml`: a run of 4 steps on 2 ranks that needs no model to be warmed up."""
    write_tiny("qwen_vl", tmp_path / "tiny", seed=0)
    shutil.copy(Path(__file__).parents[1] / "loop" / "vowels.py", tmp_path)
    (tmp_path / "run.toml").write_text(QUICK)
    return tmp_path
